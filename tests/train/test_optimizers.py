"""CAME, 8-bit AdamW, rounding by chance, loss scaling and running averages, in one process."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.base.launch import Launch
from sana_pipe.config import Config
from sana_pipe.tools.planning import predict
from sana_pipe.train.models.flow_matching import FlowMatching
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.parallel import data_parallel, mesh
from sana_pipe.train.parallel.parallelize import ParallelModel, parallelize
from sana_pipe.train.parallel.shards import local
from sana_pipe.train.training import build, checkpoint, loss_scale, metrics, optimizers, trainer
from sana_pipe.train.training.config import EmaConfig, OptimConfig
from sana_pipe.train.training.ema import EMA
from sana_pipe.train.training.objectives.flow import Flow
from sana_pipe.train.training.optimizer_records import OPTIMIZERS, OptimizerRecord
from sana_pipe.train.training.optimizers import came, stochastic_rounding
from sana_pipe.train.training.optimizers.came import CAME
from sana_pipe.train.training.step import NonFiniteError, TrainStep
from sana_pipe.train.training.task import Report
from sana_pipe.train.training.trainer import fit
from tests.support.checkpoints import load_model_state
from tests.support.messages import naming
from tests.support.parameters import first_quick
from tests.support.workers import tiny_run

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
SHAPES = [(16, 8), (12, 8, 1, 1), (10, 1, 3, 3), (6, 16), (5, 3, 2, 2), (7,), ()]


def _fit(settings: Config, *, resume: str | Path | None = None, log: Any = None, **options: Any) -> Report:
    return fit(
        settings.train, tiny_run.task(settings, **options), Launch(), resume=resume, log=log or (lambda line: None)
    )


# ----------------------------------------------------------------------------------------------------------- CAME


def _published(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    lr: float,
    decay: float,
    eps: tuple[float, float] = (1e-30, 1e-16),
) -> None:
    """One step of the published algorithm on a whole float64 parameter, by the letter: no sharing of means, outer
    products written out."""
    rows = parameter.shape[0] if parameter.ndim > 1 else 1
    value, g = parameter.view(rows, -1), gradient.view(rows, -1)
    vector = parameter.ndim < 2

    def moved(name: str, new: Tensor, beta: float) -> Tensor:
        state[name] = beta * state.get(name, torch.zeros_like(new)) + (1 - beta) * new
        return state[name]

    def approximated(name: str, squares: Tensor, beta: float) -> Tensor:
        if vector:
            return moved(name, squares, beta)
        r, c = moved(name + "r", squares.mean(1), beta), moved(name + "c", squares.mean(0), beta)
        return torch.outer(r, c) / r.mean()

    value *= 1 - lr * decay
    u = g / approximated("v", g**2 + eps[0], 0.999).sqrt()
    u = u / max(1.0, float((u**2).mean()) ** 0.5)
    m = moved("m", u, 0.9)
    value -= lr * (m if vector else m / approximated("s", (u - m) ** 2 + eps[1], 0.9999).sqrt())


@pytest.mark.parametrize("eps", [(1e-30, 1e-16), (1e-4, 0.3)])
def test_came_is_the_published_algorithm(eps: tuple[float, float]) -> None:
    """The second pair is so large that each epsilon shows in its place."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    exact = [p.detach().double().clone() for p in ours]
    states: list[dict[str, Tensor]] = [{} for _ in SHAPES]
    optimizer = CAME([{"params": ours[:4], "weight_decay": 0.1}, {"params": ours[4:]}], lr=1e-2, eps=eps)
    for step in range(20):
        for i, parameter in enumerate(ours):
            parameter.grad = torch.randn(parameter.shape) * 10.0 ** (-step % 7 - 3)
            _published(exact[i], parameter.grad.double(), states[i], 1e-2, 0.1 if i < 4 else 0.0, eps)
        optimizer.step()
    for mine, true in zip(ours, exact, strict=True):
        assert float((mine.detach() - true).norm() / true.norm()) < 1e-6


@pytest.mark.parametrize("kind", [CAME, stochastic_rounding.AdamW])
def test_rounding_depends_on_the_seed_of_the_optimizer_alone(kind: type[torch.optim.Optimizer]) -> None:
    def run(seed: int, others: int) -> Tensor:
        parameter = nn.Parameter(torch.linspace(-1, 1, 999).bfloat16().view(27, 37))
        optimizer = kind([parameter], lr=1e-3, seed=seed)  # type: ignore[call-arg]
        torch.manual_seed(others)
        for _ in range(2):
            parameter.grad = parameter.detach() / 3
            optimizer.step()
        return parameter.detach()

    assert torch.equal(run(1, 1), run(1, 2))
    assert not torch.equal(run(1, 1), run(2, 1))


