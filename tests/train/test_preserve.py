"""Preservation: on a share of the samples the target is the base's prediction, by the same weights without adapter."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sana_pipe.base.errors import ConfigError
from sana_pipe.base.launch import Launch
from sana_pipe.base.layer_classes import without_adapter
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.prompts import newest
from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.parallel.microbatch import REFERENCE, Outputs
from sana_pipe.train.parallel.parallelize import ParallelModel
from sana_pipe.train.training import metrics
from sana_pipe.train.training.assemble import objective_of
from sana_pipe.train.training.build import adapter_of
from sana_pipe.train.training.objectives import StepLoss, visit_chosen
from sana_pipe.train.training.trainer import fit
from tests.support.checkpoints import load_model_state
from tests.support.workers import tiny_run

ROWS = torch.randn(20, tiny_run.TEXT_WIDTH, generator=torch.Generator().manual_seed(5)).bfloat16()


def settings(folder: Path | str = "unused", **train: Any) -> Config:
    usual = {"adapter": {"rank": 2}, "preserve": {"share": 0.5, "prompt": "a dog"}, "optim": {"lr": 1e-2}}
    return tiny_run.config(folder, **{**usual, **train})


def adapted(given: Config) -> nn.Module:
    model = tiny_run.model(given)
    adapter = adapter_of(given.train, model.config)
    assert adapter is not None
    adapter.apply(model)
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    return model


def preserved(batch: Batch, share: float) -> torch.Tensor:
    return visit_chosen(batch, "preserve", share)


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("prompts", [[], [ROWS], [ROWS, 2 * ROWS[:5]]])
def test_targets_are_the_bases_predictions(packed: bool, prompts: list[torch.Tensor]) -> None:
    given = settings()
    model, objective = adapted(given), objective_of(given.train, prompts)
    batch = tiny_run.global_batch(0)
    chosen = preserved(batch, 0.5)
    assert 0 < chosen.sum() < len(chosen)
    results = []
    for each in (batch, tiny_run.packed(batch)) if packed else (batch,):
        microbatch = objective.prepare(each, same, torch.float32)
        total, flow, preserve = result = ParallelModel(model).losses([microbatch], StepLoss(objective))[0]
        assert torch.equal(flow != 0, ~chosen) and torch.equal(preserve != 0, chosen)
        torch.testing.assert_close(total, flow + preserve)
        results.append(result)
    torch.testing.assert_close(results[0], results[-1])
    inputs = objective.prepare(batch, same, torch.float32).inputs
    with torch.no_grad():
        adapted_output = model(**inputs)
        with without_adapter(model):
            base = model(**inputs)
    expected = (adapted_output - base).square().flatten(1).mean(1)
    torch.testing.assert_close(results[0][2][chosen], expected[chosen])
    shown = [rows[mask] for rows, mask in zip(inputs["captions"], inputs["mask"], strict=True)]
    for caption, rows, mask, new in zip(shown, batch.captions, batch.mask, chosen.tolist(), strict=True):
        texts = prompts if new and prompts else [rows[mask]]
        assert any(torch.equal(caption, text.float()) for text in texts)
    drawn = {len(caption) for caption, new in zip(shown, chosen.tolist(), strict=True) if new}
    assert len(prompts) < 2 or drawn == {5, 20}, "each of the prompts is drawn"


def test_no_row_is_selected_by_a_mask_whose_count_the_host_would_read_from_the_gpu() -> None:
    """In `prepare` the inputs are on the device; the host would wait for it in every microbatch."""
    masks: list[torch.Size] = []

    class Selections(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.index.Tensor:
                masks.extend(args[0].shape for each in args[1] if each is not None and each.dtype == torch.bool)
            return func(*args, **(kwargs or {}))

    given, batch = settings(), tiny_run.global_batch(0)
    batches = batch, tiny_run.packed(batch)
    with Selections():
        for prompts in ([], [ROWS]):
            for each in batches:
                objective_of(given.train, prompts).prepare(each, same, torch.float32)
    assert not masks


def test_the_draw_belongs_to_the_sample_and_has_the_share() -> None:
    batch = tiny_run.global_batch(1)
    whole = preserved(batch, 0.5)
    assert torch.equal(whole, torch.cat([preserved(tiny_run.part(batch, n, n + 1), 0.5) for n in range(8)]))
    many = [preserved(tiny_run.global_batch(step), 0.25) for step in range(200)]
    assert float(torch.cat(many).float().mean()) == pytest.approx(0.25, abs=0.04)
    other = replace(batch, logit=batch.logit + 0.1)
    assert not torch.equal(preserved(other, 0.5), whole), "another visit"


def test_validation_measures_the_flow_of_all_samples() -> None:
    given = settings()
    objective, batch = objective_of(given.train, [ROWS]), tiny_run.global_batch(0)
    microbatch = objective.prepare(batch, same, torch.float32, 0.5)
    assert microbatch.reference is None
    plain = objective_of(given.train.model_copy(update={"preserve": None}))
    outputs = Outputs(torch.zeros_like(batch.noise), {}, {})
    losses = objective.losses(outputs, microbatch.targets)
    expected = plain.losses(outputs, plain.prepare(batch, same, torch.float32, 0.5).targets)
    assert torch.equal(losses["flow"], expected["flow"]) and not losses["preserve"].any()


def test_gradients_do_not_reach_the_bases_prediction_and_the_adapter_is_on_again() -> None:
    given = settings()
    model, objective = adapted(given), objective_of(given.train, [ROWS])
    microbatch = objective.prepare(tiny_run.global_batch(0), same, torch.float32)
    seen = []

    def loss(outputs: Outputs, targets: Any) -> torch.Tensor:
        seen.append((outputs.prediction.requires_grad, targets[REFERENCE].requires_grad))
        return StepLoss(objective)(outputs, targets)

    loss.rows = 3  # type: ignore[attr-defined]
    ParallelModel(model).forward_backward([microbatch], loss, 8)  # type: ignore[arg-type]
    assert seen == [(True, False)]
    assert not any(getattr(part, "adapter_off", False) for part in model.modules())


def test_a_preserved_run_resumes_and_differs_from_a_free_one(tmp_path: Path) -> None:
    def run(name: str, steps: int, **train: Any) -> list[dict[str, Any]]:
        given = settings(tmp_path / name, steps=steps, save_every=2, **train)
        task = replace(tiny_run.task(given), preserved=[ROWS])
        fit(given.train, task, Launch(), resume="auto", log=lambda line: None)
        return metrics.read(tmp_path / name / "metrics.jsonl")

    one = run("one", 6)
    run("stopped", 2)
    assert [row["loss"] for row in run("stopped", 6)] == [row["loss"] for row in one]
    assert one[0]["parts"]["preserve"] < 1e-10 < one[-1]["parts"]["preserve"], "B is zero at first"
    run("free", 6, preserve=None)
    states = [load_model_state(tmp_path / name / "checkpoints/step-00000006")[1] for name in ("one", "free")]
    assert tiny_run.distance(*states) > 1e-3


def test_prompts_are_those_of_any_set_in_the_cache(small_cache_copy: Path, make_config: Any, tmp_path: Path) -> None:
    import sana_pipe.stages.encode
    import sana_pipe.stages.train

    options = ["train.device=cpu", "train.precision=fp32", "train.steps=2", "train.log_every=1", "train.compile=none"]
    options += ["train.adapter={rank: 2}", "train.preserve={prompt: [A dog, a cat]}"]
    config = make_config(tmp_path, *options)
    with pytest.raises(ConfigError, match=r"'A dog'(.|\n)*sana-pipe encode --prompts") as refused:
        sana_pipe.stages.train.run(config, log=lambda line: None)
    (tmp_path / "prompts.txt").write_text("a bird\na tree\n")
    sana_pipe.stages.encode.run(make_config(tmp_path), None, prompts=str(tmp_path / "prompts.txt"))
    drawn = newest(Cache(config.cache), "prompts")
    (tmp_path / "preserve.txt").write_text("a dog\na cat\n")
    words = shlex.split(str(refused.value.fix).partition(", ")[0].replace("FILE", str(tmp_path / "preserve.txt")))
    asked = dict(zip(words[2::2], words[3::2], strict=True))
    assert words[:2] == ["sana-pipe", "encode"] and asked.keys() == {"--prompts", "--prompts-name"}
    sana_pipe.stages.encode.run(
        make_config(tmp_path), None, prompts=asked["--prompts"], prompts_name=asked["--prompts-name"]
    )
    assert drawn == newest(Cache(config.cache), "prompts"), "the fix leaves the prompts that are drawn"
    sana_pipe.stages.train.run(config, log=lambda line: None)
    rows = metrics.read(tmp_path / "run/metrics.jsonl")
    assert [sorted(row["parts"]) for row in rows] == [["flow", "preserve"]] * 2


@pytest.mark.slow
def test_compiled_it_is_the_same_and_needs_few_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sana_pipe.train.parallel.parallelize.COMPILE_BACKEND", "aot_eager")
    losses = []
    for how in ("none", "block"):
        given = settings(tmp_path / how, steps=4, compile=how)
        fit(given.train, replace(tiny_run.task(given), preserved=[ROWS]), Launch(), log=lambda line: None)
        losses.append([row["loss"] for row in metrics.read(tmp_path / how / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_preserve_without_adapter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"preserve needs adapter: .*; set preserve: null"):
        TrainConfig.model_validate({"preserve": {}})
