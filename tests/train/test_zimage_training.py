"""A tiny Z-Image and a tiny PRX are trained: resumed, compiled, in two processes; what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.base.gpus import GIB, card
from sana_pipe.base.launch import Launch
from sana_pipe.data.snapshots.config import BucketConfig
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.tools.planning import predict
from sana_pipe.tools.planning.trace import Shape, Traced
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.config import ModelConfig
from sana_pipe.train.models.spec import spec_at
from sana_pipe.train.models.zimage_config import ZImageConfig
from sana_pipe.train.parallel import parallelize
from sana_pipe.train.parallel.mesh import check_sizes
from sana_pipe.train.training import checkpoint, metrics
from sana_pipe.train.training.checks import check_inputs
from sana_pipe.train.training.trainer import fit
from tests.support.checkpoints import load_model_state
from tests.support.launched import run_worker
from tests.support.messages import naming
from tests.support.tiny_zimage import TINY, save
from tests.support.workers import other_models, tiny_run

LAST = "checkpoints/step-00000004"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Start weights, and runs of one process without an interruption."""
    path = tmp_path_factory.mktemp("models")
    other_models.save(path)
    for model, kind in other_models.RUNS:
        other_models.run(other_models.settings(path / model, kind, "one"))
    return path


def losses(place: Path) -> list[float]:
    return [row["loss"] for row in metrics.read(place / "metrics.jsonl")]


def test_buckets_that_the_patches_do_not_divide_are_refused(tmp_path: Path) -> None:
    save(tmp_path)
    given = other_models.settings(tmp_path, "lora", "odd", steps=1)
    task = replace(tiny_run.task(given), compression=8, batches={"32x32": 2, "32x24": 2})
    with pytest.raises(ConfigError, match="multiples of 16"):
        fit(given.train, task, Launch(), log=lambda line: None)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kind"), other_models.RUNS)
def test_a_resumed_run_is_the_uninterrupted_one(folder: Path, model: str, kind: str) -> None:
    folder /= model
    other_models.run(other_models.settings(folder, kind, "stopped", steps=2))
    other_models.run(other_models.settings(folder, kind, "stopped"), resume="auto")
    assert losses(folder / f"{kind}, one") == losses(folder / f"{kind}, stopped")
    one, other = (checkpoint.read_document(folder / f"{kind}, {name}" / LAST).files for name in ("one", "stopped"))
    one.pop(".metadata"), other.pop(".metadata")
    assert one == other


@pytest.mark.slow
def test_training_changes_what_is_trained_and_nothing_else(folder: Path) -> None:
    folder /= "zimage"
    architecture, weights = load_model_state(folder / "full, one" / LAST)
    start = TINY.stored(folder / "transformer")
    before = {name: start.read(name, [0] * len(sides), sides) for name, sides in start.shapes.items()}
    assert architecture == TINY and not any(torch.equal(before[name], weights[name]) for name in weights)
    assert all(row["model_tflops"] > 0 for row in metrics.read(folder / "full, one/metrics.jsonl"))
    assert all("lora_" in name for name in load_model_state(folder / "lora, one" / LAST)[1])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.parametrize("model", other_models.MODELS)
