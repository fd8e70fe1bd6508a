"""The sections of the report's page: the columns of their tables, their plots by `run_plots.PLOTS`, their sentences.

Each section has blocks: functions from figures to lines of text, tables, plots and cards. `of_run` and `of_snapshot`
make them from functions of the run's or the snapshot's figures alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from markupsafe import Markup

from sana_pipe.base.amounts import amount
from sana_pipe.base.options import flat
from sana_pipe.data.snapshots.assemble import SourceShare
from sana_pipe.tools.reporting import run_plots
from sana_pipe.tools.reporting.adapter_figures import AdapterProblem
from sana_pipe.tools.reporting.blocks import Block, Card, Column, Heading, Table, count, number, share, size
from sana_pipe.tools.reporting.controls_and_masks import ControlOrMask
from sana_pipe.tools.reporting.curves import column, divided, held_out, labels, length, line, marks
from sana_pipe.tools.reporting.data_figures import (
    BucketFigures,
    Example,
    KindStorage,
    LeftOut,
    NewAndOld,
    Repeats,
    SnapshotFigures,
)
from sana_pipe.tools.reporting.figures import Figures
from sana_pipe.tools.reporting.plots import bar_plot, column_plot, line_plot
from sana_pipe.tools.reporting.progress import progress
from sana_pipe.tools.reporting.run_figures import DifferingOption, PartFigures, RunFigures, ValidationFigures

Blocks = Callable[[Figures], Iterable[Block]]
FIRST = 5
"""The number of figures above everything."""


@dataclass(frozen=True)
class Section(Heading):
    """A section of the report: the plots that name it (`run_plots.PLOTS`), then its blocks. One without content is left
    out."""

    blocks: Sequence[Blocks] = ()

    def blocks_of(self, figures: Figures) -> Iterator[Block]:
        if figures.run is not None:
            yield from _plots(figures.run, self.id)
        for blocks in self.blocks:
            yield from blocks(figures)


def of_run(*functions: Callable[[RunFigures], Iterable[Block]]) -> list[Blocks]:
    """Blocks of the run, where there is one."""

    def of(function: Callable[[RunFigures], Iterable[Block]]) -> Blocks:
        return lambda figures: () if figures.run is None else function(figures.run)

    return [of(function) for function in functions]


def of_snapshot(*functions: Callable[[SnapshotFigures], Iterable[Block]]) -> list[Blocks]:
    """Blocks of the snapshot, where there is one."""

    def of(function: Callable[[SnapshotFigures], Iterable[Block]]) -> Blocks:
        return lambda figures: () if figures.snapshot is None else function(figures.snapshot)

    return [of(function) for function in functions]


def _plots(run: RunFigures, section: str) -> Iterator[Markup]:
    """Draw the plots of a section; a loss with several parts has a curve for each."""
    [label] = labels([run])
    for plot in run_plots.PLOTS:
        if plot.section == section:
            name = plot.column
            parts = {each for part in run.parts for each in part.curves if each.startswith(f"{name}: ")}
            shown = [(label, name), *((each, each) for each in sorted(parts))]
            lines = [line(title, run, column(each), plot.scale) for title, each in shown]
            yield line_plot(plot.title, lines, plot.unit, marks=marks(run))


def _compared(figures: Figures) -> Iterator[Markup]:
    """Plots of two runs."""
    if figures.run is None or figures.compare is None:
        return
    runs = figures.run, figures.compare
    compared = [plot for plot in run_plots.PLOTS if plot.compared]
    plots = [(plot.title, plot.unit, plot.scale, column(plot.column)) for plot in compared]
    for title, unit, scale, curve_of in (*plots, ("Held-out loss", "loss", 1.0, held_out)):
        lines = [line(name, run, curve_of, scale) for name, run in zip(labels(runs), runs, strict=True)]
        yield line_plot(f"{title}: both runs", lines, unit)


# ---------------------------------------------------------------- data


def _snapshot(data: SnapshotFigures) -> Iterator[Block]:
    names = f" ({', '.join(data.names)})" if data.names else ""
    named = f", since {data.named['at']} by sana-pipe {data.named['version']}" if data.named else ""
    yield f"Snapshot {data.id}{names}" + (f", content {data.content}" if data.content else "") + named
    yield (
        f"{data.samples:,} samples in {len(data.buckets)} buckets, {data.steps_per_epoch:,.2f} optimizer "
        "steps per epoch" + (", packed" if data.packed else "")
    )
    if (rule := data.heldout) is not None:
        whole = "" if rule.group is None else f", by whole groups of {rule.group}"
        yield f"Held out: {rule.share:g} of the pictures{whole}; this is the side {rule.side}"
    columns: list[Column[tuple[str, Any]]] = [
        Column("rule", lambda each: each[0]),
        Column("value", lambda each: str(each[1])),
    ]
    yield Table(columns, list(flat(data.rules or {})))


def _buckets(data: SnapshotFigures) -> Iterator[Block]:
    columns: list[Column[BucketFigures]] = [
        Column("bucket (height x width)", lambda bucket: bucket.name),
        Column("samples", lambda bucket: bucket.samples, count),
        Column("batch", lambda bucket: bucket.batch, count),
        Column("steps per epoch", lambda bucket: bucket.steps, "{:,.2f}".format),
        Column("mean crop loss", lambda bucket: bucket.crop, share),
        Column("", lambda bucket: bucket.note),
    ]
    yield Table(columns, data.buckets)
    samples = {"samples": [bucket.samples for bucket in data.buckets]}
    yield bar_plot("Samples by bucket", [bucket.name for bucket in data.buckets], samples)


def _crop(data: SnapshotFigures) -> Iterator[Block]:
    if (crop := data.crop) is None:
        return
    yield (
        f"The crop to the bucket removes {crop.mean:.1%} of a picture's area on average, at most "
        f"{crop.largest:.1%}. {crop.enlarged:,} pictures are enlarged."
    )
    edges = [100 * edge for edge in crop.edges]
    title = "Samples by crop loss (the last column also has larger ones)"
    yield column_plot(title, edges, crop.samples, "area removed, %", "samples")


def _controls_and_masks(data: SnapshotFigures) -> Iterator[Block]:
    if (figures := data.controls_and_masks) is None:
        return
    columns: list[Column[ControlOrMask]] = [
        Column("", lambda kind: kind.kind),
        Column("samples that have one", lambda kind: kind.samples, count),
        Column("blank, since there is none", lambda kind: kind.blank, count),
        Column("made from the picture by", lambda kind: kind.made),
    ]
    yield Table(columns, figures.kinds)
    if (learned := figures.learned) is not None:
        yield f"On average {learned.mean:.1%} of a picture is learned, according to {learned.read:,} masks."
    for example in figures.examples:
        if example.pictures is not None:
            note = f"{example.source}, {example.height}x{example.width}"
            yield Card(example.pictures, example.item, note)


class _Source(NamedTuple):
    """A source: what it is of the snapshot, and its counts in the cache."""

    of: SourceShare
    counts: dict[str, Any]


def _sources(figures: Figures) -> Iterator[Block]:
    if figures.snapshot is None or figures.cache is None:
        return
    in_cache = figures.cache["sources"]
    columns: list[Column[_Source]] = [
        Column("source", lambda source: source.of.source),
        Column("samples", lambda source: source.of.samples, count),
        Column("weight", lambda source: source.of.weight, "{:g}".format),
        Column("visits an epoch", lambda source: source.of.visits, "{:,.2f}".format),
        Column("share of visits", lambda source: source.of.share, share),
        Column("items in the cache", lambda source: source.counts.get("items"), count),
        Column("rejected by the scan", lambda source: source.counts.get("rejected"), count),
    ]
    yield Table(columns, [_Source(each, in_cache.get(each.source, {})) for each in figures.snapshot.mixture])


def _captions(data: SnapshotFigures) -> Iterator[Block]:
    captions = data.captions
    yield (
        f"{captions.captions:,} captions, {captions.mean_tokens:.1f} tokens on average; half of them have at most "
        f"{captions.p50}, 95 % have at most {captions.p95}."
    )
    yield (
        f"{captions.at_max_length:,} ({captions.share_at_max_length:.1%}) have {captions.max_length} tokens: "
        "they were cut, or just fit."
    )
    counts = captions.by_tokens
    counts = counts[: max((i for i, n in enumerate(counts) if n), default=0) + 1]
    width = max(1, -(-len(counts) // 60))
    heights = [sum(counts[start : start + width]) for start in range(0, len(counts), width)]
    edges = [float(start * width) for start in range(len(heights) + 1)]
    yield column_plot("Captions by length", edges, heights, "tokens", "captions")
    columns: list[Column[tuple[str, int]]] = [
        Column("captions of a sample", lambda pair: pair[0], str),
        Column("samples", lambda pair: pair[1], count),
    ]
    yield Table(columns, list(captions.per_sample.items()))


def _duplicates(data: SnapshotFigures) -> Iterator[Block]:
    yield "Pictures with the same file and the same bucket count as one."
    columns: list[Column[tuple[str, Repeats]]] = [
        Column("", lambda pair: pair[0]),
        Column("in the snapshot", lambda pair: pair[1].entries, count),
        Column("distinct", lambda pair: pair[1].distinct, count),
        Column("that occur more than once", lambda pair: pair[1].repeated, count),
        Column("most occurrences", lambda pair: pair[1].most, count),
    ]
    yield Table(columns, [("pictures", data.duplicates.pictures), ("captions", data.duplicates.captions)])


def _left_out(data: SnapshotFigures) -> Iterator[Block]:
    columns: list[Column[LeftOut]] = [
        Column("reason", lambda entry: entry.reason),
        Column("items", lambda entry: entry.samples, count),
    ]
    yield Table(columns, data.left_out)


def _rejects(data: SnapshotFigures) -> Iterator[Card]:
    return (_card(entry.examples, f"{entry.samples:,} {entry.stage}: {entry.kind}") for entry in data.rejects)


def _visits(data: SnapshotFigures) -> Iterator[Card]:
    for entry in data.visits:
        before, after = f"{entry.share:.1%} of the samples", f"{entry.share_of_visits:.1%} of the visits"
        title = f"{entry.visits:g} visits an epoch: {entry.samples:,} samples, {before}, {after}"
        yield _card(entry.examples, title)


def _alike(data: SnapshotFigures) -> Iterator[Block]:
    if data.not_compared:
        yield data.not_compared
    if data.alike:
        yield "The hashes of these pictures differ in few bits; bucket.dedup=near uses one picture of each group."
    yield from (_card(entry.examples, f"{entry.pictures:,} pictures look the same") for entry in data.alike)


def _card(examples: Sequence[Example], title: str) -> Card:
    """A few of the samples or items that an entry counts."""
    items = ", ".join(example.item for example in examples)
    images = [example.picture for example in examples if example.picture is not None]
    return Card(images, title, f"for instance {items}" if items else "")


def _storage(figures: Figures) -> Iterator[Block]:
    if figures.snapshot is None or figures.cache is None:
        return
    storage, free = figures.snapshot.storage, figures.cache["free_bytes"]
    yield (
        f"The snapshot's shards take {amount(storage.shards_bytes)}, its tables {amount(storage.tables_bytes)}"
        + (f"; {amount(free)} are free." if free is not None else ".")
    )
    rows = [(name, storage.kinds[kind]) for kind, name in (("latent", "latents"), ("text", "text rows"))]
    columns: list[Column[tuple[str, KindStorage]]] = [
        Column("kind", lambda pair: pair[0]),
        Column("stored as", lambda pair: pair[1].storage),
        Column("shards", lambda pair: pair[1].shards, count),
        Column("bytes of its shards", lambda pair: pair[1].bytes, size),
    ]
    yield Table(columns, rows)
    of_stores: list[Column[tuple[str, dict[str, Any]]]] = [
        Column("whole cache", lambda pair: pair[0]),
        Column("records", lambda pair: pair[1].get("records"), count),
        Column("bytes", lambda pair: pair[1].get("bytes"), size),
        Column("rejected", lambda pair: pair[1].get("rejects"), count),
    ]
    yield Table(of_stores, list(figures.cache["stores"].items()))


def _new_samples(data: SnapshotFigures) -> Iterator[Block]:
    if (new := data.new) is None:
        return
    before, tokens = ", ".join(new.earlier_names) or new.earlier[:12], new.mean_tokens
    yield (
        f"Compared with the earlier snapshot {before}: {new.new:,} new samples, {new.old:,} old ones, "
        f"{new.removed:,} removed."
    )
    if tokens.new is not None and tokens.old is not None:
        yield f"Tokens per caption: {tokens.new:.1f} of new samples, {tokens.old:.1f} of old ones."
    series = {
        "old samples": [bucket.old for bucket in new.buckets],
        "new samples": [bucket.new for bucket in new.buckets],
    }
    yield bar_plot("Old and new samples by bucket", [bucket.name for bucket in new.buckets], series)
    columns: list[Column[tuple[str, NewAndOld]]] = [
        Column("source", lambda pair: pair[0]),
        Column("new", lambda pair: pair[1].new, count),
        Column("old", lambda pair: pair[1].old, count),
    ]
    yield Table(columns, list(new.sources.items()))


# ---------------------------------------------------------------- runs


def _measured(run: RunFigures) -> list[tuple[PartFigures, ValidationFigures]]:
    return [(part, part.validation) for part in run.parts if part.validation is not None]


class _Divided(NamedTuple):
    """A row of the held-out loss divided. ends: its last value by number of the part."""

    name: str
    first: float
    ends: dict[int, float]
    change: float


def _held_out(run: RunFigures) -> Iterator[Block]:
    """The held-out loss divided: a plot for each division, and a table of all."""
    measured, rows = _measured(run), list[_Divided]()
    for part, checks in measured:
        if checks.samples is not None:
            yield f"{part.name}: measured {checks.rows} times on {number(checks.samples)} held-out samples."
    for division, lines in divided(run):
        yield line_plot(f"Held-out loss by {division.by}", [*lines.values()], "loss", marks=marks(run))
        for value, drawn in lines.items():
            curves = [division.values(part).get(value) for part, _ in measured]
            ends = {i: curve.value[-1] for i, curve in enumerate(curves) if curve is not None and curve.value}
            rows.append(_Divided(drawn.name, drawn.y[0], ends, drawn.y[-1] - drawn.y[0]))
    heads = [f"after {part.name}" for part, _ in measured] if len(measured) > 1 else ["last"]
    columns: list[Column[_Divided]] = [
        Column("held-out loss of", lambda row: row.name),
        Column("first", lambda row: row.first, number),
        *(_end(head, i) for i, head in enumerate(heads)),
        Column("change", lambda row: row.change, "{:+.4g}".format),
    ]
    yield Table(columns, rows)


def _end(head: str, part: int) -> Column[_Divided]:
    return Column(head, lambda row: row.ends.get(part), number)


def _ema(run: RunFigures) -> Iterator[Block]:
    average = line("EMA", run, lambda part: None if part.validation is None else part.validation.ema_loss)
    if average.x:
        lines = [line("weights", run, held_out), average]
        yield line_plot("Held-out loss, weights and EMA", lines, "loss", marks=marks(run))


def _run(run: RunFigures) -> Iterator[Block]:
    yield f"Run directory {run.folder}"
    columns: list[Column[PartFigures]] = [
        Column("part", lambda part: part.name),
        Column("steps", lambda part: part.steps, number),
        Column("attempts", lambda part: part.attempts, number),
        Column("processes", lambda part: part.processes, number),
        Column("device", lambda part: part.device),
        Column("last loss", lambda part: part.last.get("loss"), number),
        Column("images/s", lambda part: part.mean.get("images_per_s"), number),
        Column("data wait", lambda part: part.mean.get("data_wait"), share),
        Column("snapshot", lambda part: part.snapshots, ids),
    ]
    yield Table(columns, run.parts)


def _plans(run: RunFigures) -> Iterator[Block]:
    """Memory as predicted and as measured, a table for each part."""
    for part in run.parts:
        document = part.prediction or {}
        plan = document.get("prediction") or {}
        sizes = {
            **{f"predicted: {kind}": amount(bytes) for kind, bytes in (plan.get("kinds") or {}).items()},
            **({"predicted in total": amount(plan["total"])} if "total" in plan else {}),
            **({"memory of the device": amount(plan["memory"])} if "memory" in plan else {}),
        }
        for key, value in (document.get("measured") or {}).items():
            unit = "GiB" if key.startswith("memory_gib") else "images/s"
            what = "predicted for the steps measured" if key.endswith("_predicted") else "measured"
            sizes[f"{what}, until step {document.get('until_step')}"] = f"{number(value)} {unit}"
        columns: list[Column[tuple[str, str]]] = [
            Column(f"plan of {part.name}", lambda pair: pair[0]),
            Column("bytes", lambda pair: pair[1], str),
        ]
        yield Table(columns, list(sizes.items()))


def _adapter(run: RunFigures) -> Iterator[Block]:
    for part in run.parts:
        if (made := part.adapter) is None:
            continue
        if isinstance(made, AdapterProblem):
            yield f"{part.name}: {made.problem}"
            continue
        blocks = made.blocks
        names = list(dict.fromkeys(name for norms in blocks.values() for name in norms))
        title = f"{part.name}, step {made.step}: norm of the change by {made.adapter}, by block"
        yield bar_plot(title, list(blocks), {n: [norms.get(n, 0.0) for norms in blocks.values()] for n in names})


@dataclass(frozen=True)
class _Compared:
    """A value of several rounds. values: by number of the round."""

    name: str
    values: dict[int, Any] = field(default_factory=dict)


def _rounds(run: RunFigures) -> Iterator[Block]:
    """Each round as a column."""
    rows: dict[str, _Compared] = {}
    parts = run.parts if len(run.parts) > 1 else []
    for i, part in enumerate(parts):
        curve = held_out(part)
        measured = [] if curve is None else curve.value
        values = {
            "steps": part.steps,
            "loss of the last row": part.last.get("loss"),
            "held-out loss, first": measured[0] if measured else None,
            "held-out loss, last": measured[-1] if measured else None,
            "images/s": part.mean.get("images_per_s"),
            **{f"summary: {key}": value for key, value in _scalars(part.summary or {})},
        }
        for name, value in values.items():
            if value is not None:
                rows.setdefault(name, _Compared(name)).values[i] = value
    columns = [Column[_Compared]("", lambda row: row.name), *(_round(part.name, i) for i, part in enumerate(parts))]
    yield Table(columns, list(rows.values()))


def _round(head: str, number_of_round: int) -> Column[_Compared]:
    return Column(head, lambda row: row.values.get(number_of_round), number)


def _scalars(summary: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of a summary and of the objects in it; the plots show what lies deeper."""
    for key, value in summary.items():
        below = value if isinstance(value, dict) else {"": value}
        for name, single in below.items():
            if single is not None and not isinstance(single, dict):
                yield f"{key}.{name}".removesuffix("."), single


