"""All numbers of a report: those of a snapshot, of its cache, of a run, and of another run next to it.

`collect` serves the page (`sana-pipe report`) and scripts (`sana-pipe inspect`), so both show the same numbers. What
cannot be had is in `missing`, with the command that makes it; only what the user named and is not there is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sana_pipe.base.errors import CacheError, UserError
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.status import status
from sana_pipe.tools.reporting.blocks import Missing
from sana_pipe.tools.reporting.data_figures import SnapshotFigures, snapshot_figures
from sana_pipe.tools.reporting.run_figures import RunFigures, differing_options, is_run, run_figures, undecoded

TRAIN = "sana-pipe train --resume auto"


@dataclass(frozen=True)
class Figures:
    """All numbers of a report.

    Attributes:
        cache: of `cache.status`.
        compare: another run next to `run`.
        missing: by the id of the section.
    """

    cache: dict[str, Any] | None
    snapshot: SnapshotFigures | None
    run: RunFigures | None
    compare: RunFigures | None
    missing: dict[str, Missing]


def collect(
    output: Path,
    open_cache: Callable[[], Cache] | None,
    *,
    run: Path | None = None,
    snapshot: str | None = None,
    compare: Path | None = None,
) -> tuple[Figures, Cache | None, Snapshot | None]:
    """The numbers, and their cache and snapshot if they exist.

    Args:
        output: `train.output`.
        open_cache: None leaves cache and snapshot out, whose numbers take long for many samples.
        run: a run directory; None: `output`, if something was trained there. The runs that it began from are
            parts of it, unless it is compared with another.
        snapshot: a name or id; None: the last that the run was trained on, if the cache has it, else the newest.
        compare: a second run directory.

    Raises:
        UserError: `run` or `compare` is not a run directory.
        CacheError: `snapshot` does not exist, or the snapshot is damaged.
    """
    missing: dict[str, Missing] = {}
    cache = opened = counts = data = first = second = None
    folder = output if run is None else run
    if run is not None or is_run(folder):
        first = run_figures(folder, earlier=compare is None)
    try:
        if open_cache is not None:
            cache = open_cache()
            counts = status(cache)
            opened = cache.open_snapshot(snapshot or _trained_on(cache, first))
        else:
            missing["snapshot"] = Missing("this page is about the run alone", "sana-pipe report")
    except CacheError as error:
        if snapshot is not None:
            raise
        missing["snapshot"] = Missing(error.what, error.fix or "sana-pipe status")
    if cache is not None and opened is not None:
        data = snapshot_figures(cache, opened)
        if data.crop is None:
            what = data.crop_missing or "the sizes of the pictures are not known"
            missing["crop"] = Missing(what, "sana-pipe encode --data DIR")
        if data.new is None:
            what = "there is no earlier snapshot to compare with"
            missing["new"] = Missing(what, "sana-pipe bucket --name NAME")
    if first is not None:
        missing |= _missing_in_run(first, data)
    else:
        missing["run"] = Missing(f"nothing was trained in {folder}", TRAIN)
    if compare is not None:
        if first is None:
            raise UserError(
                "--compare needs a run to compare with",
                expected="a run directory",
                found=f"nothing was trained in {folder}",
                fix="name the first run: --run DIR",
            )
        second = run_figures(compare)
        missing |= _missing_pictures([first, second])
        second = replace(second, options=differing_options(first, second))
    return Figures(counts, data, first, second, missing), cache, opened


def _trained_on(cache: Cache, run: RunFigures | None) -> str | None:
    """The last snapshot that a run was trained on; None if there is no run or the cache lacks it."""
    names = [] if run is None else run.parts[-1].snapshots
    try:
        return cache.open_snapshot(names[-1]).id if names else None
    except CacheError:
        return None


def _missing_pictures(runs: Sequence[RunFigures]) -> dict[str, Missing]:
    """Name the first run with drawings that are not decoded, else that there are none."""
    for run in runs:
        if waiting := undecoded(run):
            what, commands = ("; ".join(texts) for texts in zip(*waiting, strict=True))
            return {"pictures": Missing(what, commands)}
    if not any(part.pictures for run in runs for part in run.parts):
        what = "no pictures were drawn during the run; encode prompts first with sana-pipe encode --prompts default"
        return {"pictures": Missing(what, "sana-pipe train --set 'train.pictures={}'")}
    return {}


def _missing_in_run(run: RunFigures, data: SnapshotFigures | None) -> dict[str, Missing]:
    parts, missing = run.parts, dict[str, Missing]()
    if not any(part.rows for part in parts):
        missing["losses"] = Missing("the journal has no rows yet", TRAIN)
    if not any(part.validation for part in parts):
        what = "no held-out loss was measured; bucket.heldout keeps samples for it"
        missing["validation"] = Missing(what, "sana-pipe train --set 'train.validation={}'")
    missing |= _missing_pictures([run])
    if not any(part.prediction for part in parts):
        missing["memory"] = Missing("memory and speed were not predicted for this run", "sana-pipe plan")
    if len(parts) < 2:
        command = "sana-pipe train --from RUN --set train.output=DIR"
        missing["rounds"] = Missing("the run did not begin from another run", command)
    if run.lost:
        missing["earlier"] = Missing("; ".join(run.lost), "sana-pipe report --run DIR")
    used = {name for part in parts for name in part.snapshots}
    if data is not None and used and data.id not in used:
        names = ", ".join(sorted(name[:12] for name in used))
        what = f"the run was trained on {names}, not on this snapshot"
        missing["trained-on"] = Missing(what, "sana-pipe snapshots")
    return missing