@pytest.mark.parametrize("numerics", ["default", "nvlabs"])
def test_a_group_of_any_size_gives_the_same(numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> dict[str, Tensor]:
        settings = tiny_run.config(optim={"name": "came"}, numerics=numerics)
        model = tiny_run.model(settings)
        tiny_run.train_losses(model, settings, 2)
        return model.state_dict()

    whole = run()
    monkeypatch.setattr(came, "GROUP", 500)
    assert all(torch.equal(value, whole[name]) for name, value in run().items())


_NO_KERNELS = ("view", "unbind", "split", "detach", "unsqueeze", "empty", "_local_scalar")


class _Kernels(TorchDispatchMode):
    """Counts operations that a GPU would be given: not views, not the counters of steps, which are on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counter = bool(args) and isinstance(args[0], Tensor) and args[0].ndim == 0
        self.count += not counter and not any(part in str(operation) for part in _NO_KERNELS)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "precision", "most"), [("came", "fp32", 3.0), ("came", "bf16_pure", 4.0), ("adamw", "bf16_pure", 0.3)]
)
def test_an_update_takes_few_operations_per_parameter(name: str, precision: str, most: float) -> None:
    """One parameter after the other took 29, 46 and 27."""
    optim = {"name": name, "weight_decay": 0.1, **({"betas": None, "eps": None} if name == "came" else {})}
    settings = tiny_run.config(layers=12, precision=precision, optim=optim)
    model = tiny_run.model(settings).to(data_parallel.STORED.get(precision, torch.float32))
    optimizer = optimizers.build(model, settings.train.optim, CPU)
    for _ in range(2):  # the first step makes the states
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        with _Kernels() as kernels:
            optimizer.step()
    per_parameter = kernels.count / len(list(model.parameters()))
    print(f"{name} {precision}: {per_parameter:.2f} operations per parameter")
    assert per_parameter <= most


def test_joint_parameters_are_one_matrix() -> None:
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(12, 5))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split([6, 2, 4])]
    one, several = CAME([whole], lr=1e-2), CAME(parts, lr=1e-2, joint=[parts])
    for step in range(5):
        whole.grad = torch.randn(12, 5) * 10.0 ** torch.arange(12)[:, None].div(3).sub(step)
        for part, gradient in zip(parts, whole.grad.split([6, 2, 4]), strict=True):
            part.grad = gradient.clone()
        one.step()
        several.step()
    torch.testing.assert_close(torch.cat([part.detach() for part in parts]), whole.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("side", [0, 1])
def test_came_on_two_equal_shards_is_came(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process does not exist: a sum over both is twice this one's."""
    torch.manual_seed(0)
    halves = [torch.randn(shape) for shape in SHAPES if len(shape) > side]
    whole = [nn.Parameter(torch.cat([half, half], side)) for half in halves]
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        shards = [nn.Parameter(DTensor.from_local(half, mesh, [Shard(side)])) for half in halves]
        monkeypatch.setattr(dist, "all_reduce", lambda flat, group: flat.mul_(2))
        one, two = CAME(whole, lr=1e-2), CAME(shards, lr=1e-2)
        for step in range(3):
            for parameter, shard in zip(whole, shards, strict=True):
                gradient = torch.randn(local(shard).shape) * 10.0**-step
                parameter.grad = torch.cat([gradient, gradient], side)
                shard.grad = DTensor.from_local(gradient, mesh, [Shard(side)])
            one.step()
            two.step()
        for parameter, shard in zip(whole, shards, strict=True):
            torch.testing.assert_close(local(shard), parameter.detach().chunk(2, side)[0])
    finally:
        dist.destroy_process_group()


def test_nvlabs_joint_parameters_are_those_of_their_qkv_and_kv() -> None:
    model = tiny_run.model(tiny_run.config(layers=1))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    actual = [[names[id(p)] for p in members] for members in came.joint_weights(model.named_parameters())]
    before = "transformer_blocks.0."
    assert sorted(actual) == [
        [f"{before}attn1.to_{part}.weight" for part in "qkv"],
        [f"{before}attn2.to_{part}.bias" for part in "kv"],
        [f"{before}attn2.to_{part}.weight" for part in "kv"],
    ]


def _state_bytes(name: str, dtype: torch.dtype) -> float:
    """Bytes of optimizer state per parameter of Sana 1.6B, on the meta device."""
    model = SanaTransformer.on_meta(SanaConfig()).to(dtype)
    optimizer = optimizers.build(model, OptimConfig(name=name), torch.device("meta"))  # type: ignore[arg-type]
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()

    def size(value: Tensor) -> int:
        if hasattr(value, "codes"):
            return sum(getattr(value, part).nbytes for part in ("codes", "scale", "qmap"))
        return value.nbytes

    state_bytes = sum(size(value) for state in optimizer.state.values() for value in state.values())
    return state_bytes / sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "dtype", "low", "high"),
    [
        ("adamw", torch.float32, 8.0, 8.01),
        ("came", torch.float32, 4.0, 4.02),
        pytest.param("adamw8bit", torch.float32, 2.0, 2.05, marks=pytest.mark.slow),
        ("adamw", torch.bfloat16, 4.0, 4.01),
        ("came", torch.bfloat16, 2.0, 2.02),
    ],
)
def test_state_of_sana_1600m(
    name: str, dtype: torch.dtype, low: float, high: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stochastic_rounding.Noise, "at", lambda *key: None)  # the meta device has no random numbers
    if name == "adamw8bit":
        pytest.importorskip("torchao")
    actual = _state_bytes(name, dtype)
    print(f"{name}: {actual:.3f} bytes of state per parameter")
    assert low <= actual <= high


