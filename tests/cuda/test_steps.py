"""Steps of `sana-pipe train` on the pretended card: where the host waits, what is copied, what a card would not launch;
runs that end and go on with every optimizer; compiled kernels for every capability."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sana_pipe.train.training import checkpoint
from tests.cuda.cards import Log, one_after_the_other

pytestmark = pytest.mark.cuda

Words = Callable[..., list[str]]

CAME = ("train.optim.name=came", "train.optim.betas=null", "train.optim.eps=null")
VARIANTS = {
    "plain": (),
    "checkpointing": ("train.activation_checkpointing=full",),
    "microbatches": ("train.microbatch=4",),
    "packed": ("train.text=packed",),
    "average": ("train.ema.device=cpu",),
    "lora": ("train.adapter.rank=4",),
    "came": CAME,
    "adamw8bit": ("train.optim.name=adamw8bit",),
}


def numbers(log: Log) -> list[int]:
    """Of the steps. Before the first, step 1 is tried, which changes nothing."""
    return [int(part.title[1]) for part in log.parts("step")][1:]


def quiet_steps(log: Log) -> list[Log]:
    """Steps after the first two, without the last, each up to the next one: all between is the loop's."""
    return [part for part in log.parts("step") if 2 < int(part.title[1]) < 7]


def test_a_step_waits_once_and_copies_no_pageable_memory(words: Words, tmp_path: Path) -> None:
    """Edits: `mask.sum().item()` of the placed mask in `Flow.prepare`; a batch that is not pinned; in the step, a
    `torch.tensor` of more than 64 KiB that is sent to the card."""
    usual = ("train.steps=7", "train.log_every=100")
    commands = {
        name: words("train", *usual, f"train.output={tmp_path / name}", *options) for name, options in VARIANTS.items()
    }
    for name, log in one_after_the_other(commands).items():
        steps = quiet_steps(log)
        assert len(steps) == 4
        assert log.contexts() <= {(0, 0)}
        assert not log.refused(), name
        for step in steps:
            # the average is moved in a thread that waits for its copy
            waits = [line for line in step.waits() if name != "average" or line.thread == line.pid]
            assert len(waits) == 1, (name, step.title, waits)
            assert not step.pageable(), (name, step.title, step.pageable())


@pytest.mark.parametrize("name", ["plain", "checkpointing", "microbatches"])
def test_a_step_copies_no_gradient(name: str, words: Words, tmp_path: Path) -> None:
    """A block's has 265 KiB, all others are smaller. Edit: `apply_fsdp` without `_InPlace`."""
    command = words("train", "train.steps=7", "train.log_every=100", *VARIANTS[name])
    (log,) = one_after_the_other({name: command}).values()
    copied = [int(line.words[-1]) for step in quiet_steps(log) for line in step.of("copy") if "on_card" in line.words]
    assert 0 < max(copied) < 128 << 10


OPTIMIZERS = {
    "adamw": (),
    "adamw8bit": ("train.optim.name=adamw8bit",),
    "came": CAME,
    "in_backward": ("train.optim.in_backward=true", "train.optim.clip=null"),
    "pure": ("train.precision=bf16_pure",),
    "pure_came": ("train.precision=bf16_pure", *CAME),
    "offloaded": ("train.parallel.offload=all",),
    "averaged": ("train.ema.device=cpu",),
    "lora": ("train.adapter.rank=4",),
}


def test_runs_go_on_with_every_optimizer(words: Words, tmp_path: Path) -> None:
    """Edit: a state that `get_state_dict` gives on another device than the parameters' (came's row sums on the CPU)."""
    commands = {}
    for name, options in OPTIMIZERS.items():
        place = f"train.output={tmp_path / name}"
        commands[name] = words("train", "train.steps=2", place, *options)
        commands[f"{name}-resumed"] = [*words("train", "train.steps=4", place, *options), "--resume", "auto"]
    logs = one_after_the_other(commands)
    for name in OPTIMIZERS:
        assert numbers(logs[name]) == [1, 2]
        assert numbers(logs[f"{name}-resumed"]) == [3, 4]
        assert checkpoint.newest(tmp_path / name / "checkpoints").name.endswith("4")


@pytest.mark.parametrize("card", ["A100", "3060", "4090", "H100", "B200", "5090"])
def test_kernels_are_compiled_and_launched_on_every_capability(card: str, words: Words) -> None:
    """Edit: a block of the gated convolution that exceeds the shared memory of 8.6 (a larger `BLOCK`)."""
    (log,) = one_after_the_other({"train": words("train", "train.steps=1")}, card=card).values()
    assert numbers(log) == [1]
    assert not log.refused()


def test_compiled_blocks_run(words: Words) -> None:
    """Edit: an operation of `pipeline/train/kernels` whose fake tensor has another shape or layout than its result."""
    (log,) = one_after_the_other(
        {"train": words("train", "train.compile=block", "train.steps=2")}, timeout=600
    ).values()
    assert numbers(log) == [1, 2]
    assert not log.refused()
