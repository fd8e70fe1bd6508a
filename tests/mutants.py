"""Mutation testing by room: `make mutants ROOM=cache`, or `python -m tests.mutants pipeline/data/cache/codec.py`.

mutmut edits every expression of the files in turn, in a clone of the last commit; `support/mutant_trials.py` runs the
tests that reach it, and mypy looks at those that live. Prints the mutants that neither kills, a table, and a line of
JSON; exit code 1 below `WANTED`.
Messages of errors and of the log are not mutated, whatever the class or helper that makes the error: tests hold types
and exit codes, not words. Neither are other texts with a space in them, which are words for people, too, `strict=True`,
which is an assertion, and encodings of files: here UTF-8 is the default.
With `--statements` calls and guards are dropped instead (`support/mutant_making.py`).
mutmut's own use of mypy checks a file with all of its mutants at once; ours sees what `make types` would see.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import date
from itertools import islice
from pathlib import Path

import libcst
from mutmut.mutation.diff_apply import find_mutant, get_diff_for_mutant, read_functions_from_index
from mutmut.utils.format_utils import orig_function_and_class_names_from_key

from tests.support.package_links import link

ROOT = Path(__file__).resolve().parent.parent
WANTED = 0.95
# A room's files, and the subjects of its tests (tests/test_*.py): those that reach it most for their time. Tests that
# read the sources themselves cannot pass on edited copies.
ROOMS = {
    "cache": (
        ["pipeline/data/cache/*"],
        "audit bucket cache cache_layout claims disk_space documents edges engines estimate unit_folders fuzz gc "
        "golden integrity_law large_tables loader loader_laws missing_work objects pack pack_objects "
        "patience prompts reads repair scan scratch snapshot_chunks snapshot_head storage synced urls web_cache",
    ),
    "sources": (
        ["pipeline/data/sources/*"],
        "caption_rules captions documents edges encode encode_sources estimate fuzz prompts reasons remote scan "
        "source sources tag_sets urls web_tables",
    ),
    "images": (
        ["pipeline/data/images/*"],
        "bucket buckets edges encode estimate image source",
    ),
    "snapshots": (
        ["pipeline/data/snapshots/*"],
        "bucket buckets caption_rules captions edges golden large_tables missing_work pack pack_objects reasons "
        "scratch snapshot_chunks snapshot_head validation",
    ),
    "loader": (
        ["pipeline/data/loader/*"],
        "block_order bucket captions edges golden integrity_law loader loader_laws pack pack_objects reads schedule "
        "scratch shard_prefetch snapshot_head validation",
    ),
    "work": (
        ["pipeline/data/work/*", "pipeline/base/metrics/*"],
        "caption_rules claims disk_space encode engines unit_folders lock metrics plan_once scan terminal throughput",
    ),
    "verification": (["pipeline/data/verification/*"], "audit documents repair verify_shares ways_out"),
    "encoding": (
        ["pipeline/data/encoding/*"],
        "caption_rules disk_space documents edges encode encode_sources estimate unit_folders image_batch "
        "large_tables missing_work pack plan_once prompts remote repair scan storage text_mode",
    ),
    "training": (
        [
            "pipeline/train/training/*",
            "pipeline/train/training/optimizers/*",
            "pipeline/train/models/flow_matching.py",
            "pipeline/train/models/sampler.py",
        ],
        "checkpoint feeding foreign_checkpoint golden launch lock loss_band memory_modes "
        "nvlabs_docs nvlabs_numerics flow_matching optimizers pipeline_parallel planned_runs planning residual rounds "
        "sampler strategies terminal throughput training training_pictures validation",
    ),
}
SETTINGS = """
[tool.mutmut]
source_paths = ["pipeline/", "stages/"]
only_mutate = {files}
also_copy = ["configs/", "benchmarks/", "docs/", "cache_layout.md", "README.md", "Makefile", ".ci/"]
do_not_mutate_patterns = [
    'raise (?!Stopped|Interrupted)[\\w.]+\\(',
    '(return|=) \\w*Error\\(',
    '^\\s*(expected|found|fix|what) ?=',
    'click\\.echo\\(',
    '^\\s*(retrying\\.)?(log|announce)\\(',
    '^\\s*[\\w.]+log\\(f?"',
]
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", help=f"rooms ({', '.join(ROOMS)}) or files")
    parser.add_argument("--tests", nargs="*", help="test files; default: those of the room")
    parser.add_argument("--sample", type=int, help="try this many mutants of each room or file, drawn at random")
    parser.add_argument("--seed", type=int, default=date.today().toordinal(), help="of the sample; default: the day's")
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU time of tests for one mutant, quickest first")
    parser.add_argument(
        "--statements", action="store_true", help="drop calls and guards instead of editing expressions"
    )
    options = parser.parse_args()
    rooms = {what: ROOMS[what][0] if what in ROOMS else [what] for what in options.what}
    table = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, contextlib.chdir(folder):
        clone = Path(folder)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        with open(clone / "pyproject.toml", "a", encoding="utf-8") as project:
            project.write(SETTINGS.format(files=sorted(set().union(*rooms.values()))))
        making = [sys.executable, "-m", "tests.support.mutant_making", *(["statements"] if options.statements else [])]
        subprocess.run(making, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        link(clone)
        assert not _mypy().returncode, "the sources have type errors: make types"
        copy = clone / "mutants"
        environment = {
            **os.environ,
            "PYTHONPATH": f"{link(copy)}{os.pathsep}{copy}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(clone / "tmp"),
        }
        (clone / "tmp").mkdir()
        for room, files in rooms.items():
            names = list(islice(_drawn(sorted(_mutants(copy, files)), options.seed), options.sample))
            report = clone / "report.jsonl"
            order = {"tests": options.tests or _tests(files), "mutants": names, "seconds": options.seconds}
            (clone / "order.json").write_text(json.dumps({**order, "report": str(report)}), encoding="utf-8")
            trials = [sys.executable, "-m", "tests.support.mutant_trials", str(clone / "order.json")]
            subprocess.run(trials, cwd=copy, env=environment, check=True, stdout=subprocess.DEVNULL)
            left_out, *results = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
            if left_out:
                print(f"{room}: left out, since they fail without a mutant: {', '.join(left_out)}")
            table[room] = Counter[str]()
            for name, result, tests, seconds in results:
                if result in ("alive", "unreached"):
                    if _is_type_error(name):
                        result = "types"
                    else:
                        print(f"\n{result}: {name} ({tests} tests, {seconds:.0f} s)", flush=True)
                        print(get_diff_for_mutant(name))
                table[room][result] += 1
    columns = ("killed", "types", "timeout", "alive", "unreached")
    print(f"\n{'room':24}" + "".join(f"{column:>10}" for column in columns) + f"{'share':>8}")
    shares = {}
    for room, counts in table.items():
        shares[room] = 1 - (counts["alive"] + counts["unreached"]) / max(1, counts.total())
        print(f"{room:24}" + "".join(f"{counts[column]:10}" for column in columns) + f"{shares[room]:8.1%}")
    print(json.dumps({"seed": options.seed, "sample": options.sample, "seconds": options.seconds, "rooms": table}))
    return 0 if min(shares.values()) >= WANTED else 1


def _mypy() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mypy"], capture_output=True, text=True)


def _is_type_error(mutant: str) -> bool:
    """Whether mypy refuses the sources with this mutant. They are those of the current folder."""
    path = find_mutant(mutant).path
    functions = read_functions_from_index(mutant, path)
    assert functions is not None
    name, class_name = orig_function_and_class_names_from_key(mutant)
    source = Path(path).read_text(encoding="utf-8")
    module: libcst.Module = libcst.parse_module(source)
    owner: libcst.Module | libcst.BaseSuite = module
    if class_name is not None:
        owner = next(n.body for n in module.body if isinstance(n, libcst.ClassDef) and n.name.value == class_name)
    original = next(
        n for n in owner.body if isinstance(n, libcst.FunctionDef) and n.name.value == name.rpartition(".")[2]
    )
    replaced = original.with_changes(params=functions[1].params, body=functions[1].body)
    changed = module.deep_replace(original, replaced)
    try:
        Path(path).write_text(changed.code, encoding="utf-8")  # type: ignore[union-attr]
        return bool(_mypy().returncode)
    finally:
        Path(path).write_text(source, encoding="utf-8")


def _tests(files: list[str]) -> list[str]:
    """Test files of the rooms that the files belong to."""
    subjects = {
        subject
        for patterns, subjects in ROOMS.values()
        if any(fnmatch.fnmatch(file, pattern) for file in files for pattern in patterns)
        for subject in subjects.split()
    }
    return [str(next((ROOT / "tests").rglob(f"test_{subject}.py")).relative_to(ROOT)) for subject in sorted(subjects)]


def _mutants(copy: Path, files: list[str]) -> set[str]:
    names = set()
    for meta in copy.rglob("*.meta"):
        source = meta.relative_to(copy).with_suffix("").as_posix()
        if any(fnmatch.fnmatch(source, pattern) for pattern in files):
            names |= json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"].keys()
    return names


def _drawn(names: list[str], seed: int) -> Iterator[str]:
    """The mutants in random order, without those that only drop or change words, a `strict=True` or an encoding."""
    for name in random.Random(seed).sample(names, len(names)):
        lines = get_diff_for_mutant(name).splitlines()[3:]
        versions = ("".join(line[1:] for line in lines if line[:1] == sign) for sign in "-+")
        removed, added = map(_tried, versions)
        if removed != added:
            yield name


def _tried(lines: str) -> str:
    """The text without what is not tried."""
    wordless = re.sub(r'"[^"]*"', lambda text: '""' if " " in text[0] and "{" not in text[0] else text[0], lines)
    return re.sub(r'strict=\w+|encoding=[\w"-]+|[\s,]', "", wordless)


if __name__ == "__main__":
    sys.exit(main())