# ----------------------------------------------------------------------------------------------- rounding by chance


def _far(actual: Tensor, value: float, gap: float) -> float:
    """Distance of the mean from `value` in standard errors of a draw between two neighbours `gap` apart."""
    return abs(float(actual.double().mean()) - value) / (gap / 2 / math.sqrt(actual.numel()))


@pytest.mark.parametrize("value", [1.0 + 1 / 512, -1.0 - 1 / 2048, 3.14159, 1e-3 / 3, -2.0e20 / 3])
def test_rounding_by_chance_is_right_on_the_average(value: float) -> None:
    exact = torch.full((200_000,), value)
    rounded = stochastic_rounding.to_bf16(exact, torch.Generator().manual_seed(1))
    near = sorted(set(rounded.tolist()))
    true = float(exact[0])
    assert len(near) == 2
    assert near[0] < true < near[1]
    assert near[1] - near[0] <= abs(true) / 128
    assert _far(rounded, true, near[1] - near[0]) < 5
    assert _far(exact.bfloat16(), true, near[1] - near[0]) > 5, "the check would not see rounding to nearest"


def test_what_bf16_can_hold_is_not_changed() -> None:
    values = torch.randn(1000).bfloat16().float()
    values[:3] = torch.tensor([0.0, -0.0, 2.0**-130])
    assert torch.equal(stochastic_rounding.to_bf16(values).float(), values)


def test_noise_belongs_to_seed_step_and_parameter() -> None:
    parameter = torch.zeros(4)

    def drawn(seed: int, step: int, index: int) -> list[int]:
        generator = stochastic_rounding.Noise(seed).at(parameter, step, index)
        return torch.randint(0, 1 << 16, (8,), generator=generator).tolist()

    every = [drawn(*key) for key in itertools.product((0, 1), (1, 2), (0, 1))]
    assert len({tuple(draw) for draw in every}) == 8
    assert drawn(1, 2, 1) == every[-1]


def test_a_run_rounds_with_its_own_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, original = list[Any](), optimizers.build

    def recorded(*args: Any, **options: Any) -> torch.optim.Optimizer:
        built.append(original(*args, **options))
        return built[-1]

    monkeypatch.setattr(optimizers, "build", recorded)
    _fit(tiny_run.config(tmp_path / "run", layers=1, steps=1, precision="bf16_pure", seed=7))
    assert [each.noise.seed for each in built] == [7]


