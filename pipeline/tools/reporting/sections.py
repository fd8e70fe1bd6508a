"""The sections of the report's page, as data: where their figures are, the columns of their tables, their plots.

Each section has blocks: functions from its figures to lines of text, tables, plots and cards. `table` and `curves`
make such functions from paths of rows and of curves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from pipeline.base.amounts import amount
from pipeline.base.options import value_at
from pipeline.tools.reporting.blocks import Block, Card, Column, Table, count, number, share, size
from pipeline.tools.reporting.curves import VALIDATION, divided, labels, length, line, marks
from pipeline.tools.reporting.data_figures import bucket_name
from pipeline.tools.reporting.plots import bar_plot, column_plot, line_plot
from pipeline.tools.reporting.progress import progress

Figures = dict[str, Any]
Blocks = Callable[[Figures], Iterable[Block]]
FIRST = 5
"""The number of figures above everything."""


@dataclass(frozen=True)
class Section:
    """A section of the page; one without content is left out.

    Attributes:
        at: path of the figures that its blocks are made from ("": all).
        needs: path of figures; where they are null the section is left out.
        wide: its plots have the page's width; the second is for narrow pages.
    """

    id: str
    title: str
    at: str = ""
    blocks: Sequence[Blocks] = ()
    needs: str = ""
    wide: bool = False

    def blocks_of(self, figures: Figures) -> Iterator[Block]:
        values = value_at(figures, self.at) if self.at else figures
        if values is not None and (not self.needs or value_at(figures, self.needs) is not None):
            for blocks in self.blocks:
                yield from blocks(values)


def table(rows: str, *columns: Column) -> Blocks:
    """A table of the list at the path `rows`; of a mapping the keys are the column `name`, single values `value`."""

    def made(figures: Figures) -> Iterator[Table]:
        values = value_at(figures, rows)
        if isinstance(values, dict):
            values = [{"name": k, **(v if isinstance(v, dict) else {"value": v})} for k, v in values.items()]
        yield Table(columns, values)

    return made


_CURVES = {
    "curves.loss": ("Training loss", "loss", 1.0),
    "curves.grad_norm": ("Gradient norm before clipping", "norm", 1.0),
    "curves.lr": ("Learning rate", "rate", 1.0),
    "curves.loss_scale": ("Loss scale (fp16)", "factor", 1.0),
    "curves.images_per_s": ("Images per second, all processes", "images/s", 1.0),
    "curves.tokens_per_s": ("Image tokens per second, all processes", "tokens/s", 1.0),
    "curves.mfu": ("Model FLOPs utilisation", "MFU, %", 100.0),
    "curves.data_wait": ("Time that the slowest process waited for data", "% of the wall time", 100.0),
    "curves.memory_gib": ("Peak of allocated GPU memory", "GiB", 1.0),
    "curves.reserved_gib": ("Peak of reserved GPU memory", "GiB", 1.0),
    "curves.rss_gib": ("Main memory of the largest process", "GiB", 1.0),
    "validation.loss": ("Held-out loss", "loss", 1.0),
}
"""Title, label with unit, and factor of a plot, by the path of its curve in a part of a run."""


def curves(*paths: str) -> Blocks:
    """A plot for each path of `_CURVES`, of a run or of both; a run's loss with several parts has a curve for each."""

    def made(figures: Figures) -> Iterator[Markup]:
        runs = [figures["run"], figures["compare"]] if "compare" in figures else [figures]
        for path in paths:
            title, unit, scale = _CURVES[path]
            lines = [line(name, run, path.split("."), scale) for name, run in zip(labels(runs), runs, strict=True)]
            if len(runs) > 1:
                yield line_plot(f"{title}: both runs", lines, unit)
                continue
            parts = {name for part in figures["parts"] for name in part["curves"] if name.startswith(f"{path[7:]}: ")}
            lines += [line(name, figures, ("curves", name), scale) for name in sorted(parts)]
            yield line_plot(title, lines, unit, marks=marks(figures))

    return made


# ---------------------------------------------------------------- data


