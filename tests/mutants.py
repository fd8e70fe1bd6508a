"""Mutation testing by room: `make mutants ROOM=cache`, or `python -m tests.mutants pipeline/cache/codec.py`.

mutmut edits every expression of the files in turn, in a clone of the last commit, and runs the tests that reach it.
Prints the share of mutants that some test kills, and the survivors; exit code 1 below `WANTED`. Hours for a room: for
the night. `--sample 100` estimates the share. Messages of errors and of the log are not mutated: tests hold their types
and exit codes, not their words.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WANTED = 0.95
ROOMS = {
    room: [f"pipeline/{room}/*"]
    for room in ("cache", "sources", "images", "snapshots", "loader", "work", "encoding", "training")
}
ROOMS["training"] += ["pipeline/training/optimizers/*", "pipeline/models/objective.py", "pipeline/models/sampler.py"]
# What reads the sources themselves cannot pass on edited copies.
APART = (
    "tests/test_layering.py",
    "tests/test_cli.py",
    "tests/test_readme.py",
    "tests/test_process_end.py",
    "tests/test_model_checking.py",
)
# A mutant that is stopped for its time counts as killed. mutmut's limit knows the time of tests, not of their fixtures
# and not of a busy machine, so it has a generous constant.
SETTINGS = """
[tool.mutmut]
source_paths = ["pipeline/", "stages/"]
only_mutate = {files}
also_copy = ["configs/", "benchmarks/", "docs/", "cache_layout.md", "README.md", "Makefile", ".ci/"]
process_isolation = "forkserver"
timeout_multiplier = 10.0
timeout_constant = 18.0
do_not_mutate_patterns = [
    'raise \\w*(Error|Reject)\\(',
    '^\\s*(expected|found|fix|what)=',
    'click\\.echo\\(',
    '^\\s*(retrying\\.)?log\\(',
]
pytest_add_cli_args = ["-p", "no:cacheprovider"]
pytest_add_cli_args_test_selection = {tests}
"""
ALIVE = {0, 2, 5, 33, 34, 35, None}  # mutmut's exit codes: survived, interrupted, no tests, skipped, not checked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", help=f"rooms ({', '.join(ROOMS)}) or files")
    parser.add_argument("--tests", nargs="*", help="tests to run; default: all that can be")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--sample", type=int, help="try this many mutants of each room or file, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args()
    rooms = {what: ROOMS.get(what, [what]) for what in options.what}
    tests = options.tests or ["tests", *(f"--ignore={name}" for name in APART)]
    shares = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        clone = Path(folder)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        with open(clone / "pyproject.toml", "a", encoding="utf-8") as project:
            project.write(SETTINGS.format(files=sorted(set().union(*rooms.values())), tests=tests))
        mutmut = [sys.executable, "-m", "mutmut"]
        run = [*mutmut, "run", "--max-children", str(options.processes)]
        if options.sample is None:
            subprocess.run(run, cwd=folder, check=True)
        else:  # "none" matches no mutant: mutmut stops once it has made the mutants and knows the tests of each
            subprocess.run([*run, "none"], cwd=folder, check=False, stderr=subprocess.DEVNULL)
            stats = json.loads((clone / "mutants/mutmut-stats.json").read_text(encoding="utf-8"))
            reached = stats["tests_by_mangled_function_name"]
        for room, files in rooms.items():
            names = sorted(_results(clone, files))
            if options.sample is not None:
                names = random.Random(options.seed).sample(names, min(options.sample, len(names)))
                tried = [name for name in names if name.rpartition("__mutmut_")[0] in reached]
                subprocess.run([*run, *tried], cwd=folder, check=True)
            results = _results(clone, files)
            alive = [name for name in names if results[name] in ALIVE]
            for name in alive:
                print(f"\nalive: {name}")
                subprocess.run([*mutmut, "show", name], cwd=folder, check=False)
            shares.append(1 - len(alive) / max(1, len(names)))
            print(
                f"{room}: {len(names) - len(alive)} of {len(names)} mutants were killed: {shares[-1]:.1%}", flush=True
            )
    print(f"wanted: {WANTED:.0%}")
    return 0 if min(shares) >= WANTED else 1


def _results(clone: Path, files: list[str]) -> dict[str, int | None]:
    """The exit code of the tests by the mutant's name."""
    results = {}
    for meta in (clone / "mutants").rglob("*.meta"):
        source = meta.relative_to(clone / "mutants").with_suffix("").as_posix()
        if any(fnmatch.fnmatch(source, pattern) for pattern in files):
            results.update(json.loads(meta.read_text())["exit_code_by_key"])
    return results


if __name__ == "__main__":
    sys.exit(main())
