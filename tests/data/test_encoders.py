"""The encoders against diffusers' own pipeline, and the encodings that are read from files."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sana_pipe.base import hub
from sana_pipe.base.config import Weights
from sana_pipe.base.errors import UserError, not_permitted
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.encoders.config import TextConfig, Tokenizer, VaeConfig
from sana_pipe.data.encoders.frozen import NonFiniteOutputError, bf16_bits, from_bits, provenance_of
from sana_pipe.data.encoders.text import TextEncoder, count_rows, describe_text, tokenized
from sana_pipe.data.sources import caption_rules as rules
from sana_pipe.tools.demo import photographs, small_models
from sana_pipe.train.models.config import StartWeights
from sana_pipe.train.models.sana_files import WeightFiles
from sana_pipe.train.models.sana_shape import read_config
from tests.support import tiny_models
from tests.support.messages import naming

INSTRUCTION = rules.INSTRUCTIONS["diffusers"]
CAPTIONS = [
    "a red circle",
    "",
    "A sign that says \"OPEN\" -- and it's 'new'",
    "日本の猫、桜の下で眠る",
    "  émile's café  ",
    "🙂 smile",
    "line one\nline two",
    "x",
    "two small dogs run through green grass by the sea at night " * 60,  # beyond 300 tokens: cut
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("tiny") / "models")


@pytest.fixture(scope="module")
def pipe(folder: Path):
    """diffusers' SanaPipeline on the same Gemma-2, in fp32."""
    from diffusers import SanaPipeline
    from transformers import AutoTokenizer, Gemma2Model

    # not sdpa, which some versions of transformers choose: it leaves the soft cap out
    model = Gemma2Model.from_pretrained(folder / "text_encoder", dtype=torch.float32, attn_implementation="eager")
    return SanaPipeline(AutoTokenizer.from_pretrained(folder / "tokenizer"), model, None, None, None)


@pytest.fixture(scope="module")
def text(folder: Path) -> TextEncoder:
    return TextEncoder.load(TextConfig(id=str(folder), dtype="fp32"), "cpu")


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (3, 48, 80, 3), dtype=np.uint8)


@torch.inference_mode()
def exact(encoder: TextEncoder, captions: list[str]) -> list[torch.Tensor]:
    """The rows before they are rounded to bf16."""
    encoder.encode(captions)
    return encoder.run(encoder.token_ids(captions)[0])


