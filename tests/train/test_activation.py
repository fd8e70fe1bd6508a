"""What blocks keep for the backward pass: fewer bytes, the same gradients, nothing kept that must not be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from sana_pipe.train.config import TrainConfig
from sana_pipe.train.parallel.activation_checkpoint import (
    ManagedActivations,
    apply_activation_checkpointing,
    compressible_modules,
)
from sana_pipe.train.parallel.saved_tensors import BLOCK, SMALLEST, Compressor, quantise, restore
from tests.support.parameters import first_quick
from tests.support.saved_activations import PRECISIONS, WAYS, compressors, inputs, measure, model, settings
from tests.support.workers import tiny_run


@pytest.fixture(scope="module")
def plain() -> Callable[[str], tuple[int, dict[str, Tensor]]]:
    """What a model measures that keeps everything, by precision."""
    return cache(lambda precision: measure(model(PRECISIONS[precision]), PRECISIONS[precision]))


QUICK = ("full", "selective", "int8")


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=[pytest.mark.slow] * (name not in QUICK or precision == "bf16"))
        for name in WAYS
        for precision in PRECISIONS
    ],
)
def test_fewer_bytes_are_kept_and_the_gradients_are_the_same(
    name: str, precision: str, plain: Callable[[str], tuple[int, dict[str, Tensor]]]
) -> None:
    way, fp32, bf16, exact = WAYS[name]
    without, expected = plain(precision)
    module = model(PRECISIONS[precision], *way)
    kept, actual = measure(module, PRECISIONS[precision])
    assert without / kept >= (fp32 if precision == "fp32" else bf16), f"{without / kept:.2f} times fewer"
    if exact:
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[n], expected[n]) for n in expected)
    else:
        assert tiny_run.distance(actual, expected) <= (1e-2 if "int8" in name else 4e-2)
        assert tiny_run.distance(actual, expected) > 0


# ------------------------------------------------------------------------------------------- what is kept, and how


class _Saves(torch.autograd.Function):
    """Saves a tensor as it is and hands out what came back."""

    @staticmethod
    def forward(context: Any, x: Tensor, tensor: Tensor, back: list[Tensor]) -> Tensor:
        context.save_for_backward(tensor)
        context.back = back
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        context.back.extend(context.saved_tensors)
        return gradient, None, None


def through(compressor: Compressor, *tensors: Tensor, module: nn.Module | None = None, **options: Any) -> list[Tensor]:
    """The tensors as the backward pass gets them."""
    x, back = torch.zeros(1, requires_grad=True), list[Tensor]()
    with compressor.hooks(module or nn.Identity(), **options):
        for tensor in tensors:
            x = _Saves.apply(x, tensor, back)  # type: ignore[no-untyped-call]
    x.backward()
    return back[::-1]


def layouts(dtype: torch.dtype) -> dict[str, Tensor]:
    x = torch.randn(2, 16, 12, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    return {
        "contiguous": x,
        "transposed": x.flatten(2).transpose(1, 2),
        "channels last": x.contiguous(memory_format=torch.channels_last),
        "every second channel": x[:, 0::2],
        "every second channel, transposed": x[:, 1::2].flatten(2).transpose(1, 2),
        "a part": x[:, 3:15, 1:],
        "expanded": x[:, :, None].expand(2, 16, 7, 12, 10),
        "with a dimension of one": x[:, :1].as_strided((2, 1, 120 * 8), (1920, 7, 1)),
    }


GAPS = ("every second channel", "every second channel, transposed", "a part", "expanded", "with a dimension of one")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_size_strides_and_type_come_back(precision: str) -> None:
    compressor, given = Compressor(), layouts(PRECISIONS[precision])
    for (name, tensor), back in zip(given.items(), through(compressor, *given.values()), strict=True):
        assert (back is tensor) == (name in GAPS), name
        assert (back.shape, back.stride(), back.dtype) == (tensor.shape, tensor.stride(), tensor.dtype), name
        worst = tensor.float().abs().max() / 254 + 1e-2
        assert (back.float() - tensor.float()).abs().max() <= worst, name
    assert compressor.stored == len(given) - len(GAPS)


def test_what_must_not_be_touched_is_not() -> None:
    linear = nn.Linear(64, 64)
    whole = torch.randn(64, 64)
    untouched = [
        linear.weight,
        linear.weight.detach().t(),
        torch.randn(SMALLEST - 1),
        torch.randn(1).expand(5000),
        torch.randn(4000).as_strided((3000, 2), (1, 1)),
        torch.arange(5000),
        torch.ones(5000, dtype=torch.bool),
    ]
    compressor = Compressor()
    back = through(compressor, *untouched, module=linear)
    assert all(b.data_ptr() == t.data_ptr() for b, t in zip(back, untouched, strict=True))
    assert compressor.stored == 0
    other = torch.randn(64, 64)
    back = through(compressor, whole, other, whole.t(), only=whole)
    assert [torch.equal(b, t) for b, t in zip(back, (whole, other, whole.t()), strict=True)] == [False, True, False]


def test_equal_tensors_are_kept_once_and_changed_ones_again() -> None:
    compressor, x = Compressor(), torch.randn(2048)
    through(compressor, x, x.view(2048), x.detach())
    assert compressor.stored == 1
    through(compressor, x, x.view(32, 64))
    assert compressor.stored == 3
    start, back = torch.zeros(1, requires_grad=True), list[Tensor]()
    with compressor.hooks(nn.Identity()):
        first = _Saves.apply(start, x.detach(), back)  # type: ignore[no-untyped-call]
        x.neg_()
        second = _Saves.apply(first, x.detach(), back)  # type: ignore[no-untyped-call]
    second.backward()
    assert torch.equal(back[0], -back[1])


def test_memory_that_is_used_again_is_another_tensor() -> None:
    """The allocator gives the same addresses to later tensors; what was kept of the earlier ones stays theirs."""
    compressor, x, back = Compressor(), torch.zeros(1, requires_grad=True), list[Tensor]()
    with compressor.hooks(nn.Identity()):
        for number in range(50):
            x = _Saves.apply(x, torch.full((4096,), float(number)), back)  # type: ignore[no-untyped-call]
    x.backward()
    assert [round(float(tensor[0])) for tensor in back[::-1]] == list(range(50))
    assert compressor.stored == 50


def test_one_scale_for_128_values() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    values[:BLOCK] *= 1e6
    values[BLOCK : 2 * BLOCK] = 0
    codes, scales = quantise(values)
    assert codes.element_size() == 1 and codes.numel() == 1024 and scales.shape == (8,)
    back = restore(codes, scales, 1000, torch.float32)
    for start in range(0, 1000, BLOCK):
        block, actual = values[start : start + BLOCK], back[start : start + BLOCK]
        bound = block.abs().max() / 254
        assert ((actual - block).abs() <= bound * 1.001).all()
    values[300] = float("inf")
    values[700] = float("nan")
    back = restore(*quantise(values), 1000, torch.float32)
    assert not torch.isfinite(back[300]) and not torch.isfinite(back[700]), "a bad number stays visible"


def test_the_parts_that_are_compressed() -> None:
    block = model(torch.float32).blocks[0]
    names = {id(module): name for name, module in block.named_modules()}
    assert {names[id(part)] for part in compressible_modules(block)} == {
        *(f"{attn}.{part}" for attn in ("attn1", "attn2") for part in ("to_q", "to_k", "to_v", "to_out.0")),
        "ff",
    }


@pytest.mark.parametrize("way", first_quick(("none", "int8"), ("full",), ("selective",), ("every-2", "int8")))
def test_names_copies_and_second_calls(way: tuple[Any, ...]) -> None:
    plain, module = model(torch.float32), model(torch.float32, *way)
    assert list(module.state_dict()) == list(plain.state_dict())
    classes = [type(m) for m in module.modules()]
    apply_activation_checkpointing(module.blocks, settings(*way))
    assert [type(m) for m in module.modules()] == classes
    twin = copy.deepcopy(module)
    assert len(compressors(twin)) == len(compressors(module)) and not compressors(twin) & compressors(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
        for parameter in plain.parameters():
            parameter.mul_(1.5)
    _, expected = measure(plain, torch.float32)
    _, actual = measure(twin, torch.float32)
    assert tiny_run.distance(actual, expected) <= 1e-2, "a copy recomputes itself, not the model it was copied from"


def test_without_gradients_nothing_is_kept() -> None:
    module = model(torch.float32, "none", "int8")
    with torch.no_grad():
        module(*inputs(torch.float32))
    assert all(compressor.stored == 0 for compressor in compressors(module))


@pytest.mark.parametrize("way", ["full", "selective"])
def test_the_state_of_the_generators_is_saved_only_for_blocks_with_dropout(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[int] = []
    get = torch.get_rng_state

    def counted() -> torch.Tensor:
        states.append(1)
        return get()

    monkeypatch.setattr(torch, "get_rng_state", counted)
    measure(model(torch.float32, way), torch.float32)
    assert not states
    random = model(torch.float32, "none")
    for block in random.blocks:
        block.attn1.to_out[1].p = 0.3  # type: ignore[union-attr, index, operator]
    torch.manual_seed(7)
    _, expected = measure(random, torch.float32)
    apply_activation_checkpointing(random.blocks, settings(way))
    random.zero_grad()
    torch.manual_seed(7)
    _, actual = measure(random, torch.float32)
    assert states
    assert tiny_run.distance(actual, expected) < 1e-6


def test_every_third_block() -> None:
    module = model(torch.float32, "every-3", layers=7)
    assert [isinstance(block, ManagedActivations) for block in module.blocks] == [
        False,
        False,
        True,
    ] * 2 + [False]


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"activation_checkpointing": "every-1"}, r"none, full, selective, every-K"),
        ({"activation_checkpointing": "every-x"}, r"none, full, selective, every-K"),
        ({"activation_checkpointing": "some"}, r"none, full, selective, every-K"),
        ({"activation_checkpointing": "selective", "activation_compression": "int8"}, r"full, every-K or none"),
        ({"optim": {"in_backward": True}}, r"optim.clip: null"),
        ({"optim": {"in_backward": True, "clip": None}, "precision": "fp16"}, r"precision to fp32 or bf16"),
        ({"optim": {"in_backward": True, "clip": None}, "precision": "bf16_pure"}, r"precision to fp32 or bf16"),
        ({"optim": {"in_backward": True, "clip": None}, "parallel": {"pp_size": 2}}, r"parallel.pp_size: 1"),
    ],
)
def test_impossible_settings_are_refused_with_what_would_work(train: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(train)


@pytest.mark.parametrize("mode", ["none", "full", "selective", "every-2", "every-12"])
def test_possible_settings(mode: str) -> None:
    assert TrainConfig.model_validate({"activation_checkpointing": mode}).activation_checkpointing == mode
