"""Training Sana 1.6B on a GPU, within the memory of smaller cards and against itself compiled."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_train
from pipeline.launch import Launch
from pipeline.models.sana_flops import training_flops
from pipeline.parallel import mesh
from pipeline.parallel.parallelize import parallelize
from tests.support.workers import tiny_run
from tests.test_sana_model import TINY

ROOT = Path(__file__).resolve().parent.parent


def test_without_a_gpu_the_measurement_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_train", "--quick"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "no GPU here" in done.stdout
    assert '"batch_24gb": null' in done.stdout.splitlines()[-1]


def test_every_row_can_be_configured_or_is_left_out() -> None:
    rows = gpu_train.grid([8], quick=False)
    ours = [row for row in rows if row.side == "ours"]
    assert len({(row.name, row.batch) for row in rows}) == len(rows)
    assert {"ours none adamw", "ours full adamw"} <= {row.name for row in ours if gpu_train.possible(row.train)}
    assert not gpu_train.possible({"activation_checkpointing": "half"})


@pytest.mark.parametrize("train", [{}, {"text": "packed", "packed_attention": True}])
def test_both_sides_of_the_measurement_do_their_step(train: dict[str, Any]) -> None:
    """On the CPU and with a small model, since only a GPU can do more."""
    config = replace(TINY, caption_channels=24)
    with ExitStack() as ending:
        sides = [gpu_train.ours(gpu_train.Row("ours", 2, train), config, torch.device("cpu"), ending)]
        if not train:
            row = gpu_train.Row("diffusers", 2, {"activation_checkpointing": "full"})
            sides.append(gpu_train.diffusers(row, config, torch.device("cpu")))
        for step in sides:
            step()
            step()


def test_operations_on_padding_count_only_where_padding_is_computed() -> None:
    config = replace(TINY, caption_channels=24)
    mask = gpu_train.batch_of(config, 4, packed=True).mask
    assert int(mask.sum()) < mask.numel() == 4 * gpu_train.ROWS
    for packed, rows in ((False, mask.numel()), (True, int(mask.sum()))):
        row = gpu_train.Row("ours", 4, {"text": "packed", "packed_attention": packed})
        assert gpu_train.step_flops(row, config) == training_flops(config, 4, gpu_train.SIDE**2, rows)


@pytest.mark.gpu
@pytest.mark.parametrize(("card", "batch"), [("24gb", 8), ("48gb", 32)])
def test_full_fine_tuning_fits_a_smaller_card(card: str, batch: int) -> None:
    cap, _ = gpu_train.SMALL[card]
    result = gpu_train.in_a_process(
        gpu_train.Row("ours", batch, {"optim": gpu_train.LIGHT[0], **gpu_train.FRUGAL}, cap)
    )
    assert result is not None, f"batch {batch} does not fit into {cap} GiB"
    assert (result["reserved_gib"] or 0) <= cap


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks_on_a_gpu(recompute: str) -> None:
    result = {}
    for how in ("none", "block"):
        settings = tiny_run.config(compile=how, precision="bf16", activation_checkpointing=recompute, device="cuda")
        with mesh.open_mesh(Launch(), settings.train.parallel, torch.device("cuda", 0)) as devices:
            parallel_model = parallelize(tiny_run.model(settings), devices, settings.train)
            batch = tiny_run.global_batch(0)
            inputs = (batch.latents, batch.captions, batch.mask, batch.logit.abs() * 500)
            out = parallel_model.module(*(x.cuda() for x in inputs))
            out.float().square().mean().backward()
            whole = {n: p.grad.full_tensor() for n, p in parallel_model.module.named_parameters()}  # type: ignore[union-attr]
            result[how] = {name: value.cpu() for name, value in whole.items()}
    assert tiny_run.distance(result["block"], result["none"]) <= 2e-2  # both are bf16, rounded at other places