@torch.no_grad()
def reference(pipe, captions: list[str], **options) -> list[torch.Tensor]:
    """What SanaPipeline computes with its default instruction, padding removed."""
    from diffusers import SanaPipeline

    default = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
    rows, mask, _, _ = pipe.encode_prompt(
        captions,
        do_classifier_free_guidance=False,
        complex_human_instruction=options.pop("instruction", default),
        **options,
    )
    return [one[kept.bool()] for one, kept in zip(rows, mask, strict=True)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


# ---------------------------------------------------------------- captions


@pytest.mark.parametrize("max_length", [300, 24])
@pytest.mark.parametrize("mode", ["auto", "exact"])
def test_rows_equal_those_of_sana_pipeline(folder: Path, pipe, mode: Literal["auto", "exact"], max_length: int) -> None:
    config = TextConfig(id=str(folder), dtype="fp32", max_length=max_length, mode=mode)
    encoder = TextEncoder.load(config, "cpu")
    mine = exact(encoder, [rules.normalise(c, "diffusers") for c in CAPTIONS])
    theirs = reference(pipe, CAPTIONS, max_sequence_length=max_length)
    assert [len(rows) for rows in mine] == [len(rows) for rows in theirs]
    assert max(relative(a, b) for a, b in zip(mine, theirs, strict=True)) < 1e-5
    assert len(mine[-1]) == max_length and len({len(rows) for rows in mine}) > 3
    assert encoder.truncated >= 1  # the long caption is cut, and counted


def test_the_comparison_notices_a_wrong_rule(folder: Path, pipe) -> None:
    """Sabotage: one position further, another quote in the instruction, no lowering; each must differ."""
    encoder = TextEncoder.load(TextConfig(id=str(folder), dtype="fp32", mode="exact"), "cpu")
    theirs = reference(pipe, ["A Red circle"])[0]
    assert relative(exact(encoder, ["a red circle"])[0], theirs) < 1e-5
    wrong = exact(encoder, ["A Red circle"])[0]
    assert wrong.shape != theirs.shape or relative(wrong, theirs) > 1e-3
    encoder.first_kept += 1
    assert len(exact(encoder, ["a red circle"])[0]) != len(theirs)
    encoder.first_kept -= 1
    encoder.instruction = rules.INSTRUCTIONS["nvlabs"]
    wrong = exact(encoder, ["a red circle"])[0]
    assert wrong.shape != theirs.shape or relative(wrong, theirs) > 1e-4


def test_without_an_instruction(folder: Path, pipe) -> None:
    config = TextConfig(id=str(folder), dtype="fp32", max_length=12, instruction="")
    encoder = TextEncoder.load(config, "cpu")
    mine = exact(encoder, ["a red circle", "", "two small dogs run " * 9])
    theirs = reference(pipe, ["a red circle", "", "two small dogs run " * 9], instruction=None, max_sequence_length=12)
    # The pipeline strips; the trailing space of the cut caption lies beyond the cut.
    assert [len(rows) for rows in mine] == [len(rows) for rows in theirs]
    assert max(relative(a, b) for a, b in zip(mine, theirs, strict=True)) < 1e-5


def test_rows_do_not_depend_on_the_batch(text: TextEncoder) -> None:
    batch = exact(text, ["a red circle", "two small dogs run through green grass by the sea"])
    alone = exact(text, ["a red circle"])[0]
    assert relative(batch[0], alone) < 1e-5
    assert text.encode([]) == []


def test_a_caption_that_fills_its_place_exactly_is_not_cut(text: TextEncoder) -> None:
    many = [" ".join(["x"] * count) + end for count in range(1, text.max_ids) for end in ("", "a", "ab", ".")]
    lengths = [len(ids) for ids in tokenized(text.tokenizer, [text.instruction + each for each in many])]
    full, longer = (many[lengths.index(text.max_ids + more)] for more in (0, 1))
    assert text.token_ids([full])[1] == 0, "nothing of it is lost"
    (row,), cut = text.token_ids([longer])
    assert cut == 1 and len(row) == text.max_ids


def test_null_is_the_empty_caption_with_all_its_rows(text: TextEncoder, pipe) -> None:
    with torch.no_grad():
        _, _, rows, mask = pipe.encode_prompt("a", negative_prompt="", max_sequence_length=300)
    bits, valid = text.null()
    assert bits.shape == (300, small_models.TEXT_WIDTH) and bits.dtype == np.uint16
    assert valid == int(mask.sum()) == 1
    difference = (from_bits(bits).float() - rows[0]).abs() / rows[0].abs().clamp_min(1e-2)
    assert float(difference.max()) <= 2**-8 + 1e-4  # bf16 rounding
    first = from_bits(text.encode(["a red circle"])[0])[0]
    assert torch.equal(first, from_bits(bits)[0])  # <bos> sees only itself


def test_captions_are_distinguished(text: TextEncoder) -> None:
    """What a small Sana needs of a random Gemma-2: captions that differ give rows that differ by their own size."""
    means = torch.stack([from_bits(rows).float()[1:].mean(0) for rows in text.encode(list(tiny_models.CAPTIONS))])
    apart = torch.cdist(means, means) + torch.eye(len(means)) * 1e9
    assert float(apart.min()) > 0.3 * float(means.norm(dim=1).mean())


def test_a_bf16_encoder_runs_in_bf16(folder: Path, text: TextEncoder) -> None:
    half = TextEncoder.load(TextConfig(id=str(folder), dtype="bf16"), "cpu")
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    a, b = (from_bits(e.encode(["a red circle"])[0]).float() for e in (half, text))
    assert 0 < relative(a, b) < 0.05


def test_a_language_models_folder_serves_as_well(folder: Path, tmp_path: Path, text: TextEncoder) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    model = Gemma2ForCausalLM(Gemma2Config.from_pretrained(folder / "text_encoder"))
    model.model.load_state_dict(text.model.state_dict())
    model.save_pretrained(tmp_path, max_shard_size="400KB")
    shutil.copytree(folder / "tokenizer", tmp_path, dirs_exist_ok=True)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    config = TextConfig(id=str(tmp_path), dtype="fp32")
    mine = TextEncoder.load(config, "cpu").encode(["a red circle"])[0]
    assert np.array_equal(mine, text.encode(["a red circle"])[0])
    assert describe_text(config) == describe_text(TextConfig(id=str(folder), dtype="fp32"))


def test_a_tokenizer_without_bos_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    path = copy / "tokenizer" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "add_bos_token": False}))
    tokenizer = copy / "tokenizer" / "tokenizer.json"
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "post_processor": None}))
    with pytest.raises(UserError, match="<bos>"):
        TextEncoder.load(TextConfig(id=str(copy)), "cpu")


