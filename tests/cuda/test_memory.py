"""Memory of the kit's rows on the pretended card: what a real H100 measured (docs/gpu.md), and what `plan` says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cuda.cards import python

pytestmark = pytest.mark.cuda

MEASURED = {
    "step/full-32": (31.761, 38.189),
    "lora/12gb-1": (3.508, 3.598),
    "lora/24gb-4": (4.417, 4.594),
    "lora/full-32": (12.894, 13.697),
}
"""Peak and reserved GiB on a real H100."""

ROWS = [
    ("3060", "lora/12gb-1"),
    ("4090", "24gb/came-8"),
    ("5090", "24gb/came-16"),
    ("A100", "48gb/came-32"),
    *(("H100", row) for row in MEASURED),
]
WITHIN = 0.03
SMALL = 0.06
"""Of what a step of less than 6 GiB reserves: cuBLAS's workspaces (64 MiB on an H100) are in the plan's context."""

MEASURE = """
import dataclasses, json, sys
from pipeline.launch import prefer_expandable_segments
prefer_expandable_segments()
from benchmarks.gpu import steps
from benchmarks.gpu.rows import chosen
from benchmarks.gpu.sizes import Sizes
(row,) = chosen(sys.argv[1:])
given = {**row.given, "cap_gib": None}
print(json.dumps(steps.step(dataclasses.replace(Sizes.of(False), timed=1), **given)))
"""
"""Without the row's cap: under it the allocator gives memory back and tries again (24gb/came-16: 22.4 of 24.2 GiB)."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("card", "row"), ROWS)
def test_memory_is_what_plan_says_and_what_a_card_measured(card: str, row: str) -> None:
    """Edits: a tensor of each step that is kept (in `TrainStep.__call__`); another residual in `predict`."""
    output = python("-c", MEASURE, row, card=card, timeout=800).succeed().output
    figures: dict[str, Any] = next(json.loads(line) for line in output.splitlines() if line.startswith("{"))
    assert abs(figures["memory_error"]) <= WITHIN, figures
    assert abs(figures["reserved_error"]) <= (SMALL if figures["reserved_gib"] < 6 else WITHIN), figures
    assert figures["reserved_gib"] >= figures["peak_gib"]
    if card == "H100":
        assert (figures["peak_gib"], figures["reserved_gib"]) == pytest.approx(MEASURED[row], rel=0.002)
