"""A ControlNet from pictures with control pictures to drawn ones: encode, bucket, train, sample."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.report
import sana_pipe.stages.sample
import sana_pipe.stages.train
from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.config import Config
from sana_pipe.data.cache import prompts
from sana_pipe.data.cache.cache import Cache
from sana_pipe.tools.reporting import controls_and_masks, draw_latents, encoder_process
from sana_pipe.tools.reporting.draw_latents import SnapshotTensors
from sana_pipe.train.models.adapters import adapter_from
from sana_pipe.train.training import checkpoint
from sana_pipe.train.training.base_weights import whole_weights
from tests.support.drawings import draw_prompts
from tests.support.reports import collect
from tests.support.workers.drawings import distance, drawn

pytestmark = pytest.mark.slow
MakeConfig = Callable[..., Config]
OPTIONS = (
    "data.pictures.control.suffix=.control",
    *("train.controlnet.layers=1", "train.steps=2", "train.optim.lr=0.01", "sample.steps=3"),
)
DRAWING = (
    *("bucket.heldout=0.5", "train.validation={every: 2}", "train.pictures={every: 2}"),
    *("train.ema={decay: 0.1}", "train.optim.lr=0.05", "train.precision=fp32"),
)


@pytest.fixture(scope="module")
def trained(make_config: MakeConfig, made_once: Callable[..., Path]) -> Path:
    """A folder with `data`, its `cache` and a `run`. Do not write into it."""

    def make(folder: Path) -> None:
        data, draws = folder / "data", np.random.default_rng(0)
        data.mkdir(parents=True)
        for number in range(12):
            for ending in ("", ".control"):
                pixels = draws.integers(0, 255, (64, 64, 3) if number < 8 else (48, 80, 3), np.uint8)
                Image.fromarray(pixels).save(data / f"{number}{ending}.png")
            (data / f"{number}.txt").write_text(f"picture {number}")
        config = configured(make_config, folder, "train.pictures={every: 2}")
        sana_pipe.stages.encode.run(config, str(data))
        sana_pipe.stages.bucket.run(config)
        sana_pipe.stages.train.run(config)

    return made_once("controlnet", make)


def configured(make_config: MakeConfig, folder: Path, *options: str) -> Config:
    return make_config(folder, *OPTIONS, *options)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


def test_a_control_that_is_no_picture_is_refused_before_anything_is_encoded(
    trained: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_process, "command", lambda *words: pytest.fail("a process was started"))
    config, text, cut = configured(make_config, trained), tmp_path / "text.png", tmp_path / "cut.png"
    text.write_text("no picture")
    cut.write_bytes((trained / "data/3.control.png").read_bytes()[:3000])
    for place in (text, cut, tmp_path, tmp_path / "missing.png"):
        with pytest.raises(UserError, match=f"--control {re.escape(str(place))}: cannot be read") as error:
            sana_pipe.stages.sample.run_prompts(
                config, "auto", ["one"], tmp_path / "out", control=place, height=64, width=64
            )
        assert error.value.found and error.value.fix


def test_captions_are_drawn_with_the_controls_of_their_samples(
    trained: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = configured(make_config, trained)
    result = sana_pipe.stages.sample.run(config, "auto", None, tmp_path / "drawn", 2)
    assert result.count == len(rows(tmp_path / "drawn")) == 2 and result.sheet.is_file()
    sana_pipe.stages.sample.run(config, "auto", None, tmp_path / "off", 2, scale=0.0)
    controlled, base, off = (
        pixels(tmp_path / name) for name in ("drawn/0000.png", "drawn/0000-base.png", "off/0000.png")
    )
    assert (off == base).all() and (controlled != base).any()
    snapshot = Cache(config.cache).open_snapshot()
    while_training = drawn(trained / "run", 2)[1]["controls"]
    assert while_training["snapshot"] == snapshot.id and len(while_training["samples"]) == 8, "nothing is held out"
    chosen = [row["item"] for row in rows(tmp_path / "drawn")]
    at = [snapshot.source_item(row)[1] for row in range(len(snapshot))].index(chosen[0])
    tensors = SnapshotTensors(snapshot)
    control, latent = (tensors.latent(snapshot.sample(at), kind) for kind in ("control", "latent"))
    work = tmp_path / "decoded"
    work.mkdir()
    encoder_process.decode(config, {"control": control, "latent": latent}, work)
    shown = pixels(tmp_path / "drawn/0000-control.png")
    assert (shown == pixels(work / "pictures/control.png")).all()
    assert (shown != pixels(work / "pictures/latent.png")).any()


def test_a_prompt_is_drawn_with_the_control_of_a_file(
    trained: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is cropped and encoded as those of a data set, and both halves of the guidance have it."""
    config, given = configured(make_config, trained), dict[str, Any]()
    real = draw_latents.sample

    def sample(model: Any, texts: Any, null: Any, noise: Any, settings: Any, controls: Any) -> Any:
        def predict(*inputs: torch.Tensor) -> Any:
            given.setdefault("inputs", inputs)
            return model(*inputs)

        given.setdefault("controls", controls)
        return real(predict, texts, null, noise, settings, controls)

    monkeypatch.setattr(draw_latents, "sample", sample)
    file = trained / "data/3.control.png"
    sana_pipe.stages.sample.run_prompts(
        config, "auto", ["one", "two"], tmp_path, control=file, base=False, height=64, width=64
    )
    snapshot = Cache(config.cache).open_snapshot()
    row = [snapshot.source_item(row)[1] for row in range(len(snapshot))].index("3.png")
    stored = SnapshotTensors(snapshot).latent(snapshot.sample(row), "control")
    assert [each.equal(stored) for each in given["controls"]] == [True, True]
    assert len(given["inputs"]) == 5 and len(given["inputs"][4]) == len(given["inputs"][0]) == 4
    assert (tmp_path / "0001-control.png").is_file() and len(rows(tmp_path)) == 2


