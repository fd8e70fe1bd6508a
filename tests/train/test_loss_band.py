"""A loss that leaves its band is reported once; noise and slow changes are not."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from sana_pipe.train.training.loss_band import BEFORE, LossBand
from sana_pipe.train.training.metrics import Metrics


def noisy(count: int, mean: float, spread: float, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(mean, spread) for _ in range(count)]


def test_noise_and_a_slow_fall_stay_inside() -> None:
    band = LossBand()
    assert [band.add(loss) for loss in noisy(2000, 0.3, 0.02)] == [None] * 2000
    falling = LossBand()
    assert not any(falling.add(1.0 - step / 4000 + noise) for step, noise in enumerate(noisy(2000, 0, 0.01)))


@pytest.mark.parametrize("loss", [0.5, 0.1])
def test_a_jump_is_reported_once_with_the_band(loss: float) -> None:
    band = LossBand()
    for value in noisy(200, 0.3, 0.01):
        band.add(value)
    reported = band.add(loss)
    assert reported is not None
    assert reported == pytest.approx((0.24, 0.36), abs=0.02)
    assert band.add(loss) is None, "still outside"
    assert not any(band.add(value) for value in noisy(400, loss, 0.01, 1)), "the new band"
    assert band.add(0.3) is not None


def test_the_first_rows_are_not_judged_and_a_constant_has_a_band() -> None:
    band = LossBand()
    assert [band.add(loss) for loss in (9.0, *[0.3] * (BEFORE - 1))] == [None] * BEFORE
    constant = LossBand()
    for _ in range(100):
        constant.add(0.3)
    assert constant.add(0.31) is None
    assert constant.add(0.33) is not None


def test_the_band_has_exact_ends_and_begins_after_its_first_rows() -> None:
    for rows, reported in ((BEFORE - 1, None), (BEFORE, (2 - 0.12, 2 + 0.12)), (200, (2 - 0.12, 2 + 0.12))):
        for loss in (2.125, 1.875):
            band = LossBand()
            assert not any(band.add(2.0) for _ in range(rows))
            assert band.add(loss) == (reported and pytest.approx(reported))
            assert (band.rows, band.inside) == (rows + 1, reported is None)
    share = 1 - math.exp(-1 / 50)  # from the 51st row on
    assert band.mean == pytest.approx(2 - share / 8)
    assert band.variance == pytest.approx((1 - share) * share / 64)
    for end in (2 + 0.06 * 2, 2 - 0.06 * 2):
        assert LossBand(mean=2.0, rows=99).add(end) is None, "the end belongs to it"


def test_mean_and_variance_are_those_of_the_rows_while_they_are_few() -> None:
    values, band = noisy(15, 2.0, 0.5), LossBand()
    for value in values:
        band.add(value)
    mean = sum(values) / 15
    assert band.mean == pytest.approx(mean)
    assert band.variance == pytest.approx(sum((value - mean) ** 2 for value in values) / 15)


def test_a_run_says_when_its_loss_leaves_the_band_also_after_a_restart(tmp_path: Path) -> None:
    printed: list[str] = []

    def row(step: int, loss: float) -> dict[str, Any]:
        numbers = {"grad_norm": 1.0, "lr": 1e-4, "images_per_s": 1.0, "data_wait": 0.0, "seconds": float(step)}
        return {"step": step, "loss": loss, "bucket": [64, 64], **numbers}

    losses = noisy(60, 0.3, 0.01)
    for attempt in (range(1, 31), range(31, 61)):
        journal = Metrics(tmp_path / "metrics.jsonl", log=printed.append)
        journal.start(step=attempt[0] - 1)
        for step in attempt:
            journal.row(100, row(step, losses[step - 1]))
        journal.close()
    assert not [line for line in printed if line.startswith("warning")]
    journal = Metrics(tmp_path / "metrics.jsonl", log=printed.append)
    journal.start(step=60)
    journal.row(100, row(61, 0.9))
    journal.close()
    (warning,) = [line for line in printed if line.startswith("warning")]
    assert "0.9000" in warning and "grad_norm" in warning


def test_a_damaged_journal_ends_no_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 0.3}\n{"step": 2}\n\xff\xfe{"step": 3\n{"step": 4, "loss": null}\n')
    journal = Metrics(path, log=lambda line: None)
    journal.start(step=4)
    journal.close()
    assert journal._band.rows == 1