def ids(names: list[str]) -> str:
    return ", ".join(name[:12] for name in names)


def _options(figures: Figures) -> Iterator[Block]:
    first, second = figures.run, figures.compare
    if first is None or second is None:
        return
    yield f"{first.folder} and {second.folder}"
    if not second.options:
        yield "No option differs."
    here, there = labels((first, second))
    columns: list[Column[DifferingOption]] = [
        Column("option", lambda option: option.option),
        Column(here, lambda option: option.here),
        Column(there, lambda option: option.there),
    ]
    yield Table(columns, second.options or [])


def headline(figures: Figures) -> list[tuple[str, str, str]]:
    """The numbers above everything, the first `FIRST` of them: (name, value, remark)."""
    data, run, numbers = figures.snapshot, figures.run, list[tuple[str, str, str]]()
    if run is not None:
        last, checks, loss = run.parts[-1], line("", run, held_out), line("", run, column("loss"))
        mean, several = last.mean, f"in {len(run.parts)} rounds" if len(run.parts) > 1 else ""
        numbers.append(("optimizer steps", f"{length(run):,.0f}", several))
        if checks.y:
            numbers.append(("held-out loss", number(checks.y[-1]), f"{number(checks.y[0])} at first"))
        if loss.y:
            numbers.append(("training loss", number(loss.y[-1]), f"{number(loss.y[0])} at first"))
        if "images_per_s" in mean:
            numbers.append(("images/s", number(mean["images_per_s"]), f"{last.processes} x {last.device or ''}"))
        if "data_wait" in mean:
            numbers.append(("data wait", share(mean["data_wait"]), "of the wall time"))
    if data is not None:
        numbers.insert(4, ("samples", f"{data.samples:,}", f"in {len(data.buckets)} buckets"))
        numbers += [
            ("steps per epoch", f"{data.steps_per_epoch:,.2f}", ""),
            ("tokens per caption", f"{data.captions.mean_tokens:.1f}", ""),
            ("crop loss", share(data.crop.mean) if data.crop else "unknown", "of a picture's area"),
            ("shards", amount(data.storage.shards_bytes), ""),
        ]
    return numbers


