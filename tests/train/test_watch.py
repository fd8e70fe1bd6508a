"""`sample --watch`: every drawing is decoded once, by the VAE of its latents and without a transformer."""

from __future__ import annotations

import io
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import sana_pipe.stages.sample
from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.base.launch import Gpus
from sana_pipe.config import Config
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.signals import Encoders
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.tools.reporting import run_pictures
from sana_pipe.tools.reporting.run_pictures import Drawing, Watcher
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.training import lock
from tests.support.drawings import draw
from tests.support.foreign_lock import ELSEWHERE, plant
from tests.support.messages import naming

MakeConfig = Callable[..., Config]


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> Config:
    return make_config(tmp_path, "encode.device=cpu")


@pytest.fixture
def encoding(config: Config) -> LatentEncoding:
    return LatentEncoding.wanted(Encoders(config.vae, config.text), config.data, config.encode)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def refuse(*args: object, **options: object) -> None:
    raise AssertionError("this was not to be called")


def decoded(path: Path) -> dict[str, Path | None]:
    made = Drawing.read(path).pictures()
    assert made is not None
    return made


def test_pictures_reach_tensorboard_once_and_a_broken_tracker_ends_nothing(
    config: Config,
    encoding: LatentEncoding,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from accelerate import tracking
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config.with_train(trackers=["tensorboard"])
    first = draw(run, 100, encoding)
    for _ in range(2):
        sana_pipe.stages.sample.watch(config, run, once=True)
    draw(run, 200, encoding)
    sana_pipe.stages.sample.watch(config, run, once=True)
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    names = decoded(first)
    assert events.Tags()["images"] == sorted(f"pictures/{name}" for name in names)
    for name, file in names.items():
        shown = events.Images(f"pictures/{name}")
        assert [image.step for image in shown] == [100, 200]
        with Image.open(io.BytesIO(shown[0].encoded_image_string)) as image, Image.open(str(file)) as picture:
            assert np.array_equal(np.asarray(image), np.asarray(picture))

    monkeypatch.setattr(tracking.TensorBoardTracker, "log_images", refuse)
    capsys.readouterr()
    made = draw(run, 300, encoding)
    sana_pipe.stages.sample.watch(config, run, once=True)
    assert decoded(made) and "tensorboard" in capsys.readouterr().out


def test_each_drawing_is_decoded_once_without_the_transformer(
    config: Config, encoding: LatentEncoding, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SanaTransformer, "__init__", refuse)
    monkeypatch.setattr(encoders.LatentEncoder, "load", refuse)
    paths = [draw(run, 100, encoding), draw(run / "second", 200, encoding)]
    sana_pipe.stages.sample.watch(config, run, once=True)
    decoder = encoders.LatentDecoder.load(config.vae, "cpu")
    for path in paths:
        for name, latent in load_file(path).items():
            picture = decoded(path)[name]
            assert picture == path.with_suffix("") / f"{name}.png"
            assert np.array_equal(np.asarray(Image.open(picture)), decoder.decode(latent[None])[0])
        assert sorted(p.name for p in path.with_suffix("").iterdir()) == ["0000.png", "0001.png", "decoded.json"]
    del decoder

    with monkeypatch.context() as patch:
        patch.setattr(encoders.LatentDecoder, "load", refuse)
        sana_pipe.stages.sample.watch(config, run, once=True)
    before = (paths[0].with_suffix("") / "0000.png").read_bytes()
    draw(run, 100, encoding, seed=1)  # a resumed training has drawn the step again
    assert Drawing.read(paths[0]).pictures() is None, "pictures of another drawing do not count"
    (paths[1].with_suffix("") / "decoded.json").unlink()  # killed before the end
    sana_pipe.stages.sample.watch(config, run, once=True)
    assert (paths[0].with_suffix("") / "0000.png").read_bytes() != before and decoded(paths[0]) and decoded(paths[1])


def test_drawings_of_another_vae_are_refused(
    config: Config, encoding: LatentEncoding, run: Path, tiny_repo: Path, tmp_path: Path
) -> None:
    vae = tmp_path / "other" / "vae"
    vae.mkdir(parents=True)
    for file in (tiny_repo / "vae").iterdir():
        (vae / file.name).write_bytes(file.read_bytes())
    weights = vae / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if name.startswith("encoder."))
    save_file({**tensors, name: tensors[name] + 0.01}, weights)
    other = config.model_copy(update={"vae": config.vae.model_copy(update={"id": str(vae.parent)})})
    path = draw(run, 100, encoding)
    with pytest.raises(ConfigError, match="another VAE") as refused:
        sana_pipe.stages.sample.watch(other, run, once=True)
    assert "weights" in str(refused.value.found) and not path.with_suffix("").exists()
    draw(run, 100, encoding, latent=None)
    with pytest.raises(ConfigError, match="another VAE"):
        sana_pipe.stages.sample.watch(config, run, once=True)


