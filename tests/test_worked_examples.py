"""The worked examples in comments of hard functions give the numbers that stand there."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sana_pipe.data.loader.schedule import Blocks, Order, Schedule, interleaved
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_files import WeightFiles, save_weights
from sana_pipe.train.models.sana_shape import SanaShape, interleave
from sana_pipe.train.parallel.pipeline_parallel import stage_ranges
from sana_pipe.train.parallel.saved_tensors import quantise, restore


def test_the_order_of_a_snapshot() -> None:
    order = Schedule([5, 3], [2, 1], seed=0, phase=0, remainder="carry")
    assert [order.steps_upto(epochs) for epochs in range(4)] == [0, 5, 11, 16]
    step = order.step(6)
    assert (step.epoch, step.bucket) == (1, 0) and step.visits.tolist() == [0, 1], "of epoch 0, then of epoch 1"


def test_the_passes_of_the_plain_order() -> None:
    order, key = Order(), ("samples", 0, 0, 0)
    assert order.one_pass(np.arange(5), 5, *key, 0).tolist() == [2, 4, 1, 0, 3]
    assert order.one_pass(np.arange(5), 5, *key, 1).tolist() == [0, 2, 1, 4, 3]
    assert order.positions(np.array([0, 0, 1, 1]), np.array([3, 4, 0, 1]), 5, *key).tolist() == [0, 3, 0, 2]
    streams, numbers = order.woven(np.arange(6), [4, 2], 3, "k")
    assert streams.tolist() == [0, 0, 1, 1, 0, 0] and numbers.tolist() == [1, 3, 1, 0, 2, 0]


def test_batches_of_one_bucket() -> None:
    """The batch that `carry` fills from two passes, `drop` from one; and two weighted parts in an epoch."""
    carry, drop = (Schedule([5], [2], seed=0, phase=0, remainder=remainder) for remainder in ("carry", "drop"))
    assert [b.visits.tolist() for step in (2, 3, 4) if (b := carry.step(step)).positions.tolist() == [3, 0]] == [[0, 1]]
    assert {tuple(drop.step(step).visits.tolist()) for step in (2, 3)} == {(1, 1)}
    parts = [[(4, Fraction(1, 2)), (2, Fraction(1))]]
    step = Schedule([6], [4], seed=0, phase=0, remainder="carry", parts=parts).step(1)
    assert step.positions.tolist() == [1, 0, 5, 4] and step.visits.tolist() == [0, 0, 1, 1]


def test_another_order_is_a_class_with_two_methods() -> None:
    class InRows(Order):
        def one_pass(self, places: np.ndarray, size: int, *key: int | str) -> np.ndarray:
            return places

        def woven(self, slots: np.ndarray, counts: Any, group: int, *key: int | str) -> tuple[np.ndarray, np.ndarray]:
            ends = np.cumsum(counts)
            streams = np.searchsorted(ends, slots, side="right")
            return streams, slots - (ends - counts)[streams]

    schedule = Schedule([4, 2], [2, 2], seed=0, phase=0, remainder="carry", orders=[InRows(), InRows()])
    steps = [schedule.step(number) for number in range(3)]
    assert [(step.bucket, *step.positions.tolist()) for step in steps] == [(0, 0, 1), (0, 2, 3), (1, 0, 1)]


def test_interleaved_streams() -> None:
    streams, numbers = interleaved(np.arange(6), [4, 2], 3, "k")
    assert streams.tolist() == [0, 1, 0, 0, 0, 1] and numbers.tolist() == [0, 0, 1, 2, 3, 1]


def test_a_permutation_in_blocks() -> None:
    assert Blocks(4, 2).one_pass(np.arange(10), 10, "k").tolist() == [8, 9, 2, 5, 0, 3, 7, 4, 1, 6]


def test_codes_of_saved_tensors() -> None:
    values = torch.zeros(130)
    values[[0, 1, 129]] = torch.tensor([2.54, -1.0, 127.0])
    codes, scales = quantise(values)
    assert codes[:3].tolist() == [127, -50, 0] and scales.tolist() == pytest.approx([0.02, 1.0])
    assert restore(codes, scales, 130, torch.float32)[[0, 1, 129]].tolist() == pytest.approx([2.54, -1.0, 127.0])


def test_the_stages_of_a_pipeline_and_their_order() -> None:
    assert stage_ranges(20, 3) == [range(6), range(6, 13), range(13, 20)]
    count, stages = 4, 3
    ends: dict[tuple[str, int, int], int] = {}
    waiting = []
    for rank in range(stages):  # as torch's Schedule1F1B: some forward passes first, then one backward and one forward
        first, passes = stages - rank, [("F", number) for number in range(count)]
        rest = [one for number in range(count) for one in (("B", number), *passes[first + number :][:1])]
        waiting.append([*passes[:first], *rest])
    slots = [["--"] * 12 for _ in range(stages)]
    for slot in range(12):
        for rank in range(stages):
            kind, number = waiting[rank][0] if waiting[rank] else ("", 0)
            source = rank - 1 if kind == "F" else rank + 1
            ready = source in (-1, stages) or ends.get((kind, number, source), slot) < slot
            if kind and ready:
                slots[rank][slot], ends[kind, number, rank] = f"{kind}{number}", slot
                waiting[rank].pop(0)
    assert [" ".join(row) for row in slots] == [
        "F0 F1 F2 -- -- B0 F3 B1 -- B2 -- B3",
        "-- F0 F1 -- B0 F2 B1 F3 B2 -- B3 --",
        "-- -- F0 B0 F1 B1 F2 B2 F3 B3 -- --",
    ]


def test_rows_of_values_and_gates(tmp_path: Path) -> None:
    heads = {"attention_head_dim": 4, "cross_attention_head_dim": 4, "cross_attention_dim": 4, "mlp_ratio": 1.0}
    counts = dict.fromkeys(("num_layers", "num_attention_heads", "num_cross_attention_heads"), 1)
    shape = SanaShape(in_channels=4, out_channels=4, caption_channels=4, **heads, **counts)  # type: ignore[arg-type]
    model = SanaTransformer.from_scratch(shape, 0)
    name = "transformer_blocks.0.ff.conv_depth.bias"
    weights = dict(model.named_parameters()) | {name: interleave(name, torch.arange(8.0))}
    save_weights(weights, shape, tmp_path, torch.float32)
    assert WeightFiles(tmp_path).read(name, [3], [3]).tolist() == [5.0, 2.0, 6.0]
