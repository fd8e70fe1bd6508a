"""Output of every measurement: a table, the machine and commit, and as last line the figures as JSON."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch


def machine() -> str:
    """Processor count and kind, GPU, torch."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{os.cpu_count()} x {platform.machine()}{gpu}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def commit() -> str:
    """The commit of this tree, with `+` if there are uncommitted changes; unknown without git."""
    root = Path(__file__).parent

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return result.stdout.strip()

    if shutil.which("git") is None:
        return "unknown"
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if git("status", "--porcelain") else "")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print aligned columns."""
    cells = [list(head), *([f"{c:.3g}" if isinstance(c, float) else str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print(
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        )


def finish(figures: Mapping[str, float | str | None]) -> None:
    """The last line: one JSON object."""
    print(f"{machine()}; commit {commit()}")
    print(json.dumps({k: _rounded(v) if isinstance(v, float) else v for k, v in figures.items()}), flush=True)


def part_of_lab(doc: str | None, measure: Callable[[bool, Path], dict[str, float]], wanted: Mapping[str, str]) -> None:
    """The command line of a measurement `lab_*`: measure in a folder that is removed, and print.

    Args:
        doc: of the module.
        measure: given whether `--quick` was, and an empty folder.
        wanted: what figures should be, such as `<= 600`.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller cache")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(quick, Path(folder))
    table(("figure", "value", "wanted"), [(name, value, wanted.get(name, "")) for name, value in figures.items()])
    finish(figures)


def _rounded(value: float) -> float:
    return round(value, 4) if abs(value) >= 1e-3 else float(f"{value:.2g}")


def resident(key: str) -> int:
    """Bytes of this process's memory: VmRSS (current) or VmHWM (peak since `reset_peak`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def reset_peak() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))
