"""Products in float8: near those of bf16, on where they should be, and refused by name where they cannot work."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("torchao")

from pipeline.errors import ConfigError, UserError
from pipeline.launch import Launch
from pipeline.parallel import float8, mesh
from pipeline.parallel.compile import compile_blocks
from pipeline.parallel.parallelize import ParallelModel, parallelize
from pipeline.parallel.shards import local
from pipeline.training.checks import check_inputs
from tests.support.launched import results_by_case
from tests.support.workers import float8_runs, tiny_run

CPU = torch.device("cpu")
RECIPES = ("rowwise", "rowwise_with_gw_hp")


@contextlib.contextmanager
def made(**train: Any) -> Any:
    settings = tiny_run.config(layers=2, **{"precision": "bf16", **train})
    with mesh.open_mesh(Launch(), settings.train.parallel, CPU) as device_mesh:
        yield parallelize(tiny_run.model(settings), device_mesh, settings.train), settings


def trained(steps: int = 3, **train: Any) -> tuple[list[float], ParallelModel]:
    with made(**train) as (model, settings):
        return tiny_run.train_losses(model, settings, steps), model


@pytest.mark.slow
def test_losses_are_near_those_of_bf16_but_other_ones_and_parameters_stay() -> None:
    plain, model = trained()
    shapes = {name: (x.shape, x.dtype) for name, x in model.module.state_dict().items()}
    assert {dtype for _, dtype in shapes.values()} == {torch.float32}
    results = {}
    for recipe in RECIPES:
        results[recipe], model = trained(float8=recipe)
        assert {name: (x.shape, x.dtype) for name, x in model.module.state_dict().items()} == shapes
        assert results[recipe] == pytest.approx(plain, rel=1e-2)
        assert all(ours != other for ours, other in zip(results[recipe], plain, strict=True))
    assert results["rowwise"][0] == results["rowwise_with_gw_hp"][0], "the same forward pass"
    assert results["rowwise"][1:] != results["rowwise_with_gw_hp"][1:], "other gradients of the weights"
    recomputed, _ = trained(float8="rowwise", activation_checkpointing="full")
    assert recomputed == results["rowwise"]


def test_every_matrix_of_a_block_is_multiplied_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.float8 import float8_linear

    function, seen = float8_linear.matmul_with_hp_or_float8_args, list[torch.Size]()
    plain = function.apply
    monkeypatch.setattr(
        function, "apply", lambda x, weight, *more: seen.append(weight.shape) or plain(x, weight, *more)
    )
    with made(float8="rowwise") as (model, settings):
        step = tiny_run.train_step(model, settings.train)
        tiny_run.losses(step, tiny_run.global_batch(0)).sum().backward()
        matrices = [
            local(x).shape[:2]
            for name, x in model.module.named_parameters()
            if "blocks" in name and x.ndim > 1 and "conv_depth" not in name and "table" not in name
        ]
        assert all(p.grad is not None for p in model.module.parameters())
    assert len(seen) == 2 * 10
    assert sorted(size[::-1] for size in seen) == sorted(map(torch.Size, matrices))


def scales_rows() -> bool:
    """Whether torch multiplies float8 matrices with a scale for each row on a CPU; 2.11 does not."""
    one, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(one, one.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def test_emulated_products_are_those_of_torchs_float8_kernel() -> None:
    """It pads the nine tokens."""
    if not scales_rows():
        pytest.skip("this torch's float8 kernel for CPUs takes one scale for a matrix")
    results = []
    for device in ("cpu", "as a gpu"):
        torch.manual_seed(0)
        block = torch.nn.ModuleList([torch.nn.Linear(32, 16), torch.nn.Conv2d(32, 16, 1)]).bfloat16()
        float8.apply([block], "rowwise", device)
        x = torch.randn(3, 3, 32, dtype=torch.bfloat16, requires_grad=True)
        outputs = [layer(x) for layer in block]
        sum(out.square().sum() for out in outputs).backward()  # type: ignore[union-attr]
        results.append([*outputs, x.grad, *(p.grad for p in block.parameters())])
    for emulated, real in zip(*results, strict=True):
        torch.testing.assert_close(emulated, real, rtol=2**-7, atol=2**-7 * float(real.detach().abs().max()))


@pytest.mark.slow
def test_compiled_blocks_stay_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    where = "pipeline.parallel.parallelize."
    monkeypatch.setattr(where + "compile_blocks", lambda blocks, backend, count: compile_blocks(blocks, counter, count))
    monkeypatch.setattr(where + "compile_conditions", lambda model, backend: None)
    compiled, _ = trained(float8="rowwise", compile="block", compile_max_graphs=2)
    assert counter.frame_count == 1
    assert compiled == pytest.approx(trained(float8="rowwise")[0], rel=1e-6)


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_two_processes_have_the_losses_of_one(tmp_path: Path) -> None:
    results = results_by_case(float8_runs, tmp_path)
    assert list(results) == list(float8_runs.CASES[2])
    for row in results.values():
        assert row["losses"] == pytest.approx(row["alone"], rel=3e-3)


@pytest.mark.parametrize(
    ("train", "named"),
    [
        ({"precision": "fp32"}, r"precision.*bf16 or bf16_pure"),
        ({"precision": "fp16"}, r"precision.*bf16 or bf16_pure"),
        ({"activation_compression": "int8"}, "activation_compression"),
        ({"parallel": {"tp_size": 2}}, r"parallel\.tp_size"),
        ({"parallel": {"pp_size": 2, "pp_schedule": "zbv"}}, r"parallel\.pp_schedule"),
        ({"float8": "tensorwise"}, "rowwise_with_gw_hp"),
    ],
)
def test_what_it_does_not_go_with_is_named(train: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        tiny_run.config(**{"precision": "bf16", "float8": "rowwise", **train})


def test_devices_without_float8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old")
    for capability, fits in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, answer=capability: answer)
        with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=r"(?s)8\.9 or newer.*Old"):
            float8.check("rowwise", torch.device("cuda"))
    with pytest.raises(ConfigError, match="mps"):
        float8.check("rowwise", torch.device("mps"))


def test_a_missing_torchao_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny_run.config(precision="bf16", float8="rowwise")
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match=r"sana-pipe\[torchao\]"):
        check_inputs(settings, tiny_run.task(settings), Launch(), print)
    plain = tiny_run.config()
    check_inputs(plain, tiny_run.task(plain), Launch(), print)


def test_layers_of_other_sizes_are_named_before_the_run() -> None:
    heads = {"num_attention_heads": 3, "num_cross_attention_heads": 3, "cross_attention_head_dim": 8}
    settings = tiny_run.config(precision="bf16", float8="rowwise", arch=heads)
    with pytest.raises(ConfigError, match=r"attn1\.to_q 24 x 24"):
        check_inputs(settings, tiny_run.task(settings), Launch(), print)
    plain = tiny_run.config(arch=heads)
    check_inputs(plain, tiny_run.task(plain), Launch(), print)