def test_missing_text_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    """transformers would warn and go on with random numbers."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    path = copy / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("layers.1.mlp.up_proj.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj"):
        TextEncoder.load(TextConfig(id=str(copy)), "cpu")


def test_text_that_is_not_finite_names_its_rows(folder: Path) -> None:
    encoder = TextEncoder.load(TextConfig(id=str(folder), dtype="fp32"), "cpu")
    (only_here,) = set(encoder.tokenizer("zzz")["input_ids"]) - set(encoder.tokenizer("a red circle")["input_ids"])
    encoder.model.embed_tokens.weight.data[only_here] = float("nan")  # type: ignore[union-attr]
    with pytest.raises(NonFiniteOutputError) as caught:
        encoder.encode(["a red circle", "zzz", "snow"])
    assert caught.value.rows == (1,)
    assert len(encoder.encode(["a red circle", "snow"])) == 2  # the prefix is not touched by it


# ---------------------------------------------------------------- pictures


def test_latents_equal_the_autoencoders(folder: Path, images: np.ndarray) -> None:
    from diffusers import AutoencoderDC

    whole = AutoencoderDC.from_pretrained(folder / "vae").eval()
    x = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float() / 255 * 2 - 1
    with torch.no_grad():
        want = whole.encode(x).latent * whole.config.scaling_factor
    encoder = encoders.LatentEncoder.load(VaeConfig(id=str(folder)), "cpu")
    bits = encoder.encode(images)
    assert bits.dtype == np.uint16 and bits.shape == (3, small_models.LATENT_CHANNELS, 6, 10)
    got = from_bits(bits)
    # The same module on weights that lie elsewhere in memory differs in the last bits of fp32, so now and then a
    # value at a tie is rounded the other way.
    assert torch.all(((want - 1e-5).to(torch.bfloat16) <= got) & (got <= (want + 1e-5).to(torch.bfloat16)))
    assert (got != want.to(torch.bfloat16)).float().mean() < 0.01
    assert np.array_equal(bits, encoder.encode(images))
    assert (encoder.compression, encoder.channels) == (8, small_models.LATENT_CHANNELS)
    settings = encoder.kind.settings
    encoder.kind = replace(encoder.kind, settings={**settings, "scaling_factor": 2 * settings["scaling_factor"]})
    assert torch.equal(from_bits(encoder.encode(images)).float(), 2 * got.float())


def test_each_half_holds_no_part_of_the_other(folder: Path) -> None:
    config = VaeConfig(id=str(folder))
    encoder, decoder = encoders.LatentEncoder.load(config, "cpu"), encoders.LatentDecoder.load(config, "cpu")
    names = {name.split(".")[0] for name, _ in encoder.model.named_parameters()}
    assert names == {"encoder"} and not hasattr(encoder.model, "decoder")
    assert {name.split(".")[0] for name, _ in decoder.model.named_parameters()} == {"decoder"}
    assert not any(t.is_meta for half in (encoder, decoder) for t in half.model.state_dict().values())


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16"])
def test_tf32_is_allowed_in_the_encoder_alone_and_if_it_is_its_dtype(
    folder: Path, images: np.ndarray, monkeypatch: pytest.MonkeyPatch, dtype: Any, before: bool
) -> None:
    def flags() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    first, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, before
    outside, inside = flags(), []
    encoder = encoders.LatentEncoder.load(VaeConfig(id=str(folder), dtype=dtype), "cpu")
    inner = encoder.model.encode

    def spy(x: torch.Tensor) -> Any:
        inside.append((*flags(), torch.backends.cudnn.deterministic))
        return inner(x)

    monkeypatch.setattr(encoder.model, "encode", spy)
    try:
        encoder.encode(images)
        after = flags()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = first
    allowed = dtype == "tf32"
    assert inside == [(allowed, allowed, True)] and after == outside


def test_decoding_equals_the_autoencoders(folder: Path, images: np.ndarray, one_thread: None) -> None:
    from diffusers import AutoencoderDC

    config = VaeConfig(id=str(folder))
    latents = from_bits(encoders.LatentEncoder.load(config, "cpu").encode(images))
    whole = AutoencoderDC.from_pretrained(folder / "vae").eval()
    with torch.no_grad():
        want = whole.decode(latents.float() / whole.config.scaling_factor).sample
    want = ((want / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    got = encoders.LatentDecoder.load(config, "cpu").decode(latents)
    assert got.dtype == np.uint8 and np.array_equal(got, want)


def other_decoder(folder: Path, kind: str, **changes: Any) -> Path:
    """Random weights of another decoder, in diffusers' format."""
    from diffusers import AutoencoderDC, AutoencoderTiny

    settings = dict(AutoencoderDC.load_config(folder / "vae"))
    if kind == "AutoencoderDC":
        model = AutoencoderDC.from_config({**settings, "decoder_layers_per_block": [1, 2, 1, 1], **changes})
    else:
        blocks = {"num_encoder_blocks": (1, 1, 1, 1), "num_decoder_blocks": (1, 1, 1, 1)}
        model = AutoencoderTiny(**{"latent_channels": small_models.LATENT_CHANNELS, **blocks, **changes})
    path = folder / f"{kind}-{len(list(folder.iterdir()))}"
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", ["AutoencoderDC", "AutoencoderTiny"])
def test_another_decoder_of_the_same_latents_takes_the_place_of_the_vaes(
    folder: Path, images: np.ndarray, kind: str
) -> None:
    import diffusers

    path = other_decoder(folder, kind)
    config = VaeConfig(id=str(folder), decoder=str(path))
    assert encoders.describe_vae(config) == encoders.describe_vae(VaeConfig(id=str(folder))), "the same encoding"
    latents = from_bits(encoders.LatentEncoder.load(config, "cpu").encode(images)).float()
    decoder = encoders.LatentDecoder.load(config, "cpu")
    assert {name.split(".")[0] for name, _ in decoder.model.named_parameters()} == {"decoder"}
    whole = getattr(diffusers, kind).from_pretrained(path).eval()
    scale = whole.config.scaling_factor
    assert (scale == 1) == (kind == "AutoencoderTiny")
    with torch.no_grad():
        want = whole.decode(latents / scale).sample
    want = ((want / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()

    def differs(config: VaeConfig) -> float:  # sums of fp32 depend on where the weights lie in memory
        got = encoders.LatentDecoder.load(config, "cpu").decode(latents)
        return float((np.abs(got.astype(int) - want) > 1).mean())

    assert differs(config) == 0 and differs(VaeConfig(id=str(folder))) > 0.1


@pytest.mark.parametrize(
    ("kind", "changes", "found"),
    [
        ("AutoencoderDC", {"latent_channels": 8}, "latent channels: 16 | 8"),
        ("AutoencoderDC", {"scaling_factor": 0.5}, "scaling factor: "),
        ("AutoencoderTiny", {"latent_channels": 4}, "latent channels: 16 | 4"),
        (
            "AutoencoderTiny",
            {"num_decoder_blocks": (1, 1), "decoder_block_out_channels": (64, 64)},
            "pixels per latent side: 8 | 2",
        ),
    ],
)
def test_a_decoder_of_other_latents_is_refused(folder: Path, kind: str, changes: dict[str, Any], found: str) -> None:
    config = VaeConfig(id=str(folder), decoder=str(other_decoder(folder, kind, **changes)))
    with pytest.raises(hub.ModelError) as refused:
        encoders.LatentDecoder.load(config, "cpu")
    assert found in str(refused.value.found)


def test_a_decoder_of_another_class_is_refused(folder: Path) -> None:
    config = VaeConfig(id=str(folder), decoder=str(folder / "text_encoder"))
    with pytest.raises(hub.ModelError, match="not a decoder"):
        encoders.LatentDecoder.load(config, "cpu")


def test_bf16_rounds_to_nearest_even() -> None:
    # 1 + 2^-8 lies half way between 1 and 1 + 2^-7: to even, down; the next half way goes up.
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -0.0, 3.0e38])
    assert bf16_bits(values).tolist() == [0x3F80, 0x3F82, 0x8000, 0x7F62]
    everything = np.arange(65536, dtype=np.uint16)
    assert np.array_equal(bf16_bits(from_bits(everything)), everything)


