"""Preference pairs: the loss against an independent computation, strategies, resume, the stop."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor

from sana_pipe.base.errors import ConfigError
from sana_pipe.base.launch import Launch
from sana_pipe.base.layer_classes import without_adapter
from sana_pipe.config import Config
from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import adapter_of
from sana_pipe.train.models.config import FlowConfig
from sana_pipe.train.parallel.mesh import open_mesh
from sana_pipe.train.parallel.parallelize import ParallelModel, blocks_of
from sana_pipe.train.training import build, checkpoint, metrics
from sana_pipe.train.training.assemble import Trainable, assemble, objective_of
from sana_pipe.train.training.config import PreferConfig
from sana_pipe.train.training.metadata_reader import CheckpointError, read_metadata
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


def run(
    folder: Path, steps: int, resume: str | None = "auto", origin: Path | None = None, phase: int = 0, **train: Any
) -> list[str]:
    given, lines = settings(folder, steps=steps, **{"save_every": 2, **train}), list[str]()
    task = tiny_run.task(given, touch=pairs, phase=phase)
    if given.train.validation is not None:
        held = [(pairs(1000), 8)]
        task = replace(
            task, validation=lambda layout: [(tiny_run.part(b, at, at + 4), 4) for b, _ in held for at in (0, 4)]
        )
    fit(given.train, task, Launch(), resume=resume, origin=origin, log=lines.append)
    return lines


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return metrics.read(folder / "metrics.jsonl")


LAST = "checkpoints/step-00000004"
WHOLE: dict[str, Any] = {"adapter": None}
PARTS: dict[str, dict[str, Any]] = {"lora": {}, "whole": WHOLE, "only": {**WHOLE, "only": ["attn2"]}}
PARTS["whole, bf16"] = {**WHOLE, "precision": "bf16"}


def reference_losses(weights: dict[str, torch.Tensor] | None, steps: range) -> list[float]:
    """The loss of the chosen pictures that the parameters of a model have; None: the start weights."""
    model, flow = tiny_run.model(settings()), Preferring(FlowConfig(), PreferConfig()).flow
    if weights is not None:
        model.load_state_dict(weights)
    losses = []
    for batch in map(pairs, steps):
        sigma, times = flow.sigmas(batch.logit)
        noised, captions = flow.noised(batch.latents.float(), batch.noise, sigma), batch.captions.float()
        with torch.no_grad():
            shown = model(latents=noised, captions=captions, mask=batch.mask, timesteps=times)
        losses.append(float((shown - (batch.noise - batch.latents.float())).square().mean()))
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_whole_model_is_compared_with_its_start_weights(tmp_path: Path, precision: str) -> None:
    """At the first step policy and reference are equal to the bit: the loss is the mean weight times log 2. Edits: no
    `copy_to_reference` in `build`; `self.module` in place of `self.reference` in `ParallelModel._predict_base`."""
    run(tmp_path, 4, **WHOLE, precision=precision)
    rows, weight = rows_of(tmp_path), pairs(0).pair_weight
    assert weight is not None
    assert rows[0]["loss"] == pytest.approx(float(weight.mean()) * math.log(2), rel=1e-6)
    parts = {name: [row["parts"][name] for row in rows] for name in rows[0]["parts"]}
    assert parts["margin"][0] == parts["accuracy"][0] == parts["anchor"][0] == 0
    assert parts["chosen"][0] == parts["chosen_reference"][0] and parts["margin"][-1] > 0
    within = 1e-5 if precision == "fp32" else 1e-2
    assert parts["chosen_reference"] == pytest.approx(reference_losses(None, range(4)), rel=within)
    document = checkpoint.read_document(tmp_path / LAST)
    assert document.adapter is None and document.base is not None
    held = read_metadata(tmp_path / LAST / ".metadata").state_dict_metadata
    assert {name.partition(".")[0] for name in held} == {"model", "optim"}, "the reference is model.weights"


@pytest.mark.parametrize("part", PARTS)
def test_a_run_that_begins_from_another_keeps_its_reference(tmp_path: Path, part: str) -> None:
    """The whole model's is what the other run has trained, an adapter's the base; resumed without the other run.

    Edits: no `copy_to_reference` in `build._begin`; no `reference` in `TrainingRun.sections`."""
    run(tmp_path / "first", 4, **PARTS[part])
    begins: dict[str, Any] = {"origin": tmp_path / "first", "phase": 1, **PARTS[part]}
    run(tmp_path / "one", 4, **begins)
    run(tmp_path / "stopped", 2, **begins)
    (tmp_path / "first").rename(tmp_path / "gone")
    run(tmp_path / "stopped", 4, **begins)
    rows = rows_of(tmp_path / "one")
    assert [row["loss"] for row in rows] == [row["loss"] for row in rows_of(tmp_path / "stopped")]
    one, other = (load_model_state(tmp_path / name / LAST)[1] for name in ("one", "stopped"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    trained = None
    if part != "lora":
        trained = tiny_run.model(settings()).state_dict() | load_model_state(tmp_path / "gone" / LAST)[1]
    expected = reference_losses(trained, range(4))
    within = 1e-2 if part == "whole, bf16" else 1e-5
    assert [row["parts"]["chosen_reference"] for row in rows] == pytest.approx(expected, rel=within)
    assert (rows[0]["parts"]["margin"] == 0) == (part != "lora")


def test_a_run_is_resumed_with_the_reference_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "pairs", 2, **WHOLE)
    run(tmp_path / "flow", 2, **WHOLE, prefer=None)
    with pytest.raises(CheckpointError, match="holds no reference"):
        run(tmp_path / "flow", 4, **WHOLE)
    run(tmp_path / "second", 2, origin=tmp_path / "flow", phase=1, **WHOLE, prefer=None)
    with pytest.raises(CheckpointError, match="holds no reference"):
        run(tmp_path / "second", 4, phase=1, **WHOLE)
    monkeypatch.setattr(build, "start_values", lambda weights, seed, spec: spec.initial(7))
    with pytest.raises(CheckpointError, match="another base"):
        run(tmp_path / "pairs", 4, **WHOLE)


def test_the_reference_frees_a_block_before_the_next_and_all_before_the_model_runs() -> None:
    """Also where the model keeps what it has gathered. Edits: `reshard` out of `ParallelModel._predict_base`;
    `reshard_after_forward` out of `parallelize_reference`."""
    given = settings(**WHOLE, precision="bf16", parallel={"offload": "all", "reshard_after_forward": False})
    trainable = Trainable(tiny_run.model(given).config, objective_of(given.train))

    def is_sharded(module: torch.nn.Module) -> bool:
        return all(isinstance(parameter, DTensor) for parameter in module.parameters())

    with open_mesh(Launch(), given.train.parallel, torch.device("cpu")) as mesh:
        module = trainable.module(given.train)
        reference = trainable.reference(module, given.train)
        model, *_ = assemble(trainable, module, mesh, given.train, torch.device("cpu"), reference=reference)
        assert model.reference is not None
        first, *_, last = blocks_of(model.reference.module)
        seen = list[bool]()
        last.register_forward_pre_hook(lambda *_: seen.append(is_sharded(first)))
        model.module.register_forward_pre_hook(lambda *_: seen.append(is_sharded(model.reference.module)))  # type: ignore[union-attr]
        model.losses([trainable.objective.prepare(pairs(0), same, torch.bfloat16)], StepLoss(trainable.objective))
        assert seen == [True, True] and not is_sharded(model.module)


@pytest.mark.parametrize("size", ["tp_size", "pp_size"])
def test_what_divides_matrices_and_blocks_is_refused_by_name(size: str) -> None:
    given = settings(**WHOLE, parallel={size: 2})
    with pytest.raises(ConfigError, match=f"train.prefer.*train.parallel.{size}"):
        Trainable(tiny_run.model(given).config, objective_of(given.train)).module(given.train)


@pytest.mark.parametrize("part", ["lora", "whole"])
def test_a_resumed_run_is_the_uninterrupted_one_bitwise_and_recomputation_changes_no_loss(
    tmp_path: Path, part: str
) -> None:
    run(tmp_path / "one", 4, **PARTS[part])
    run(tmp_path / "stopped", 2, **PARTS[part])
    run(tmp_path / "stopped", 4, **PARTS[part])
    rows = [metrics.read(tmp_path / name / "metrics.jsonl") for name in ("one", "stopped")]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    assert rows[0][0]["parts"]["accuracy"] == 0 < rows[0][-1]["parts"]["accuracy"], "the model is the base at first"
    run(tmp_path / "recomputed", 4, microbatch=3, activation_checkpointing="full", **PARTS[part])
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


@pytest.mark.slow
@pytest.mark.parametrize("part", ["lora", "whole"])
def test_compiled_blocks_learn_what_others_do(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edit: a reference that is not compiled (`parallelize_reference`)."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr("sana_pipe.train.parallel.parallelize.COMPILE_BACKEND", counter)
    losses = {}
    for how in ("none", "block"):
        run(tmp_path / how, 2, **PARTS[part], compile=how, layers=1)
        losses[how] = [row["loss"] for row in rows_of(tmp_path / how)]
    assert losses["block"] == pytest.approx(losses["none"], rel=1e-5)
    if part == "whole":
        assert counter.frame_count == 4, "blocks and conditions, with gradients and of the reference"


def test_a_run_that_goes_too_far_ends_with_a_message_and_a_checkpoint(tmp_path: Path) -> None:
    rising = {"optim": {"lr": 0.05}, "validation": {"every": 2}}
    lines = run(tmp_path / "ends", 40, prefer={"beta": 200.0, "anchor": 0.0, "stop": 0.05}, **rising)
    ended = next(line for line in lines if line.startswith("ended after step"))
    step = int(ended.split()[3].rstrip(":"))
    assert step < 40 and "train.prefer.stop" in ended and (tmp_path / f"ends/checkpoints/step-{step:08d}").exists()
    rows = metrics.read_events(tmp_path / "ends/metrics.jsonl", events_only=True)["validation"]
    objective = Preferring(FlowConfig(), PreferConfig(anchor=0.0))
    reasons = [objective.why_end([row["parts"] for row in rows[:n]]) for n in (-1, None)]
    assert rows[-1]["step"] == step and reasons[0] is None and reasons[1] is not None and reasons[1] in ended
    again = run(tmp_path / "ends", 40, prefer={"beta": 200.0, "anchor": 0.0, "stop": 0.05}, **rising)
    assert ended in again and not any(line.startswith(("resumed", "training")) for line in again)
    assert len(metrics.read(tmp_path / "ends/metrics.jsonl")) == step
    goes_on = run(tmp_path / "ends", step + 4, prefer={"beta": 200.0, "anchor": 0.0, "stop": None}, **rising)
    assert not any(line.startswith("ended") for line in goes_on)


def validation(accuracy: float | None, loss: float | None = 0.5, chosen: float | None = 1.0) -> dict[str, float | None]:
    """Parts of a validation. loss: `prefer` and `anchor` together."""
    return {
        "prefer": None if loss is None else loss - 0.1,
        "anchor": 0.1,
        "accuracy": accuracy,
        "chosen": chosen,
        "chosen_reference": 1.0,
    }


@pytest.mark.parametrize(
    ("accuracies", "losses", "chosen", "ends"),
    [
        ([0.5, 0.9, 0.8], [0.6, 0.4, 0.5], 1.0, False),
        ([0.5, 0.9, 0.8, 0.9], [0.6, 0.4, 0.5, 0.5], 1.0, False),
        ([0.5, 0.9, 0.8, 0.9, 0.8, 0.7], [0.6, 0.4, 0.5, 0.3, 0.4, 0.4], 1.0, True),
        ([0.5, 0.9, 0.8, 0.7], [0.6, 0.5, 0.4, 0.3], 1.0, False),
        ([0.5, 0.9, 0.8, 0.7], [0.6, 0.5, 0.4, 0.5], 1.0, False),
        ([0.5, 0.9, 0.8, 0.7], [0.6, 0.3, 0.4, 0.4], 1.0, True),
        ([0.5, 0.9, 0.9, 0.9], [0.6, 0.3, 0.4, 0.4], 1.0, False),
        ([0.9], [0.5], 1.04, False),
        ([0.9], [0.5], 1.06, True),
    ],
)
def test_the_rule_of_the_stop(accuracies: list[float], losses: list[float], chosen: float, ends: bool) -> None:
    rows = [validation(*each, chosen) for each in zip(accuracies, losses, strict=True)]
    assert (Preferring(FlowConfig(), PreferConfig()).why_end(rows) is not None) == ends
    assert Preferring(FlowConfig(), PreferConfig(stop=None)).why_end(rows) is None


def test_the_stop_weighs_the_anchor_as_the_training_does() -> None:
    rows = [{**validation(accuracy), "anchor": anchor} for accuracy, anchor in ((0.9, 0.0), (0.8, 0.2), (0.8, 0.2))]
    ends = [Preferring(FlowConfig(), PreferConfig(anchor=share)).why_end(rows) for share in (0.0, 1.0)]
    assert ends[0] is None and ends[1] is not None


def test_the_stop_looks_at_the_last_validation_by_the_share_that_is_set() -> None:
    losses = [1.2, 1.08, 1.12]  # the first is above, and is over
    rows = [validation(0.5, 0.5, loss) for loss in losses]
    stops = [Preferring(FlowConfig(), PreferConfig(stop=share)) for share in (0.1, 0.15)]
    assert [[stop.why_end(rows[:n]) is not None for n in (1, 2, 3)] for stop in stops] == [
        [True, False, True],
        [True, False, False],
    ]


def test_a_validation_that_is_not_finite_ends_no_run_and_is_no_accuracy() -> None:
    objective = Preferring(FlowConfig(), PreferConfig())
    finite, without = validation(0.9), validation(None, None)
    assert objective.why_end([finite, validation(None, None, None)]) is None
    assert objective.why_end([without, finite]) is None
    assert objective.why_end([finite, without, without]) is not None
    other = {"flow": 0.5, "preserve": 0.1}
    assert objective.why_end([other]) is None and objective.why_end([other, finite]) is None


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"adapter": None, "controlnet": {}}, "prefer does not go with controlnet"),
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
    assert objective_of(settings().train).pictures == ("rejected",)


@pytest.mark.parametrize(("pays", "samples"), [(False, [8]), (True, [16, 16])])
def test_only_a_run_of_pairs_computes_a_second_pass(pays: bool, samples: list[int]) -> None:
    """Samples of each forward pass of a step: chosen and rejected pictures for the base, then with the adapter."""
    given = settings(microbatch=8) if pays else settings(microbatch=8, prefer=None)
    model, seen = adapted(given), list[int]()
    model.register_forward_pre_hook(lambda _, args, inputs: seen.append(len(inputs["latents"])), with_kwargs=True)
    tiny_run.train_step(model, given.train)([pairs(0)], 1)
    assert seen == samples
