"""Kinds of VAEs: what they are digested to, and the classes against diffusers' formulas."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
from sana_pipe.base.hub import ModelError
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.encoders.config import VaeConfig
from sana_pipe.data.encoders.frozen import from_bits
from sana_pipe.data.signals.latent import LatentEncoding
from tests.support import tiny_models
from tests.support.constants import set_constants, unit_sizes
from tests.support.messages import naming
from tests.support.trees import files


def test_ids_and_keys_of_earlier_caches(tmp_path: Path) -> None:
    """Recorded before there were kinds."""
    blocks = {"latent_channels": 4, "encoder_block_out_channels": [8, 16, 16, 16], "scaling_factor": 0.5}
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderDC", **blocks}))
    encoder = {"encoder.conv_in.weight": torch.arange(24.0).reshape(2, 3, 2, 2), "encoder.conv_in.bias": torch.ones(2)}
    save_file({**encoder, "decoder.conv_out.bias": torch.arange(3.0)}, tmp_path / "diffusion_pytorch_model.safetensors")
    described = encoders.describe_vae(VaeConfig(id=str(tmp_path)))
    assert described["weights"] == "affb62e1d2ad9cc7bd795f1a51158b1b"
    encoding = LatentEncoding(**described, decoder="pillow-srgb-1", resize="lanczos")
    assert encoding.id == "2a529732a4393e46c6b808df34983a04"
    assert encoding.key(b"0" * 16, 64, 64).hex() == "deddc2fa423f8ecde95be0c27d2af65a"
    assert LatentEncoding().id == "401be2fa2e7d6d86f17fa70561a4ef99"
    values = encoding.values()
    assert "shift_factor" not in values, "the heads of snapshots, so their ids"
    assert LatentEncoding.from_values(values) == encoding
    shifted = LatentEncoding(shift_factor=0.25)
    assert shifted.id != LatentEncoding().id and LatentEncoding.from_values(shifted.values()) == shifted


# ---------------------------------------------------------------- AutoencoderKL

QUANT = {"use_quant_conv": True, "use_post_quant_conv": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build_kl(tmp_path_factory.mktemp("kl"))


@pytest.fixture(scope="module")
def with_quant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build_kl(tmp_path_factory.mktemp("quant"), **QUANT, shift_factor=None, latent_channels=4)


@pytest.fixture
def each(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


both = pytest.mark.parametrize("each", ["folder", "with_quant"], indirect=True)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (2, 24, 40, 3), dtype=np.uint8)


def settings_of(folder: Path, **changes: Any) -> VaeConfig:
    """The configuration for the VAE with other settings in its `config.json`."""
    path = folder / "vae" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return VaeConfig(id=str(folder))


@both
def test_latents_and_pictures_are_those_of_the_pipelines_formula(
    each: Path, images: np.ndarray, one_thread: None
) -> None:
    from diffusers import AutoencoderKL

    whole, config = AutoencoderKL.from_pretrained(each / "vae").eval(), VaeConfig(id=str(each))
    scale, shift = whole.config.scaling_factor, whole.config.shift_factor or 0.0
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 * 2 - 1
    encoder, decoder = encoders.LatentEncoder.load(config, "cpu"), encoders.LatentDecoder.load(config, "cpu")
    with torch.no_grad():
        want = (whole.encode(x).latent_dist.mode() - shift) * scale
        got = encoder.kind.normalise(encoder.kind.encode(encoder.model, x))
        assert (got - want).abs().max() <= 1e-5
        bits = encoder.encode(images)
        assert bits.shape == (2, whole.config.latent_channels, 3, 5) and encoder.compression == 8
        assert (from_bits(bits).float() - want).abs().max() <= want.abs().max() * 2**-8 + 1e-5
        assert np.array_equal(bits, encoder.encode(images)), "the mode, not a sample"
        drawn = whole.decode(want / scale + shift).sample
    drawn = ((drawn / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    assert np.abs(decoder.decode(want).astype(int) - drawn).max() <= 1
    assert np.abs(decoder.decode(want + 0.5).astype(int) - drawn).max() > 1, "the pictures are not all alike"


@both
def test_each_half_holds_no_part_of_the_other(each: Path) -> None:
    config, quant = VaeConfig(id=str(each)), "quant" in each.name
    encoder, decoder = encoders.LatentEncoder.load(config, "cpu"), encoders.LatentDecoder.load(config, "cpu")
    names = [{name.split(".")[0] for name, _ in half.model.named_parameters()} for half in (encoder, decoder)]
    assert names == [
        {"encoder"} | ({"quant_conv"} if quant else set()),
        {"decoder"} | ({"post_quant_conv"} if quant else set()),
    ]


def test_what_decides_a_latent_is_in_its_encoding_and_nothing_else(with_quant: Path, tmp_path: Path) -> None:
    def after(name: str, change: Callable[[dict[str, torch.Tensor]], Any], **settings: Any) -> dict[str, Any]:
        folder = Path(shutil.copytree(with_quant, tmp_path / name))
        path = folder / "vae" / "diffusion_pytorch_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        return encoders.describe_vae(settings_of(folder, **settings))

    def nothing(tensors: dict[str, torch.Tensor]) -> None:
        pass

    def old_names(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".to_q." in name or ".to_out.0." in name]:
            old = name.replace(".to_q.", ".query.").replace(".to_out.0.", ".proj_attn.")
            tensors[old] = tensors.pop(name)

    before = encoders.describe_vae(VaeConfig(id=str(with_quant)))
    assert before == {
        "weights": before["weights"],
        "compression": 8,
        "channels": 4,
        "dtype": "fp32",
        "scaling_factor": 0.3611,
        "shift_factor": 0.0,
        "tiling": False,
    }
    assert after("decoder", lambda t: t["post_quant_conv.weight"].add_(1)) == before
    assert after("notes", nothing, force_upcast=False, sample_size=512) == before
    assert after("old", old_names) == before
    encoders.LatentEncoder.load(VaeConfig(id=str(tmp_path / "old")), "cpu")
    assert after("quant", lambda t: t["quant_conv.bias"].add_(1))["weights"] != before["weights"]
    assert after("groups", nothing, norm_num_groups=2)["weights"] != before["weights"]
    assert after("shift", nothing, shift_factor=0.25) == {**before, "shift_factor": 0.25}


def test_a_file_older_than_the_scale_has_that_of_stable_diffusion(folder: Path, tmp_path: Path) -> None:
    config = settings_of(Path(shutil.copytree(folder, tmp_path / "copy")))
    path = tmp_path / "copy" / "vae" / "config.json"
    stated = json.loads(path.read_text())
    del stated["scaling_factor"]
    path.write_text(json.dumps(stated))
    from diffusers import AutoencoderKL

    unstated = inspect.signature(AutoencoderKL.__init__).parameters["scaling_factor"].default
    assert encoders.describe_vae(config)["scaling_factor"] == unstated == 0.18215


def test_a_batch_is_measured_without_weights(folder: Path) -> None:
    small, large = (encoders.footprint(VaeConfig(id=str(folder)), side, side) for side in (64, 128))
    weights = sum(t.nbytes for t in encoders.LatentEncoder.load(VaeConfig(id=str(folder)), "cpu").model.parameters())
    assert small.weights == weights and 3.5 < large.picture / small.picture < 4.5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}, ("latents_mean", "latents_std", "vae.id")),
        ({"scaling_factor": None}, ("scaling_factor", "None")),
        ({"scaling_factor": float("inf")}, ("scaling_factor", "inf")),
        ({"shift_factor": "0.1"}, ("shift_factor", "0.1")),
        ({"_class_name": "AutoencoderKLWan"}, ("AutoencoderKLWan", "AutoencoderKL", "vae.id", "time")),
        ({"_class_name": "AutoencoderKLQwenImage"}, ("AutoencoderKLQwenImage", "AutoencoderKL", "vae.id", "time")),
        ({"_class_name": "VQModel"}, ("VQModel", "AutoencoderKL", "AutoencoderDC", "vae.id")),
        ({"_class_name": "AutoencoderTiny"}, ("AutoencoderTiny", "AutoencoderKL", "vae.id")),
        ({"block_out_channels": [8, 8]}, ("AutoencoderKL",)),
        ({"down_block_types": ["Unknown"] * 4}, ("Unknown",)),
        ({"use_quant_conv": True}, ("quant_conv",)),
    ],
)
def test_a_vae_that_is_not_implemented_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], named: tuple[str, ...]
) -> None:
    config = settings_of(Path(shutil.copytree(folder, tmp_path / "copy")), **changes)
    with pytest.raises(ModelError, match=naming(tmp_path / "copy", *named)):
        encoders.describe_vae(config)
        encoders.LatentEncoder.load(config, "cpu")


def test_a_decoder_of_another_shift_is_refused_and_a_tiny_one_has_its_factors(
    folder: Path, images: np.ndarray, tmp_path: Path
) -> None:
    from diffusers import AutoencoderTiny

    other = tiny_models.build_kl(tmp_path / "other", seed=1, shift_factor=0.0609)
    config = VaeConfig(id=str(folder), decoder=str(other / "vae"))
    with pytest.raises(ModelError, match=naming(other, folder, "vae.decoder")) as refused:
        encoders.LatentDecoder.load(config, "cpu")
    assert "0.1159 | 0.0609" in str(refused.value.found)
    same = tiny_models.build_kl(tmp_path / "same", seed=1)
    config = VaeConfig(id=str(folder), decoder=str(same / "vae"))
    latents = torch.randn(1, 16, 3, 5, generator=torch.Generator().manual_seed(0))
    alone = encoders.LatentDecoder.load(VaeConfig(id=str(same)), "cpu").decode(latents)
    assert np.array_equal(encoders.LatentDecoder.load(config, "cpu").decode(latents), alone)

    blocks = {"num_encoder_blocks": (1, 1, 1, 1), "num_decoder_blocks": (1, 1, 1, 1), "latent_channels": 16}
    tiny = AutoencoderTiny(**blocks, scaling_factor=2.0, shift_factor=0.5).eval()
    tiny.save_pretrained(tmp_path / "tiny")
    decoder = encoders.LatentDecoder.load(VaeConfig(id=str(folder), decoder=str(tmp_path / "tiny")), "cpu")
    with torch.no_grad():
        want = (tiny.decode(latents / 2 + 0.5).sample / 2 + 0.5).clamp(0, 1).mul(255).round()
    assert np.abs(decoder.decode(latents).astype(int) - want.permute(0, 2, 3, 1).numpy()).max() <= 1


# ---------------------------------------------------------------- in the pipeline

SIDES = ("data.resolution=64", "data.buckets=[[48, 80], [64, 64], [80, 48]]", "data.min_side=16", "data.max_upscale=8")


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six noisy pictures of three shapes, with captions."""
    path, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(1)
    for number in range(6):
        shape = [(48, 80), (64, 64), (80, 48)][number % 3]
        Image.fromarray(rng.integers(0, 256, (*shape, 3), np.uint8)).save(path / f"{number}.png")
        (path / f"{number}.txt").write_text(f"noise number {number}")
    return path