@pytest.mark.parametrize("name", first_quick("adamw", "came", "adamw8bit"))
def test_small_updates_of_bf16_weights_are_not_lost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 steps of 2e-6 of the weight each: rounded to nearest, nothing would ever move."""
    if name == "adamw8bit":
        pytest.importorskip("torchao")

    def moved(dtype: torch.dtype) -> float:
        model = nn.Linear(64, 64, bias=False)
        nn.init.constant_(model.weight, 1.0)
        model.to(dtype)
        settings = OptimConfig(name=name, lr=1e-5, weight_decay=0.0)  # type: ignore[arg-type]
        optimizer = optimizers.build(model, settings, CPU, seed=3)
        torch.manual_seed(0)
        for _ in range(300):
            model.weight.grad = torch.full((64, 64), 1.0, dtype=dtype) + 0.5 * torch.randn(64, 64).to(dtype)
            optimizer.step()
        assert model.weight.dtype == dtype
        assert optimizer.state[model.weight]["exp_avg"].dtype == (torch.float32 if name == "adamw8bit" else dtype)
        return float(model.weight.detach().double().mean()) - 1.0

    exact, actual = moved(torch.float32), moved(torch.bfloat16)
    assert exact < -1e-3
    assert actual == pytest.approx(exact, rel=0.1)
    for module in (
        stochastic_rounding,
        came,
        *([sys.modules["sana_pipe.train.training.optimizers.adamw_8bit"]] if name == "adamw8bit" else []),
    ):
        monkeypatch.setattr(module, "to_bf16", lambda value, generator=None: value.bfloat16())
    assert abs(moved(torch.bfloat16) - exact) > 0.5 * abs(exact), "rounding to nearest passes the check"


@pytest.mark.parametrize("name", ["adamw", "came", "adamw8bit"])
def test_bf16_gradients_are_clipped_in_fp32(name: str) -> None:
    """A third is not a bf16 number: rounded to bf16, the factor would be 0.2 % too large."""
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    config = OptimConfig.model_validate({"name": name, "lr": 1e-6, "betas": None, "eps": None})
    optimizer: Any = optimizers.build(layer, config, CPU)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.gradient_factor = torch.tensor(1 / 3)
    optimizer.step()
    beta1, beta2 = optimizer.param_groups[0]["betas"][:2]
    mean, expected = ("exp_avg_sq_row", (1 - beta2) / 9) if name == "came" else ("exp_avg", (1 - beta1) / 3)
    state = optimizer.state_dict()["state"][0]
    assert float(state[mean].float().mean()) == pytest.approx(expected, rel=3e-4)
    assert torch.equal(layer.weight.grad, torch.ones_like(layer.weight)), "the bf16 gradient is not rounded again"


def test_adamw_in_bf16_is_adamw() -> None:
    torch.manual_seed(0)
    start = torch.randn(64, 32).bfloat16()
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.float())
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    mine, torchs = stochastic_rounding.AdamW([ours], **options), torch.optim.AdamW([theirs], **options)
    for _ in range(20):
        gradient = torch.randn(64, 32).bfloat16()
        ours.grad, theirs.grad = gradient, gradient.float()
        mine.step()
        torchs.step()
    moved, off = (theirs - start.float()).detach(), (ours - theirs).detach()
    assert off.norm() < 0.25 * moved.norm()
    assert off.mean().abs() < 1e-3


def test_adamw_in_bf16_keeps_groups_and_step_counts_apart() -> None:
    """The second group neither decays nor has the first one's rate; its second parameter misses the first 10 steps."""
    torch.manual_seed(0)
    start = [torch.randn(64, 32).bfloat16() for _ in range(3)]
    ours, theirs = ([nn.Parameter(cast(value)) for value in start] for cast in (torch.clone, torch.Tensor.float))
    options: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-6, "lr": 1e-2}

    def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        first, *others = parameters
        return [{"params": [first], "weight_decay": 1.0}, {"params": others, "lr": 3e-2, "weight_decay": 0.0}]

    mine, torchs = stochastic_rounding.AdamW(groups(ours), **options), torch.optim.AdamW(groups(theirs), **options)
    for number in range(20):
        for our, their in zip(ours[: 2 + number // 10], theirs, strict=False):
            gradient = torch.randn(64, 32).bfloat16() + 0.5
            our.grad, their.grad = gradient, gradient.float()
        mine.step()
        torchs.step()
    for our, their, before in zip(ours, theirs, start, strict=True):
        moved, off = (their - before.float()).detach(), (our - their).detach()
        assert off.norm() < 0.1 * moved.norm()


# ---------------------------------------------------------------------------------------------------- 8-bit AdamW


def _trained(name: str, steps: int) -> tuple[SanaTransformer, torch.optim.Optimizer]:
    settings = tiny_run.config(layers=1, optim={"name": name})
    model = tiny_run.model(settings)
    optimizer = optimizers.build(model, settings.train.optim, CPU)
    step = tiny_run.train_step(model, settings.train, optimizer)
    for number in range(steps):
        step([tiny_run.global_batch(number)], number + 1)
    return model, optimizer


def test_adamw_on_the_cpu_is_fused_clips_in_its_kernel_and_is_torchs_plain_loop() -> None:
    settings = tiny_run.config()
    fused_model, plain_model = tiny_run.model(settings), tiny_run.model(settings)
    fused = optimizers.build(fused_model, settings.train.optim, CPU)
    assert all(group["fused"] for group in fused.param_groups)
    groups = [{**group, "params": []} for group in fused.param_groups]
    number = {id(p): i for i, group in enumerate(fused.param_groups) for p in group["params"]}
    for ours, other in zip(fused_model.parameters(), plain_model.parameters(), strict=True):
        groups[number[id(ours)]]["params"].append(other)
    plain = torch.optim.AdamW([{**group, "fused": None, "foreach": False} for group in groups])
    step = TrainStep(ParallelModel(fused_model), Flow(settings.train.flow), fused, settings.train, CPU)
    torch.manual_seed(0)
    for number_of_step in range(20):
        factor = None if number_of_step % 2 else torch.tensor(0.03)
        for ours, other in zip(fused_model.parameters(), plain_model.parameters(), strict=True):
            ours.grad = torch.randn_like(ours) * 10.0 ** (-number_of_step % 5 - 3)
            other.grad = ours.grad * (1.0 if factor is None else 0.03)
        step._update(factor)
        plain.step()
    assert tiny_run.distance(fused_model.state_dict(), plain_model.state_dict()) < 1e-6


def test_adamw8bit_follows_adamw() -> None:
    pytest.importorskip("torchao")
    (exact, _), (model, optimizer) = _trained("adamw", 10), _trained("adamw8bit", 10)
    start = tiny_run.model(tiny_run.config(layers=1)).state_dict()
    difference = {n: v - exact.state_dict()[n] for n, v in model.state_dict().items()}
    moved = {n: v - start[n] for n, v in exact.state_dict().items()}
    norm = [math.sqrt(sum(float(t.square().sum()) for t in tree.values())) for tree in (difference, moved)]
    assert norm[0] < 0.05 * norm[1]
    moment = optimizer.state[model.get_parameter("transformer_blocks.0.ff.conv_inverted.weight")]["exp_avg"]
    assert moment.codes.dtype == torch.uint8  # type: ignore[attr-defined]
    small = optimizer.state[model.get_parameter("proj_out.bias")]["exp_avg"]
    assert not hasattr(small, "codes")


def test_states_of_adamw8bit_come_back_as_they_were() -> None:
    pytest.importorskip("torchao")
    model, optimizer = _trained("adamw8bit", 5)
    saved = optimizer.state_dict()
    assert all(type(value) is Tensor for state in saved["state"].values() for value in state.values())
    twin = optimizers.build(model, OptimConfig(name="adamw8bit"), CPU)
    twin.load_state_dict(saved)
    for parameter in model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            one, other = optimizer.state[parameter][name], twin.state[parameter][name]
            assert type(one) is type(other)
            if hasattr(one, "codes"):
                assert torch.equal(one.codes, other.codes)
                torch.testing.assert_close(one.scale, other.scale, rtol=1e-6, atol=1e-12)
            else:
                assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adamw8bit_compiled_is_adamw8bit() -> None:
    """Also right after another kind of torchao's states was compiled for the same shapes."""
    pytest.importorskip("torchao")
    from torchao.optim import AdamWFp8

    from sana_pipe.train.training.optimizers.adamw_8bit import AdamW8bit

    torch.manual_seed(0)
    start, gradients = torch.randn(64, 128), torch.randn(3, 64, 128)

    def run(make: Callable[[nn.Parameter], torch.optim.Optimizer]) -> Tensor:
        parameter = nn.Parameter(start.clone())
        optimizer = make(parameter)
        for gradient in gradients:
            parameter.grad = gradient
            optimizer.step()
        return parameter.detach()

    run(lambda parameter: AdamWFp8([parameter], lr=1e-2))
    actual = [run(lambda parameter, on=on: AdamW8bit([parameter], lr=1e-2, compiled=on)) for on in (True, False)]  # type: ignore[misc]
    torch.testing.assert_close(actual[0], actual[1], rtol=1e-4, atol=1e-5)


def test_without_torchao_the_run_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sana_pipe.train.training.optimizers.adamw_8bit", raising=False)
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim.adam", None)
    monkeypatch.setattr(trainer, "open_mesh", lambda *arguments: pytest.fail("processes were started"))
    with pytest.raises(UserError, match=naming("torchao", "pip install 'sana-pipe[torchao]'")):
        _fit(tiny_run.config(tmp_path / "run", optim={"name": "adamw8bit"}))
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------- configuration


def test_betas_and_eps_are_those_of_the_optimizer() -> None:
    assert (OptimConfig().betas, OptimConfig().eps) == ((0.9, 0.999), 1e-8)
    assert OptimConfig(name="came").betas == came.BETAS
    again = OptimConfig.model_validate(OptimConfig(name="came").model_dump())
    assert (again.betas, again.eps) == (came.BETAS, None)
    groups = optimizers.build(nn.Linear(2, 2), OptimConfig(name="came", lr=2e-5), CPU).param_groups
    assert [(g["lr"], g["betas"], g["eps"]) for g in groups] == [(2e-5, (0.9, 0.999, 0.9999), (1e-30, 1e-16))] * 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "came", "betas": (0.9, 0.999)}, "came has 3 betas, not 2; betas: null"),
        ({"betas": (0.9, 0.999, 0.9999)}, "adamw has 2 betas, not 3"),
        ({"name": "came", "eps": 1e-8}, "write eps: null"),
    ],
)
def test_settings_of_another_optimizer_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        OptimConfig(**options)