def test_a_bf16_vae_runs_in_bf16(folder: Path, images: np.ndarray) -> None:
    half = encoders.LatentEncoder.load(VaeConfig(id=str(folder), dtype="bf16"), "cpu")
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    full = encoders.LatentEncoder.load(VaeConfig(id=str(folder)), "cpu")
    a, b = (from_bits(e.encode(images)).float() for e in (half, full))
    assert 0 < relative(a, b) < 0.1


def test_latents_that_are_not_finite_name_their_rows(folder: Path, images: np.ndarray) -> None:
    encoder = encoders.LatentEncoder.load(VaeConfig(id=str(folder)), "cpu")
    encoder.kind = replace(encoder.kind, settings={**encoder.kind.settings, "scaling_factor": 1.0})
    inner = encoder.model.encoder
    encoder.model.encoder = torch.nn.Sequential(inner, Spoil({0: float("nan"), 2: 3.4e38}))
    with pytest.raises(NonFiniteOutputError) as caught:
        encoder.encode(images)
    assert caught.value.rows == (0, 2)  # 3.4e38 is finite in fp32 and infinite in bf16


class Spoil(torch.nn.Module):
    def __init__(self, values: dict[int, float]):
        super().__init__()
        self.values = values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for row, value in self.values.items():
            x[row, 0, 0, 0] = value
        return x


