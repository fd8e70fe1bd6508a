"""The README is a contract: its commands run, its links lead somewhere, its tests exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_links_lead_to_files() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > 10
    headings = re.findall(r"^#+ (.+)$", README, flags=re.MULTILINE)
    anchors = {"#" + re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    missing = [link for link in links if link not in anchors and not (ROOT / link).exists()]
    assert not missing


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(test_[a-z0-9_]+)`", README)
    assert len(named) > 8
    defined = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    missing = [name for name in named if f"def {name}(" not in defined]
    assert not missing


def test_every_figure_has_a_command_that_exists() -> None:
    commands = re.findall(r"`python -m (benchmarks\.[a-z_]+)", README)
    assert commands
    missing = [name for name in commands if not (ROOT / (name.replace(".", "/") + ".py")).exists()]
    assert not missing


def test_the_commands_of_the_real_run_are_real() -> None:
    """Each `sana-pipe` command of the walk-through is one that the command line accepts (its --help is asked)."""
    from click.testing import CliRunner

    from pipeline.cli import cli

    lines = [line.removeprefix("$ ").split("#")[0].strip() for line in "\n".join(blocks("console")).splitlines()]
    commands = [line[line.index("sana-pipe ") :] for line in lines if "sana-pipe " in line]
    assert {shlex.split(c)[1] for c in commands} == {
        "check",
        "encode",
        "bucket",
        "snapshots",
        "train",
        "sample",
        "export",
    }
    for command in commands:
        _, name, *arguments = shlex.split(command)
        options = [argument for argument in arguments if argument.startswith("--")]
        told = CliRunner().invoke(cli, [name, "--help"])
        assert told.exit_code == 0, told.output
        assert all(option in told.output for option in options), command


def test_the_bucket_section_is_a_configuration(tmp_path: Path) -> None:
    """The example is valid as it stands, with the batches that its comments state."""
    import yaml

    from pipeline.config import SHIPPED, load
    from pipeline.images import buckets
    from pipeline.snapshots.filters import Filter

    [example] = [yaml.safe_load(block) for block in blocks("yaml")]
    whole = yaml.safe_load((SHIPPED / "sana_1600m_1024.yaml").read_text(encoding="utf-8"))
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**whole, **example}))
    own = load(tmp_path / "own.yaml")
    for text in (own.bucket.filter, own.bucket.sources["art"].filter):
        assert text
        Filter(text, "bucket.filter")
    tables = buckets.resolutions(own.bucket, own.data, 32)
    shapes = [shape for _, table in tables for shape in table]
    batches = dict(zip(shapes, buckets.batches(own.bucket, shapes, 32), strict=True))
    assert (batches[1024, 1024], batches[512, 2048], batches[512, 512]) == (32, 24, 128)
    assert set(example["bucket"]) | {"batch", "grow", "pad_text_multiple"} == set(type(own.bucket).model_fields)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_two_commands_run(tmp_path: Path) -> None:
    """`make demo` (quick) in a copy of the tree with this environment, then the commands that the README adds."""
    [commands, again] = blocks("bash")
    assert [line.split("#")[0].strip() for line in commands.splitlines()] == ["make demo", "make test"]
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("Makefile", "README.md", "pyproject.toml", "constraints.txt", "pipeline", "stages", "configs"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    (tree / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "sana-pipe"):
        start = f'exec "{sys.executable}" ' + ('"$@"' if name == "python" else '-m pipeline.cli "$@"')
        (tree / ".venv" / "bin" / name).write_text(f"#!/bin/sh\n{start}\n")
        (tree / ".venv" / "bin" / name).chmod(0o755)
    (tree / ".venv" / ".installed").touch()
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}  # this may run under make
    environment = {**outside, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
    told = subprocess.run(
        ["make", "demo", "DEMO_ARGS=--quick"], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr
    sheet = tree / told.stdout.strip().splitlines()[-1].partition("contact sheet: ")[2]
    assert sheet.read_bytes().startswith(b"\x89PNG")
    told = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", again],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
