"""The line that a terminal overwrites, of `encode` and of `train`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sana_pipe.base.launch import Launch
from sana_pipe.base.terminal import LiveLine
from sana_pipe.data.work import progress
from sana_pipe.data.work.progress import Meter, Progress
from sana_pipe.train.training import metrics, trainer
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


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a progress line reads."""
    clock = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_a_text_takes_the_place_of_the_last_one(capsys: pytest.CaptureFixture[str], width: Callable[..., None]) -> None:
    width(30)
    line = LiveLine(True)
    log = line.above(lambda text: print(text, file=sys.stderr))
    for text in ("a long text", "short", "x" * 100, "a text"):
        line.show(text)
    log("printed")
    line.show("last")
    line.end()
    log("after")
    assert screen(capsys.readouterr().err) == ["printed", "last", "after", ""]
    line.show("y" * 100)
    assert screen(capsys.readouterr().err) == ["y" * 29], "a line that wraps cannot be overwritten"


def test_a_narrow_terminal_shows_a_shorter_text(capsys: pytest.CaptureFixture[str], width: Callable[..., None]) -> None:
    line = LiveLine(True)
    log = line.above(lambda text: print(text, file=sys.stderr))
    for columns, shown in ((30, "a long text"), (9, "shorter"), (4, "sho")):
        width(columns)
        line.show("a long text", "shorter")
        log("above")
        assert screen(capsys.readouterr().err)[-1] == shown


@pytest.mark.parametrize("columns", [200, 80, 60, 40, 32])
def test_step_loss_and_time_left_are_shown_at_any_width(
    columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], width: Callable[..., None]
) -> None:
    width(columns)
    journal = metrics.Metrics(tmp_path / "metrics.jsonl", lambda line: None, line=LiveLine(True), epoch_steps=2.5)
    row = {"grad_norm": 1.0, "lr": 1.0, "images_per_s": 123.4, "data_wait": 0.0, "bucket": [8, 8]}
    journal.start(step=0, device="cpu")
    journal.validation(
        12000, {"step": 0, "loss": 1.5, "snapshot": "a", "ema_loss": None, "by_sigma": {}, "ema_by_sigma": None,
                "samples": 5, "seconds": 1.0}
    )  # fmt: skip
    for step in range(1, 5):
        journal.row(12000, {"step": step, "loss": 1 / step, **row, "seconds": 10.0 * step})
    (shown,) = screen(capsys.readouterr().err)
    journal.close()
    assert len(shown) < columns
    assert "4/12000" in shown and "0.2500" in shown and "33h19m left" in shown
    assert ("validation 1.5000" in shown) == (columns >= 80)


def test_encode_shows_the_time_left_at_any_width(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    now: list[float],
    width: Callable[..., None],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    width(50)
    bar = Progress("captions", 10000, Meter(tokens=40))
    now[0] += 10
    bar.add(3, 1)
    assert "captions: 3/10000, 1 rejected, " in (shown := screen(capsys.readouterr().err)[-1]) and " left" in shown


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


@pytest.mark.parametrize(("live", "every"), [(True, 0.25), (False, 30.0)])
def test_a_line_is_shown_when_it_is_due(
    live: bool,
    every: float,
    now: list[float],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: live, raising=False)
    monkeypatch.setattr(Progress, "lines", lambda self: iter([f"{self.done}+{self.rejected} of {self.total}"]))

    def shown() -> list[str]:
        return capsys.readouterr().err.replace("\r", "\n").split()[::3]

    with Progress("pictures", 9) as bar:
        for _ in range(2):
            now[0] += every * 0.75
            bar.add(1)
            assert shown() == []
            now[0] += every * 0.25
            bar.add(1)
            assert shown() == [f"{bar.done}+0"]
        now[0] += every
        bar.reach(6, 7)
        assert (bar.done, bar.total, shown()) == (6, 7, ["6+0"])
        bar.reach(7)
        assert (bar.total, shown()) == (None, [])
    assert shown() == ["7+0"], "the last line is shown whenever it comes"
    with Progress("pictures", 9):
        pass
    assert shown() == [], "nothing was done"
    with Progress("pictures", 9) as bar:
        bar.add(0, 2)
    assert shown() == ["0+2"]


def test_figures_count_from_the_start_of_the_line(now: list[float]) -> None:
    meter = Meter()
    bar = Progress("captions", 10, meter)
    nothing = {"done": 0, "rejected": 0, "per_s": 0.0, "tokens": 0, "tokens_per_s": 0.0, "encoder_busy": 0.0}
    assert bar.figures() == {**nothing, "seconds": 1e-9}
    now[0] += 4
    with pytest.raises(ValueError), meter.computing():
        now[0] += 1
        raise ValueError
    meter.tokens += 40
    bar.add(3, 1)
    rates = {"per_s": 0.6, "tokens": 40, "tokens_per_s": 8.0, "encoder_busy": 0.2}
    assert bar.figures() == {"done": 3, "rejected": 1, "seconds": 5.0, **rates}
    assert bar.line() == "captions: 3/10, 1 rejected, 7s left, 0.8 captions/s, encoder 20% busy, 8 tokens/s"
    bar.add(1, 1)
    assert (bar.done, bar.rejected) == (4, 2)
    bar.forget(2, 0)
    assert (bar.done, bar.rejected) == (2, 0)
    bar = Progress("parts", None)
    assert bar.figures() == {**nothing, "seconds": 1e-9}
    now[0] += 2
    bar.add(5)
    assert bar.line() == "parts: 5, 2.5/s"
    bar.expect(8)
    bar.expect(-2)
    assert bar.total == 6


def test_where_encoders_work_at_the_same_time_their_own_seconds_count(now: list[float]) -> None:
    meter = Meter(wall_s=0.0)
    bar = Progress("captions", None, meter)
    assert bar.busy == 0.0
    meter.add(Meter(1, 2, 3, 1.0, 4.0))
    meter.add(Meter(10, 20, 30))
    assert meter == Meter(11, 22, 33, 1.0, 4.0)
    assert bar.busy == 0.25
    meter.add(Meter(busy_s=9.0, wall_s=1.0))
    assert bar.busy == 1.0, "at most"
    first = Meter()
    first.add(Meter(wall_s=3.0))
    assert first.wall_s == 3.0
    bar = Progress("captions", None, Meter(wall_s=0.0))
    now[0] += 5
    assert bar.busy == 0.0


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
    validation = {"every": 4}
    config = tiny_run.config(tmp_path / "run", layers=1, steps=5, validation=validation)
    trainer.fit(config.train, tiny_run.task(config), Launch(), log=lambda text: print(text, file=sys.stderr))
    printed = capsys.readouterr().err
    events = metrics.read_events(tmp_path / "run/metrics.jsonl")
    rows, (*_, value) = events[None], events["validation"]
    if not live:
        assert "\r" not in printed
        assert sum(text.startswith("step ") for text in printed.splitlines()) == 5
        return
    shown = screen(printed)
    *_, row = [text for text in shown if text.startswith("step ")]
    losses = [entry["loss"] for entry in rows]
    trend = sum(losses[3:]) / 2 - sum(losses[:2]) / 2
    assert row.startswith(f"step 5/5 (100%)  loss {losses[-1]:.4f} ({trend:+.4f})")
    assert "images/s" in row and "validation " in row
    assert sum(text.startswith("step ") for text in shown) == 1
    assert sum(text.startswith("validation after") for text in shown) == 3, "other lines stay"
    assert f"{value['loss']:.4f}" in printed
