"""Latents that others have computed: `encode --format latents`."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from PIL import Image

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.train
from sana_pipe.base.errors import RejectRateError, UserError
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.encoders.config import VaeConfig
from sana_pipe.data.encoders.vae import LatentEncoder
from sana_pipe.tools.demo import photographs, small_models

MakeConfig = Callable[..., Config]
SIZES = {"a": (64, 96), "b": (64, 64), "c": (96, 64), "d": (64, 96), "e": (128, 128)}
"""Two of one ratio: a table of ratios could not tell them apart."""


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    """A small VAE whose decoder undoes its encoder about as well as a released one's, and the pictures."""
    root = tmp_path_factory.mktemp("vae")
    pictures = [np.asarray(Image.open(path).convert("RGB")) for path, _ in photographs.demo_photos(root / "photos")]
    small_models.make_vae(root / "vae", pictures, steps=1, sizes=[(64, 64)], lr=1e-12)
    return root, pictures


@pytest.fixture(scope="module")
def latents(vae: tuple[Path, list[np.ndarray]]) -> dict[str, np.ndarray]:
    """Latents of photographs, times the scaling factor, in fp16, as others publish them."""
    encoder = LatentEncoder.load(VaeConfig(id=str(vae[0])), "cpu")
    made = {}
    for (name, (height, width)), picture in zip(SIZES.items(), vae[1], strict=False):
        pixels = np.asarray(Image.fromarray(picture).resize((width, height)))
        bits = encoder.encode(pixels[None])[0]
        made[name] = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy().astype(np.float16)
    return made


def npy(array: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def stated(shape: tuple[int, ...]) -> bytes:
    """A file of a header alone."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def sample(key: str, array: bytes, ending: str = "npy") -> list[tuple[str, bytes]]:
    about = {"prompt": f"a picture called {key}", "width": 1000, "height": 700}
    return [(f"{key}.json", json.dumps(about).encode()), (f"{key}.{ending}", array)]


def published(folder: Path, latents: dict[str, np.ndarray]) -> Path:
    """Two tars; the second has one latent of the first again, and one as safetensors."""
    folder.mkdir()
    first = [member for key in "abc" for member in sample(key, npy(latents[key]))]
    again = sample("a", npy(latents["a"]))
    second = [*again, *sample("d", npy(latents["d"][None])), *sample("e", tensor(latents["e"]), "safetensors")]
    tar(folder / "shard-0000.tar", first)
    tar(folder / "shard-0001.tar", second)
    return folder


def tensor(array: np.ndarray) -> bytes:
    return safetensors.numpy.save({"latent": array})


@pytest.fixture
def settings(make_config: MakeConfig, tmp_path: Path, vae: tuple[Path, list[np.ndarray]]) -> Callable[..., Config]:
    factor = json.loads((vae[0] / "vae/config.json").read_text())["scaling_factor"]

    def make(*more: str) -> Config:
        return make_config(tmp_path, f"vae.id={vae[0]}", f"vae.imported={factor}", "bucket.batch=2", *more)

    return make


def encode(config: Config, data: Path) -> dict[str, Any]:
    return sana_pipe.stages.encode.run(config, str(data), format="latents")


def test_latents_of_others_become_a_snapshot_and_train(
    settings: Callable[..., Config],
    latents: dict[str, np.ndarray],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Values are theirs to a bf16 rounding, buckets their sizes; a latent that occurs twice is one sample."""
    config = settings("bucket.dedup=image", "train.steps=2")
    data = published(tmp_path / "theirs", latents)
    assert encode(config, data)["images"] == 5
    assert "correlation" in capsys.readouterr().out
    assert len(list((tmp_path / "cache/reports").glob("imported-*.png"))) == 1
    sana_pipe.stages.bucket.run(config)
    snapshot = Cache(config.cache).open_snapshot()
    assert len(snapshot) == 5 and snapshot.head.left_out
    assert {(bucket.height, bucket.width): bucket.samples for bucket in snapshot.buckets} == {
        (64, 64): 1, (64, 96): 2, (96, 64): 1, (128, 128): 1,
    }  # fmt: skip
    for row in range(len(snapshot)):
        key = snapshot.source_item(row)[1].rpartition("/")[2][0]
        bits = snapshot.picture(snapshot.sample(row), "latent")
        values = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
        np.testing.assert_allclose(values, latents[key].astype(np.float32), rtol=2**-8, atol=1e-6)
    assert sana_pipe.stages.train.run(config, log=lambda line: None).step == 2
    assert encode(config, data)["new"] == {"images": 0, "captions": 0}
    assert "correlation" not in capsys.readouterr().out, "with nothing new no model is read"


def test_their_encoding_never_passes_for_ours(
    settings: Callable[..., Config], latents: dict[str, np.ndarray], tmp_path: Path, make_config: MakeConfig
) -> None:
    encode(settings(), published(tmp_path / "theirs", latents))
    [encoding] = Cache(tmp_path / "cache").encodings("latent")
    assert encoding.imported is not None  # type: ignore[attr-defined]
    ours = settings("vae.imported=null")
    with pytest.raises(UserError, match="other settings"):
        sana_pipe.stages.bucket.run(ours)
    assert encoding.id != replace(encoding, imported=None).id  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda latent: latent / 3, "standard deviation"),
        (lambda latent: np.concatenate([latent, latent]), "can be of the configured VAE"),
        (lambda latent: np.full_like(latent, np.nan), "none of"),
    ],
)
def test_latents_that_do_not_fit_are_refused(
    settings: Callable[..., Config],
    latents: dict[str, np.ndarray],
    tmp_path: Path,
    change: Callable[[np.ndarray], np.ndarray],
    words: str,
) -> None:
    """Wrong scale, another VAE, other channels, nothing finite. Nothing is committed."""
    data = published(tmp_path / "theirs", {key: change(latent) for key, latent in latents.items()})
    with pytest.raises(UserError, match=words):
        encode(settings(), data)
    assert Cache(tmp_path / "cache").sources() == []


