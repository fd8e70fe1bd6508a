"""Lines by room, at a commit before and now: `python -m benchmarks.house [--before COMMIT]`; needs git.

Lines are all lines of tracked .py files. `data`: the rooms between a picture and a batch; `data_stage`: their stages.
`train`: the rooms between a batch and a report, with `config.py`, `cli.py` and the stages that are not of the data.
"""

from __future__ import annotations

import argparse
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import finish, table
from sana_pipe.base.processes import run_and_exit

BEFORE = "4eaa37d"
ROOT = Path(__file__).parent.parent
DATA = ["cache", "signals", "sources", "encoding", "snapshots", "loader", "work", "images"]
TRAIN = ["training", "parallel", "models", "kernels", "planning", "reporting", "demo", "config.py", "cli.py"]
DATA_STAGES = ["encode", "bucket", "pack", "snapshots", "inspect", "verify", "gc", "forget", "status", "view"]
HALVES: dict[str, Callable[[str], bool]] = {
    "data": lambda room: room in {f"pipeline/{name}" for name in DATA},
    "train": lambda room: (
        room in {f"pipeline/{name}" for name in TRAIN}
        or (room.startswith("stages/") and room.removeprefix("stages/").removesuffix(".py") not in DATA_STAGES)
    ),
    "data_stage": lambda room: room in {f"stages/{name}.py" for name in DATA_STAGES},
    "total": lambda room: room.startswith(("pipeline/", "stages/")),
    "test": lambda room: room == "tests",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT")
    parser.add_argument("--quick", action="store_true", help="the same; it takes a second")
    options = parser.parse_args()
    before, now = lines(options.before), lines("HEAD")
    rooms = sorted(before.keys() | now.keys(), key=lambda room: -before[room])
    table(["room", f"at {options.before}", "now"], [[room, before[room], now[room]] for room in rooms])
    figures = {}
    for name, of in HALVES.items():
        figures[f"{name}_lines"] = sum(count for room, count in now.items() if of(room))
        figures[f"{name}_lines_before"] = sum(count for room, count in before.items() if of(room))
    finish(figures)


def lines(commit: str) -> Counter[str]:
    """Lines by room of a commit: pipeline/ROOM, stages/FILE, tests, benchmarks."""
    counts: Counter[str] = Counter()
    for line in git("grep", "-c", "", commit, "--", "*.py").splitlines():
        _, path, count = line.rsplit(":", 2)
        parts = path.split("/")
        counts["/".join(parts[:2]) if parts[0] in ("pipeline", "stages") else parts[0]] += int(count)
    return counts


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    run_and_exit(main)
