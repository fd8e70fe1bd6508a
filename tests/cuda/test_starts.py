"""How commands start where a card, its driver, a compiler or its memory is missing, and where all is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cuda.cards import Done, sana_pipe, torchrun

pytestmark = pytest.mark.cuda

Words = Callable[..., list[str]]
TOO_OLD, NO_DEVICE = "35", "100"
MIB_OF_A_4090, CONTEXT = 24173, 450


def refused(done: Done, tmp_path: Path) -> str:
    """The message of a run that did not start: a user's error, without a traceback."""
    assert done.code != 0 and "sana-pipe:" in done.output, done.output[-3000:]
    assert "Traceback (most recent call last)" not in done.output.partition("torch/distributed/elastic")[0]
    assert not list(tmp_path.glob("run/checkpoints/*"))
    return done.output


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("error", [TOO_OLD, NO_DEVICE])
def test_a_card_that_cannot_be_used_is_an_error(error: str, device: str, words: Words, tmp_path: Path) -> None:
    """Edit: `resolve_device` gives the CPU where torch warns."""
    if (error, device) == (NO_DEVICE, "auto"):
        pytest.skip("that machine has no card: auto takes the CPU")
    done = sana_pipe(*words("train", f"train.device={device}"), more={"FAKE_INIT_ERROR": error})
    said = refused(done, tmp_path)
    assert done.code == 2
    assert "driver" in said.lower() or error != TOO_OLD


def test_a_rank_without_a_card_ends_the_launch(words: Words, tmp_path: Path) -> None:
    """Edit: `open_mesh` does not compare devices; then rank 0 waits in NCCL's start."""
    broken = {"FAKE_INIT_ERROR": NO_DEVICE, "FAKE_INIT_ERROR_RANK": "1", "FAKE_NCCL_WAIT_S": "20"}
    done = torchrun(2, *words("train"), more=broken)
    assert "process 1" in refused(done, tmp_path)
    assert not done.log.of("group") and not done.log.hangs()


def test_without_a_compiler_training_is_refused_before_its_first_step(words: Words, tmp_path: Path) -> None:
    """Edit: no call of `check_compiler`; then the first step dies in Triton."""
    done = sana_pipe(*words("train"), more={"PATH": str(tmp_path), "CC": ""})
    assert "compiler" in refused(done, tmp_path)
    assert done.code == 2 and not done.log.of("mark")


def test_memory_that_others_hold_counts(words: Words, tmp_path: Path) -> None:
    """Edit: `is_out_of_memory` knows no torch.OutOfMemoryError; then a traceback instead of the advice."""
    done = sana_pipe(*words("train"), more={"FAKE_OTHER_MIB": str(MIB_OF_A_4090 - CONTEXT - 6)})
    assert "memory" in refused(done, tmp_path)


def halved(cache: Path) -> int:
    """Batches that were halved, by the units' provenance."""
    heads = (json.loads(path.read_text()) for path in cache.rglob("units/**/*.json"))
    return sum(head.get("provenance", {}).get("halved_batches", 0) for head in heads)


@pytest.mark.parametrize("left", [30, 0])
def test_encode_halves_its_batch_where_memory_is_full(left: int, words: Words, tmp_path: Path, photos: Path) -> None:
    """Edit: `encode_finite` halves no batch; then no record is made with 30 MiB left."""
    options = ("encode.device=auto", "encode.image_batch=8", f"cache={tmp_path / 'cache'}")
    full = {"FAKE_OTHER_MIB": str(MIB_OF_A_4090 - CONTEXT - left)}
    done = sana_pipe(*words("encode", *options), "--data", photos, more=full)
    if left == 0:
        assert "memory" in refused(done, tmp_path)
        return
    done.succeed()
    assert halved(tmp_path / "cache") > 0