def test_a_new_optimizer_is_a_record_and_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration, build, the bytes of a checkpoint and the check read the record alone."""
    module: Any = ModuleType("toy_sgd")
    module.build = lambda groups, config, named, device, seed, nvlabs: torch.optim.SGD(
        groups, lr=config.lr, momentum=config.betas[0]
    )
    monkeypatch.setitem(sys.modules, "toy_sgd", module)
    toy = OptimizerRecord("SGD", "toy_sgd", "SGD", state_bytes=4.0, pure_state_bytes=2.0, betas=(0.5, 0.6), eps=None)
    plain = tiny_run.config().train
    with pytest.raises(ValueError, match="sgd"):
        OptimConfig(name="sgd")
    monkeypatch.setitem(OPTIMIZERS, "sgd", toy)
    train = plain.model_copy(update={"optim": OptimConfig(name="sgd", lr=0.1)})
    assert (train.optim.betas, train.optim.eps) == ((0.5, 0.6), None)
    with pytest.raises(ValueError, match="eps: null"):
        OptimConfig(name="sgd", eps=1e-8)
    optimizers.check(train.optim)
    built = optimizers.build(nn.Linear(2, 2), train.optim, CPU)
    assert isinstance(built, torch.optim.SGD) and built.param_groups[0]["momentum"] == 0.5
    earlier = plain.model_dump()
    with pytest.raises(ConfigError, match=r"(?s)adamw.*sgd"):
        optimizers.check_resumable(earlier, train)
    optimizers.check_resumable(earlier | {"optim": train.optim.model_dump()}, train)
    shape = SanaConfig(num_layers=1)
    assert predict.checkpoint_bytes(shape, train) == predict.checkpoint_bytes(shape, plain) * (4 + 4) / (4 + 8)
    toy = replace(toy, module="absent_toy", extra="toys")
    monkeypatch.setitem(OPTIMIZERS, "sgd", toy)
    with pytest.raises(UserError, match=naming("sgd", "pip install 'sana-pipe[toys]'")):
        optimizers.check(train.optim)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    _fit(tiny_run.config(tmp_path / "run", steps=1))
    with pytest.raises(ConfigError, match=r"(?s)adamw.*train.optim.name: came.*adamw8bit"):
        _fit(tiny_run.config(tmp_path / "run", steps=2, optim={"name": "came"}), resume="auto")


def test_a_checkpoint_of_came_under_the_other_numerics_is_refused(tmp_path: Path) -> None:
    _fit(tiny_run.config(tmp_path / "run", steps=1, optim={"name": "came"}, layers=1))
    with pytest.raises(ConfigError, match=naming("train.numerics: default", "--set train.numerics=default")):
        _fit(
            tiny_run.config(tmp_path / "run", steps=2, optim={"name": "came"}, layers=1, numerics="nvlabs"),
            resume="auto",
        )


# ------------------------------------------------------------------------------------------------------ loss scaling


def _stepper(settings: Config, model: nn.Module | None = None) -> TrainStep:
    module = model or tiny_run.model(settings)
    return tiny_run.train_step(module, settings.train)


def _in_fp16(run: Callable[[ParallelModel], Any]) -> Any:
    settings = tiny_run.config(precision="fp16")
    with mesh.open_mesh(Launch(), settings.train.parallel, CPU) as device_mesh:
        return run(parallelize(tiny_run.model(settings), device_mesh, settings.train))


def test_fp16_keeps_gradients_that_would_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss made 1e-4 times as long: its fp16 gradients are subnormal or zero unless they are scaled."""
    settings = tiny_run.config()
    _, norm, exact = tiny_run.gradients(tiny_run.model(settings), settings, [tiny_run.global_batch(0)])
    plain = FlowMatching.loss
    monkeypatch.setattr(FlowMatching, "loss", lambda self, *given: plain(self, *given) * 1e-4)

    def actual(parallel_model: ParallelModel) -> tuple[float, float]:
        _, length, gradients = tiny_run.gradients(
            parallel_model, tiny_run.config(precision="fp16"), [tiny_run.global_batch(0)]
        )
        return length * 1e4, tiny_run.distance({n: g * 1e4 for n, g in gradients.items()}, exact)

    length, distance = _in_fp16(actual)
    assert length == pytest.approx(norm, rel=1e-2)
    assert distance < 1e-2
    monkeypatch.setattr(loss_scale, "INITIAL", 1.0)
    assert _in_fp16(actual)[1] > 3 * distance


