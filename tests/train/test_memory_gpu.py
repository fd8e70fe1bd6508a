"""Memory techniques where device and host memory are two: only a GPU can show this."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sana_pipe.base.launch import Launch
from sana_pipe.train.parallel import mesh
from sana_pipe.train.parallel.parallelize import parallelize
from sana_pipe.train.training import optimizers
from sana_pipe.train.training.config import EmaConfig
from sana_pipe.train.training.ema import EMA
from sana_pipe.train.training.objectives.flow import Flow
from sana_pipe.train.training.optimizers import in_backward
from sana_pipe.train.training.step import TrainStep
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


def occupy(times: int) -> None:
    """Give the GPU work for some 20 ms each."""
    matrix = torch.ones(8192, 8192, device="cuda")
    for _ in range(times):
        matrix = matrix @ matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_in_host_memory_is_that_of_copied_weights(dtype: torch.dtype) -> None:
    """Bit for bit, although the host goes on and each next step changes the weights at once."""
    model = torch.nn.Linear(8192, 4096, device="cuda", dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    on_host = EMA(model, EmaConfig(decay=0.9, device="cpu"))
    optimizer.register_step_pre_hook(lambda *_: on_host.await_copy())
    reference = torch.nn.Linear(8192, 4096, dtype=dtype)
    reference.load_state_dict(model.state_dict())
    expected = EMA(reference, EmaConfig(decay=0.9))
    history = []
    for step in range(1, 6):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        if step % 2:
            occupy(1)  # the weights are not yet those of this step when the copy is asked for
        optimizer.step()
        history.append({name: value.clone() for name, value in model.state_dict().items()})
        on_host.update(step)
    for step, weights in enumerate(history, 1):
        reference.load_state_dict(weights)
        expected.update(step)
    assert all(torch.equal(value, expected.values[name]) for name, value in on_host.values.items())


def test_the_host_does_not_wait_for_the_copy_of_an_average() -> None:
    model = torch.nn.Linear(64, 64, device="cuda")
    average = EMA(model, EmaConfig(decay=0.9, device="cpu"))
    average.update(1)  # page-locks the memory
    assert average.values
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    occupy(50)
    done.record()
    average.update(2)
    assert not done.query()


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