# ---------------------------------------------------------------- encodings


def describe(folder: Path) -> tuple[dict, dict]:
    return encoders.describe_vae(VaeConfig(id=str(folder))), describe_text(TextConfig(id=str(folder)))


def change(path: Path, name: str) -> None:
    """Add one unit in the last place to one number of a tensor."""
    tensors = load_file(path)
    flat = tensors[name].flatten()
    flat[-1] = torch.nextafter(flat[-1], torch.tensor(9.0))
    tensors[name] = flat.reshape(tensors[name].shape)
    save_file(tensors, path, metadata={"format": "pt"})


def test_encoding_fields(folder: Path) -> None:
    vae, text = describe(folder)
    saved = json.loads((folder / "vae" / "config.json").read_text())
    assert vae == {
        "weights": vae["weights"],
        "compression": 8,
        "channels": small_models.LATENT_CHANNELS,
        "dtype": "fp32",
        "scaling_factor": saved["scaling_factor"],
        "shift_factor": 0.0,
        "tiling": False,
    }
    assert text == {
        "weights": text["weights"],
        "tokenizer": text["tokenizer"],
        "dtype": "bf16",
        "attention": "eager",
        "instruction": INSTRUCTION,
        "normalisation": "diffusers",
        "max_length": 300,
        "selection": "sana",
        "width": small_models.TEXT_WIDTH,
        "encoder_kind": "gemma2",
        "template": "",
    }
    assert all(len(digest) == 32 for digest in (vae["weights"], text["weights"], text["tokenizer"]))
    json.dumps((vae, text), allow_nan=False)


def test_a_moved_or_resharded_model_is_the_same_encoding(folder: Path, tmp_path: Path) -> None:
    from diffusers import AutoencoderDC
    from transformers import AutoTokenizer, Gemma2Model

    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert describe(moved) == describe(folder)
    AutoencoderDC.from_pretrained(folder / "vae").save_pretrained(tmp_path / "new" / "vae", max_shard_size="1MB")
    model = Gemma2Model.from_pretrained(folder / "text_encoder", dtype="auto")
    model.save_pretrained(tmp_path / "new" / "text_encoder", max_shard_size="300KB")
    AutoTokenizer.from_pretrained(folder / "tokenizer").save_pretrained(tmp_path / "new" / "tokenizer")
    assert len(list((tmp_path / "new").glob("*/*-of-*.safetensors"))) > 4
    assert describe(tmp_path / "new") == describe(folder)


def test_what_changes_a_value_changes_the_encoding_and_nothing_else_does(folder: Path, tmp_path: Path) -> None:
    before = describe(folder)

    def after(name: str, edit) -> tuple[dict, dict]:
        copy = Path(shutil.copytree(folder, tmp_path / name))
        edit(copy)
        return describe(copy)

    def settings(file: str, **values):
        def edit(copy: Path) -> None:
            path = copy / file
            path.write_text(json.dumps({**json.loads(path.read_text()), **values}, indent=3))

        return edit

    vae = "vae/diffusion_pytorch_model.safetensors"
    text = "text_encoder/model.safetensors"
    assert after("decoder", lambda c: change(c / vae, "decoder.conv_out.weight")) == before
    assert (
        after("notes", settings("text_encoder/config.json", transformers_version="4.1", architectures=["X"])) == before
    )
    assert after("padding", settings("tokenizer/tokenizer.json", padding={"strategy": "BatchLongest"})) == before

    changed = after("encoder", lambda c: change(c / vae, "encoder.conv_out.weight"))
    assert changed[0]["weights"] != before[0]["weights"] and changed[1] == before[1]
    changed = after("heads", settings("vae/config.json", attention_head_dim=16))
    assert changed[0]["weights"] != before[0]["weights"]
    changed = after("scale", settings("vae/config.json", scaling_factor=0.5))
    assert changed[0] == {**before[0], "scaling_factor": 0.5}

    changed = after("text", lambda c: change(c / text, "norm.weight"))
    assert changed[1]["weights"] != before[1]["weights"] and changed[0] == before[0]
    changed = after("softcap", settings("text_encoder/config.json", attn_logit_softcapping=30.0))
    assert changed[1]["weights"] != before[1]["weights"]
    changed = after("token", settings("tokenizer/tokenizer.json", normalizer=None))
    assert changed[1] == {**before[1], "tokenizer": changed[1]["tokenizer"]}
    assert changed[1]["tokenizer"] != before[1]["tokenizer"]