def _snapshot(data: Figures) -> Iterator[Block]:
    yield f"Snapshot {data['id']}" + (f" ({', '.join(data['names'])})" if data["names"] else "")
    yield (
        f"{data['samples']:,} samples in {len(data['buckets'])} buckets, {data['steps_per_epoch']:,.2f} optimizer "
        "steps per epoch" + (", packed" if data["packed"] else "")
    )


def _buckets(data: Figures) -> Iterator[Block]:
    rows = [{**bucket, "name": bucket_name(bucket)} for bucket in data["buckets"]]
    columns = (
        Column("bucket (height x width)", "name"),
        Column("samples", "samples", count),
        Column("batch", "batch", count),
        Column("steps per epoch", "steps", "{:,.2f}".format),
        Column("mean crop loss", "crop", share),
        Column("", "note"),
    )
    yield Table(columns, rows)
    samples = {"samples": [row["samples"] for row in rows]}
    yield bar_plot("Samples by bucket", [row["name"] for row in rows], samples)


def _crop(crop: Figures) -> Iterator[Block]:
    yield (
        f"The crop to the bucket removes {crop['mean']:.1%} of a picture's area on average, at most "
        f"{crop['largest']:.1%}. {crop['enlarged']:,} pictures are enlarged."
    )
    edges = [100 * edge for edge in crop["edges"]]
    title = "Samples by crop loss (the last column also has larger ones)"
    yield column_plot(title, edges, crop["samples"], "area removed, %", "samples")


def _further(further: Figures) -> Iterator[Block]:
    columns = (
        Column("", "kind"),
        Column("samples that have one", "samples", count),
        Column("blank, since there is none", "blank", count),
        Column("made from the picture by", "made"),
    )
    yield Table(columns, further["kinds"])
    if (learned := further["learned"]) is not None:
        yield f"On average {learned['mean']:.1%} of a picture is learned, by {learned['read']:,} masks."
    for example in further["examples"]:
        size = f"{example['source']}, {example['height']}x{example['width']}"
        if "pictures" in example:
            yield Card(example["pictures"], example["item"], size)


def _sources(figures: Figures) -> Iterator[Block]:
    counts = figures["snapshot"]["sources"].items()
    rows = [{"name": name, "samples": n, **figures["cache"]["sources"].get(name, {})} for name, n in counts]
    columns = (
        Column("source", "name"),
        Column("samples", "samples", count),
        Column("items in the cache", "items", count),
        Column("rejected by the scan", "rejected", count),
    )
    yield Table(columns, rows)


