"""All numbers of a report: those of a snapshot, of its cache, of a run, and of another run next to it.

`collect` serves the page (`sana-pipe report`) and scripts (`sana-pipe inspect`), so both show the same numbers. What
cannot be had is in `missing`, with the command that makes it; only what the user named and is not there is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.base.errors import CacheError, UserError
from pipeline.data.cache.cache import Cache
from pipeline.data.cache.snapshot import Snapshot
from pipeline.data.cache.status import status
from pipeline.tools.reporting import run_pictures
from pipeline.tools.reporting.data_figures import snapshot_figures
from pipeline.tools.reporting.run_figures import differing_options, is_run, run_figures

TRAIN = "sana-pipe train --resume auto"


def collect(
    output: Path,
    open_cache: Callable[[], Cache] | None,
    *,
    run: Path | None = None,
    snapshot: str | None = None,
    compare: Path | None = None,
) -> tuple[dict[str, Any], Cache | None, Snapshot | None]:
    """The numbers as JSON values (`cache`, `snapshot`, `run`, `compare`, `missing`), and their cache and snapshot if
    they exist.

    Args:
        output: `train.output`.
        open_cache: None leaves cache and snapshot out, whose numbers take long for many samples.
        run: a run directory; None: `output`, if something was trained there. The runs that it began from are
            parts of it, unless it is compared with another.
        snapshot: a name or id; None: the last that the run was trained on, if the cache has it, else the newest.
        compare: a second run directory.

    Raises:
        UserError: `run` or `compare` is no run directory.
        CacheError: `snapshot` does not exist, or the snapshot is damaged.
    """
    missing: dict[str, dict[str, str]] = {}

    def lacks(section: str, what: str, command: str) -> None:
        missing[section] = {"what": what, "command": command}

    figures: dict[str, Any] = {"cache": None, "snapshot": None, "run": None, "compare": None, "missing": missing}
    cache = opened = None
    folder = output if run is None else run
    if run is not None or is_run(folder):
        figures["run"] = run_figures(folder, earlier=compare is None)
    try:
        if open_cache is not None:
            cache = open_cache()
            figures["cache"] = status(cache)
            opened = cache.open_snapshot(snapshot or _trained_on(cache, figures["run"]))
        else:
            lacks("snapshot", "this page is about the run alone", "sana-pipe report")
    except CacheError as error:
        if snapshot is not None:
            raise
        lacks("snapshot", error.what, error.fix or "sana-pipe status")
    if cache is not None and opened is not None:
        figures["snapshot"] = data = snapshot_figures(cache, opened)
        if data["crop"] is None:
            lacks("crop", data["crop_missing"] or "there are no sizes of pictures", "sana-pipe encode --data DIR")
        if data["new"] is None:
            lacks("new", "the snapshot has no earlier one to compare with", "sana-pipe bucket --name NAME")
    if figures["run"] is not None:
        _lacks_of_run(figures, lacks)
    else:
        lacks("run", f"{folder}: nothing was trained there", TRAIN)
    if compare is not None:
        if figures["run"] is None:
            raise UserError("--compare needs a first run", found=f"nothing in {folder}", fix="--run DIR names it")
        figures["compare"] = other = run_figures(compare)
        _lacks_pictures([figures["run"], other], lacks)
        other["options"] = differing_options(figures["run"], other)
    return figures, cache, opened


def _trained_on(cache: Cache, run: dict[str, Any] | None) -> str | None:
    """The last snapshot that a run was trained on; None if there is no run or the cache lacks it."""
    names = [] if run is None else run["parts"][-1]["snapshots"]
    try:
        return cache.open_snapshot(names[-1]).id if names else None
    except CacheError:
        return None


def _lacks_pictures(runs: list[dict[str, Any]], lacks: Any) -> None:
    """Names the first run with drawings that are not decoded, else that there are none."""
    for run in runs:
        if waiting := run_pictures.undecoded(run):
            lacks("pictures", "; ".join(drawn for drawn, _ in waiting), "; ".join(command for _, command in waiting))
            return
    if not any(part["pictures"] for run in runs for part in run["parts"]):
        what = "no pictures were drawn during the run; before: sana-pipe encode --prompts default"
        lacks("pictures", what, "sana-pipe train --set 'train.pictures={}'")


def _lacks_of_run(figures: dict[str, Any], lacks: Any) -> None:
    parts, snapshot = figures["run"]["parts"], figures["snapshot"]
    if not any(part["rows"] for part in parts):
        lacks("losses", "the journal has no rows yet", TRAIN)
    if not any(part["validation"] for part in parts):
        lacks(
            "validation",
            "no held-out loss was measured (bucket.heldout holds samples out)",
            "sana-pipe train --set 'train.validation={}'",
        )
    _lacks_pictures([figures["run"]], lacks)
    if not any(part["prediction"] for part in parts):
        lacks("memory", "memory and speed were not predicted for this run", "sana-pipe plan")
    if len(parts) < 2:
        lacks("rounds", "no run began from another", "sana-pipe train --from RUN --set train.output=DIR")
    if lost := figures["run"]["lost"]:
        lacks("earlier", "; ".join(lost), "sana-pipe report --run DIR")
    used = {name for part in parts for name in part["snapshots"]}
    if snapshot is not None and used and snapshot["id"] not in used:
        names = ", ".join(sorted(name[:12] for name in used))
        lacks("trained-on", f"the run was trained on {names}, not on this snapshot", "sana-pipe snapshots")