def test_latents_of_another_vae_are_refused(
    settings: Callable[..., Config], latents: dict[str, np.ndarray], tmp_path: Path, tiny_repo: Path
) -> None:
    """Here that of a decoder and an encoder that are strangers to each other."""
    factor = json.loads((tiny_repo / "vae/config.json").read_text())["scaling_factor"]
    with pytest.raises(UserError, match="do not come back") as caught:
        encode(settings(f"vae.id={tiny_repo}", f"vae.imported={factor}"), published(tmp_path / "theirs", latents))
    assert "vae.id" in str(caught.value.fix)


class Executed:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


def test_single_bad_members_are_rejected_by_name_and_nothing_is_executed(
    settings: Callable[..., Config], latents: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "theirs").mkdir()
    torch_file = io.BytesIO()
    torch.save(Executed(), torch_file)
    bad = {
        "p.pth": torch_file.getvalue(),
        "q.npy": npy(np.array([Executed()], object), allow_pickle=True),
        "r.npy": pickle.dumps(Executed()),
        "s.npy": npy(np.where(np.arange(4) == 3, np.nan, 1.0)[None, None] * np.ones((2, 2, 4), np.float32)),
        "t.npy": npy(latents["b"])[:-100],
        "v.npy": stated((10**6, 10**6, 10**6)),
        "u.safetensors": b"\x08\0\0\0\0\0\0\0{",
    }
    members = [member for key in "abcde" for member in sample(key, npy(latents[key]))]
    for name, data in bad.items():
        members += sample(name.partition(".")[0], data, name.partition(".")[2])
    tar(folder / "0.tar", members)
    (folder / "1.tar").write_bytes((folder / "0.tar").read_bytes()[:3000])
    done = encode(settings("encode.max_reject_rate=1"), folder)
    assert done["images"] == 5
    [report] = (tmp_path / "cache/reports").glob("rejects*")
    said = report.read_text()
    assert [name for name in bad if f"0.tar/{name}" not in said] == [] and "1.tar" in said
    assert "pickle" in said and not (tmp_path / "executed").exists()


def test_pictures_are_not_taken_for_latents_nor_the_other_way_round(
    settings: Callable[..., Config], make_config: MakeConfig, latents: dict[str, np.ndarray], tmp_path: Path
) -> None:
    data = published(tmp_path / "theirs", latents)
    with pytest.raises(UserError, match="how they are scaled") as caught:
        encode(make_config(tmp_path), data)
    assert "vae.imported" in str(caught.value.fix)
    photographs.demo_photos(tmp_path / "pictures")
    with pytest.raises(UserError, match="holds pictures"):
        sana_pipe.stages.encode.run(settings(), str(tmp_path / "pictures"))
    with pytest.raises((UserError, RejectRateError)):
        sana_pipe.stages.encode.run(make_config(tmp_path), str(data))
