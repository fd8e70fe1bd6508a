"""Mutation testing by room: `make mutants ROOM=cache`, or `python -m tests.mutants pipeline/cache/codec.py`.

mutmut edits every expression of the files in turn, in a clone of the last commit, and runs the tests that reach it.
Prints the share of mutants that some test kills, and the survivors; exit code 1 below `WANTED`. Hours for a room: for
the night. Messages of errors are not mutated: tests hold their types and exit codes, not their words.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WANTED = 0.95
ROOMS = {
    "cache": ["pipeline/cache/*"],
    "data": ["pipeline/data/*", "pipeline/encoding/scan.py", "pipeline/encoding/plan.py"],
    "encoding": ["pipeline/encoding/*"],
    "training": ["pipeline/training/*", "pipeline/models/objective.py", "pipeline/models/sampler.py"],
}
# What reads the sources themselves cannot pass on edited copies.
APART = ("tests/test_layering.py", "tests/test_readme.py", "tests/test_process_end.py", "tests/test_model_checking.py")
SETTINGS = """
[tool.mutmut]
source_paths = ["pipeline/", "stages/"]
only_mutate = {files}
also_copy = ["configs/", "benchmarks/", "docs/", "cache_layout.md", "README.md", "Makefile", ".ci/"]
process_isolation = "forkserver"
do_not_mutate_patterns = ['raise \\w*Error\\(', '^\\s*(expected|found|fix|what)=', 'click\\.echo\\(']
pytest_add_cli_args = ["-p", "no:cacheprovider"]
pytest_add_cli_args_test_selection = {tests}
"""
KILLED = ("killed", "timeout", "segfault")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", help=f"rooms ({', '.join(ROOMS)}) or files")
    parser.add_argument("--tests", nargs="*", help="tests to run; default: all that can be")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    files = [pattern for what in options.what for pattern in ROOMS.get(what, [what])]
    tests = options.tests or ["tests", *(f"--ignore={name}" for name in APART)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        with open(Path(folder) / "pyproject.toml", "a", encoding="utf-8") as project:
            project.write(SETTINGS.format(files=files, tests=tests))
        mutmut = [sys.executable, "-m", "mutmut"]
        subprocess.run([*mutmut, "run", "--max-children", str(options.processes)], cwd=folder, check=True)
        said = subprocess.run(
            [*mutmut, "results", "--all", "true"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
        results = re.findall(r"^\s*(\S+): (.+)$", said, re.MULTILINE)
        alive = [name for name, outcome in results if outcome not in KILLED]
        for name in alive:
            print(f"\nalive: {name}")
            subprocess.run([*mutmut, "show", name], cwd=folder, check=False)
    share = 1 - len(alive) / max(1, len(results))
    print(f"{len(results) - len(alive)} of {len(results)} mutants were killed: {share:.1%}, wanted {WANTED:.0%}")
    return 0 if results and share >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
