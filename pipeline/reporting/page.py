"""The page of `sana-pipe report`: sections with numbers, tables, plots and pictures in one HTML file.

The page needs no network, no script and no font: plots are SVG (`pipeline.reporting.plots`), pictures are inside it.
Captions and file names are foreign text: Jinja2 escapes every value, and a content security policy in the page forbids
loading anything. A section without data is listed at the end with the command that makes its data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from pipeline import __version__
from pipeline.amounts import amount
from pipeline.cache.local_files import replacing
from pipeline.errors import UserError, writing
from pipeline.reporting.data_figures import bucket_name
from pipeline.reporting.photos import Embedded, embedded
from pipeline.reporting.pictures import decode_command, undecoded
from pipeline.reporting.plots import WIDE, WIDTH, Line, bar_plot, column_plot, line_plot, number_text

FRAMES = 24
"""Limit on the pictures of a slider: the first, the last, and others evenly between them."""
PICTURE_SIDE = 320
COLUMNS = 168
"""Of the grid along the axis of losses and pictures."""
ROWS = 60
"""Limit on the rows of a table; the rest is added up."""


@dataclass(frozen=True)
class Table:
    """heads: of the columns. numbers: the columns that are aligned to the right."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()


@dataclass(frozen=True)
class Figure:
    """Pictures side by side with a text."""

    images: Sequence[Embedded]
    text: str
    note: str = ""


@dataclass(frozen=True)
class Slider:
    """Pictures over time: one of them in sight, or on a wide page all of them along the axis.

    Attributes:
        id: unique on the page.
        frames: (label, picture), by time.
        columns: of each picture, (first, number).
    """

    id: str
    title: str
    frames: Sequence[tuple[str, Embedded]]
    columns: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Sliders:
    """The sliders of a prompt, side by side."""

    text: str
    sliders: Sequence[Slider]


@dataclass
class Section:
    """One part of the page; without content it is left out. wide: a plot for a wide page, and the same for a narrow
    one."""

    id: str
    title: str
    lines: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Markup] = field(default_factory=list)
    wide: list[Markup] = field(default_factory=list)
    cards: list[Figure] = field(default_factory=list)
    sliders: list[Sliders] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(
            self.lines
            or any(table.rows for table in self.tables)
            or any((*self.plots, *self.wide))
            or self.cards
            or self.sliders
        )


_BEGIN = b"<!DOCTYPE html>"
TITLES = {
    "progress": "Loss and pictures",
    "pictures": "Pictures",
    "validation": "Held-out loss",
    "ema": "EMA",
    "losses": "Losses",
    "run": "Run",
    "phases": "Phases side by side",
    "throughput": "Throughput",
    "data-wait": "Data wait",
    "memory": "Memory beside the plan",
    "compare": "Two runs compared",
    "snapshot": "Snapshot",
    "new": "New samples against old ones",
    "buckets": "Buckets",
    "crop": "Crop loss",
    "sources": "Sources",
    "captions": "Caption lengths",
    "duplicates": "Duplicates",
    "rejects": "Rejects and samples left out",
    "storage": "Storage",
    "gallery": "Decoded latents",
    "trained-on": "Snapshot of the run",
}
"""Sections by id, in the order of the page."""


def write_page(
    figures: dict[str, Any],
    out: Path,
    *,
    thumbnails: Callable[[str | None, str], Embedded] | None = None,
    gallery: Sequence[Figure] = (),
) -> list[str]:
    """Write the page, whole or not at all.

    Args:
        figures: of `pipeline.reporting.figures.collect`.
        thumbnails: (source or None, item) -> picture of a reject; None: without pictures.
        gallery: cards of decoded latents.

    Returns:
        Ids of the sections.

    Raises:
        UserError: the file cannot be written.
    """
    sections = [section for section in _sections(figures, thumbnails, gallery) if section]
    sections.sort(key=lambda section: list(TITLES).index(section.id))
    missing = [{"title": TITLES[name], **entry} for name, entry in figures["missing"].items()]
    if figures["snapshot"] is not None and not gallery:
        missing.append(_absent("gallery", "no latents were decoded", "sana-pipe report --gallery 8"))
    if figures["run"] is not None and figures["compare"] is None:
        missing.append(_absent("compare", "no second run was named", "sana-pipe report --compare RUN"))
    text = render("report.html", title=_title(figures), numbers=_first(figures), sections=sections, missing=missing)
    write(text, out)
    return [section.id for section in sections]


