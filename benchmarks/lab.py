"""What a lab asks of its data, in one table: the measurements `lab_*`, each in a process of its own.

`python -m benchmarks.lab [--quick] [NAME ...]`; NAME: `groups` for `benchmarks.lab_groups`, and so on; none: all.
The figures are explained in the modules. Exit code 1: a figure is not what is wanted.
"""

from __future__ import annotations

import argparse
import json
import operator
import subprocess
import sys
import time

from benchmarks import lab_content, lab_groups, lab_scores, lab_status, lab_takedown
from benchmarks.report import finish, table
from sana_pipe.base.processes import run_and_exit

MEASUREMENTS = {
    "content": lab_content,
    "groups": lab_groups,
    "scores": lab_scores,
    "takedown": lab_takedown,
    "status": lab_status,
}
COMPARED = {"==": operator.eq, "<=": operator.le, ">=": operator.ge}


def reached(value: float, wanted: str) -> bool:
    """Whether a figure is as wanted: `<= 600`."""
    sign, number = wanted.split()
    return bool(COMPARED[sign](value, float(number)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller caches")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    options = parser.parse_args()
    unknown = set(options.names) - set(MEASUREMENTS)
    if unknown:
        parser.error(f"no such measurement: {', '.join(sorted(unknown))}")
    figures, rows = dict[str, float](), []
    for name, module in MEASUREMENTS.items():
        if options.names and name not in options.names:
            continue
        began = time.perf_counter()
        command = [sys.executable, "-m", module.__name__, *["--quick"] * options.quick]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found: dict[str, float] = json.loads(printed.splitlines()[-1])
        figures |= found | {f"{name}_seconds": time.perf_counter() - began}
        for figure, value in found.items():
            wanted = module.WANTED.get(figure, "")
            rows.append([figure, value, wanted, "" if not wanted else "yes" if reached(value, wanted) else "NO"])
    table(["figure", "value", "wanted", "reached"], rows)
    finish(figures)
    return int(any(row[-1] == "NO" for row in rows))


if __name__ == "__main__":
    run_and_exit(main)
