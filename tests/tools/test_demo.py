"""The demonstration: what it prepares and reuses, and what it prints when a command fails."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sana_pipe.base.errors import UserError
from sana_pipe.base.processes import command
from sana_pipe.config import load
from sana_pipe.stages import demo
from sana_pipe.tools.demo import small_models
from sana_pipe.train.training import metrics
from tests.support.messages import naming


class Commands:
    """Stands in for subprocess.run: records `sana-pipe` command lines and their directory."""

    def __init__(self, failing: str | None = None, code: int = 4):
        self.failing, self.code = failing, code
        self.lines: list[list[str]] = []

    def __call__(self, arguments: list[str], cwd: Path, check: bool) -> subprocess.CompletedProcess[str]:
        assert arguments[3] == "--quiet", "no line names a next command"
        line = arguments[4:]
        self.lines.append(line)
        code = self.code if line[0] == self.failing else 0
        if line[0] == "train" and not code:
            run = cwd / self.settings(line)["train.output"]
            run.mkdir(parents=True, exist_ok=True)
            (run / "summary.json").touch()
        return subprocess.CompletedProcess(arguments, code)

    @staticmethod
    def settings(line: list[str]) -> dict[str, str]:
        """The options that a command line sets."""
        return dict(word.split("=", 1) for flag, word in pairwise(line) if flag == "--set")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    recorder = Commands()
    monkeypatch.setattr(demo.subprocess, "run", recorder)
    return recorder


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stands in for the fitting of the small models, and records what they would be fitted to."""
    calls: list[dict[str, Any]] = []

    def make(folder: Path, pictures: list[np.ndarray], captions: list[str], **options: Any) -> Any:
        calls.append({"pictures": pictures, "captions": captions, **options})
        folder.mkdir()
        return {"vae": {"parameters": 1, "scaling_factor": 1.0, "psnr": 1.0}, "text": {"parameters": 1}}

    monkeypatch.setattr(small_models, "make_all", make)
    return calls


def test_the_demonstration_runs_the_commands_in_its_folder(
    tmp_path: Path, commands: Commands, made: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    assert demo.run(out) == 0
    rounds = ["encode", "encode", "bucket", "bucket", "train", "encode", "bucket", "train"]
    assert [line[0] for line in commands.lines] == [*rounds, "export", "sample", "report"]
    assert [line[2] for line in commands.lines if line[0] == "encode"] == ["photos", "heldout", "more"]
    assert [line[2] for line in commands.lines if line[0] == "bucket"] == ["heldout", "round1", "round2"]
    first, second = (line for line in commands.lines if line[0] == "train")
    assert "--from" not in first and second[second.index("--from") + 1] == commands.settings(first)["train.output"]
    for line, name, steps in ((first, "round1", 500), (second, "round2", 350)):
        settings = [word for flag, word in pairwise(line) if flag == "--set"]
        train = load(out / "sana-pipe.yaml", settings, "train").train
        assert line[line.index("--snapshot") + 1] == name and line[-2:] == ["--resume", "auto"]
        assert (Path(train.output).name, train.steps) == (name, steps)
        assert train.validation is not None and train.validation.snapshot == "heldout"
        assert train.pictures is not None and train.pictures.every == steps // 2
    assert all(commands.settings(second)["train.output"] in line for line in commands.lines[-3:-1])
    assert [len(list((out / name).glob("*.txt"))) for name in ("photos", "more", "heldout")] == [8, 4, 4]
    later, heldout = (
        {path.stem: path.read_bytes() for path in (out / n).glob("*.[jp][pn]g")} for n in ("more", "heldout")
    )
    assert later.keys() == heldout.keys() and all(later[name] != heldout[name] for name in later)
    assert len((out / "prompts.txt").read_text().splitlines()) == len(demo.PROMPTED)
    assert len(made[0]["pictures"]) == 12, "the VAE stands for one that has seen such pictures"
    assert made[0]["sizes"] == load("tiny").data.buckets
    printed = capsys.readouterr().out
    assert printed.count("$ cd ") == 11
    assert printed.splitlines()[-1] == f"contact sheet: {out / 'samples' / 'contact_sheet.png'}"

    before = {p: p.stat().st_mtime_ns for p in (out / "photos").iterdir()}
    assert demo.run(out) == 0  # again: everything is reused, and the last round's commands are run again
    assert len(made) == 1
    assert {p: p.stat().st_mtime_ns for p in (out / "photos").iterdir()} == before
    assert [line[0] for line in commands.lines[11:]] == [
        "encode",
        "bucket",
        "train",
        "export",
        "sample",
        "report",
    ]


def test_an_interrupted_preparation_is_done_again(
    tmp_path: Path, commands: Commands, made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(folder: Path, *_: Any, **__: Any) -> Any:
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(small_models, "make_all", dies)
        with pytest.raises(KeyboardInterrupt):
            demo.run(tmp_path / "demo")
    assert not (tmp_path / "demo" / "tiny").exists()
    assert demo.run(tmp_path / "demo") == 0
    assert list((tmp_path / "demo" / "tiny").iterdir()) == []


def test_a_failing_command_stops_the_demonstration(
    tmp_path: Path, made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for code, expected in ((4, 4), (-9, 137)):
        failing = Commands("train", code)
        monkeypatch.setattr(demo.subprocess, "run", failing)
        assert demo.run(tmp_path / "demo") == expected
        assert [line[0] for line in failing.lines] == ["encode", "encode", "bucket", "bucket", "train"]
        assert re.search(rf"train .*\b{abs(code)}$", capsys.readouterr().out, re.MULTILINE)


def test_a_folder_of_something_else_is_left_alone(
    tmp_path: Path, commands: Commands, made: list[dict[str, Any]]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match=naming(tmp_path / "mine")):
        demo.run(tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    demo.run(tmp_path / "demo", quick=True)
    with pytest.raises(UserError, match=naming(tmp_path / "demo", "--out")):
        demo.run(tmp_path / "demo", quick=False)
    assert json.loads((tmp_path / "demo" / demo.MARK).read_text()) == {"quick": True}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_second_round_learns_the_new_photographs(tmp_path: Path) -> None:
    """Held-out crops of them: the loss rises while the first round learns others, and falls far below its start."""
    done = subprocess.run(command("demo", "--out", str(tmp_path / "demo")), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (
        [row["loss"] for row in metrics.read_events(tmp_path / f"demo/runs/tiny/{name}/metrics.jsonl")["validation"]]
        for name in ("round1", "round2")
    )
    assert second[0] == pytest.approx(first[-1], abs=1e-5)
    assert second[-1] < 0.5 * first[0] < 0.5 * first[-1]
    page = (tmp_path / "demo/report.html").read_text()
    assert "round1" in page and "round2" in page
    assert "likeness: 12 of 12 pictures" in done.stdout
    for name, step in (("round1", 500), ("round2", 350)):
        assert len(list((tmp_path / f"demo/runs/tiny/{name}/pictures/step-{step:08d}").glob("*.png"))) == len(
            demo.PROMPTED
        )