def test_recomputation_changes_no_loss(folder: Path, model: str, mode: str) -> None:
    folder /= model
    given = other_models.settings(folder, "lora", mode, activation_checkpointing=mode)
    other_models.run(given)
    assert losses(folder / f"lora, {mode}") == pytest.approx(losses(folder / "lora, one"), rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", other_models.MODELS)
def test_compiled_it_learns_the_same(folder: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder /= model
    monkeypatch.setattr(parallelize, "COMPILE_BACKEND", "aot_eager")
    other_models.run(other_models.settings(folder, "lora", "compiled", compile="block"))
    assert losses(folder / "lora, compiled") == pytest.approx(losses(folder / "lora, one"), rel=1e-5)


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_two_processes_are_one(folder: Path) -> None:
    run_worker("other_models", folder, processes=2, timeout_s=500)
    for model, kind in other_models.RUNS:
        place = folder / model
        one = losses(place / f"{kind}, one")
        for name in (*other_models.PARALLEL, "resumed"):
            two = losses(place / f"{kind}, {name}")
            assert two == pytest.approx(one[-len(two) :], abs=1e-5), (model, kind, name)
            places = [place / f"{kind}, {run}" / LAST for run in ("one", name)]
            expected, actual = (load_model_state(each)[1] for each in places)
            assert tiny_run.distance(actual, expected) <= 1e-4, (model, kind, name)
        assert losses(place / f"{kind}, bf16") == pytest.approx(one, rel=2e-2), (model, kind)


# ------------------------------------------------------------------------------------------------ before a training


def test_what_does_not_fit_is_refused_before_the_training(tmp_path: Path) -> None:
    save(tmp_path)
    wrong = ({"in_channels": 6}, "in_channels is 6.*4"), ({"cap_feat_dim": 20}, "caption_channels is 20.*24")
    for number, (change, message) in enumerate(wrong):
        shape = ZImageConfig.from_dict({**TINY.to_dict(), **change})
        save(tmp_path / str(number), shape)
        given = other_models.settings(tmp_path / str(number), "lora", "wrong")
        with pytest.raises(ConfigError, match=message):
            other_models.run(given)
    with pytest.raises(ConfigError, match="pp_size"):
        other_models.run(other_models.settings(tmp_path, "full", "divided", parallel={"pp_size": 2}), tiny_launch(2))


def test_captions_and_latents_that_do_not_fit_are_refused_before_the_training(tmp_path: Path) -> None:
    shape = replace(TINY, in_channels=16)
    save(tmp_path, shape)
    given = other_models.settings(tmp_path, "lora", "wrong")
    task = replace(tiny_run.task(given), channels=16, vae_factors=(0.3611, 0.1159), text_rows=224)
    wrong = replace(task, text_rows=225), replace(task, vae_factors=(1.5305, 0.0609))  # the second: SD3's
    for each, names in zip(wrong, (("text.max_length", 224, 225), ("vae.id", 0.3611, 0.0609)), strict=True):
        with pytest.raises(ConfigError, match=naming(*names)):
            fit(given.train, each, Launch(), log=lambda line: None)


def test_checks_before_the_processes_meet_read_no_file_of_the_model(tmp_path: Path) -> None:
    """A file that one process lacks is an error that all of them learn of: it is read where they can tell each
    other."""
    given = other_models.settings(tmp_path, "lora", "absent")
    check_inputs(given.train, tiny_run.task(given), Launch(), lambda line: None)
    with pytest.raises(UserError, match="transformer"):
        other_models.run(given)


def tiny_launch(world: int) -> Any:
    from sana_pipe.base.launch import Launch

    return Launch(rank=0, world=world, local_rank=0, local_world=world)


@pytest.mark.parametrize("place", ["models--Tongyi-MAI--Z-Image-Turbo/snapshots/1", "z_image_turbo"])
def test_a_distilled_base_is_refused_by_its_folder(place: str, tmp_path: Path) -> None:
    save(tmp_path / place)
    with pytest.raises(ConfigError, match="Tongyi-MAI/Z-Image"):
        spec_at(tmp_path / place / "transformer")


def test_a_distilled_base_is_refused_by_the_name_that_diffusers_wrote(tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "transformer/config.json"
    for name, refused in (("Tongyi-MAI/Z-Image-Turbo", True), ("ostris/Z-Image-De-Turbo", False)):
        path.write_text(path.read_text().replace("{", f'{{"_name_or_path": "{name}",', 1))
        if refused:
            with pytest.raises(ConfigError, match="Turbo"):
                spec_at(tmp_path / "transformer")
            save(tmp_path)
        else:
            assert spec_at(tmp_path / "transformer") == TINY


# ------------------------------------------------------------------------------------------------------- predictions


@pytest.mark.slow
def test_a_prediction_extrapolates_over_the_layers_alone() -> None:
    """Refiners are computed, not counted as layers: the same prediction as of the whole model."""
    from sana_pipe.tools.planning import trace

    train = other_models.settings(Path("unused"), "lora", "one").train.model_copy(update={"microbatch": 2})
    shape, layout = Shape(16, 16, 64, 2), check_sizes(train.parallel, 1)
    whole = TINY.with_layers(6)
    found = Traced.of(whole, train, layout, shape, rank=0, on_gpu=True)
    exact = trace.trace(whole, train, layout, shape)
    assert found.total == pytest.approx(exact.total, rel=1e-3)


@pytest.mark.slow
def test_the_released_model_fits_the_cards_that_the_page_names() -> None:
    """docs/training.md; the shape by its name, without network."""
    model = ModelConfig.model_validate({"weights": "Tongyi-MAI/Z-Image"})
    data = predict.Data.configured(model, DataConfig(), BucketConfig(batch=1), 512)
    assert (data.compression, data.channels, data.text_width) == (8, 16, 2560)
    shape = predict.architecture(model, 1024, data)
    assert shape == ZImageConfig()
    for name, mode, expected in (("4090", "selective", 20.2), ("4090", "full", 14.9), ("4060-ti", "full", 14.9)):
        given = {"precision": "bf16", "microbatch": 1, "activation_checkpointing": mode, "adapter": {}}
        machine = predict.Machine(card(name), card(name).memory, 1)
        found = predict.predict(TrainConfig.model_validate(given), shape, data, machine)
        assert found.fits and found.total / GIB == pytest.approx(expected, abs=0.1), (name, mode)