def test_describing_builds_no_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a module was built")

    monkeypatch.setattr(torch.nn.Module, "__init__", forbidden)
    assert describe(folder)


# ---------------------------------------------------------------- where weights come from


def test_a_folder_that_is_not_the_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="AutoencoderDC"):
        encoders.describe_vae(VaeConfig(id=str(folder / "text_encoder")))
    with pytest.raises(UserError, match="gemma2"):
        describe_text(TextConfig(id=str(folder / "vae")))
    with pytest.raises(UserError, match="tokenizer"):
        describe_text(TextConfig(id=str(folder / "text_encoder")))
    with pytest.raises(UserError, match="'transformer'") as caught:
        hub.resolve(StartWeights(id=str(folder)))
    assert "text_encoder" in str(caught.value)
    with pytest.raises(UserError, match=naming(tmp_path / "absent", "OWNER/NAME")):
        hub.resolve(Weights(id=str(tmp_path / "absent")))
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    (broken / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"\x09\0\0\0\0\0\0\0not json!")
    with pytest.raises(UserError, match="safetensors"):
        encoders.describe_vae(VaeConfig(id=str(broken)))
    (broken / "vae" / "diffusion_pytorch_model.safetensors").rename(broken / "vae" / "diffusion_pytorch_model.bin")
    with pytest.raises(UserError, match=r"diffusion_pytorch_model\.bin"):
        encoders.describe_vae(VaeConfig(id=str(broken)))


@pytest.mark.parametrize("file", ["tokenizer/tokenizer_config", "tokenizer/config", "text_encoder/config"])
def test_code_of_a_model_folder_is_neither_run_nor_asked_for(
    folder: Path, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    place, code = copy / f"{file}.json", {"AutoTokenizer": [None, "own.Own"], "AutoConfig": "own.Own"}
    values = json.loads(place.read_text()) if place.exists() else {"model_type": "own"}
    if place.name == "tokenizer_config.json":
        values["tokenizer_class"] = "Own"
    place.write_text(json.dumps({**values, "auto_map": code}))
    (place.parent / "own.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w')\nclass Own: pass\n")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "yes")
    with suppress(hub.ModelError):
        TextEncoder.load(TextConfig(id=str(copy)), "cpu")
    assert not asked and not (tmp_path / "was run").exists()
    if place.name == "tokenizer_config.json":
        with pytest.raises(hub.ModelError, match=naming("copy/tokenizer")) as caught:
            count_rows(TextConfig(id=str(copy)), ["a"])
        assert caught.value.fix and "trust_remote_code" not in str(caught.value)


def refused(root: Path) -> str:
    """What is said of each file that may not be read: its path, and the fix; then of three that are not there."""
    lines = []
    for read, name in (
        (hub.read_json, "file.json"),
        (read_config, ""),
        (hub.open_tensors, "file.safetensors"),
        (WeightFiles, "file.pth"),
        (hub.open_tensors, "closed/inside.safetensors"),
    ):
        try:
            read(root / name)
        except UserError as error:
            lines.append(f"{error.what.partition(': ')[0]}|{str(error.fix).partition(', ')[0]}")
    absent = (root / "absent", root / "no" / "where", root / ("x" * 300))
    return "\n".join([*lines, " ".join(str(not_permitted(path)) for path in absent)])


