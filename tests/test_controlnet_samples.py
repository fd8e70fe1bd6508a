"""A ControlNet from pictures with control pictures to drawn ones: encode, bucket, train, sample."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import stages.bucket
import stages.encode
import stages.sample
import stages.train
from pipeline.cache.root import Cache
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.reporting import draw_latents, encoder_process
from pipeline.reporting.draw_latents import SnapshotTensors

MakeConfig = Callable[..., Config]
OPTIONS = (
    "data.pictures.control.suffix=.control",
    *("train.controlnet.layers=1", "train.steps=2", "train.optim.lr=0.01", "sample.steps=3", "sample.count=2"),
)


@pytest.fixture(scope="module")
def trained(make_config: MakeConfig, made_once: Callable[..., Path]) -> Path:
    """A folder with `data`, its `cache` and a `run`. Do not write into it."""

    def make(folder: Path) -> None:
        data, draws = folder / "data", np.random.default_rng(0)
        data.mkdir(parents=True)
        for number in range(8):
            for ending in ("", ".control"):
                pixels = draws.integers(0, 255, (64, 64, 3), np.uint8)
                Image.fromarray(pixels).save(data / f"{number}{ending}.png")
            (data / f"{number}.txt").write_text(f"picture {number}")
        config = configured(make_config, folder)
        stages.encode.run(config, str(data))
        stages.bucket.run(config)
        stages.train.run(config)

    return made_once("controlnet", make)


def configured(make_config: MakeConfig, folder: Path, *options: str) -> Config:
    return make_config(folder, *OPTIONS, *options)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


def test_captions_are_drawn_with_the_controls_of_their_samples(
    trained: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = configured(make_config, trained)
    result = stages.sample.run(config, "auto", None, tmp_path / "drawn")
    assert result.count == len(rows(tmp_path / "drawn")) == 2 and result.sheet.is_file()
    stages.sample.run(config, "auto", None, tmp_path / "off", scale=0.0)
    drawn, base, off = (pixels(tmp_path / name) for name in ("drawn/0000.png", "drawn/0000-base.png", "off/0000.png"))
    assert (off == base).all() and (drawn != base).any()
    snapshot = Cache.of(config).open_snapshot()
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
    stages.sample.run_prompts(config, "auto", ["one", "two"], tmp_path, control=file, base=False, height=64, width=64)
    snapshot = Cache.of(config).open_snapshot()
    row = [snapshot.source_item(row)[1] for row in range(len(snapshot))].index("3.png")
    stored = SnapshotTensors(snapshot).latent(snapshot.sample(row), "control")
    assert [each.equal(stored) for each in given["controls"]] == [True, True]
    assert len(given["inputs"]) == 5 and len(given["inputs"][4]) == len(given["inputs"][0]) == 4
    assert (tmp_path / "0001-control.png").is_file() and len(rows(tmp_path)) == 2


def test_a_control_and_its_model_go_together(
    trained: Path, make_config: MakeConfig, tmp_path: Path, small_cache: Path
) -> None:
    config = configured(make_config, trained)
    with pytest.raises(ConfigError, match="which draws with a control picture") as error:
        stages.sample.run_prompts(config, "auto", ["one"], tmp_path)
    assert error.value.fix == "--control FILE"
    with pytest.raises(ConfigError, match="has no control pictures"):
        stages.sample.run(config.model_copy(update={"cache": str(small_cache)}), "auto", None, tmp_path)
