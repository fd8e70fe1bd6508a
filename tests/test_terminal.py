"""The line that a terminal overwrites, of `encode` and of `train`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.launch import Launch
from pipeline.terminal import LiveLine
from pipeline.training import metrics, trainer
from pipeline.work.progress import Progress
from tests.support.workers import tiny_run


def screen(text: str) -> list[str]:
    """What a terminal shows."""
    lines = [""]
    at = 0
    for letter in text:
        if letter == "\n":
            lines.append("")
            at = 0
        elif letter == "\r":
            at = 0
        else:
            lines[-1] = lines[-1][:at].ljust(at) + letter + lines[-1][at + 1 :]
            at += 1
    return [line.rstrip() for line in lines]


@pytest.fixture
def width(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_width(columns: int) -> None:
        monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((columns, 24)))

    return set_width


def test_a_text_takes_the_place_of_the_last_one(capsys: pytest.CaptureFixture[str], width: Callable[..., None]) -> None:
    width(30)
    line = LiveLine(True)
    say = line.above(lambda text: print(text, file=sys.stderr))
    for text in ("a long text", "short", "x" * 100, "a text"):
        line.show(text)
    say("printed")
    line.show("last")
    line.end()
    say("after")
    assert screen(capsys.readouterr().err) == ["printed", "last", "after", ""]
    line.show("y" * 100)
    assert screen(capsys.readouterr().err) == ["y" * 29], "a line that wraps cannot be overwritten"


def test_without_a_terminal_there_is_no_such_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = LiveLine(False)
    line.show("never")
    line.above(print)("printed")
    line.end()
    assert capsys.readouterr() == ("printed\n", "")
    with Progress("pictures", 3) as progress:
        progress.add(3)
    assert "\r" not in capsys.readouterr().err


def test_encode_redraws_its_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress("pictures", 3) as progress:
        progress._last = 0.0  # long ago
        progress.add(1)
        progress.add(2)
    shown = screen(capsys.readouterr().err)
    assert (len(shown), shown[-1]) == (2, "")
    assert shown[0].startswith("pictures: 3/3")


@pytest.mark.parametrize("live", [True, False])
def test_train_shows_its_progress(
    live: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    width: Callable[..., None],
) -> None:
    width(200)
    monkeypatch.setattr(trainer, "LiveLine", lambda there: LiveLine(live))
    validation = {"every": 4, "levels": 2}
    config = tiny_run.config(tmp_path / "run", layers=1, steps=5, validation=validation)
    trainer.fit(config, tiny_run.task(config), Launch(), say=lambda text: print(text, file=sys.stderr))
    printed = capsys.readouterr().err
    rows, (*_, value) = (read(tmp_path / "run/metrics.jsonl") for read in (metrics.read, metrics.validations))
    if not live:
        assert "\r" not in printed
        assert sum(text.startswith("step ") for text in printed.splitlines()) == 5
        return
    shown = screen(printed)
    *_, row = [text for text in shown if text.startswith("step ")]
    losses = [entry["loss"] for entry in rows]
    trend = sum(losses[3:]) / 2 - sum(losses[:2]) / 2
    assert row.startswith(f"step 5/5  loss {losses[-1]:.4f} ({trend:+.4f})")
    assert "images/s" in row and "validation " in row
    assert sum(text.startswith("step ") for text in shown) == 1
    assert sum(text.startswith("validation after") for text in shown) == 3, "other lines stay"
    assert f"{value['loss']:.4f}" in printed