def _captions(captions: Figures) -> Iterator[Block]:
    yield (
        f"{captions['captions']:,} captions, {captions['mean_tokens']:.1f} tokens on average, half of them at most "
        f"{captions['p50']}, 95 % at most {captions['p95']}."
    )
    yield (
        f"{captions['at_max_length']:,} ({captions['share_at_max_length']:.1%}) have {captions['max_length']} tokens: "
        "they were cut there, or just fit."
    )
    counts = captions["by_tokens"]
    counts = counts[: max((i for i, n in enumerate(counts) if n), default=0) + 1]
    width = max(1, -(-len(counts) // 60))
    columns = [sum(counts[start : start + width]) for start in range(0, len(counts), width)]
    edges = [float(start * width) for start in range(len(columns) + 1)]
    yield column_plot("Captions by length", edges, columns, "tokens", "captions")


def _rejects(data: Figures) -> Iterator[Card]:
    return (_card(entry, f"{entry['samples']:,} {entry['stage']}: {entry['kind']}") for entry in data["rejects"])


def _visits(data: Figures) -> Iterator[Card]:
    for entry in data["visits"]:
        share, after = f"{entry['share']:.1%} of the samples", f"{entry['share_of_visits']:.1%} of the visits"
        yield _card(entry, f"{entry['visits']:g} visits an epoch: {entry['samples']:,} samples, {share}, {after}")


def _alike(data: Figures) -> Iterator[Block]:
    if data["not_compared"]:
        yield data["not_compared"]
    if data["alike"]:
        yield "Pictures whose hashes differ in few bits; bucket.dedup=near takes one of each."
    yield from (_card(entry, f"{entry['pictures']:,} pictures look the same") for entry in data["alike"])


def _card(entry: Figures, title: str) -> Card:
    """A few of the samples or items that an entry counts."""
    items = ", ".join(example["item"] for example in entry["examples"])
    images = [example["picture"] for example in entry["examples"] if "picture" in example]
    return Card(images, title, f"for instance {items}" if items else "")


def _storage(figures: Figures) -> Iterator[Block]:
    storage, free = figures["snapshot"]["storage"], figures["cache"]["free_bytes"]
    yield (
        f"The snapshot's shards have {amount(storage['shards_bytes'])}, its tables {amount(storage['tables_bytes'])}"
        + (f"; {amount(free)} are free." if free is not None else ".")
    )
    rows = [{"name": name, **storage[kind]} for kind, name in (("latent", "latents"), ("text", "text rows"))]
    columns = (
        Column("kind", "name"),
        Column("stored as", "storage"),
        Column("shards", "shards", count),
        Column("bytes of its shards", "bytes", size),
    )
    yield Table(columns, rows)


def _new_samples(new: Figures) -> Iterator[Block]:
    before, tokens = ", ".join(new["earlier_names"]) or new["earlier"][:12], new["mean_tokens"]
    yield (
        f"Against the earlier snapshot {before}: {new['new']:,} new samples, {new['old']:,} old ones, "
        f"{new['removed']:,} removed."
    )
    if tokens["new"] is not None and tokens["old"] is not None:
        yield f"Tokens per caption: {tokens['new']:.1f} of new samples, {tokens['old']:.1f} of old ones."
    series = {f"{side} samples": [bucket[side] for bucket in new["buckets"]] for side in ("old", "new")}
    yield bar_plot("Old and new samples by bucket", [bucket_name(b) for b in new["buckets"]], series)


# ---------------------------------------------------------------- runs


def _measured(run: Figures) -> list[tuple[str, Figures]]:
    return [(part["name"], part["validation"]) for part in run["parts"] if part["validation"] is not None]


def _held_out(run: Figures) -> Iterator[Block]:
    """The held-out loss divided: a plot for each division, and a table of all."""
    measured, rows = _measured(run), []
    for name, checks in measured:
        if checks["samples"] is not None:
            yield f"{name}: {checks['rows']} times on {number(checks['samples'])} held-out samples."
    for key, what, lines in divided(run):
        yield line_plot(f"Held-out loss by {what}", [*lines.values()], "loss", marks=marks(run))
        for value, one in lines.items():
            ends = [value_at(checks, (key, value, "value")) for _, checks in measured]
            row = {str(i): end[-1] for i, end in enumerate(ends) if end}
            rows.append({"name": one.name, "first": one.y[0], **row, "change": one.y[-1] - one.y[0]})
    heads = [f"after {name}" for name, _ in measured] if len(measured) > 1 else ["last"]
    columns = [
        Column("held-out loss of", "name"),
        Column("first", "first", number),
        *(Column(head, str(i), number) for i, head in enumerate(heads)),
        Column("change", "change", "{:+.4g}".format),
    ]
    yield Table(columns, rows)


def _ema(run: Figures) -> Iterator[Block]:
    average = line("EMA", run, ("validation", "ema_loss"))
    if average.x:
        lines = [line("weights", run, VALIDATION), average]
        yield line_plot("Held-out loss, weights and EMA", lines, "loss", marks=marks(run))


def _plans(run: Figures) -> Iterator[Block]:
    """Memory as predicted and as measured, a table for each part."""
    for part in run["parts"]:
        document = part["prediction"] or {}
        plan = document.get("prediction") or {}
        sizes = {
            **{f"predicted: {kind}": amount(bytes) for kind, bytes in (plan.get("kinds") or {}).items()},
            **({"predicted in all": amount(plan["total"])} if "total" in plan else {}),
            **({"memory of the device": amount(plan["memory"])} if "memory" in plan else {}),
        }
        for key, value in (document.get("measured") or {}).items():
            unit = "GiB" if key.startswith("memory_gib") else "images/s"
            what = "predicted for the steps measured" if key.endswith("_predicted") else "measured"
            sizes[f"{what}, until step {document.get('until_step')}"] = f"{number(value)} {unit}"
        columns = Column(f"plan of {part['name']}", "name"), Column("bytes", "value", str)
        yield Table(columns, [{"name": name, "value": value} for name, value in sizes.items()])


def _adapter(run: Figures) -> Iterator[Block]:
    for part in run["parts"]:
        if (made := part["adapter"]) is None:
            continue
        if "problem" in made:
            yield f"{part['name']}: {made['problem']}"
            continue
        blocks = made["blocks"]
        names = list(dict.fromkeys(name for norms in blocks.values() for name in norms))
        title = f"{part['name']}, step {made['step']}: norm of the change by {made['adapter']}, by block"
        yield bar_plot(title, list(blocks), {n: [norms.get(n, 0.0) for norms in blocks.values()] for n in names})


def _rounds(run: Figures) -> Iterator[Block]:
    """Each round as a column."""
    rows: dict[str, dict[str, Any]] = {}
    parts = run["parts"] if len(run["parts"]) > 1 else []
    for i, part in enumerate(parts):
        held_out = value_at(part, "validation.loss.value") or [None]
        values = {
            "steps": part["steps"],
            "loss of the last row": part["last"].get("loss"),
            "held-out loss, first": held_out[0],
            "held-out loss, last": held_out[-1],
            "images/s": part["mean"].get("images_per_s"),
            **{f"summary: {key}": value for key, value in _scalars(part["summary"] or {})},
        }
        for name, value in values.items():
            if value is not None:
                rows.setdefault(name, {"name": name})[str(i)] = value
    columns = [Column("", "name"), *(Column(part["name"], str(i), number) for i, part in enumerate(parts))]
    yield Table(columns, list(rows.values()))


def _scalars(summary: Figures) -> Iterator[tuple[str, Any]]:
    """The values of a summary and of the objects in it; the plots show what lies deeper."""
    for key, value in summary.items():
        below = value if isinstance(value, dict) else {"": value}
        for name, single in below.items():
            if single is not None and not isinstance(single, dict):
                yield f"{key}.{name}".removesuffix("."), single


def ids(names: list[str]) -> str:
    return ", ".join(name[:12] for name in names)


def _options(figures: Figures) -> Iterator[Block]:
    first, second = figures["run"], figures["compare"]
    yield f"{first['folder']} and {second['folder']}"
    if not second["options"]:
        yield "No option differs."
    here, there = labels((first, second))
    columns = Column("option", "option"), Column(here, "here"), Column(there, "there")
    yield Table(columns, second["options"])


def headline(figures: Figures) -> list[tuple[str, str, str]]:
    """The numbers above everything, the first `FIRST` of them: (name, value, remark)."""
    data, run, numbers = figures["snapshot"], figures["run"], []
    if run is not None:
        last, checks, loss = run["parts"][-1], line("", run, VALIDATION), line("", run, ("curves", "loss"))
        mean, several = last["mean"], f"in {len(run['parts'])} rounds" if len(run["parts"]) > 1 else ""
        numbers.append(("optimizer steps", f"{length(run):,.0f}", several))
        if checks.y:
            numbers.append(("held-out loss", number(checks.y[-1]), f"{number(checks.y[0])} at first"))
        if loss.y:
            numbers.append(("training loss", number(loss.y[-1]), f"{number(loss.y[0])} at first"))
        if "images_per_s" in mean:
            numbers.append(("images/s", number(mean["images_per_s"]), f"{last['processes']} x {last['device'] or ''}"))
        if "data_wait" in mean:
            numbers.append(("data wait", share(mean["data_wait"]), "of the wall time"))
    if data is not None:
        numbers.insert(4, ("samples", f"{data['samples']:,}", f"in {len(data['buckets'])} buckets"))
        numbers += [
            ("steps per epoch", f"{data['steps_per_epoch']:,.2f}", ""),
            ("tokens per caption", f"{data['captions']['mean_tokens']:.1f}", ""),
            ("crop loss", share(data["crop"]["mean"]) if data["crop"] else "unknown", "of a picture's area"),
            ("shards", amount(data["storage"]["shards_bytes"]), ""),
        ]
    return numbers


_PARTS = (
    Column("part", "name"),
    Column("steps", "steps", number),
    Column("attempts", "attempts", number),
    Column("processes", "processes", number),
    Column("device", "device"),
    Column("last loss", "last.loss", number),
    Column("images/s", "mean.images_per_s", number),
    Column("data wait", "mean.data_wait", share),
    Column("snapshot", "snapshots", ids),
)
_SAME = "Pictures count as one where file and bucket are the same."
_DUPLICATES = (
    Column("", "name"),
    Column("in the snapshot", "entries", count),
    Column("distinct", "distinct", count),
    Column("that occur more than once", "repeated", count),
    Column("most often", "most", count),
)
_STORES = (
    Column("whole cache", "name"),
    Column("records", "records", count),
    Column("bytes", "bytes", size),
    Column("rejected", "rejects", count),
)
_LEFT_OUT = Column("reason", "reason"), Column("items", "samples", count)
_NEW = Column("source", "name"), Column("new", "new", count), Column("old", "old", count)
_PER_SAMPLE = Column("captions of a sample", "name", str), Column("samples", "value", count)
_MEMORY = "curves.memory_gib", "curves.reserved_gib", "curves.rss_gib"
_COMPARED = "curves.loss", "curves.grad_norm", "curves.images_per_s", "validation.loss"

SECTIONS = (
    Section("progress", "Loss and pictures", "", (progress,), wide=True),
    Section("pictures", "Pictures"),
    Section("validation", "Held-out loss", "run", (_held_out,)),
    Section("ema", "EMA", "run", (_ema,)),
    Section("losses", "Losses", "run", (curves("curves.loss", "curves.grad_norm", "curves.lr", "curves.loss_scale"),)),
    Section("run", "Run", "run", (lambda run: [f"Run directory {run['folder']}"], table("parts", *_PARTS))),
    Section("adapter", "Change by the adapter", "run", (_adapter,)),
    Section("rounds", "Rounds side by side", "run", (_rounds,)),
    Section("throughput", "Throughput", "run", (curves("curves.images_per_s", "curves.tokens_per_s", "curves.mfu"),)),
    Section("data-wait", "Data wait", "run", (curves("curves.data_wait"),)),
    Section("memory", "Memory and its plan", "run", (curves(*_MEMORY), _plans)),
    Section("compare", "Two runs compared", "", (_options, curves(*_COMPARED)), needs="compare"),
    Section("snapshot", "Snapshot", "snapshot", (_snapshot,)),
    Section("new", "New samples against old ones", "snapshot.new", (_new_samples, table("sources", *_NEW))),
    Section("buckets", "Buckets", "snapshot", (_buckets,)),
    Section("crop", "Crop loss", "snapshot.crop", (_crop,)),
    Section("further", "Control pictures and masks", "snapshot.further", (_further,)),
    Section("sources", "Sources", "", (_sources,), needs="snapshot"),
    Section("captions", "Caption lengths", "snapshot.captions", (_captions, table("per_sample", *_PER_SAMPLE))),
    Section("duplicates", "Duplicates", "snapshot", (lambda _: [_SAME], table("duplicates", *_DUPLICATES))),
    Section("visits", "Visits by weight", "snapshot", (_visits,)),
    Section("alike", "Pictures that look the same", "snapshot", (_alike,)),
    Section("rejects", "Rejects and samples left out", "snapshot", (table("left_out", *_LEFT_OUT), _rejects)),
    Section("storage", "Storage", "", (_storage, table("cache.stores", *_STORES)), needs="snapshot"),
    Section("gallery", "Decoded latents"),
    Section("trained-on", "Snapshot of the run"),
    Section("earlier", "Earlier rounds"),
)
"""The sections in the order of the page. `pictures`, `gallery`, `trained-on` and `earlier` have no figures; the page
names what makes them."""