def render(template: str, **values: Any) -> str:
    """A page of `templates/`, with `version` and `time` added."""
    environment = Environment(
        loader=PackageLoader("pipeline.reporting"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return environment.get_template(template).render(version=__version__, time=now, columns=COLUMNS, **values)


def check_out(out: Path) -> None:
    """Raise a UserError if `out` is there and is no page: `write` would replace it."""
    with _writing(out):
        if not out.exists():
            return
        if out.is_file():
            with out.open("rb") as file:
                if file.read(len(_BEGIN)) in (b"", _BEGIN):
                    return
    raise UserError(f"{out} exists and is no page of sana-pipe", expected="a new file, or a page", fix="another --out")


def _writing(out: Path) -> AbstractContextManager[None]:
    return writing(out, "check the rights, or give another --out")


def write(text: str, out: Path) -> None:
    """Replace a page, whole or not at all. Raises a UserError if it cannot be written, or see `check_out`."""
    check_out(out)
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as work:
            work.write_bytes(text.encode("utf-8", "replace"))  # names of files may hold lone surrogates


def _absent(section: str, what: str, command: str) -> dict[str, str]:
    return {"title": TITLES[section], "what": what, "command": command}


def _title(figures: dict[str, Any]) -> str:
    parts = []
    if figures["run"] is not None:
        parts.append(f"run {Path(figures['run']['folder']).name}")
    if (data := figures["snapshot"]) is not None:
        names = [name for name in data["names"] if not name.startswith("trained-")]
        parts.append(f"snapshot {names[0] if names else data['id'][:12]}")
    return "sana-pipe report" + (f": {', '.join(parts)}" if parts else "")


def _first(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The five numbers above everything: (name, value, remark)."""
    data, run, numbers = figures["snapshot"], figures["run"], []
    if run is not None:
        last, checks = run["parts"][-1], _line("", run, _of_validation("loss"))
        several = f"in {len(run['parts'])} rounds" if len(run["parts"]) > 1 else ""
        numbers.append(("optimizer steps", f"{_starts(run)[-1]:,.0f}", several))
        if checks.y:
            numbers.append(("held-out loss", _number(checks.y[-1]), f"{_number(checks.y[0])} at first"))
        loss = _line("", run, _of_journal("loss"))
        if loss.y:
            numbers.append(("training loss", _number(last["last"].get("loss")), f"{_number(loss.y[0])} at first"))
        if (speed := last["mean"].get("images_per_s")) is not None:
            numbers.append(("images/s", _number(speed), f"{_number(last['processes'])} x {last['device'] or ''}"))
        if (wait := last["mean"].get("data_wait")) is not None:
            numbers.append(("data wait", _percent(wait), "of the wall time"))
    if data is not None:
        numbers.insert(4, ("samples", f"{data['samples']:,}", f"in {len(data['buckets'])} buckets"))
        numbers += [
            ("steps per epoch", f"{data['steps_per_epoch']:,.2f}", ""),
            ("tokens per caption", f"{data['captions']['mean_tokens']:.1f}", ""),
            ("crop loss", _percent((data["crop"] or {}).get("mean")), "of a picture's area"),
            ("shards", amount(data["storage"]["shards_bytes"]), ""),
        ]
    return numbers[:5]


def _sections(
    figures: dict[str, Any], thumbnails: Callable[[str | None, str], Embedded] | None, gallery: Sequence[Figure]
) -> Iterator[Section]:
    if figures["snapshot"] is not None:
        yield from _data_sections(figures["snapshot"], figures["cache"], thumbnails)
    yield Section("gallery", TITLES["gallery"], cards=list(gallery))
    if figures["run"] is not None:
        yield _progress([run for run in (figures["run"], figures["compare"]) if run is not None])
        yield from _run_sections(figures["run"])
        if figures["compare"] is not None:
            yield _compare(figures["run"], figures["compare"])


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"


def _limited(rows: list[list[str]], what: str) -> list[list[str]]:
    if len(rows) <= ROWS:
        return rows
    return [
        *rows[:ROWS],
        [f"and {len(rows) - ROWS} more {what} (sana-pipe inspect --json)", *[""] * (len(rows[0]) - 1)],
    ]


# ---------------------------------------------------------------- data


def _data_sections(
    data: dict[str, Any], cache: dict[str, Any], thumbnails: Callable[[str | None, str], Embedded] | None
) -> Iterator[Section]:
    yield _section(
        "snapshot",
        f"Snapshot {data['id']}" + (f" ({', '.join(data['names'])})" if data["names"] else ""),
        f"{data['samples']:,} samples in {len(data['buckets'])} buckets, {data['steps_per_epoch']:,.2f} optimizer "
        "steps per epoch" + (", packed" if data["packed"] else ""),
    )
    yield _buckets(data["buckets"])
    if data["crop"] is not None:
        yield _crop(data["crop"])
    sources = _section("sources")
    heads = ("source", "samples", "items in the cache", "rejected by the scan")
    rows = [_source(name, count, cache) for name, count in data["sources"].items()]
    sources.tables.append(Table(heads, _limited(rows, "sources"), (1, 2, 3)))
    yield sources
    yield _captions(data["captions"])
    yield _duplicates(data["duplicates"])
    yield _rejects(data, thumbnails)
    yield _storage(data, cache)
    if data["new"] is not None:
        yield _new_samples(data["new"])


def _section(name: str, *lines: str) -> Section:
    return Section(name, TITLES[name], lines=list(lines))


def _buckets(buckets: list[dict[str, Any]]) -> Section:
    part = _section("buckets")
    names = [bucket_name(bucket) for bucket in buckets]
    heads = ("bucket (height x width)", "samples", "batch", "steps per epoch", "mean crop loss", "")
    rows = [
        [name, f"{b['samples']:,}", f"{b['batch']:,}", f"{b['steps']:,.2f}", _percent(b["crop"]), b["note"]]
        for name, b in zip(names, buckets, strict=True)
    ]
    part.tables.append(Table(heads, rows, (1, 2, 3, 4)))
    samples = [bucket["samples"] for bucket in buckets]
    part.plots.append(bar_plot("buckets-plot", "Samples by bucket", names, [("samples", samples)]))
    return part


def _crop(crop: dict[str, Any]) -> Section:
    part = _section(
        "crop",
        f"The crop to the bucket removes {_percent(crop['mean'])} of a picture's area on average, at most "
        f"{_percent(crop['largest'])}. {crop['enlarged']:,} pictures are enlarged.",
    )
    edges = [100 * edge for edge in crop["edges"]]
    title = "Samples by crop loss (the last column also has larger ones)"
    part.plots.append(column_plot("crop-plot", title, edges, crop["samples"], "area removed, %", "samples"))
    return part


def _duplicates(duplicates: dict[str, Any]) -> Section:
    part = _section("duplicates")
    heads = ("", "in the snapshot", "distinct", "that occur more than once", "most often")
    titles = {"pictures": "pictures (same file, same bucket)", "captions": "captions"}
    rows = [
        [title, *(f"{duplicates[name][key]:,}" for key in ("entries", "distinct", "repeated", "most"))]
        for name, title in titles.items()
    ]
    part.tables.append(Table(heads, rows, (1, 2, 3, 4)))
    return part


def _rejects(data: dict[str, Any], thumbnails: Callable[[str | None, str], Embedded] | None) -> Section:
    part = _section("rejects")
    if data["left_out"]:
        rows = [[entry["reason"], f"{entry['samples']:,}"] for entry in data["left_out"]]
        part.tables.append(Table(("reason", "items"), _limited(rows, "reasons"), (1,)))
    for entry in data["rejects"]:
        images = [thumbnails(e["source"], e["item"]) for e in entry["examples"]] if thumbnails is not None else []
        text = f"{entry['samples']:,} {entry['stage']}: {entry['kind']}"
        items = ", ".join(example["item"] for example in entry["examples"])
        part.cards.append(Figure(images, text, f"for instance {items}" if items else ""))
    return part


def _new_samples(new: dict[str, Any]) -> Section:
    before = ", ".join(new["earlier_names"]) or new["earlier"][:12]
    part = _section(
        "new",
        f"Against the earlier snapshot {before}: {new['new']:,} new samples, {new['old']:,} old ones, "
        f"{new['removed']:,} removed.",
    )
    tokens = new["mean_tokens"]
    if tokens["new"] is not None and tokens["old"] is not None:
        part.lines.append(f"Tokens per caption: {tokens['new']:.1f} of new samples, {tokens['old']:.1f} of old ones.")
    labels = [bucket_name(bucket) for bucket in new["buckets"]]
    series = [(f"{side} samples", [bucket[side] for bucket in new["buckets"]]) for side in ("old", "new")]
    part.plots.append(bar_plot("new-plot", "Old and new samples by bucket", labels, series))
    rows = [[name, f"{pair['new']:,}", f"{pair['old']:,}"] for name, pair in new["sources"].items()]
    part.tables.append(Table(("source", "new", "old"), _limited(rows, "sources"), (1, 2)))
    return part


def _source(name: str, samples: int, cache: dict[str, Any]) -> list[str]:
    known = cache["sources"].get(name)
    counts = ("", "") if known is None else (f"{known['items']:,}", f"{known['rejected']:,}")
    return [name, f"{samples:,}", *counts]


def _captions(captions: dict[str, Any]) -> Section:
    longest = captions["max_length"]
    part = _section(
        "captions",
        f"{captions['captions']:,} captions, {captions['mean_tokens']:.1f} tokens on average"
        + (f", half of them at most {captions['p50']}, 95 % at most {captions['p95']}." if "p50" in captions else "."),
        f"{captions['at_max_length']:,} ({_percent(captions['share_at_max_length'])}) have {longest} tokens: they were "
        "cut there, or just fit.",
    )
    counts = captions["by_tokens"]
    counts = counts[: max((i for i, count in enumerate(counts) if count), default=0) + 1]
    width = max(1, -(-len(counts) // 60))
    columns = [sum(counts[start : start + width]) for start in range(0, len(counts), width)]
    edges = [float(start * width) for start in range(len(columns) + 1)]
    part.plots.append(column_plot("captions-plot", "Captions by length", edges, columns, "tokens", "captions"))
    rows = [[number, f"{samples:,}"] for number, samples in captions["per_sample"].items()]
    part.tables.append(Table(("captions of a sample", "samples"), rows, (0, 1)))
    return part


def _storage(data: dict[str, Any], cache: dict[str, Any]) -> Section:
    storage = data["storage"]
    free = cache["free_bytes"]
    part = _section(
        "storage",
        f"The snapshot's shards have {amount(storage['shards_bytes'])}, its tables {amount(storage['tables_bytes'])}"
        + (f"; {amount(free)} are free." if free is not None else "."),
    )
    kinds = {"latent": "latents", "text": "text rows"}
    rows = [
        [title, entry["storage"], f"{entry['shards']:,}", amount(entry["bytes"]), amount(entry["payload"])]
        for kind, title in kinds.items()
        for entry in [storage[kind]]
    ]
    heads = ("kind", "stored as", "shards", "bytes of its shards", "tensors of this snapshot")
    part.tables.append(Table(heads, rows, (2, 3, 4)))
    rows = [
        [name, f"{store['records']:,}", amount(store["bytes"]), f"{store['rejects']:,}"]
        for name, store in cache["stores"].items()
    ]
    part.tables.append(Table(("whole cache", "records", "bytes", "rejected"), _limited(rows, "stores"), (1, 2, 3)))
    sizes = [storage[kind]["payload"] for kind in kinds]
    part.plots.append(bar_plot("storage-plot", "Tensors of the snapshot", list(kinds.values()), [("", sizes)], amount))
    return part


# ---------------------------------------------------------------- runs

Pick = Callable[[dict[str, Any]], dict[str, list[float]] | None]
"""The curve of a part of a run; None: it has none."""


def _starts(run: dict[str, Any]) -> list[float]:
    """The steps that were done before each part of a run began; at the end those of all."""
    starts = [0.0]
    for part in run["parts"]:
        steps = [part["steps"] or 0, *((part["validation"] or {}).get("loss") or {"step": []})["step"]]
        starts.append(starts[-1] + max(steps + [drawing["step"] for drawing in part["pictures"]]))
    return starts


def _marks(run: dict[str, Any]) -> list[tuple[float, str]]:
    """Where the parts of a run begin."""
    names = [part["name"] for part in run["parts"]]
    return list(zip(_starts(run), names, strict=False)) if len(names) > 1 else []


def _line(name: str, run: dict[str, Any], pick: Pick, scale: float = 1.0) -> Line:
    """A curve through all parts of a run, one behind the other."""
    x: list[float] = []
    columns: dict[str, list[float]] = {"value": [], "low": [], "high": []}
    for start, part in zip(_starts(run), run["parts"], strict=False):
        curve = pick(part) or {"step": [], "value": []}
        x += [start + step for step in curve["step"]]
        for key, column in columns.items():
            column += [scale * value for value in curve.get(key, curve["value"])]
    if columns["low"] == columns["high"]:
        return Line(name, x, columns["value"])
    return Line(name, x, columns["value"], columns["low"], columns["high"])


def _of_journal(column: str) -> Pick:
    return lambda part: part["curves"].get(column)


def _of_validation(name: str, key: str | None = None) -> Pick:
    def pick(part: dict[str, Any]) -> dict[str, list[float]] | None:
        values = (part["validation"] or {}).get(name)
        return values if key is None or values is None else values.get(key)

    return pick


_PLOTS = {
    "losses": (
        ("loss", "Training loss", "loss", 1.0),
        ("grad_norm", "Gradient norm before clipping", "norm", 1.0),
        ("lr", "Learning rate", "rate", 1.0),
        ("loss_scale", "Loss scale (fp16)", "factor", 1.0),
    ),
    "throughput": (
        ("images_per_s", "Images per second, all processes", "images/s", 1.0),
        ("tokens_per_s", "Image tokens per second, all processes", "tokens/s", 1.0),
        ("mfu", "Model FLOPs utilisation", "MFU, %", 100.0),
    ),
    "data-wait": (("data_wait", "Time that the slowest process waited for data", "% of the wall time", 100.0),),
    "memory": (
        ("memory_gib", "Peak of allocated GPU memory", "GiB", 1.0),
        ("reserved_gib", "Peak of reserved GPU memory", "GiB", 1.0),
        ("rss_gib", "Main memory of the largest process", "GiB", 1.0),
    ),
}
"""The plots of a section: (column of the journal, title, label with unit, factor)."""


def _run_sections(run: dict[str, Any]) -> Iterator[Section]:
    yield from _validation_sections(run)
    for name, plots in _PLOTS.items():
        section = _section(name)
        for column, title, label, scale in plots:
            lines = [_line(_label(run), run, _of_journal(column), scale)]
            parts = {name for part in run["parts"] for name in part["curves"] if name.startswith(f"{column}: ")}
            lines += [_line(name, run, _of_journal(name), scale) for name in sorted(parts)]
            section.plots.append(line_plot(f"{column}-plot", title, lines, label, marks=_marks(run)))
        if name == "memory":
            section.tables = [table for part in run["parts"] for table in _plan_tables(part["name"], part)]
        yield section
    about = _section("run", f"Run directory {run['folder']}")
    heads = ("part", "steps", "attempts", "processes", "device", "last loss", "images/s", "data wait", "snapshot")
    about.tables.append(Table(heads, [_part_row(part["name"], part) for part in run["parts"]], (1, 2, 3, 5, 6, 7)))
    yield about
    if len(run["parts"]) > 1:
        yield _phases(run["parts"])


def _label(run: dict[str, Any]) -> str:
    return Path(run["folder"]).name


def _part_row(name: str, part: dict[str, Any]) -> list[str]:
    mean, last = part["mean"], part["last"]
    return [
        name,
        _number(part["steps"]),
        str(part["attempts"]),
        _number(part["processes"]),
        part["device"] or "",
        _number(last.get("loss")),
        _number(mean.get("images_per_s")),
        _percent(mean["data_wait"]) if "data_wait" in mean else "",
        ", ".join(name[:12] for name in part["snapshots"]),
    ]


def _number(value: Any) -> str:
    return number_text(value) if isinstance(value, int | float) else "" if value is None else str(value)


_DIVIDED = (
    ("by_sigma", "sigma", "sigma {}"),
    ("by_bucket", "bucket", "bucket {}"),
    ("by_age", "age", "{} samples"),
    ("parts", "part", "{}"),
)
"""Figures of the held-out loss in parts: their name, what divides them, and the label of a part."""


def _validation_sections(run: dict[str, Any]) -> Iterator[Section]:
    section, ema = _section("validation"), _section("ema")
    measured = [(part["name"], part["validation"]) for part in run["parts"] if part["validation"] is not None]
    rows, marks = [], _marks(run)
    ends = [f"after {name}" for name, _ in measured] if len(measured) > 1 else ["last"]
    for key, what, label in _DIVIDED:
        values = dict.fromkeys(value for _, checks in measured for value in checks[key])
        lines = [_line(label.format(value), run, _of_validation(key, value)) for value in values]
        section.plots.append(line_plot(f"{key}-plot", f"Held-out loss by {what}", lines, "loss", marks=marks))
        for value, line in zip(values, lines, strict=True):
            curves = [checks[key].get(value) for _, checks in measured]
            cells = [_number(curve["value"][-1]) if curve else "" for curve in curves]
            rows.append([line.name, _number(line.y[0]), *cells, f"{line.y[-1] - line.y[0]:+.4g}"])
    for name, checks in measured:
        if checks["samples"] is not None:
            section.lines.append(f"{name}: {checks['rows']} times on {_number(checks['samples'])} held-out samples.")
    section.tables.append(Table(("held-out loss of", "first", *ends, "change"), rows, range(1, 3 + len(ends))))
    yield section
    average = _line("EMA", run, _of_validation("ema_loss"))
    if average.x:
        lines = [_line("weights", run, _of_validation("loss")), average]
        ema.plots.append(line_plot("ema-plot", "Held-out loss, weights and EMA", lines, "loss", marks=marks))
    yield ema


def _plan_tables(name: str, part: dict[str, Any]) -> list[Table]:
    document = part["prediction"]
    if document is None:
        return []
    plan = document.get("prediction") or {}
    rows = []
    for kind, size in (plan.get("kinds") or {}).items():
        rows.append([f"predicted: {kind}", amount(size)])
    if "total" in plan:
        rows.append(["predicted in all", amount(plan["total"])])
    if "memory" in plan:
        rows.append(["memory of the device", amount(plan["memory"])])
    for key, value in (document.get("measured") or {}).items():
        unit = " GiB" if key.startswith("memory_gib") else " images/s"
        what = "predicted for the steps measured" if key.endswith("_predicted") else "measured"
        rows.append([f"{what}, until step {document.get('until_step')}", f"{_number(value)}{unit}"])
    return [Table((f"plan of {name}", "bytes"), rows, (1,))]


def _phases(parts: list[dict[str, Any]]) -> Section:
    """Each phase as a column."""
    rows: dict[str, list[str]] = {}
    for column, part in enumerate(parts):
        checks = part["validation"] or {}
        held_out = (checks.get("loss") or {}).get("value") or [None]
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
                rows.setdefault(name, [""] * len(parts))[column] = _number(value)
    section = _section("phases")
    heads = ("", *(part["name"] for part in parts))
    section.tables.append(Table(heads, [[name, *cells] for name, cells in rows.items()]))
    return section


def _scalars(summary: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of a summary and of the objects in it; the plots show what lies deeper."""
    for key, value in summary.items():
        below = value if isinstance(value, dict) else {"": value}
        for name, single in below.items():
            if single is not None and not isinstance(single, dict):
                yield f"{key}.{name}".removesuffix("."), single


def _progress(runs: Sequence[dict[str, Any]]) -> Section:
    """Losses and pictures of all runs on one axis: each prompt has a slider over the steps of each run."""
    section = _section("progress")
    labels, until = _labels(runs), max(_starts(run)[-1] for run in runs)
    lines = [
        _line(f"{what}{'' if len(runs) == 1 else f', {label}'}", run, pick)
        for what, pick in (("training loss", _of_journal("loss")), ("held-out loss", _of_validation("loss")))
        for label, run in zip(labels, runs, strict=True)
    ]
    for name, width in (("progress-plot", WIDE), ("progress-narrow", WIDTH)):
        title, marks = "Training loss and held-out loss", _marks(runs[0])
        plot = line_plot(name, title, lines, "loss", marks=marks, until=until, width=width)
        section.wide.append(plot)
    by_prompt: dict[str, list[Slider]] = {}
    for number, (label, run) in enumerate(zip(labels, runs, strict=True)):
        frames: dict[str, list[_Shown]] = {}
        several, drawn = len(run["parts"]) > 1, set()
        for start, part in zip(_starts(run), run["parts"], strict=False):
            for drawing in part["pictures"]:
                if drawing.get("pictures") is None:
                    continue
                step, name = f"{drawing['step']:,}", part["name"]
                when = (f"{name} {step}", f"{name}, step {step}") if several else (step, f"step {step}")
                drawn.add("EMA weights" if drawing["ema"] else "last weights")
                for prompt, place in zip(drawing["prompts"], drawing["pictures"], strict=True):
                    frames.setdefault(prompt, []).append((start + drawing["step"], *when, place))
        if drawn:
            longest = max(map(len, frames.values()))
            of = f"{FRAMES} of " if longest > FRAMES else ""
            section.lines.append(f"{label}: {of}{longest} steps, drawn with the {' and the '.join(sorted(drawn))}.")
        for order, (prompt, places) in enumerate(frames.items()):
            shown = list(_spread(places))
            columns = _columns([at / (until or 1) for at, *_ in shown])
            slider = Slider(f"time-{number}-{order}", label, [_frame(*frame[1:]) for frame in shown], columns)
            by_prompt.setdefault(prompt, []).append(slider)
    if by_prompt:
        section.lines += [f"{what}: {decode_command(Path(run['folder']))}" for run in runs if (what := undecoded(run))]
    section.sliders = [Sliders(prompt, sliders) for prompt, sliders in by_prompt.items()]
    return section


def _columns(places: Sequence[float]) -> list[tuple[int, int]]:
    """(first column, columns) of `COLUMNS` for pictures in ascending places on an axis from 0 to 1: as near as they can
    be without lying over each other."""
    span = min(COLUMNS // 8, COLUMNS // max(1, len(places)))
    firsts, least, most = [], 0, COLUMNS - span * len(places)
    for place in places:
        least, most = max(least, min(round(COLUMNS * place - span / 2), most)) + span, most + span
        firsts.append(least - span)
    return [(first + 1, span) for first in firsts]


_Shown = tuple[float, str, str, str | None]
"""A step of a slider: its place on the axis, its label, what it shows, and the path of the picture."""


def _spread(frames: Sequence[_Shown]) -> Iterator[_Shown]:
    last = len(frames) - 1
    count = min(len(frames), FRAMES)
    return (frames[round(i * last / max(1, count - 1))] for i in range(count))


def _frame(when: str, alt: str, place: str | None) -> tuple[str, Embedded]:
    if place is None:
        return when, Embedded(alt, why="the latent was not finite")
    try:
        with Image.open(place) as picture:
            return when, embedded(picture, alt, PICTURE_SIDE)
    except OSError:
        return when, Embedded(alt)


def _labels(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Names of runs; their folders where the names are equal."""
    names = [Path(run["folder"]).name for run in runs]
    return names if len(set(names)) == len(names) else [run["folder"] for run in runs]


def _compare(first: dict[str, Any], second: dict[str, Any]) -> Section:
    names = _labels((first, second))
    section = _section("compare", f"{first['folder']} and {second['folder']}")
    for column, title, unit in (
        ("loss", "Training loss of both runs", "loss"),
        ("grad_norm", "Gradient norm of both runs", "norm"),
        ("images_per_s", "Images per second of both runs", "images/s"),
    ):
        lines = [_line(name, run, _of_journal(column)) for name, run in zip(names, (first, second), strict=True)]
        section.plots.append(line_plot(f"compare-{column}", title, lines, unit))
    lines = [_line(name, run, _of_validation("loss")) for name, run in zip(names, (first, second), strict=True)]
    section.plots.append(line_plot("compare-validation", "Held-out loss of both runs", lines, "loss"))
    rows = [[entry["option"], str(entry["here"]), str(entry["there"])] for entry in second["options"]]
    if rows:
        section.tables.append(Table(("option", *names), rows))
    else:
        section.lines.append("No option differs.")
    return section