@both
def test_from_pictures_to_a_snapshot_and_back_and_a_killed_run_makes_the_same_bytes(
    each: Path,
    pictures: Path,
    make_config: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
) -> None:
    set_constants(monkeypatch, unit_sizes(2, 100))
    whole, killed = (make_config(tmp_path / name, f"vae.id={each}", *SIDES) for name in ("whole", "killed"))
    assert sana_pipe.stages.encode.run(whole, data=str(pictures))["images"] == 6
    inner, calls = encoders.LatentEncoder.encode, 0

    def dies(self: encoders.LatentEncoder, images: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Killed
        return inner(self, images)

    with monkeypatch.context() as patched:
        patched.setattr(encoders.LatentEncoder, "encode", dies)
        with pytest.raises(Killed):
            sana_pipe.stages.encode.run(killed, data=str(pictures))
    assert 0 < sana_pipe.stages.encode.run(killed, data=str(pictures))["images"] < 6
    assert files(Path(whole.cache)) == files(Path(killed.cache))

    sana_pipe.stages.bucket.run(whole)
    snapshot = Cache(whole.cache).open_snapshot()
    encoding, vae = snapshot.encoding(LatentEncoding), encoders.vae_at(each / "vae")
    assert {(b.height, b.width): b.samples for b in snapshot.buckets} == {(48, 80): 2, (64, 64): 2, (80, 48): 2}
    assert (encoding.channels, encoding.shift_factor) == (vae.channels, vae.shift_factor)
    encoder, decoder = encoders.LatentEncoder.load(whole.vae, "cpu"), encoders.LatentDecoder.load(whole.vae, "cpu")
    for row in range(len(snapshot)):
        _, item = snapshot.source_item(row)
        pixels = np.array(Image.open(pictures / item))[None]
        bits = snapshot.picture(snapshot.sample(row), "latent")
        alone, cached = from_bits(encoder.encode(pixels)[0]).float(), from_bits(bits).float()
        assert (alone - cached).abs().max() <= alone.abs().max() * 2**-7, "a step of bf16: of other batches"
        assert decoder.decode(from_bits(bits[None])).shape == pixels.shape


def test_latents_in_int8_are_near_those_in_bf16(
    folder: Path, pictures: Path, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    taken = []
    for storage in ("bf16", "int8"):
        config = make_config(tmp_path / storage, f"vae.id={folder}", *SIDES, f"encode.storage.latent={storage}")
        sana_pipe.stages.encode.run(config, data=str(pictures))
        sana_pipe.stages.bucket.run(config)
        snapshot = Cache(config.cache).open_snapshot()
        taken.append(
            {
                snapshot.source_item(row): from_bits(snapshot.picture(snapshot.sample(row), "latent")).float()
                for row in range(6)
            }
        )
    errors = [float((taken[1][item] - want).norm() / want.norm()) for item, want in taken[0].items()]
    assert 0 < max(errors) < 0.02