@pytest.fixture(scope="module")
def drawing(trained: Path, make_config: MakeConfig, made_once: Callable[..., Path]) -> Path:
    """As `trained`, with a held-out part and a run that drew while it trained."""

    def make(folder: Path) -> None:
        for name in ("data", "cache"):
            shutil.copytree(trained / name, folder / name)
        config = configured(make_config, folder, *DRAWING)
        sana_pipe.stages.bucket.run(config)
        sana_pipe.stages.train.run(config)

    return made_once("controlnet-drawing", make)


def test_a_training_draws_held_out_captions_with_the_controls_of_their_samples(
    drawing: Path, make_config: MakeConfig
) -> None:
    """They are what `sample` draws of each caption with the control of its sample, by the averaged weights."""
    config = configured(make_config, drawing, *DRAWING)
    run = Path(config.train.output)
    part = Cache(config.cache).open_snapshot("latest.heldout")
    latents, description = drawn(run, 2)
    assert description["controls"]["snapshot"] == part.id and 2 <= len(description["prompts"]) == len(latents) / 2
    largest = max(range(len(part.buckets)), key=lambda bucket: part.buckets[bucket].samples)
    first, samples = part.row(largest, 0), part.buckets[largest].samples
    assert 0 < samples < len(part), "there are other buckets"
    tensors, set_of_captions = SnapshotTensors(part), prompts.of_snapshot(part, 8, range(first, first + samples))
    assert [part.sample_id(row) for row in set_of_captions.samples] == description["controls"]["samples"]
    assert list(set_of_captions.texts) == description["prompts"]
    stored = checkpoint.ModelTensors(run / "checkpoints/step-00000002", ema=True)
    adapter, shape = adapter_from(stored.document.adapter), tuple(latents["0000"].shape)
    assert adapter is not None
    controls = [tensors.latent(part.sample(row), "control") for row in set_of_captions.samples]
    assert all(latents[f"{number:04d}-control"].equal(control) for number, control in enumerate(controls))

    def plain(number: int, control: torch.Tensor | None) -> dict[str, torch.Tensor]:
        weights = dict(whole_weights(config.model.weights, config.train.seed, stored, 1.0))
        given: Any = (set_of_captions, shape, adapter, control)
        return {"0": draw_prompts(config, stored.architecture, weights, *given)[number]}

    for number, control in enumerate(controls[:2]):
        made = {"0": latents[f"{number:04d}"]}
        assert distance(made, plain(number, control)) <= 1e-5
        assert distance(made, plain(number, controls[1 - number])) > 1e-4
    assert distance({"0": drawn(run, 0)[0]["0000"]}, plain(0, None)) <= 1e-5, "before the first step it is the base"


def test_the_report_has_the_control_next_to_the_result(drawing: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    run = Path(shutil.copytree(drawing / "run", tmp_path / "run"))
    config = configured(make_config, drawing, *DRAWING)
    sana_pipe.stages.sample.watch(config, run, once=True)
    count = len(drawn(run, 2)[1]["prompts"])
    assert len(list(run.glob("pictures/step-00000002/*-control.png"))) == count
    [part] = collect(config, run=run)[0]["run"]["parts"]
    assert [Path(place).name for place in part["pictures"][-1]["controls"]] == [
        f"{number:04d}-control.png" for number in range(count)
    ]
    sana_pipe.stages.report.run(config, tmp_path / "report.html", run=run)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<figcaption>control</figcaption>") == count + controls_and_masks.EXAMPLES


def test_pictures_without_controls_are_refused(
    drawing: Path, make_config: MakeConfig, small_cache_copy: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="these have no control pictures"):
        configured(make_config, drawing, "train.pictures.prompts=mine")
    for options, found in (
        (["train.pictures.size=[65, 64]"], "65x64"),
        (["train.pictures.size=[64, 128]"], "64x128"),
    ):
        with pytest.raises(ConfigError, match="that of a bucket") as error:
            sana_pipe.stages.train.run(configured(make_config, drawing, *DRAWING, *options), resume="auto")
        assert error.value.found == found and "64x64" in str(error.value.expected)
    config = configured(make_config, tmp_path, "train.pictures={every: 1}", "train.validation=null")
    with pytest.raises(ConfigError, match="no control records"):
        sana_pipe.stages.train.run(config.model_copy(update={"cache": str(small_cache_copy)}))


def test_a_control_and_its_model_go_together(
    trained: Path, make_config: MakeConfig, tmp_path: Path, small_cache_copy: Path
) -> None:
    config = configured(make_config, trained)
    with pytest.raises(ConfigError, match="which draws with a control picture") as error:
        sana_pipe.stages.sample.run_prompts(config, "auto", ["one"], tmp_path)
    assert error.value.fix == "--control FILE"
    with pytest.raises(ConfigError, match="has no control pictures"):
        sana_pipe.stages.sample.run(config.model_copy(update={"cache": str(small_cache_copy)}), "auto", None, tmp_path)
