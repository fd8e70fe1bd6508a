"""The worked examples in comments of hard functions give the numbers that stand there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.loader.schedule import Blocks, Schedule, interleaved
from pipeline.parallel.saved_tensors import quantise, restore


def test_the_order_of_a_snapshot() -> None:
    order = Schedule([5, 3], [2, 1], seed=0, phase=0, small="carry")
    assert [order.steps_upto(epochs) for epochs in range(4)] == [0, 5, 11, 16]
    step = order.step(6)
    assert (step.epoch, step.bucket) == (1, 0) and step.visits.tolist() == [0, 1], "of epoch 0, then of epoch 1"


def test_interleaved_streams() -> None:
    streams, numbers = interleaved(np.arange(6), [4, 2], 3, "k")
    assert streams.tolist() == [0, 1, 0, 0, 0, 1] and numbers.tolist() == [0, 0, 1, 2, 3, 1]


def test_a_permutation_in_blocks() -> None:
    assert Blocks(4, 2).permute(np.arange(10), 10, "k").tolist() == [8, 9, 2, 5, 0, 3, 7, 4, 1, 6]


def test_codes_of_saved_tensors() -> None:
    values = torch.zeros(130)
    values[[0, 1, 129]] = torch.tensor([2.54, -1.0, 127.0])
    codes, scales = quantise(values)
    assert codes[:3].tolist() == [127, -50, 0] and scales.tolist() == pytest.approx([0.02, 1.0])
    assert restore(codes, scales, 130, torch.float32)[[0, 1, 129]].tolist() == pytest.approx([2.54, -1.0, 127.0])