def test_what_this_user_may_not_read_is_not_called_missing(
    tmp_path: Path, bound_by_permissions: Callable[[], None]
) -> None:
    """safetensors and torch call it so, and the fix was to fetch it again."""
    for name in ("file.json", "config.json", "file.safetensors", "file.pth"):
        (tmp_path / name).touch(mode=0)
    (tmp_path / "closed").mkdir(mode=0o600)
    answer, write = os.pipe()
    if not (child := os.fork()):
        try:
            bound_by_permissions()
            os.write(write, refused(tmp_path).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(answer) as lines:
        told = lines.read().splitlines()
    os.waitpid(child, 0)
    names = ["file.json", "config.json", "file.safetensors", "file.pth"]
    assert told[:4] == [f"{tmp_path / name}|chmod a+r {tmp_path / name}" for name in names]
    inside = tmp_path / "closed" / "inside.safetensors"
    assert told[4:] == [f"{inside}|chmod a+rx {tmp_path / 'closed'}", "None None None"]


def test_others_may_read_small_models_as_the_umask_says(tmp_path: Path) -> None:
    small_models.make_vae(tmp_path / "vae", [], steps=0)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "vae").iterdir()} == {0o666 & ~umask()}


def umask() -> int:
    os.umask(value := os.umask(0))
    return value


@pytest.mark.parametrize("part", ["vae", "text_encoder", "tokenizer"])
def test_a_models_folder_is_found_in_a_pipelines_and_alone(folder: Path, tmp_path: Path, part: str) -> None:
    """A pipeline's folder comes first, even if it has a `config.json`."""
    weights: Weights = {"vae": VaeConfig, "text_encoder": TextConfig, "tokenizer": Tokenizer}[part](id=str(folder))
    assert hub.resolve(weights) == folder / part
    alone = weights.model_copy(update={"id": str(folder / part)})
    assert hub.resolve(alone) == folder / part
    both = Path(shutil.copytree(folder, tmp_path / "both"))
    (both / "config.json").write_text("{}")
    assert hub.resolve(weights.model_copy(update={"id": str(both)})) == both / part
    shutil.rmtree(both / part)
    (both / "config.json").unlink()
    with pytest.raises(UserError, match=naming(part)):
        hub.resolve(weights.model_copy(update={"id": str(both)}))