SECTIONS = (
    Section("progress", "Loss and pictures", wide=True, blocks=[progress]),
    Section("pictures", "Pictures"),
    Section("validation", "Held-out loss", blocks=of_run(_held_out)),
    Section("ema", "EMA", blocks=of_run(_ema)),
    Section("losses", "Losses"),
    Section("run", "Run", blocks=of_run(_run)),
    Section("adapter", "Change by the adapter", blocks=of_run(_adapter)),
    Section("rounds", "Rounds side by side", blocks=of_run(_rounds)),
    Section("throughput", "Throughput"),
    Section("data-wait", "Data wait"),
    Section("memory", "Memory and its plan", blocks=of_run(_plans)),
    Section("compare", "Two runs compared", blocks=[_options, _compared]),
    Section("snapshot", "Snapshot", blocks=of_snapshot(_snapshot)),
    Section("new", "New samples against old ones", blocks=of_snapshot(_new_samples)),
    Section("buckets", "Buckets", blocks=of_snapshot(_buckets)),
    Section("crop", "Crop loss", blocks=of_snapshot(_crop)),
    Section("controls-and-masks", "Control pictures and masks", blocks=of_snapshot(_controls_and_masks)),
    Section("sources", "Sources", blocks=[_sources]),
    Section("captions", "Caption lengths", blocks=of_snapshot(_captions)),
    Section("duplicates", "Duplicates", blocks=of_snapshot(_duplicates)),
    Section("visits", "Visits by weight", blocks=of_snapshot(_visits)),
    Section("alike", "Pictures that look the same", blocks=of_snapshot(_alike)),
    Section("rejects", "Rejects and samples left out", blocks=of_snapshot(_left_out, _rejects)),
    Section("storage", "Storage", blocks=[_storage]),
    Section("gallery", "Decoded latents"),
    Section("trained-on", "Snapshot of the run"),
    Section("earlier", "Earlier rounds"),
)
"""The sections in the order of the page. `pictures`, `gallery`, `trained-on` and `earlier` have no figures; the page
names what makes them."""
