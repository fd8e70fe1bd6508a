"""The kernels: Triton in its interpreter and compiled for GPUs that are not there, their twins, the operations."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sana_pipe.train.kernels import backend, gated_convolution, joined_linear, linear_attention

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"fp32": 1e-6, "bf16": 2**-6}
"""Relative L2. The interpreter cuts to bf16 where a GPU rounds (2^-7), and one gradient passes through bf16 twice."""

triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# ----------------------------------------------------------------------------------------------------- interpreter


def interpreted(*options: str) -> dict[str, dict[str, float]]:
    seed = random.SystemRandom().randrange(2**31)
    print(f"python -m tests.support.workers.interpreted {seed} {' '.join(options)}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.workers.interpreted", str(seed), *options],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def within_limits(results: dict[str, dict[str, float]]) -> bool:
    wrong = {n: e for n, e in results.items() if not max(e.values()) <= LIMITS[n[-4:]]}
    assert wrong == {}
    return bool(results)


@pytest.mark.slow
@triton
def test_values_and_gradients_in_the_interpreter_are_those_of_fp64() -> None:
    results = interpreted()
    assert within_limits(results)
    assert len(results) == 12


@triton
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_so_are_those_of_random_shapes() -> None:
    assert within_limits(interpreted("--more"))


# -------------------------------------------------------------------------------------------------------- assembler

CONVOLUTION, ATTENTION = "gated_convolution_triton", "linear_attention_triton"
KERNELS: dict[tuple[str, str], Callable[[Any, str], dict[str, Any]]] = {  # the constants that its launcher gives
    **{
        (CONVOLUTION, name): lambda m, t: m.CONSTANTS for name in ("_gate_forward", "_gate_backward", "_input_backward")
    },
    (CONVOLUTION, "_sum_parts"): lambda m, t: m.SUM_CONSTANTS,
    (ATTENTION, "_moments"): lambda m, t: m.constants(32) | {"EXACT": "tf32" if t == "bf16" else "tf32x3"},
    (ATTENTION, "_query_forward"): lambda m, t: m.constants(32),
    (ATTENTION, "_query_backward"): lambda m, t: m.constants(32) | {"TILE": m.SMALL_TILE},
    (ATTENTION, "_key_value_backward"): lambda m, t: m.constants(32),
}
GPUS = (80, 86, 89, 90, 100, 120)


def needs_of(kernel: tuple[str, str], gpu: int, dtype: str, **more: int) -> Any:
    from tests.support import assembled

    module = importlib.import_module(f"sana_pipe.train.kernels.{kernel[0]}")
    needs = assembled.needs(getattr(module, kernel[1]), gpu, dtype, **(KERNELS[kernel](module, dtype) | more))
    print(kernel, gpu, dtype, needs)
    return needs


def fits(kernel: tuple[str, str], gpu: int, dtype: str, **more: int) -> bool:
    from tests.support import assembled

    needs = needs_of(kernel, gpu, dtype, **more)
    return needs.stack == 0 and needs.shared <= assembled.SHARED_LIMIT[gpu]


@triton
@pytest.mark.parametrize("kernel", KERNELS, ids=".".join)
def test_a_kernel_compiles_without_spills_and_within_shared_memory(kernel: tuple[str, str]) -> None:
    assert fits(kernel, 90, "bf16")


@triton
@pytest.mark.parametrize(
    ("gpu", "dtype"),
    [  # in fp32 and fp16 also the GPU with the least shared memory, and the one that is measured
        pytest.param(
            gpu, dtype, marks=getattr(pytest.mark, "slow" if dtype == "bf16" or gpu in (86, 90) else "nightly")
        )
        for gpu in GPUS
        for dtype in ("bf16", "fp32", "fp16")
    ],
)
@pytest.mark.parametrize("kernel", KERNELS, ids=".".join)
def test_on_every_gpu_in_every_dtype(kernel: tuple[str, str], gpu: int, dtype: str) -> None:
    assert fits(kernel, gpu, dtype)
    module, name = kernel
    if "height" in getattr(importlib.import_module(f"sana_pipe.train.kernels.{module}"), name).arg_names:
        assert fits(kernel, gpu, dtype, height=1, width=1), "a launch with a size of 1 compiles it as a constant"


INSTRUCTIONS = {"_gate_forward": 820, "_gate_backward": 1080, "_input_backward": 690}
"""At most; with `tl.exp` and divisions, and without chains of multiply-adds, 932, 1170 and 728."""


@triton
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_the_gated_convolution_takes_few_instructions(name: str) -> None:
    """Its time on an H100 is 2.5 times that of its memory traffic. Edit: `1 / (1 + tl.exp(-x))` in `_sigmoid`."""
    assert needs_of((CONVOLUTION, name), 90, "bf16").instructions <= INSTRUCTIONS[name]


@triton
@pytest.mark.parametrize("name", [name for module, name in KERNELS if module == ATTENTION])
def test_one_kernel_serves_all_numbers_of_tokens(name: str) -> None:
    kernel = getattr(importlib.import_module(f"sana_pipe.train.kernels.{ATTENTION}"), name)
    assert [p.do_not_specialize for p in kernel.params if p.name == "tokens"] == [True]


@triton
def test_the_check_sees_spills() -> None:
    assert not fits((CONVOLUTION, "_input_backward"), 90, "bf16", BLOCK=512, num_warps=1)


# ------------------------------------------------------------------------------------------------ twins, operations


def convolution_inputs(dtype: torch.dtype) -> list[Tensor]:
    shapes = (2, 3, 5, 6), (6, 1, 3, 3), (6,)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def attention_inputs(dtype: torch.dtype) -> list[Any]:
    return [*(torch.randn(2, 5, 6, dtype=dtype, requires_grad=True) for _ in range(3)), 3, 1e-15]


def side_by_side_inputs(dtype: torch.dtype) -> list[Any]:
    return [torch.randn(2, 5, 18, dtype=dtype, requires_grad=True), None, None, 3, 1e-15]


def product_inputs(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((2, 5, 6), *((4, 6),) * 3)]


def registered(module: ModuleType) -> tuple[Any, Any]:
    """The operation of a module as torch knows it, and that of its gradients."""
    name = module.__name__.rpartition(".")[2]
    return getattr(torch.ops.sana_pipe, name).default, getattr(torch.ops.sana_pipe, f"{name}_backward").default


OPERATIONS: dict[str, tuple[Any, Any, Callable[[torch.dtype], list[Any]]]] = {
    "gated convolution": (*registered(gated_convolution), convolution_inputs),
    "linear attention": (*registered(linear_attention), attention_inputs),
    "linear attention, side by side": (*registered(linear_attention), side_by_side_inputs),
    "joined product": (*registered(joined_linear), product_inputs),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_twin_has_the_gradients_of_its_values(name: str) -> None:
    """Against differences in float64. Linear attention computes in float32, so its differences are coarser."""
    operation, _, inputs = OPERATIONS[name]
    torch.manual_seed(0)
    if name.startswith("linear attention"):
        given = inputs(torch.float64)
        plain = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in given]
        gradient = torch.randn(2, 5, 6, dtype=torch.float64)
        parts = plain if plain[1] is not None else [*plain[0].chunk(3, dim=2), *plain[3:]]
        (formula(*parts) * gradient).sum().backward()
        (operation(*given)[0] * gradient).sum().backward()
        for ours, exact in zip(given, plain, strict=True):
            if isinstance(ours, Tensor):
                assert (ours.grad - exact.grad).norm() <= 1e-5 * exact.grad.norm()
    else:
        assert torch.autograd.gradcheck(operation, inputs(torch.float64))


def formula(query: Tensor, key: Tensor, value: Tensor, head_dim: int, eps: float) -> Tensor:
    q, k, v = (x.unflatten(2, (-1, head_dim)).transpose(1, 2) for x in (query, key, value))
    weights = q.relu() @ k.relu().transpose(2, 3)
    return (weights @ v / (weights.sum(-1, keepdim=True) + eps)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_registered_as_torch_expects(name: str) -> None:
    """Schema, shapes and strides without data, gradients, and all of it within a graph of dynamic shapes."""
    operation, gradients, inputs = OPERATIONS[name]
    given = inputs(torch.float32)
    torch.library.opcheck(operation, given)
    result = operation(*given)
    result, *state = result if isinstance(result, tuple) else (result,)
    gradient = result.detach().transpose(0, 1).contiguous().transpose(0, 1)  # not contiguous
    plain = [x.detach() if isinstance(x, Tensor) else x for x in (*state, *given)]
    torch.library.opcheck(gradients, [gradient, *plain], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["gated convolution", "joined product"])
def test_frozen_parameters_have_no_gradient_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operation, gradients, inputs = OPERATIONS[name]
    sizes: list[bool] = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = called(*args, **(kwargs or {}))
            if called is gradients:
                sizes.extend(bool(part.numel()) for part in result)
            return result

    given = inputs(torch.float64)
    first, *others = given
    with Spy():
        operation(first, *(x.detach() for x in others)).sum().backward()
    assert sizes == [True] + [False] * (len(sizes) - 1)
    assert first.grad is not None


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_saves_its_inputs_alone_and_attention_a_state_that_no_token_widens(name: str) -> None:
    operation, _, inputs = OPERATIONS[name]
    given, saved = inputs(torch.float32), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        operation(*given)
    if name.startswith("linear attention"):
        assert saved.pop(0).shape == (2, 2, 3 + 1, 3)
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in given if isinstance(x, Tensor)]


def test_flops_are_those_of_the_formula() -> None:
    given = convolution_inputs(torch.float32)
    with FlopCounterMode(display=False) as counter:
        gated_convolution.gated_convolution(*given).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 9 * given[0].numel()
    with FlopCounterMode(display=False) as plain:
        F.conv2d(given[0].permute(0, 3, 1, 2), given[1], padding=1, groups=6)
    assert 3 * plain.get_total_flops() == counter.get_total_flops()
    whole = attention_inputs(torch.float32)
    with FlopCounterMode(display=False) as counter:
        linear_attention.linear_attention(*whole).sum().backward()
    assert counter.get_total_flops() == 3 * 4 * whole[0].numel() * 4


class OnGpu:
    """Stands for a tensor of the second GPU."""

    is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def forgotten_capability() -> Iterator[None]:
    backend.is_new_enough.cache_clear()
    yield
    backend.is_new_enough.cache_clear()


def test_kernels_run_on_a_gpu_alone_and_not_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.kernels("linear_attention", torch.zeros(1)) is None

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, device.index))
    if importlib.util.find_spec("triton") is not None:
        chosen = backend.kernels("linear_attention", OnGpu(), OnGpu())  # type: ignore[arg-type]
        assert chosen is not None and chosen.__name__.endswith("_triton")
    exact = OnGpu()
    exact.dtype = torch.float64
    assert backend.kernels("linear_attention", OnGpu(), exact) is None  # type: ignore[arg-type]
    monkeypatch.setattr(backend, "triton_is_installed", lambda: False)
    assert backend.kernels("linear_attention", OnGpu()) is None  # type: ignore[arg-type]


@triton
@pytest.mark.parametrize(("capability", "kernels"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_kernels_are_for_the_gpus_that_they_are_compiled_for(
    capability: tuple[int, int], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (backend.kernels("linear_attention", OnGpu()) is not None) == kernels  # type: ignore[arg-type]


@pytest.mark.parametrize("operation", ["gated_convolution", "linear_attention"])
def test_kernels_are_launched_on_the_gpu_of_their_tensors(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current one."""
    module, inputs = {
        "gated_convolution": (gated_convolution, (torch.ones(1, 2, 2, 4), torch.ones(4, 1, 3, 3), torch.ones(4))),
        "linear_attention": (linear_attention, (torch.ones(1, 4, 8),) * 3 + (4,)),
    }[operation]
    events: list[str] = []

    @contextlib.contextmanager
    def current(tensor: torch.Tensor) -> Iterator[None]:
        assert isinstance(tensor, torch.Tensor)
        events.append("entered")
        yield
        events.append("left")

    def recorded(name: str) -> Any:
        return lambda *args: (events.append(name), getattr(reference, name)(*args))[1]

    reference = SimpleNamespace(forward=module.forward, backward=module.backward)
    chosen = SimpleNamespace(forward=recorded("forward"), backward=recorded("backward"))
    monkeypatch.setattr(module, "kernels", lambda *_: chosen)
    monkeypatch.setattr(torch.cuda, "device_of", current)
    given = inputs[0].clone().requires_grad_()
    getattr(module, operation)(given, *inputs[1:]).sum().backward()
    assert events == ["entered", "forward", "left", "entered", "backward", "left"]