def test_fp16_gradients_are_clipped_as_they_are_without_the_scale() -> None:
    settings = tiny_run.config(precision="fp16", optim={"clip": 0.1})
    step = _stepper(settings)
    step.dtype = torch.float32
    outcome = step([tiny_run.global_batch(0)], 1)
    assert not outcome.skipped
    assert outcome.grad_norm > 1
    gradients = step.optimizer.gradients  # type: ignore[attr-defined]
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    assert norm == pytest.approx(0.1, rel=1e-4)


def _overflowing(model: nn.Module, times: int) -> nn.Module:
    """The last gradient is infinite in the first `times` backward passes."""
    left = itertools.count(times, -1)
    weight = model.proj_out.weight  # type: ignore[union-attr]
    weight.register_hook(lambda gradient: gradient * (float("inf") if next(left) > 0 else 1.0))  # type: ignore[union-attr,operator]
    return model


def test_a_step_that_overflows_is_left_out(tmp_path: Path) -> None:
    settings = tiny_run.config(precision="fp16")
    model = _overflowing(tiny_run.model(settings), 2)
    optimizer = optimizers.build(model, settings.train.optim, CPU)
    step = tiny_run.train_step(model.half().float(), settings.train, optimizer)
    step.dtype = torch.float32  # computed in fp32: the overflow is made
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert [step([tiny_run.global_batch(i)], i + 1).skipped for i in range(2)] == [True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert (step.scale.value, step.scale.skipped) == (2.0**14, 2)
    outcome = step([tiny_run.global_batch(2)], 3)
    assert not outcome.skipped
    assert torch.isfinite(outcome.grad_norm)
    assert not torch.equal(model.get_parameter("proj_out.weight"), before["proj_out.weight"])


def test_a_gradient_that_no_scale_can_mend_stops_the_run() -> None:
    settings = tiny_run.config(precision="fp16")
    step = _stepper(settings, _overflowing(tiny_run.model(settings), 100))
    step.dtype = torch.float32
    for number in range(16):
        assert step([tiny_run.global_batch(0)], number + 1).skipped
    assert step.scale.value == 1
    with pytest.raises(NonFiniteError, match="step 17: the gradient norm"):
        step([tiny_run.global_batch(0)], 17)


def test_a_loss_that_is_no_number_stops_fp16_too() -> None:
    settings = tiny_run.config(precision="fp16")
    batch = tiny_run.global_batch(0)
    step = _stepper(settings)
    step.dtype = torch.float32
    with pytest.raises(NonFiniteError, match=naming("step 1", "loss")):
        step([replace(batch, noise=batch.noise * float("inf"))], 1)


def test_the_scale_grows_after_many_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "PATIENCE", 3)
    scale = loss_scale.LossScale(dynamic=True)
    actual = []
    for good in (True, True, False, True, True, True, True):
        scale.succeeded() if good else scale.overflowed()
        actual.append(math.log2(scale.value))
    assert actual == [16, 16, 15, 15, 15, 16, 16]
    assert not loss_scale.LossScale(dynamic=False).overflowed()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_checkpoint_has_the_scale_of_fp16(precision: str) -> None:
    step = _stepper(tiny_run.config(precision=precision))
    sections = build.TrainingRun(*[None] * 5, step).sections()  # type: ignore[arg-type]
    assert sections == ({"loss_scale": step.scale.state} if precision == "fp16" else {})


