"""What blocks keep for the backward pass: fewer bytes, the same gradients, nothing kept that must not be."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from pipeline.config import TrainConfig
from pipeline.parallel import saved_tensors
from pipeline.parallel.activation_checkpoint import (
    ManagedActivations,
    apply_activation_checkpointing,
    compressible_modules,
)
from pipeline.parallel.compression import BLOCK, quantise, restore
from pipeline.parallel.saved_tensors import SMALLEST, Offloader
from tests.support.parameters import first_quick
from tests.support.saved_activations import PRECISIONS, WAYS, inputs, measure, model, offloaders, settings
from tests.support.workers import tiny_run


@pytest.fixture(scope="module")
def plain() -> Callable[[str], tuple[int, int, dict[str, Tensor]]]:
    """What a model measures that keeps everything, by precision."""
    return cache(lambda precision: measure(model(PRECISIONS[precision]), PRECISIONS[precision]))


QUICK = ("full", "selective", "int8", "offload")


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=[pytest.mark.slow] * (name not in QUICK or precision == "bf16"))
        for name in WAYS
        for precision in PRECISIONS
    ],
)
def test_fewer_bytes_are_kept_and_the_gradients_are_the_same(
    name: str, precision: str, plain: Callable[[str], tuple[int, int, dict[str, Tensor]]]
) -> None:
    way, fp32, bf16, exact = WAYS[name]
    without, _, expected = plain(precision)
    module = model(PRECISIONS[precision], *way)
    kept, host, actual = measure(module, PRECISIONS[precision])
    assert without / kept >= (fp32 if precision == "fp32" else bf16), f"{without / kept:.2f} times fewer"
    assert (host > 0) == ("offload" in name)
    if exact:
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[n], expected[n]) for n in expected)
    else:
        assert tiny_run.distance(actual, expected) <= (1e-2 if "int8" in name else 4e-2)
        assert tiny_run.distance(actual, expected) > 0
    gc.collect()
    assert all(offloader.host_bytes() == 0 for offloader in offloaders(module)), "nothing stays after the backward pass"


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


def through(offloader: Offloader, *tensors: Tensor, module: nn.Module | None = None, **options: Any) -> list[Tensor]:
    """The tensors as the backward pass gets them."""
    x, back = torch.zeros(1, requires_grad=True), list[Tensor]()
    with offloader.hooks(module or nn.Identity(), **options):
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


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("compress", [None, "int8", "fp8"])
@pytest.mark.parametrize("offload", [False, True])
def test_size_strides_and_type_come_back(compress: Any, offload: bool, precision: str) -> None:
    if compress is None and not offload:
        return
    offloader, given = Offloader(compress, offload), layouts(PRECISIONS[precision])
    for (name, tensor), back in zip(given.items(), through(offloader, *given.values()), strict=True):
        assert back is not tensor, name
        assert (back.shape, back.stride(), back.dtype) == (tensor.shape, tensor.stride(), tensor.dtype), name
        if compress is None:
            assert torch.equal(back, tensor), name
        else:
            worst = tensor.float().abs().max() * (1 / 254 if compress == "int8" else 1 / 16) + 1e-2
            assert (back.float() - tensor.float()).abs().max() <= worst, name
    assert offloader.stored == len(given)


def test_what_must_not_be_touched_is_not() -> None:
    linear = nn.Linear(64, 64)
    whole = torch.randn(64, 64)
    untouched = [
        linear.weight,
        linear.weight.detach().t(),
        torch.randn(SMALLEST - 1),
        torch.randn(1).expand(5000),
        torch.randn(4000).as_strided((3000, 2), (1, 1)),
    ]
    for offloader in (Offloader("int8"), Offloader(None, True), Offloader("int8", True)):
        back = through(offloader, *untouched, module=linear)
        assert all(b.data_ptr() == t.data_ptr() for b, t in zip(back, untouched, strict=True))
        assert offloader.stored == 0
    counted = [torch.arange(5000), torch.ones(5000, dtype=torch.bool)]
    assert all(b is t for b, t in zip(through(Offloader("int8"), *counted), counted, strict=True))
    assert all(torch.equal(b, t) for b, t in zip(through(Offloader("int8", True), *counted), counted, strict=True))
    other = torch.randn(64, 64)
    back = through(Offloader("int8"), whole, other, whole.t(), only=whole)
    assert [torch.equal(b, t) for b, t in zip(back, (whole, other, whole.t()), strict=True)] == [False, True, False]
    back = through(Offloader("int8", True), whole, compress=False)
    assert torch.equal(back[0], whole) and back[0] is not whole


def test_equal_tensors_are_kept_once_and_changed_ones_again() -> None:
    offloader, x = Offloader("int8"), torch.randn(2048)
    through(offloader, x, x.view(2048), x.detach())
    assert offloader.stored == 1
    through(offloader, x, x.view(32, 64))
    assert offloader.stored == 3
    start, back = torch.zeros(1, requires_grad=True), list[Tensor]()
    with Offloader(None, True).hooks(nn.Identity()):
        first = _Saves.apply(start, x.detach(), back)  # type: ignore[no-untyped-call]
        x.neg_()
        second = _Saves.apply(first, x.detach(), back)  # type: ignore[no-untyped-call]
    second.backward()
    assert torch.equal(back[0], -back[1])


def test_memory_that_is_used_again_is_another_tensor() -> None:
    """The allocator gives the same addresses to later tensors; what was kept of the earlier ones stays theirs."""
    offloader, x, back = Offloader(None, True), torch.zeros(1, requires_grad=True), list[Tensor]()
    with offloader.hooks(nn.Identity()):
        for number in range(50):
            x = _Saves.apply(x, torch.full((4096,), float(number)), back)  # type: ignore[no-untyped-call]
    x.backward()
    assert [float(tensor[0]) for tensor in back[::-1]] == list(range(50))
    assert offloader.stored == 50


class LateCopies(saved_tensors.Transfers):
    """A GPU whose copies run as late as they may: when the computation waits for one, with all that were begun before
    it. Until then their results are not numbers. `log`: ("take" | "to host" | "to device" | "wait", number)."""

    log: list[tuple[str, int]]
    freed_early: list[int]

    def __init__(self, device: torch.device):
        self.device, self.begun, self.done = device, 0, 0
        self.pending: list[tuple[int, list[weakref.ref[Tensor]], list[weakref.ref[Tensor]]]] = []

    def to_host(self, parts: Any) -> Any:
        self.log.append(("to host", self.begun + 1))
        host, number = super().to_host(parts)
        self._must_live(parts, number)
        return host, number

    def to_device(self, parts: Any) -> Any:
        self.log.append(("to device", self.begun + 1))
        there, number = super().to_device(parts)
        self._must_live(there, number)
        return there, number

    def wait(self, event: int) -> None:
        self.log.append(("wait", event))
        while self.pending and self.pending[0][0] <= event:
            self.done, sources, targets = self.pending.pop(0)
            for source, target in zip(sources, targets, strict=True):
                if (there := target()) is not None and (here := source()) is not None:
                    there.copy_(here)

    def _must_live(self, on_device: Any, number: int) -> None:
        for part in on_device:
            weakref.finalize(part, lambda: self.freed_early.append(number) if self.done < number else None)

    def empty(self, like: Tensor, device: torch.device | None) -> Tensor:
        return torch.full(like.shape, float("nan") if like.is_floating_point() else 1).to(like.dtype)

    def _copy(self, sources: Any, targets: Any) -> int:
        self.begun += 1
        self.pending.append((self.begun, [weakref.ref(s) for s in sources], [weakref.ref(t) for t in targets]))
        return self.begun


@pytest.mark.parametrize("name", first_quick(*(name for name in WAYS if "offload" in name)))
def test_copies_beside_the_computation_are_waited_for_and_begun_ahead(
    name: str, plain: Callable[[str], tuple[int, int, dict[str, Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    way, _, _, exact = WAYS[name]
    _, _, expected = plain("fp32") if exact else measure(model(torch.float32, *way), torch.float32)
    LateCopies.log, LateCopies.freed_early = log, freed_early = [], []  # type: ignore[var-annotated]
    monkeypatch.setattr(saved_tensors, "transfers", LateCopies)
    take = saved_tensors.OnDevice.take

    def logged(self: saved_tensors.OnDevice, saved: Any) -> Tensor:
        log.append(("take", 0))
        tensor = take(self, saved)
        assert len(self.pending_copies) <= 2 * saved_tensors.AHEAD
        return tensor

    monkeypatch.setattr(saved_tensors.OnDevice, "take", logged)
    module = model(torch.float32, *way)
    for _ in range(2):  # the second time after all of the first is gone
        module.zero_grad()
        given = inputs(torch.float32)
        out = module(*given)
        (offloader,) = offloaders(module)
        (on_device,) = [each for each in offloader.by_device.values() if each is not None]
        assert 0 < len(on_device.pending_copies) <= saved_tensors.AHEAD
        out.float().square().mean().backward()
        actual = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        assert all(torch.equal(actual[n], expected[n]) for n in expected)
        assert not freed_early
        del out
        gc.collect()
        assert offloader.host_bytes() == offloader.device_bytes() == 0
    late = [a for a, b in itertools.pairwise(log) if a[0] == "to device" and b == ("wait", a[1])]
    fetched = sum(kind == "to device" for kind, _ in log)
    assert fetched > 0 and len(late) <= 0.1 * fetched, (len(late), fetched)


def test_a_copy_waits_for_the_computation_and_the_computation_for_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Stream:
        def __init__(self, name: Any):
            self.name = name if isinstance(name, str) else "copies"

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} wait for {other.name}")

        def wait_event(self, event: str) -> None:
            log.append(f"{self.name} wait for {event}")

        def record_event(self) -> str:
            return f"the event after {len(log)}"

        def __enter__(self) -> None:
            log.append("begin")

        def __exit__(self, *_: Any) -> None:
            log.append("end")

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream("the computation"))
    monkeypatch.setattr(saved_tensors.Transfers, "empty", lambda self, like, device: torch.empty_like(like))
    through = saved_tensors.Transfers(torch.device("cpu"))
    (there,), event = through.to_device([torch.arange(3)])
    assert torch.equal(there, torch.arange(3))
    through.wait(event)
    assert log == ["copies wait for the computation", "begin", "end", "the computation wait for the event after 3"]


def pinned_by_torch(size: int) -> int:
    """Bytes that torch's allocator of pinned memory takes for a block."""
    return 1 << max(0, size - 1).bit_length()


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_pinned_memory_loses_at_most_an_eighth(itemsize: int) -> None:
    """By torch's rounding, for what Sana saves at many microbatches and sizes of pictures, and for odd counts."""
    saved = [
        batch * tokens * width
        for batch in (1, 3, 8, 22)
        for tokens in (256, 960, 1024, 4000)
        for width in (1, 32, 2240, 5600)
    ]
    for count in (*saved, 1024, 1025, 2**20 + 1, 2**22 - 1, *range(1, 200)):
        sizes = saved_tensors.piece_sizes(count, itemsize)
        needed = count * itemsize
        taken = sum(pinned_by_torch(size * itemsize) for size in sizes)
        assert sum(sizes) == count and min(sizes) > 0
        assert needed <= taken <= needed + max(512, needed // 8)
        assert len(sizes) <= needed // saved_tensors.PIECE + 4
        assert pinned_by_torch(max(sizes) * itemsize) <= saved_tensors.PIECE, "blocks that every tensor can use"
    whole = [count * itemsize for count in saved]
    assert max(pinned_by_torch(size) / size for size in whole) > 1.8, "what one block for each tensor loses"


def test_a_tensor_in_pieces_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[int] = []

    def pinned(count: int, dtype: torch.dtype) -> Tensor:
        blocks.append(count * dtype.itemsize)
        return torch.empty(count, dtype=dtype)

    monkeypatch.setattr(saved_tensors, "pinned_block", pinned)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    through = object.__new__(saved_tensors.Transfers)
    through.device, through.stream = torch.device("cpu"), MagicMock()  # type: ignore[assignment]
    tensors = [
        torch.randn(5 * 2**20 + 12345).bfloat16(),
        torch.randint(-9, 9, (3 * 2**20,), dtype=torch.int8),
        torch.randn(7),
    ]
    host, _ = through.to_host(tensors)
    assert [part.nbytes for part in host] == [tensor.nbytes for tensor in tensors]
    assert blocks[:2] == [saved_tensors.PIECE] * 2
    assert sum(map(pinned_by_torch, blocks)) <= 1.02 * sum(tensor.nbytes for tensor in tensors)
    back, _ = through.to_device(host)
    assert all(torch.equal(after, before) for after, before in zip(back, tensors, strict=True))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_one_scale_for_128_values(kind: Any) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    values[:BLOCK] *= 1e6
    values[BLOCK : 2 * BLOCK] = 0
    codes, scales = quantise(values, kind)
    assert codes.element_size() == 1 and codes.numel() == 1024 and scales.shape == (8,)
    back = restore(codes, scales, 1000, torch.float32)
    for start in range(0, 1000, BLOCK):
        block, actual = values[start : start + BLOCK], back[start : start + BLOCK]
        bound = block.abs().max() / 254 if kind == "int8" else block.abs() / 16 + block.abs().max() / 448 / 512
        assert ((actual - block).abs() <= bound * 1.001).all()
    values[300] = float("inf")
    values[700] = float("nan")
    back = restore(*quantise(values, kind), 1000, torch.float32)
    assert not torch.isfinite(back[300]) and not torch.isfinite(back[700]), "a bad number stays visible"


def test_the_parts_that_are_compressed() -> None:
    block = model(torch.float32).blocks[0]
    names = {id(module): name for name, module in block.named_modules()}
    assert {names[id(part)] for part in compressible_modules(block)} == {
        *(f"{attn}.{part}" for attn in ("attn1", "attn2") for part in ("to_q", "to_k", "to_v", "to_out.0")),
        "ff",
    }


@pytest.mark.parametrize("way", first_quick(("none", "int8", True), ("full",), ("selective",), ("every-2", "int8")))
def test_names_copies_and_second_calls(way: tuple[Any, ...]) -> None:
    plain, module = model(torch.float32), model(torch.float32, *way)
    assert list(module.state_dict()) == list(plain.state_dict())
    classes = [type(m) for m in module.modules()]
    apply_activation_checkpointing(module.blocks, settings(*way))
    assert [type(m) for m in module.modules()] == classes
    twin = copy.deepcopy(module)
    assert len(offloaders(twin)) == len(offloaders(module)) and not offloaders(twin) & offloaders(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
        for parameter in plain.parameters():
            parameter.mul_(1.5)
    _, _, expected = measure(plain, torch.float32)
    _, _, actual = measure(twin, torch.float32)
    assert tiny_run.distance(actual, expected) <= 1e-2, "a copy recomputes itself, not the model it was copied from"


def test_without_gradients_nothing_is_kept() -> None:
    module = model(torch.float32, "none", "int8", True)
    with torch.no_grad():
        module(*inputs(torch.float32))
    assert all(offloader.stored == 0 for offloader in offloaders(module))


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
    _, _, expected = measure(random, torch.float32)
    apply_activation_checkpointing(random.blocks, settings(way))
    random.zero_grad()
    torch.manual_seed(7)
    _, _, actual = measure(random, torch.float32)
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


@pytest.mark.parametrize(("checkpointing", "compression"), [("none", "int8"), ("full", "fp8"), ("every-2", "int8")])
def test_offload_changes_nothing_that_is_compressed(checkpointing: str, compression: str) -> None:
    _, _, here = measure(model(torch.float32, checkpointing, compression), torch.float32)
    _, _, there = measure(model(torch.float32, checkpointing, compression, True), torch.float32)
    assert all(torch.equal(here[name], there[name]) for name in here)