# -------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["gated convolution", "linear attention"])
def test_on_a_gpu_the_kernels_are_nearer_to_fp64_than_their_limit(name: str, dtype: torch.dtype) -> None:
    operation, gradients, _ = OPERATIONS[name]
    torch.manual_seed(0)
    if name.startswith("gated convolution"):
        shapes = (2, 24, 43, 1280), (1280, 1, 3, 3), (1280,)
        more: tuple[Any, ...] = ()
    else:
        shapes, more = ((2, 1032, 640),) * 3, (32, 1e-15)
    given = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    exact = [x.cpu().double() for x in given]
    plain = formula if name == "linear attention" else gated_convolution.forward
    leaves = [x.requires_grad_() for x in exact]
    expected = plain(*leaves, *more)
    gradient = torch.randn(expected.shape, device="cuda").to(dtype)
    expected.backward(gradient.cpu().double())
    result = operation(*given, *more)
    result, *state = result if isinstance(result, tuple) else (result,)
    actual = [result, *gradients(gradient, *state, *given, *more)]
    for ours, wanted in zip(actual, [expected.detach(), *(leaf.grad for leaf in leaves)], strict=True):
        error = (ours.cpu().double() - wanted).norm() / wanted.norm()  # type: ignore[union-attr]
        assert error <= (2**-7 if dtype is torch.bfloat16 else 1e-5)
