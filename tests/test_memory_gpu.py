"""Memory techniques where device and host memory are two: only a GPU can show this."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.config import EmaConfig
from pipeline.launch import Launch
from pipeline.parallel import mesh
from pipeline.parallel.parallelize import parallelize
from pipeline.training import optimizers
from pipeline.training.ema import EMA
from pipeline.training.optimizers import in_backward
from pipeline.training.recipes.flow import Flow
from pipeline.training.step import TrainStep
from tests.support import saved_activations
from tests.support.workers import tiny_run

pytestmark = pytest.mark.gpu


def on_device(*way: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes allocated between the passes beyond the parameters, and the gradients."""
    module = saved_activations.model(torch.bfloat16, *way).cuda()
    given = [tensor.cuda() for tensor in saved_activations.inputs(torch.bfloat16)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = module(*given)
    torch.cuda.synchronize()
    saved = torch.cuda.memory_allocated() - before
    out.float().square().mean().backward()
    return saved, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", saved_activations.WAYS)
def test_less_is_allocated(name: str) -> None:
    way, _, least, exact = saved_activations.WAYS[name]
    on_device()  # what libraries allocate once
    without, expected = on_device()
    saved, actual = on_device(*way)
    assert without >= 0.8 * least * saved, without / saved
    assert tiny_run.distance(actual, expected) <= (1e-3 if exact else 4e-2)


def test_an_average_in_host_memory_is_the_average() -> None:
    model = torch.nn.Linear(64, 64).cuda()
    averages = [EMA(model, EmaConfig(decay=0.9, device=device)) for device in ("same", "cpu")]
    for step in range(1, 4):
        with torch.no_grad():
            model.weight += 1
        for average in averages:
            average.update(step)
    on_gpu, on_host = (average.values["weight"] for average in averages)
    torch.testing.assert_close(on_gpu.cpu(), on_host)
    assert on_host.device.type == "cpu"


@pytest.mark.parametrize("fused", [False, True])
def test_parameters_in_host_memory(fused: bool) -> None:
    device, losses = torch.device("cuda", 0), {}
    for offload in ("none", "all"):
        settings = tiny_run.config(
            microbatch=8,
            precision="bf16",
            device="cuda",
            parallel={"offload": offload},
            optim={"clip": None if fused else 0.1, "in_backward": fused},
        )
        with mesh.open_mesh(Launch(), settings.train.parallel, device) as device_mesh:
            parallel_model = parallelize(tiny_run.model(settings), device_mesh, settings.train)
            optimizer = optimizers.build(parallel_model.module, settings.train.optim, device)
            if fused:
                in_backward.fuse(optimizer, parallel_model)
            step = TrainStep(parallel_model, Flow(settings.train.flow), optimizer, settings.train, device)
            outcomes = [step([tiny_run.global_batch(number)], number + 1) for number in range(3)]
            step.await_verdict()
            losses[offload] = [float(outcome.loss) for outcome in outcomes]
            here = {p.to_local().device.type for p in parallel_model.module.parameters()}  # type: ignore[attr-defined]
            pinned = all(p.to_local().is_pinned() for p in parallel_model.module.parameters())  # type: ignore[attr-defined]
            assert here == {"cpu" if offload == "all" else "cuda"}
            assert pinned == (offload == "all")
    assert losses["all"] == pytest.approx(losses["none"], abs=1e-3)
