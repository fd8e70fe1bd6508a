"""The command line of the kit; see `benchmarks.gpu`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import benchmarks.gpu
from benchmarks.gpu import rows as kit
from tests.support.package_links import link

NO_GPU = 2


def install(wheels: Path) -> None:
    """Install wheels into a folder next to them; this process and its children import them, and this checkout, first.

    Raises:
        SystemExit: there are none, or pip fails.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"{wheels} holds no wheels; benchmarks/gpu/wheels.txt names them and how to collect them")
    site, complete = (wheels / "installed").resolve(), wheels / "installed" / "complete"
    names = "\n".join(file.name for file in files)
    if not complete.exists() or complete.read_text(encoding="utf-8") != names:
        options = ["--no-index", "--no-deps", "--no-compile", "--quiet", "--upgrade", "--target", str(site)]
        done = subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, files)], check=False)
        if done.returncode:
            raise SystemExit(f"pip could not install the wheels in {wheels}")
        complete.write_text(names, encoding="utf-8")
    first = [str(site), str(link())]
    sys.path[:0] = first
    os.environ["PYTHONPATH"] = os.pathsep.join([*first, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def headline(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The most important figures; null where their rows yielded none."""

    def of(row: str, key: str) -> Any:
        return results.get(row, {}).get(key)

    def ratio(key: str) -> float | None:
        a, b = of("step/full-32", key), of("diffusers/full-32", key)
        return a / b if a and b else None

    def largest(card: str) -> int | None:
        cells = {row: figures for row, figures in results.items() if row.startswith(card) and "fits" in figures}
        fitting = [int(row.rpartition("-")[2]) for row, figures in cells.items() if figures.get("fits")]
        return max(fitting, default=0) if cells else None

    return {
        "images_per_s": of("step/fast", "images_per_s"),
        "mfu": of("step/fast", "mfu"),
        "peak_gib": of("step/fast", "peak_gib"),
        "default_images_per_s": of("step/default", "images_per_s"),
        "vs_diffusers": ratio("images_per_s"),
        "memory_vs_diffusers": ratio("peak_gib"),
        "batch_24gb": largest("24gb/"),
        "batch_48gb": largest("48gb/"),
        "launches": of("profile/fast", "launches"),
        "trainer_images_per_s": of("trainer", "images_per_s"),
        "vae_bf16_images_per_s": of("encode/vae", "bf16_images_per_s"),
        "text_speedup_80": of("encode/gemma", "speedup_80"),
    }


def measured(out: Path | None) -> dict[str, dict[str, Any]]:
    """The figures of the rows that an earlier call has written there; makes sure that it can be written.

    Raises:
        SystemExit: it cannot.
    """
    if out is None:
        return {}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a+", encoding="utf-8") as file:
            file.seek(0)
            lines = [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError) as error:
        raise SystemExit(f"{out} cannot be used: {error}") from None
    return {line["row"]: line["figures"] for line in lines if line["ok"]}


def child(text: str, dry: bool) -> None:
    """One row in this process; its figures are the last line. The allocator is set as the command line sets it."""
    from sana_pipe.base.launch import prefer_expandable_segments

    prefer_expandable_segments()  # before torch is imported
    figures = kit.measure(kit.Row(**json.loads(text)), dry)
    sys.stdout.flush()
    print(json.dumps(figures), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=benchmarks.gpu.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="time for all rows (default: 60)")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="rows or groups of rows")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="append each result as a line of JSON; rows that it has are not measured again",
    )
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="install the wheels of this folder first")
    parser.add_argument("--dry", action="store_true", help="on the CPU, tiny, in one process")
    parser.add_argument("--list", action="store_true", help="print the rows")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        child(given.child, given.dry)
        return 0
    try:
        rows = kit.chosen(given.rows)
    except KeyError as unknown:
        print(f"no such row: {unknown.args[0]}; --list prints them", file=sys.stderr)
        return 2
    if given.list:
        for row in rows:
            print(f"{row.name:32} {row.seconds:4.0f} s  {', '.join(row.yields)}")
        return 0
    if given.wheels is not None:
        install(given.wheels)
    import torch

    from benchmarks.report import finish

    if not given.dry and not torch.cuda.is_available():
        print("torch finds no GPU here: nothing is measured; --dry runs every row on the CPU", file=sys.stderr)
        return NO_GPU
    results = measured(given.out)
    rows = [row for row in rows if row.name not in results]
    counts = {True: len(results), False: 0, None: 0}
    for result in kit.run(rows, given.minutes, given.dry, kit.here if given.dry else kit.in_a_process):
        line = json.dumps(result)
        print(line, flush=True)
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        counts[result["ok"]] += 1
        results[result["row"]] = result.get("figures", {})
    finish({**headline(results), "rows": counts[True], "failed": counts[False], "left_out": counts[None]})
    return 1 if counts[False] else 0


if __name__ == "__main__":
    from sana_pipe.base.processes import run_and_exit

    run_and_exit(main)
