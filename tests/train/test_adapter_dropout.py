"""The masks of an adapter's dropout belong to the visit of a sample: no way to compute a step changes its gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from sana_pipe.config import Config
from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.kernels.sample_dropout import columns_of, rows_of, sample_dropout
from sana_pipe.train.models.adapters import adapter_of
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.parallel.activation_checkpoint import apply_activation_checkpointing
from sana_pipe.train.parallel.compile import compile_blocks
from sana_pipe.train.training.checkpoint import read_document
from tests.support.runs import fit_tiny
from tests.support.workers import tiny_run

KINDS = [{"kind": "lora", "targets": "attention"}, {"kind": "dora", "targets": "all"}, {"targets": ["to_k", "to_v"]}]


def settings(adapter: dict[str, Any], **train: Any) -> Config:
    return tiny_run.config(layers=2, adapter={"rank": 3, "dropout": 0.4, **adapter}, **train)


def adapted(given: Config) -> SanaTransformer:
    """A model with drawn values of the adapter."""
    model = tiny_run.model(given)
    adapter = adapter_of(given.train, model.config)
    assert adapter is not None
    adapter.apply(model)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1)
    return model


def measured(
    given: Config, pieces: list[Batch] | None = None, model: SanaTransformer | None = None
) -> dict[str, Tensor]:
    """Loss and gradients of a step, under the configuration's activation checkpointing."""
    model = adapted(given) if model is None else model
    apply_activation_checkpointing(model.blocks, given.train)
    pieces = tiny_run.microbatches(tiny_run.global_batch(1), 4) if pieces is None else pieces
    loss, _, gradients = tiny_run.gradients(model.train(), given, pieces)
    return {"loss": torch.tensor(loss), **gradients}


@pytest.mark.parametrize("adapter", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_loss_and_gradient_are_those_without_recomputation(adapter: dict[str, Any], packed: bool) -> None:
    pieces = tiny_run.microbatches(tiny_run.global_batch(1), 4)
    pieces = [tiny_run.packed(piece) for piece in pieces] if packed else pieces
    plain = measured(settings(adapter), pieces)
    for mode in ("full", "selective", "every-2"):
        torch.manual_seed(3)  # the masks are of no generator
        again = measured(settings(adapter, activation_checkpointing=mode), pieces)
        assert tiny_run.distance(again, plain) < 1e-6, mode
    for mode, bound in (("none", 2e-2), ("full", 0.5)):  # 8 bits of a whole block's input move this small model far
        less = measured(settings(adapter, activation_checkpointing=mode, activation_compression="int8"), pieces)
        assert torch.allclose(less["loss"], plain["loss"], rtol=1e-6)
        assert tiny_run.distance(less, plain) < bound
    assert tiny_run.distance(measured(settings({**adapter, "dropout": 0.0}), pieces), plain) > 0.03


@pytest.mark.parametrize("adapter", KINDS)
def test_neither_processes_nor_microbatches_nor_packed_captions_change_the_masks(adapter: dict[str, Any]) -> None:
    given, whole = settings(adapter), tiny_run.global_batch(1)
    plain = measured(given, [whole])
    for size in (1, 3, 4):
        assert tiny_run.distance(measured(given, tiny_run.microbatches(whole, size)), plain) < 1e-5
    assert tiny_run.distance(measured(given, [tiny_run.packed(whole)]), plain) < 1e-5
    halves = [measured(given, tiny_run.microbatches(whole, 4, rank, 2)) for rank in (0, 1)]
    mean = {name: (halves[0][name] + halves[1][name]) / 2 for name in plain}
    assert tiny_run.distance(mean, plain) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_one_compiled_graph_serves_all_blocks_and_sizes_and_has_the_same_masks(packed: bool) -> None:
    given, counter = settings(KINDS[1], activation_checkpointing="full"), CompileCounterWithBackend("aot_eager")
    model = adapted(given)
    apply_activation_checkpointing(model.blocks, given.train)
    compile_blocks(model.blocks, counter)  # type: ignore[arg-type]
    for step in (0, 1, 2):
        pieces = tiny_run.microbatches(tiny_run.global_batch(step), 3)
        pieces = [tiny_run.packed(piece) for piece in pieces] if packed else pieces
        assert tiny_run.distance(measured(given, pieces, model), measured(settings(KINDS[1]), pieces)) < 1e-5
    assert counter.frame_count == 2, "the first block's input has no gradient"


def test_every_visit_and_every_layer_has_another_mask_of_the_share() -> None:
    hashes, mask, x = [11, 2**64 - 1], torch.ones(2, 6, dtype=torch.bool), torch.ones(2, 256, 512)
    rows = rows_of(hashes, mask, None)
    drawn = [sample_dropout(x, share, columns_of(name, 512), rows) for name in "ab" for share in (0.1, 0.5)]
    for share, kept in zip((0.1, 0.5) * 2, drawn, strict=True):
        for dims in ((0, 1, 2), (0, 1), (0, 2)):
            assert torch.all(
                (1 - kept.mean(dims) - share).abs() < 6 * (share / (x.numel() / kept.mean(dims).numel())) ** 0.5
            )
    for one, other in ((drawn[1], drawn[3]), (drawn[1][0], drawn[1][1]), (drawn[1][0, :-1], drawn[1][0, 1:])):
        assert (one - 0.5).mul(other - 0.5).mean().abs() < 0.25 * 6 / one.numel() ** 0.5
    again = sample_dropout(x[1:], 0.5, columns_of("a", 512), rows_of(hashes[1:], mask[1:], None))
    assert torch.equal(again[0], drawn[1][1])


def test_the_share_may_change_from_run_to_run_and_from_resume_to_resume(tmp_path: Path) -> None:
    lines = list[str]()
    adapter = {"rank": 2, "targets": ["attn2.to_k"]}
    fit_tiny(tiny_run.config(tmp_path / "one", steps=1, adapter=adapter))
    other = {"steps": 2, "adapter": {**adapter, "dropout": 0.5}}
    fit_tiny(tiny_run.config(tmp_path / "next", **other), origin=tmp_path / "one")
    report = fit_tiny(tiny_run.config(tmp_path / "one", **other), resume="auto", log=lines.append)
    assert report.checkpoint is not None
    assert (read_document(report.checkpoint).adapter or {})["dropout"] == 0.5
    assert any("train.adapter.dropout" in line for line in lines)


def test_nothing_is_dropped_outside_of_training() -> None:
    given, batch = settings(KINDS[0]), tiny_run.global_batch(1)
    model, without = adapted(given), adapted(settings({**KINDS[0], "dropout": 0.0}))
    outputs = []
    for each in (model, without):
        step = tiny_run.train_step(each.eval(), given.train)
        outputs.append(step.model.losses([step.prepare(batch, 0.5)], step.loss)[0])
    assert torch.equal(*outputs)
