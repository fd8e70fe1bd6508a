"""Preference pairs: the loss against an independent computation, strategies, resume, the stop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sana_pipe.base.launch import Launch
from sana_pipe.base.layer_classes import without_adapter
from sana_pipe.config import Config
from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import adapter_of
from sana_pipe.train.models.config import FlowConfig
from sana_pipe.train.parallel.parallelize import ParallelModel
from sana_pipe.train.training import metrics
from sana_pipe.train.training.assemble import objective_of
from sana_pipe.train.training.config import PreferConfig
from sana_pipe.train.training.objectives import StepLoss
from sana_pipe.train.training.objectives.prefer import Preferring
from sana_pipe.train.training.trainer import fit
from tests.support.checkpoints import load_model_state
from tests.support.workers import tiny_run

BETA = 4.0
"""Larger ones multiply the rounding of fp32 predictions."""


def settings(folder: Path | str = "unused", **train: Any) -> Config:
    usual = {"adapter": {"rank": 2}, "prefer": {"beta": BETA, "anchor": 0.5, "stop": None}, "optim": {"lr": 1e-2}}
    return tiny_run.config(folder, **{**usual, **train})


def pairs(step: int) -> Batch:
    batch = tiny_run.global_batch(step)
    generator = torch.Generator().manual_seed(step)
    rejected = torch.randn(batch.latents.shape, generator=generator).bfloat16()
    return replace(batch, pictures={"rejected": rejected}, pair_weight=torch.rand(8, generator=generator) + 0.5)


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def adapted(given: Config) -> torch.nn.Module:
    model = tiny_run.model(given)
    adapter = adapter_of(given.train, model.config)  # type: ignore[arg-type]
    assert adapter is not None
    adapter.apply(model)
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    return model


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_loss_is_that_of_an_independent_fp64_computation(packed: bool, kind: str) -> None:
    given = settings(adapter={"kind": kind, "rank": 2})
    model, objective, batch = adapted(given), objective_of(given.train), pairs(0)
    prepared = objective.prepare(tiny_run.packed(batch) if packed else batch, same, torch.float32)
    rows = ParallelModel(model).losses([prepared], StepLoss(objective))[0]
    model.double()
    flow = Preferring(FlowConfig(), PreferConfig()).flow
    sigma, times = flow.sigmas(batch.logit)
    assert batch.pair_weight is not None
    weight, noise, level = batch.pair_weight.double(), batch.noise.double(), sigma.double().view(-1, 1, 1, 1)

    def errors(latents: torch.Tensor) -> torch.Tensor:
        noised = (1 - level) * latents.double() + level * noise
        shown = model(latents=noised, captions=batch.captions.double(), mask=batch.mask, timesteps=times)
        return (shown - (noise - latents.double())).square().mean((1, 2, 3))

    with torch.no_grad():
        w, lost = errors(batch.latents), errors(batch.pictures["rejected"])
        with without_adapter(model):
            w_base, lost_base = errors(batch.latents), errors(batch.pictures["rejected"])
    inside = -BETA / 2 * ((w - w_base) - (lost - lost_base))
    prefer, anchor = weight * torch.log1p(torch.exp(-inside)), weight * BETA / 2 * torch.clamp(w - w_base, min=0)
    assert bool((w > w_base).any()) and float((inside.abs()).max()) > 1e-2
    found = dict(zip(["total", *objective.parts], rows.double(), strict=True))
    expected = {"total": prefer + 0.5 * anchor, "prefer": prefer, "anchor": anchor, "margin": inside / (BETA / 2)}
    expected |= {"chosen": w, "rejected": lost, "chosen_reference": w_base, "accuracy": (inside > 0).double()}
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-5, msg=name)
    assert float((found["total"].mean() - expected["total"].mean()).abs() / expected["total"].mean()) < 1e-6


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_accumulation_changes_no_gradient(dropout: float) -> None:
    batch, results = pairs(0), []
    for size in (8, 3):
        given = settings(microbatch=size, adapter={"rank": 2, "dropout": dropout})
        pieces = [tiny_run.part(batch, at, min(at + size, 8)) for at in range(0, 8, size)]
        results.append(tiny_run.gradients(adapted(given), given, pieces))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert tiny_run.distance(results[1][2], results[0][2]) < 1e-4


def run(folder: Path, steps: int, resume: str | None = "auto", **train: Any) -> list[str]:
    given, lines = settings(folder, steps=steps, **{"save_every": 2, **train}), list[str]()
    task = tiny_run.task(given, touch=pairs)
    if given.train.validation is not None:
        held = [(pairs(1000), 8)]
        task = replace(
            task, validation=lambda layout: [(tiny_run.part(b, at, at + 4), 4) for b, _ in held for at in (0, 4)]
        )
    fit(given.train, task, Launch(), resume=resume, log=lines.append)
    return lines


def test_a_resumed_run_is_the_uninterrupted_one_bitwise_and_recomputation_changes_no_loss(tmp_path: Path) -> None:
    run(tmp_path / "one", 4)
    run(tmp_path / "stopped", 2)
    run(tmp_path / "stopped", 4)
    rows = [metrics.read(tmp_path / name / "metrics.jsonl") for name in ("one", "stopped")]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    assert rows[0][0]["parts"]["accuracy"] == 0 < rows[0][-1]["parts"]["accuracy"], "B is zero at first"
    run(tmp_path / "recomputed", 4, microbatch=3, activation_checkpointing="full")
    recomputed = [row["loss"] for row in metrics.read(tmp_path / "recomputed/metrics.jsonl")]
    assert recomputed == pytest.approx([row["loss"] for row in rows[0]], rel=1e-5)
    one, other = (load_model_state(tmp_path / name / "checkpoints/step-00000004")[1] for name in ("one", "stopped"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_goes_too_far_ends_with_a_message_and_a_checkpoint(tmp_path: Path) -> None:
    rising = {"optim": {"lr": 0.05}, "validation": {"every": 2}}
    lines = run(tmp_path / "ends", 40, prefer={"beta": 200.0, "anchor": 0.0, "stop": 0.05}, **rising)
    ended = next(line for line in lines if line.startswith("ended after step"))
    step = int(ended.split()[3].rstrip(":"))
    assert step < 40 and "train.prefer.stop" in ended and (tmp_path / f"ends/checkpoints/step-{step:08d}").exists()
    rows = metrics.read_events(tmp_path / "ends/metrics.jsonl", events_only=True)["validation"]
    reasons = [Preferring(FlowConfig(), PreferConfig()).why_end([row["parts"] for row in rows[:n]]) for n in (-1, None)]
    assert rows[-1]["step"] == step and reasons[0] is None and reasons[1] is not None and reasons[1] in ended
    goes_on = run(tmp_path / "ends", step + 4, prefer={"beta": 200.0, "anchor": 0.0, "stop": None}, **rising)
    assert not any(line.startswith("ended") for line in goes_on)


@pytest.mark.parametrize(
    ("accuracies", "loss", "ends"),
    [
        ([0.5, 0.9, 0.8], 1.0, False),
        ([0.5, 0.9, 0.8, 0.9], 1.0, False),
        ([0.5, 0.9, 0.8, 0.9, 0.8, 0.7], 1.0, True),
        ([0.9], 1.04, False),
        ([0.9], 1.06, True),
    ],
)
def test_the_rule_of_the_stop(accuracies: list[float], loss: float, ends: bool) -> None:
    rows = [{"accuracy": each, "chosen": loss, "chosen_reference": 1.0} for each in accuracies]
    assert (Preferring(FlowConfig(), PreferConfig()).why_end(rows) is not None) == ends
    assert Preferring(FlowConfig(), PreferConfig(stop=None)).why_end(rows) is None


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"adapter": None}, "prefer needs adapter"),
        ({"preserve": {}}, "prefer does not go with preserve"),
        ({"mask": {}}, "prefer does not go with mask"),
        ({"prefer": {}}, "prefer.stop looks at held-out pairs"),
        ({"prefer": {}, "validation": {"every": 3}, "save_every": 2}, "a multiple of save_every"),
    ],
)
def test_what_does_not_go_together_is_refused(train: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate({"adapter": {}, "prefer": {"stop": None}, **train})


def test_a_run_without_pairs_asks_for_none() -> None:
    plain = objective_of(TrainConfig())
    assert plain.pictures == () and not plain.may_end
    assert plain.prepare(tiny_run.global_batch(0), same, torch.float32).reference is None