def test_missing_shards_are_named(folder: Path, tmp_path: Path) -> None:
    from diffusers import AutoencoderDC

    AutoencoderDC.from_pretrained(folder / "vae").save_pretrained(tmp_path / "vae", max_shard_size="1MB")
    lost = sorted((tmp_path / "vae").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(UserError, match=lost.name):
        encoders.LatentEncoder.load(VaeConfig(id=str(tmp_path)), "cpu")


def test_hub_ids(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the hub, and that its errors become sentences."""
    import huggingface_hub
    from huggingface_hub import errors

    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(folder)

    listing = {
        "config.json": 9,
        "diffusion_pytorch_model.safetensors": 9,
        "diffusion_pytorch_model.bf16.safetensors": 9,
    }
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "sizes", lambda weights: listing)
    config = VaeConfig(id="owner/sana", revision="abc")
    assert hub.resolve(config) == folder / "vae"
    assert {(name, revision) for name, revision, _ in asked} == {("owner/sana", "abc")}
    # one variant, not all: that without a name
    assert [patterns for *_, patterns in asked] == [
        ["vae/*.json"],
        ["vae/*.json", "vae/diffusion_pytorch_model.safetensors"],
    ]
    assert encoders.describe_vae(config) == encoders.describe_vae(VaeConfig(id=str(folder)))
    assert provenance_of(config) == {"model": "owner/sana", "revision": "abc"}
    assert provenance_of(VaeConfig(id=str(folder))) == {}

    for error, words in (
        (errors.LocalEntryNotFoundError("offline"), "cannot be reached"),
        (errors.OfflineModeIsEnabled("offline"), "cannot be reached"),
    ):

        def fail(*_: object, error: Exception = error, **__: object) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(UserError, match=words) as caught:
            hub.resolve(config)
        assert caught.value.fix


# ---------------------------------------------------------------- the small models


def test_small_models_are_reproducible_and_readable_by_the_libraries(folder: Path, tmp_path: Path) -> None:
    from diffusers import DPMSolverMultistepScheduler

    again = tiny_models.build(tmp_path / "again")
    assert describe(again) == describe(folder)
    assert describe(tiny_models.build(tmp_path / "other", seed=1))[0]["weights"] != describe(folder)[0]["weights"]
    scheduler = DPMSolverMultistepScheduler.from_pretrained(folder, subfolder="scheduler")
    assert scheduler.config.use_flow_sigmas and scheduler.config.prediction_type == "flow_prediction"


def test_the_tokenizer_merges_the_instructions_space(text: TextEncoder) -> None:
    prefix = text.tokenizer.encode(INSTRUCTION)
    whole = text.tokenizer.encode(INSTRUCTION + "a red circle")
    assert whole[: len(prefix) - 1] == prefix[:-1] and whole[len(prefix) - 1] != prefix[-1]
    assert text.tokenizer.decode(text.tokenizer.encode("日本 café 🙂")[1:]) == "日本 café 🙂"


def test_demonstration_photographs(tmp_path: Path) -> None:
    pytest.importorskip("skimage")
    from PIL import Image

    photos = photographs.demo_photos(tmp_path)
    assert len(photos) == len({caption for _, caption in photos}) == 12
    shapes = set()
    for path, caption in photos:
        assert path.with_suffix(".txt").read_text(encoding="utf-8").strip() == caption
        with Image.open(path) as picture:
            assert picture.mode == "RGB" and min(picture.size) >= 128
            shapes.add(round(picture.height / picture.width, 1))
    assert len(shapes) >= 3


def test_photographs_without_scikit_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(UserError, match="scikit-image") as caught:
        photographs.demo_photos(tmp_path)
    assert "demo" in str(caught.value.fix)


@pytest.mark.slow
def test_a_fitted_vae_begins_as_the_best_linear_code_and_improves(tmp_path: Path) -> None:
    """Fitting starts where principal components of 8x8 pixels end, and is better after some steps."""
    rng = np.random.default_rng(3)
    images = []
    for _ in range(6):
        image = np.full((64, 64, 3), rng.integers(0, 256, 3), np.uint8)
        for _ in range(12):
            y, x = rng.integers(0, 48, 2)
            image[y : y + rng.integers(4, 24), x : x + rng.integers(4, 24)] = rng.integers(0, 256, 3)
        images.append(image)
    start = small_models.make_vae(tmp_path / "start", images, steps=1, sizes=[(64, 64)], lr=1e-12)
    fitted = small_models.make_vae(tmp_path / "fitted", images, steps=60, sizes=[(64, 64)], batch=3, lr=6e-4)

    pixels = torch.from_numpy(np.stack(images)).float() / 127.5 - 1
    patches = pixels.reshape(6, 8, 8, 8, 8, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, 192)
    mean = patches.mean(0)
    basis = torch.linalg.svd(patches - mean, full_matrices=False)[2][: small_models.LATENT_CHANNELS]
    error = ((patches - mean) - (patches - mean) @ basis.T @ basis).square().reshape(6, -1).mean(1)
    best = float((10 * torch.log10(4 / error)).mean())
    assert start["psnr"] > best - 2  # the components also serve the jittered views
    assert fitted["psnr"] > start["psnr"] + 0.2

    config = VaeConfig(id=str(tmp_path / "fitted"))
    encoder, decoder = encoders.LatentEncoder.load(config, "cpu"), encoders.LatentDecoder.load(config, "cpu")
    latents = from_bits(encoder.encode(np.stack(images)))
    assert 0.98 < float(latents.float().square().mean().sqrt()) < 1.02  # the scaling factor was measured
    error = (decoder.decode(latents).astype(np.float32) - np.stack(images)) ** 2
    psnr = float(np.mean(10 * np.log10(255**2 / error.mean(axis=(1, 2, 3)))))
    assert abs(psnr - fitted["psnr"]) < 0.2


def test_a_fitted_vae_does_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    images = list(np.random.default_rng(2).integers(0, 256, (3, 40, 40, 3), dtype=np.uint8))
    before, digests = torch.get_num_threads(), set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            small_models.make_vae(tmp_path / str(threads), images, steps=3, sizes=[(32, 32)])
            assert torch.get_num_threads() == threads
            digests.add(encoders.describe_vae(VaeConfig(id=str(tmp_path / str(threads))))["weights"])
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


@pytest.mark.parametrize("size", [(64, 64), (48, 80), (80, 48), (56, 72)])
def test_any_multiple_of_eight_goes_through_and_back(folder: Path, size: tuple[int, int]) -> None:
    config = VaeConfig(id=str(folder))
    images = np.random.default_rng(1).integers(0, 256, (2, *size, 3), dtype=np.uint8)
    bits = encoders.LatentEncoder.load(config, "cpu").encode(images)
    assert bits.shape[2:] == (size[0] // 8, size[1] // 8)
    assert encoders.LatentDecoder.load(config, "cpu").decode(from_bits(bits)).shape == images.shape
