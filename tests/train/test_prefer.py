"""Preference pairs: the loss against an independent computation, strategies, resume, the stop."""

from __future__ import annotations

import json
import signal
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
from sana_pipe.train.training import checkpoint, metrics
from sana_pipe.train.training.assemble import objective_of
from sana_pipe.train.training.config import PreferConfig
from sana_pipe.train.training.objectives import StepLoss
from sana_pipe.train.training.objectives.prefer import Preferring
from sana_pipe.train.training.trainer import fit
from tests.support.checkpoints import load_model_state
from tests.support.forked import Forked
from tests.support.runs import same_checkpoints
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


def expected(
    model: torch.nn.Module, batch: Batch, beta: float, share: float
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The losses by name in fp64, (b,) each, and beta/2 times the margins. share: `anchor` of the configuration."""
    sigma, times = Preferring(FlowConfig(), PreferConfig()).flow.sigmas(batch.logit)
    assert batch.pair_weight is not None
    weight, noise, level = batch.pair_weight.double(), batch.noise.double(), sigma.double().view(-1, 1, 1, 1)

    clean = torch.cat([batch.latents, batch.pictures["rejected"]]).double()
    noised = (1 - level).repeat(2, 1, 1, 1) * clean + (level * noise).repeat(2, 1, 1, 1)
    twice = batch.captions.double().repeat(2, 1, 1), batch.mask.repeat(2, 1), times.repeat(2)

    def errors() -> tuple[torch.Tensor, torch.Tensor]:
        """Of both pictures in one call: parts of the model compute in fp32, whose rounding depends on the batch."""
        shown = model(latents=noised, captions=twice[0], mask=twice[1], timesteps=twice[2])
        squares = (shown - (noise.repeat(2, 1, 1, 1) - clean)).square()
        return squares[:8].mean((1, 2, 3)), squares[8:].mean((1, 2, 3))

    with torch.no_grad():
        w, lost = errors()
        with without_adapter(model):
            w_base, lost_base = errors()
    inside = -beta / 2 * ((w - w_base) - (lost - lost_base))
    prefer = weight * torch.log1p(torch.exp(-inside))
    anchor = weight * beta / 2 * torch.clamp(w - w_base, min=0)
    values = {"total": prefer + share * anchor, "prefer": prefer, "anchor": anchor, "margin": inside / (beta / 2)}
    values |= {"chosen": w, "rejected": lost, "chosen_reference": w_base, "rejected_reference": lost_base}
    return values | {"accuracy": (inside > 0).double()}, inside


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_loss_of_fp32_predictions_is_that_of_an_independent_fp64_computation(packed: bool, kind: str) -> None:
    given = settings(adapter={"kind": kind, "rank": 2})
    model, objective, batch = adapted(given), objective_of(given.train), pairs(0)
    prepared = objective.prepare(tiny_run.packed(batch) if packed else batch, same, torch.float32)
    rows = ParallelModel(model).losses([prepared], StepLoss(objective))[0]
    wanted, inside = expected(model.double(), batch, BETA, 0.5)
    assert bool((wanted["anchor"] > 0).any()) and float((inside.abs()).max()) > 1e-2
    found = dict(zip(["total", *objective.parts], rows.double(), strict=True))
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-5, msg=name)
    assert float((found["total"].mean() - wanted["total"].mean()).abs() / wanted["total"].mean()) < 1e-6


@pytest.mark.parametrize("anchor", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("beta", [1.0, PreferConfig().beta, 20_000.0])
def test_the_loss_of_each_pair_is_exact_at_any_beta(beta: float, anchor: float) -> None:
    """To 1e-6, of fp64 predictions. Latents and noise are multiples of 1/16, noise levels of 1/4: noised latents are
    exact in fp32."""
    given = settings(prefer={"beta": beta, "anchor": anchor, "stop": None})
    model, objective, batch = adapted(given).double(), objective_of(given.train), pairs(8)
    logit = torch.logit(torch.tensor([0.1005, 0.2505, 0.5005]))[torch.arange(8) % 3]
    latents, rejected, noise = (
        each.mul(16).round().div(16) for each in (batch.latents, batch.pictures["rejected"], batch.noise)
    )
    batch = replace(batch, latents=latents, pictures={"rejected": rejected}, noise=noise, logit=logit)
    rows = ParallelModel(model).losses([objective.prepare(batch, same, torch.float64)], StepLoss(objective))[0]
    wanted, inside = expected(model, batch, beta, anchor)
    assert bool((inside > 0).any()) and bool((inside < 0).any()) and (beta == 1 or float(inside.abs().max()) > 10)
    assert bool((wanted["chosen"] > wanted["chosen_reference"]).any())
    found = dict(zip(["total", *objective.parts], rows.double(), strict=True))
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=1e-6, atol=1e-12, msg=name)


@pytest.mark.parametrize("beta", [BETA, PreferConfig().beta])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accumulation_changes_no_gradient(dtype: torch.dtype, dropout: float, beta: float) -> None:
    """To 1e-5 in fp64. In fp32 products of 6 and of 16 samples round differently, 2e-5 of the gradient."""
    batch, results = pairs(0), []
    for size in (8, 3):
        prefer = {"beta": beta, "anchor": 0.5, "stop": None}
        given = settings(microbatch=size, adapter={"rank": 2, "dropout": dropout}, prefer=prefer)
        model = adapted(given).to(dtype)
        step, loss = tiny_run.train_step(model, given.train), StepLoss(objective_of(given.train))
        step.dtype = dtype
        pieces = [step.prepare(tiny_run.part(batch, at, min(at + size, 8))) for at in range(0, 8, size)]
        losses = torch.cat([rows[0] for rows in ParallelModel(model).forward_backward(pieces, loss, 8)])
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((losses, gradients))
    assert len(results[0][1]) == sum(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5 if dtype == torch.float64 else 1e-2)
    assert tiny_run.distance(results[1][1], results[0][1]) < (1e-5 if dtype == torch.float64 else 1e-4)


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


@pytest.mark.fault
@pytest.mark.parametrize("point", ["written", "renamed"])
def test_a_run_that_is_killed_and_resumed_is_the_uninterrupted_one_bitwise(point: str, tmp_path: Path) -> None:
    """SIGKILL while the checkpoint of step 4 is saved, before it is published and after."""
    changes = {"adapter": {"rank": 2}, "prefer": {"beta": BETA, "stop": None}}
    killed = Forked(str(tmp_path / "killed"), point, json.dumps(changes), worker="killed_while_saving")
    assert killed.wait(120) == -signal.SIGKILL
    left = checkpoint.newest(tmp_path / "killed/checkpoints")
    assert left is not None and left.name == f"step-{2 if point == 'written' else 4:08d}"
    for name in ("killed", "one"):
        given = tiny_run.config(tmp_path / name, steps=6, save_every=2, **changes)
        assert fit(given.train, tiny_run.task(given), Launch(), resume="auto", log=lambda line: None).step == 6
    last = "checkpoints/step-00000006"
    assert same_checkpoints(tmp_path / "one" / last, tmp_path / "killed" / last)
    rows = [metrics.read(tmp_path / name / "metrics.jsonl") for name in ("one", "killed")]
    assert [row["parts"] for row in rows[0]] == [row["parts"] for row in rows[1]]


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


def test_the_stop_looks_at_the_last_validation_by_the_share_that_is_set() -> None:
    losses = [1.2, 1.08, 1.12]  # the first is above, and is over
    rows = [{"accuracy": 0.5, "chosen": loss, "chosen_reference": 1.0} for loss in losses]
    stops = [Preferring(FlowConfig(), PreferConfig(stop=share)) for share in (0.1, 0.15)]
    assert [[stop.why_end(rows[:n]) is not None for n in (1, 2, 3)] for stop in stops] == [
        [True, False, True],
        [True, False, False],
    ]


def test_a_validation_that_is_not_finite_ends_no_run_and_is_no_accuracy() -> None:
    objective = Preferring(FlowConfig(), PreferConfig())
    finite = {"accuracy": 0.9, "chosen": 1.0, "chosen_reference": 1.0}
    assert objective.why_end([finite, {"accuracy": None, "chosen": None, "chosen_reference": 1.0}]) is None
    assert objective.why_end([{**finite, "accuracy": None}, finite]) is None
    assert objective.why_end([finite, {**finite, "accuracy": None}, {**finite, "accuracy": None}]) is not None


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"adapter": None}, "prefer needs adapter"),
        ({"preserve": {}}, "prefer does not go with preserve"),
        ({"mask": {}}, "prefer does not go with mask"),
        ({"controlnet": {}}, "prefer does not go with controlnet"),
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
    assert objective_of(settings().train).pictures == ("rejected",)


@pytest.mark.parametrize(("pays", "samples"), [(False, [8]), (True, [16, 16])])
def test_only_a_run_of_pairs_computes_a_second_pass(pays: bool, samples: list[int]) -> None:
    """Samples of each forward pass of a step: chosen and rejected pictures for the base, then with the adapter."""
    given = settings(microbatch=8) if pays else settings(microbatch=8, prefer=None)
    model, seen = adapted(given), list[int]()
    model.register_forward_pre_hook(lambda _, args, inputs: seen.append(len(inputs["latents"])), with_kwargs=True)
    tiny_run.train_step(model, given.train)([pairs(0)], 1)
    assert seen == samples