@pytest.mark.slow
def test_overflows_are_counted_in_the_metrics_and_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a scale of 2^24 the first steps overflow; a resumed run goes on with the scale that was found."""
    monkeypatch.setattr(loss_scale, "INITIAL", 2.0**24)
    printed: list[str] = []
    _fit(tiny_run.config(tmp_path / "run", steps=16, log_every=1, precision="fp16"), log=printed.append)
    rows = metrics.read(tmp_path / "run/metrics.jsonl")
    skipped = rows[-1]["skipped_steps"]
    assert 0 < skipped < 16
    assert [row["grad_norm"] is None for row in rows].count(True) == skipped
    assert rows[-1]["loss_scale"] == 2.0 ** (24 - skipped)
    assert "grad overflow" in next(line for line in printed if "step  1/16" in line)
    _fit(tiny_run.config(tmp_path / "run", steps=17, precision="fp16"), resume="auto")
    last = metrics.read(tmp_path / "run/metrics.jsonl")[-1]
    assert (last["step"], last["loss_scale"], last["skipped_steps"]) == (17, rows[-1]["loss_scale"], skipped)


# ------------------------------------------------------------------------------------------------------- the average


def test_the_average_is_the_formula() -> None:
    model = nn.Linear(3, 2)
    average = EMA(model, EmaConfig(decay=0.5))
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(1, 13):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape)
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = {n: decay * expected[n] + (1 - decay) * p.detach() for n, p in model.named_parameters()}
        for name, value in average.values.items():
            torch.testing.assert_close(value, expected[name])
    assert not torch.equal(average.values["weight"], model.weight)


class Stream:
    """Of a GPU whose copies are done when `done` is set."""

    log: ClassVar[list[tuple[str, str]]] = []
    done = threading.Event()

    def __init__(self, name: str = "copies"):
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, other.name))

    def synchronize(self) -> None:
        assert self.done.wait(30)


def test_an_average_in_host_memory_is_made_during_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("passes"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: Mock(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)
    )
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(Stream, "log", [])
    monkeypatch.setattr(Stream, "done", threading.Event())
    model = nn.Linear(3, 2)
    on_host, expected = (EMA(model, EmaConfig(decay=0.9, device=device)) for device in ("cpu", "same"))
    before, average = model.weight.detach().clone(), on_host.values["weight"]
    for step in range(1, 4):
        with torch.no_grad():
            model.weight += step
        expected.update(step)
        on_host.update(step)
        assert Stream.log == [("copies", "passes")], "the copy is of the weights after the step"
        on_host.await_copy()
        assert Stream.log.pop() == ("passes", "copies")
        Stream.log.clear()
        if step == 1:
            assert torch.equal(average, before), "the host waits for no copy"
            with torch.no_grad():
                model.weight += 1
            threading.Timer(0.1, Stream.done.set).start()
        assert all(torch.equal(value, expected.values[name]) for name, value in on_host.values.items())


def test_each_step_lets_the_average_copy_the_weights_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("await_copy", "update"):
        monkeypatch.setattr(EMA, name, lambda *_, name=name: calls.append(name))
    _fit(tiny_run.config(tmp_path / "run", steps=3, ema={}))
    assert calls == ["await_copy", "update"] * 3


def test_an_average_of_bf16_weights_is_kept_in_fp32() -> None:
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    average = EMA(model, EmaConfig(decay=0.999, device="cpu"))
    before = average.values["weight"].clone()
    with torch.no_grad():
        model.weight += 0.01
    average.update(100_000)
    change = (average.values["weight"] - before) / (model.weight.detach().float() - before)
    assert average.values["weight"].dtype == torch.float32
    torch.testing.assert_close(change, torch.full_like(change, 0.001), rtol=1e-2, atol=0)


def test_an_average_begins_with_the_weights_where_the_checkpoint_has_none(tmp_path: Path) -> None:
    _fit(tiny_run.config(tmp_path / "run", steps=2))
    with pytest.raises(checkpoint.CheckpointError, match=naming("step-00000002", "--ema")):
        load_model_state(tmp_path / "run/checkpoints/step-00000002", ema=True)
    _, weights = load_model_state(tmp_path / "run/checkpoints/step-00000002")
    printed: list[str] = []
    _fit(tiny_run.config(tmp_path / "run", steps=3, ema={"decay": 0.9}), resume="auto", log=printed.append)
    assert any("no EMA weights: they start from the weights of step 2" in line for line in printed)
    _, last = load_model_state(tmp_path / "run/checkpoints/step-00000003")
    _, averages = load_model_state(tmp_path / "run/checkpoints/step-00000003", ema=True)
    share = 1 - 4 / 13  # step 3
    for name, value in averages.items():
        torch.testing.assert_close(value, weights[name] + share * (last[name] - weights[name]))
    assert not torch.equal(averages["proj_out.weight"], last["proj_out.weight"])


# ---------------------------------------------------------------------------------------------------------- the run


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("came", "fp32"),
        pytest.param("adamw8bit", "bf16", marks=pytest.mark.slow),
        pytest.param("adamw", "fp16", marks=pytest.mark.slow),
        *(pytest.param(name, "bf16_pure", marks=pytest.mark.slow) for name in ("came", "adamw")),
    ],
)
def test_interrupted_and_resumed_is_uninterrupted(name: str, precision: str, tmp_path: Path) -> None:
    if name == "adamw8bit":
        pytest.importorskip("torchao")
    options: dict[str, Any] = {"precision": precision, "optim": {"name": name}, "ema": {"decay": 0.9}}
    _fit(tiny_run.config(tmp_path / "whole", steps=6, **options))
    _fit(tiny_run.config(tmp_path / "parts", steps=3, **options))
    _fit(tiny_run.config(tmp_path / "parts", steps=6, **options), resume="auto")
    close = {"rtol": 0, "atol": 0} if name != "adamw8bit" else {"rtol": 1e-5, "atol": 1e-7}
    for ema in (False, True):
        _, whole = load_model_state(tmp_path / "whole/checkpoints/step-00000006", ema=ema)
        _, parts = load_model_state(tmp_path / "parts/checkpoints/step-00000006", ema=ema)
        for tensor, value in whole.items():
            torch.testing.assert_close(
                parts[tensor], value, **close, msg=lambda text, tensor=tensor: f"{tensor}: {text}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16_pure"])
def test_a_precision_trains_like_fp32(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL", 2.0**8)  # from 2^16 the first steps are left out

    def losses(name: str) -> list[float]:
        _fit(tiny_run.config(tmp_path / name, steps=20, precision=name, optim={"lr": 1e-3}))
        return [row["loss"] for row in metrics.read(tmp_path / name / "metrics.jsonl")]

    exact, actual = losses("fp32"), losses(precision)
    assert actual == pytest.approx(exact, abs=3e-2)
    assert actual != exact
    assert sum(actual[-4:]) < sum(actual[:4])


def test_pure_bf16_really_holds_bf16(tmp_path: Path) -> None:
    settings = tiny_run.config(precision="bf16_pure")
    with mesh.open_mesh(Launch(), settings.train.parallel, CPU) as device_mesh:
        parallel_model = parallelize(tiny_run.model(settings), device_mesh, settings.train)
        _, norm, gradients = tiny_run.gradients(parallel_model, settings, [tiny_run.global_batch(0)])
        assert {p.dtype for p in parallel_model.module.parameters()} == {torch.bfloat16}
        assert {g.dtype for g in gradients.values()} == {torch.bfloat16}
    exact = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    assert norm == pytest.approx(exact, rel=1e-5), "the norm of bf16 gradients must not be bf16"


ADAPTERS = {"lora": {"adapter": {"rank": 4}}, "dora": {"adapter": {"kind": "dora", "rank": 4, "targets": "all"}}}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("came", "bf16"),
        ("came", "bf16_pure"),
        ("adamw", "bf16_pure"),
        ("adamw", "fp16"),
        ("adamw8bit", "bf16"),
        ("lora", "fp32"),
        ("lora", "bf16"),
        ("dora", "bf16"),
        ("dora", "fp16"),
    ],
)
def test_on_a_gpu_the_losses_are_those_of_the_cpu(name: str, precision: str, tmp_path: Path) -> None:
    if name == "adamw8bit":
        pytest.importorskip("torchao")
    more: dict[str, Any] = {"ema": {"decay": 0.9, "device": "cpu" if name == "came" else "same"}}
    more |= ADAPTERS.get(name, {"optim": {"name": name}})
    rows = {}
    for device in ("cpu", "cuda"):
        settings = tiny_run.config(tmp_path / device, steps=6, save_every=3, precision=precision, device=device, **more)
        _fit(settings)
        rows[device] = [row["loss"] for row in metrics.read(tmp_path / device / "metrics.jsonl")]
    assert rows["cuda"] == pytest.approx(rows["cpu"], rel=3e-2)
    halfway = tiny_run.config(tmp_path / "again", steps=6, precision=precision, device="cuda", **more)
    _fit(halfway, resume=tmp_path / "cuda/checkpoints/step-00000003")
    again = [row["loss"] for row in metrics.read(tmp_path / "again/metrics.jsonl")]
    assert again == pytest.approx(rows["cuda"][3:], rel=1e-3)
