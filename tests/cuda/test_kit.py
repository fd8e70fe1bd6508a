"""Rows of the GPU kit with a model of few blocks: no minute of a real card is spent on an error of Python."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cuda.cards import python

pytestmark = pytest.mark.cuda

EACH = """
import dataclasses, importlib, json, os, sys, traceback
from sana_pipe.base.launch import prefer_expandable_segments
prefer_expandable_segments()
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
import torch
from benchmarks.gpu.rows import chosen
from benchmarks.gpu.sizes import Sizes
whole, tiny = Sizes.of(False), Sizes.of(True)
if blocks := int(sys.argv[1]):
    sizes = dataclasses.replace(whole, config=dataclasses.replace(whole.config, num_layers=blocks), warm=1, timed=1)
else:
    sizes = dataclasses.replace(tiny, device=whole.device)
for row in chosen(sys.argv[3:]):
    module, _, name = row.call.partition(":")
    try:
        given = row.given | json.loads(sys.argv[2])
        figures = getattr(importlib.import_module(module), name)(sizes, **given)
        lacks = [figure for figure in row.yields if figure not in figures]
        print(json.dumps({"row": row.name, "lacks": lacks, "figures": figures}), flush=True)
    except Exception:
        print(json.dumps({"row": row.name, "error": traceback.format_exc()[-2000:]}), flush=True)
    torch.cuda.set_per_process_memory_fraction(1.0)
    sizes.free()
"""

ROWS = (
    *("versions", "device", "step/default", "24gb/came-8", "lora/24gb-4", "optimizer/adamw"),
    *("diffusers/full-32", "technique/padded-16", "technique/in-backward-16", "profile/default", "buckets/default"),
)
"""Uncompiled, of each kind. Not on an H100: cuDNN's attention, which padded captions take there, does not run."""


def ran(
    blocks: int, given: dict[str, Any], *rows: str, card: str = "4090", others_mib: int = 0
) -> list[dict[str, Any]]:
    """The lines of some rows. blocks: of the transformer, all else as released; 0: all is tiny."""
    more = {"FAKE_OTHER_MIB": str(others_mib)}
    done = python("-c", EACH, blocks, json.dumps(given), *rows, card=card, more=more, timeout=880).succeed()
    lines = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    assert [line["row"] for line in lines] == list(rows)
    return lines


@pytest.mark.timeout(900)
def test_rows_of_the_kit_yield_their_figures() -> None:
    """Edits: a figure that a row does not return; `torch.cuda.nothing()` in `steps.ours`."""
    for line in ran(2, {}, *ROWS):
        assert not line.get("error") and not line["lacks"], line
        assert line["figures"].get("ok", True) and "not_predicted" not in line["figures"], line


@pytest.mark.timeout(900)
def test_the_trainer_row_saves_and_profiles() -> None:
    """With one block: a checkpoint of all has 18 GiB. Edit: another name in `Saver` than `_write`."""
    (line,) = ran(1, {"steps": 12, "save_every": 4, "batch": 8}, "trainer")
    assert not line.get("error") and not line["lacks"], line
    figures = line["figures"]
    assert figures["checkpoint_gib"] > 0.5 and figures["profile_mib"] > 0 and 0 < figures["peak_gib"] < 20


def test_rows_of_encoders_run() -> None:
    """Tiny, and with 3 GiB free, since the batch that is chosen fills the card. Edit: `torch.cuda.nothing()` in
    `encoders.vae`."""
    for line in ran(0, {}, "encode/vae", "diffusers/encoders-16", card="3060", others_mib=8500):
        assert not line.get("error") and not line["lacks"], line