def test_a_latent_that_is_not_finite_has_no_picture(
    config: Config, encoding: LatentEncoding, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = draw(run, 100, encoding)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        described = file.metadata()
    save_file({**tensors, "0000": torch.full_like(tensors["0000"], float("nan"))}, path, described)
    sana_pipe.stages.sample.watch(config, run, once=True)
    assert decoded(path) == {"0000": None, "0001": path.with_suffix("") / "0001.png"}
    assert "0000 has no picture" in capsys.readouterr().out


def test_a_damaged_file_is_named_and_stops_no_other(config: Config, encoding: LatentEncoding, run: Path) -> None:
    good = draw(run, 300, encoding)
    bad = [run / "pictures" / f"step-{step:08d}.safetensors" for step in (100, 200)]
    bad[0].write_bytes(good.read_bytes()[:-100])
    bad[1].write_bytes(b"not safetensors")
    with pytest.raises(UserError) as refused:
        sana_pipe.stages.sample.watch(config, run, once=True)
    assert all(str(path) in str(refused.value.found) for path in bad) and decoded(good)


def test_the_watcher_decodes_what_appears_and_ends_by_a_signal(
    config: Config, encoding: LatentEncoding, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    made: list[bool] = []

    def train() -> None:
        for step in (100, 200):
            path = draw(run, step, encoding)
            for _ in range(3000):
                if Drawing.read(path).pictures() is not None:
                    made.append(True)
                    break
                time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    trainer = threading.Thread(target=train)
    watcher = Watcher(config.vae, run, lambda: torch.device("cpu"), lines.append)
    monkeypatch.setattr(threading, "excepthook", lambda args: os.kill(os.getpid(), signal.SIGTERM))
    loads = []
    real = encoders.LatentDecoder.load
    monkeypatch.setattr(encoders.LatentDecoder, "load", lambda *args: loads.append(1) or real(*args))
    bad = draw(run, 50, encoding)
    bad.write_bytes(b"damaged")
    trainer.start()
    watcher.watch(poll_s=0.02)
    trainer.join()
    assert made == [True, True] and loads == [1], "one decoder for all drawings"
    assert "stopped" in lines[-1] and sum(str(bad) in line for line in lines) == 1, "a file is read once"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_run_without_drawings_is_an_error_with_once(config: Config, run: Path) -> None:
    for _ in ("not there", "empty"):
        with pytest.raises(UserError, match=naming(run, "--watch", "train.pictures")):
            sana_pipe.stages.sample.watch(config, run, once=True)
        run.mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize(
    ("host", "untouched_s", "asked", "taken"),
    [
        (platform.node(), 0, "auto", "cpu"),
        (platform.node(), 0, "cuda:1", "cuda:1"),
        (platform.node(), 3600, "auto", "auto"),
        ("node7", 0, "auto", "auto"),
    ],
)
def test_the_gpu_is_left_to_a_training_that_is_alive_on_this_host(
    host: str, untouched_s: float, asked: str, taken: str, run: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []

    def resolve(name: str, **options: object) -> torch.device:
        chosen.append(name)
        return torch.device("cpu")

    monkeypatch.setattr(run_pictures, "gpus", lambda: Gpus(2))
    monkeypatch.setattr(run_pictures, "resolve_device", resolve)
    monkeypatch.setattr(Watcher, "watch", lambda self, once: self.device())
    config = config.model_copy(update={"encode": config.encode.model_copy(update={"device": asked})})
    plant(run, replace(ELSEWHERE, host=host), untouched_s=untouched_s)
    sana_pipe.stages.sample.watch(config, run)
    below = run / "first"
    below.mkdir()
    (run / lock.NAME).rename(below / lock.NAME)
    sana_pipe.stages.sample.watch(config, run)
    assert chosen == [taken, taken]


def test_a_watcher_leaves_the_gpu_when_a_training_begins(
    run: Path, config: Config, encoding: LatentEncoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edit: the device is asked for once, at the start."""
    loaded: list[str] = []

    def load(vae: object, device: torch.device) -> SimpleNamespace:
        loaded.append(device.type)
        return SimpleNamespace(device=device, decode=lambda latents: np.zeros((1, 8, 8, 3), np.uint8))

    monkeypatch.setattr(run_pictures, "gpus", lambda: Gpus(1))
    monkeypatch.setattr(
        run_pictures, "resolve_device", lambda name, **options: torch.device("cpu" if name == "cpu" else "cuda:0")
    )
    monkeypatch.setattr(encoders.LatentDecoder, "load", load)
    watcher = Watcher(config.vae, run, run_pictures.decoder_device("auto", run, lambda line: None), lambda line: None)
    draw(run, 1, encoding)
    assert watcher.decode_new(threading.Event()) == 1 and loaded == ["cuda"]
    plant(run, replace(ELSEWHERE, host=platform.node()))
    assert watcher.decode_new(threading.Event()) == 0
    assert watcher.decoder is None, "its memory is given back before there is something to decode"
    draw(run, 2, encoding)
    assert watcher.decode_new(threading.Event()) == 1 and loaded == ["cuda", "cpu"]
    (run / lock.NAME).unlink()
    draw(run, 3, encoding)
    watcher.decode_new(threading.Event())
    assert loaded == ["cuda", "cpu"], "the next round may begin"


def test_the_command_that_is_shown_decodes(run: Path) -> None:
    assert run_pictures.decode_command(run) == f"sana-pipe sample --watch {run} --once"
