"""The released models' layouts: which files are read, what is fetched, what is said when something is missing; NVlabs'
files; and one run of all stages on a released layout, through `from_pretrained` alone."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sana_pipe import cli
from sana_pipe.base import hub
from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.config import Config, dump, load
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.index import commits
from sana_pipe.data.encoders.config import VaeConfig
from sana_pipe.stages import bucket, check, encode, export, sample, train
from sana_pipe.tools.reporting import encoder_process, export_folder
from sana_pipe.train.models import nvlabs
from sana_pipe.train.models.sana import SanaTransformer, parameter_shapes
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.sana_files import WeightFiles, save_nvlabs, save_weights
from sana_pipe.train.models.sana_shape import SanaShape
from sana_pipe.train.training import checkpoint
from sana_pipe.train.training.base_weights import first_weights
from tests.support import hub_layouts
from tests.support.hub_layouts import RELEASED, Set
from tests.support.messages import naming
from tests.support.tiny_sana import load_transformer, load_weights

BIG = "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"
SMALL = "Efficient-Large-Model/Sana_600M_512px_diffusers"
BOTH = "Efficient-Large-Model/Sana_1600M_1024px_diffusers"


@pytest.fixture(scope="module")
def repositories(tiny_repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`repositories(name)`: a released repository with small weights. Do not write into it."""
    root, built = tmp_path_factory.mktemp("hub"), {}

    def build(name: str) -> Path:
        if name not in built:
            built[name] = hub_layouts.build(root / name, name, tiny_repo)
        return built[name]

    return build


def tensors(folder: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    return {key: value for name in names for key, value in load_file(folder / name).items()}


# ---------------------------------------------------------------- which files


@pytest.mark.parametrize("name", RELEASED)
def test_a_layout_is_read_as_the_library_reads_it_that_wrote_it(name: str, repositories: Callable[[str], Path]) -> None:
    from diffusers import AutoencoderDC, SanaTransformer2DModel
    from transformers import Gemma2Model

    root = repositories(name)
    classes: dict[str, Any] = {
        "transformer": SanaTransformer2DModel,
        "vae": AutoencoderDC,
        "text_encoder": Gemma2Model,
    }
    for part, sets in RELEASED[name].items():
        for variant in {one.variant for one in sets} - {"int4"}:  # a quantised model's, of other classes
            chosen = hub.choose(root / part, variant)
            model = classes[part].from_pretrained(root / part, variant=variant)
            theirs = {key: value.float() for key, value in model.state_dict().items()}
            ours = {key: value.float() for key, value in tensors(root / part, chosen.files).items()}
            assert ours.keys() == theirs.keys(), (part, variant)
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs), (part, variant)


def test_an_index_goes_before_a_single_file(repositories: Callable[[str], Path]) -> None:
    folder = repositories(BOTH) / "transformer"
    files = WeightFiles(folder)
    assert {name.count("-of-") for name in hub.choose(folder, None).files} == {1}
    chosen = tensors(folder, hub.choose(folder, None).files)
    assert torch.equal(files.read("proj_out.bias", [0], [16]), chosen["proj_out.bias"])
    beside = load_file(folder / "diffusion_pytorch_model.safetensors")
    assert not torch.equal(chosen["proj_out.bias"], beside["proj_out.bias"]), "the two would not be told apart"


@pytest.mark.parametrize(
    ("index", "shard"),
    [
        ("{stem}.safetensors.index.{v}.json", "{stem}.{v}-{{i:05d}}-of-{{n:05d}}.safetensors"),
        ("{stem}.safetensors.index.{v}.json", "{stem}-{{i:05d}}-of-{{n:05d}}.{v}.safetensors"),
        ("{stem}.safetensors.{v}.index.json", "{stem}-{{i:05d}}-of-{{n:05d}}.{v}.safetensors"),
        ("{stem}.{v}.safetensors.index.json", "{stem}.{v}-{{i:05d}}-of-{{n:05d}}.safetensors"),
    ],
)
@pytest.mark.parametrize("stem", hub.STEMS)
def test_every_name_that_the_libraries_gave_to_shards_of_a_variant(
    stem: str, index: str, shard: str, tmp_path: Path
) -> None:
    values = {f"t{i}": torch.full((4,), float(i)) for i in range(3)}
    names = {"index": index.format(stem=stem, v="bf16"), "shard": shard.format(stem=stem, v="bf16")}
    files = hub_layouts.write_set(tmp_path, stem, values, Set("bf16", torch.bfloat16, shards=2), **names)
    plain = hub_layouts.write_set(tmp_path, stem, values, Set(shards=3))
    assert [tmp_path / name for name in hub.choose(tmp_path, "bf16").files] == files
    assert hub.weight_files(tmp_path) == plain
    assert hub.choose(tmp_path, widest=True).variant is None
    for path in plain:
        path.unlink()
    assert hub.choose(tmp_path, widest=True).variant == "bf16"  # an index without any file is no set
    assert hub.weight_files(tmp_path) == files
    files[1].unlink()
    with pytest.raises(UserError) as caught:
        hub.weight_files(tmp_path)
    assert files[1].name in str(caught.value)


def test_half_a_set_of_files_names_what_may_be_taken_instead(tmp_path: Path) -> None:
    """A variant is named; the files without one are not named by any setting: the index has to go."""
    index = tmp_path / "model.safetensors.index.fp32.json"
    shards = {str(i): f"model.fp32-0000{i}-of-00002.safetensors" for i in (1, 2)}
    index.write_text(json.dumps({"metadata": {"total_size": 1 << 20}, "weight_map": shards}))
    for name in (shards["1"], "model.safetensors"):
        save_file({"x": torch.zeros(4)}, tmp_path / name)

    def fix() -> str:
        with pytest.raises(UserError, match="not there") as caught:
            hub.choose(tmp_path, widest=True)
        return str(caught.value.fix)

    assert f"remove {index.name}" in fix() and "variant:" not in fix()
    (tmp_path / "model.safetensors").rename(tmp_path / "model.bf16.safetensors")
    assert "model.weights.variant=bf16" in fix() and hub.choose(tmp_path, "bf16").files == ("model.bf16.safetensors",)
    (tmp_path / "model.bf16.safetensors").rename(tmp_path / "model.safetensors")
    index.unlink()
    assert hub.choose(tmp_path, widest=True).files == ("model.safetensors",)


def test_start_weights_are_the_widest_that_are_there(repositories: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(repositories(BIG) / "transformer", tmp_path / "transformer"))
    widest = WeightFiles(folder)
    assert widest.dtype("proj_out.weight") == "F32" and "F32" in widest.description
    assert WeightFiles(folder, "bf16").dtype("proj_out.weight") == "BF16"
    shards = sorted(folder.glob("*-of-*"))
    away = shards[0].rename(tmp_path / "away")
    with pytest.raises(UserError, match=naming(shards[0].name, "variant=bf16")):  # half of them: no quiet step down
        WeightFiles(folder)
    shards[1].unlink()
    assert WeightFiles(folder).dtype("proj_out.weight") == "BF16", "the widest of what is there"
    away.rename(shards[0])
    with pytest.raises(UserError):
        WeightFiles(folder)
    assert WeightFiles(folder, "bf16").dtype("proj_out.weight") == "BF16"


# ---------------------------------------------------------------- NVlabs' files

SHAPES = {  # depth, width and query/key norm, of NVlabs' `SanaMS_*` and their yaml files (qk_norm and cross_norm)
    "sana_600m_512": (28, 1152, False),
    "sana_1600m_1024": (20, 2240, False),
    "sana15_1600m_1024": (20, 2240, True),
    "sana15_4800m_1024": (60, 2240, True),
}


def of_nvlabs(depth: int, width: int, norm: bool, channels: int = 32, text: int = 2304) -> dict[str, tuple[int, ...]]:
    """Parameters of NVlabs' SanaMS, from its constructor: linear attention, GLUMBConv of 2.5 widths, y_norm."""
    hidden = int(2.5 * width)
    shapes: dict[str, tuple[int, ...]] = {
        "x_embedder.proj.weight": (width, channels, 1, 1),
        "x_embedder.proj.bias": (width,),
        "t_embedder.mlp.0.weight": (width, 256),
        "t_embedder.mlp.0.bias": (width,),
        "t_embedder.mlp.2.weight": (width, width),
        "t_embedder.mlp.2.bias": (width,),
        "t_block.1.weight": (6 * width, width),
        "t_block.1.bias": (6 * width,),
        "y_embedder.y_proj.fc1.weight": (width, text),
        "y_embedder.y_proj.fc1.bias": (width,),
        "y_embedder.y_proj.fc2.weight": (width, width),
        "y_embedder.y_proj.fc2.bias": (width,),
        "attention_y_norm.weight": (width,),
        "final_layer.linear.weight": (channels, width),
        "final_layer.linear.bias": (channels,),
        "final_layer.scale_shift_table": (2, width),
    }
    for i in range(depth):
        block: dict[str, tuple[int, ...]] = {
            "scale_shift_table": (6, width),
            "attn.qkv.weight": (3 * width, width),
            "attn.proj.weight": (width, width),
            "attn.proj.bias": (width,),
            "cross_attn.q_linear.weight": (width, width),
            "cross_attn.q_linear.bias": (width,),
            "cross_attn.kv_linear.weight": (2 * width, width),
            "cross_attn.kv_linear.bias": (2 * width,),
            "cross_attn.proj.weight": (width, width),
            "cross_attn.proj.bias": (width,),
            "mlp.inverted_conv.conv.weight": (2 * hidden, width, 1, 1),
            "mlp.inverted_conv.conv.bias": (2 * hidden,),
            "mlp.depth_conv.conv.weight": (2 * hidden, 1, 3, 3),
            "mlp.depth_conv.conv.bias": (2 * hidden,),
            "mlp.point_conv.conv.weight": (width, hidden, 1, 1),
        }
        if norm:
            block |= {
                f"{one}.{name}.weight": (width,) for one in ("attn", "cross_attn") for name in ("q_norm", "k_norm")
            }
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    return shapes


@pytest.mark.parametrize("name", SHAPES)
def test_names_and_shapes_of_nvlabs_both_ways(name: str) -> None:
    depth, width, norm = SHAPES[name]
    theirs = of_nvlabs(depth, width, norm)
    side = load(name).data.resolution // 32
    stored: dict[str, Any] = {key: torch.empty(shape, device="meta") for key, shape in theirs.items()}
    stored["pos_embed"] = torch.zeros(1).expand(1, side * side, width)
    config = nvlabs.config_of(Path("absent.pth"), stored)
    heads = {1152: (16, 72), 2240: (20, 112)}[width]
    assert config == SanaShape(
        num_layers=depth,
        num_attention_heads=width // 32,
        cross_attention_dim=width,
        sample_size=side,
        num_cross_attention_heads=heads[0],
        cross_attention_head_dim=heads[1],
        qk_norm="rms_norm_across_heads" if norm else None,
    )
    ours = parameter_shapes(config)
    read = nvlabs.renamed({key: one for key, one in stored.items() if key != "pos_embed"}, ours)
    assert {key: tuple(one.shape) for key, one in read.items()} == ours
    written = {key: (sum(ours[p][0] for p in parts), *ours[parts[0]][1:]) for key, parts in nvlabs.parts(ours).items()}
    assert written == theirs
    parameters = {
        "sana_600m_512": 591_747_872,
        "sana_1600m_1024": 1_604_462_752,
        "sana15_1600m_1024": 1_604_641_952,
        "sana15_4800m_1024": 4_721_825_952,
    }
    assert sum(torch.Size(shape).numel() for shape in theirs.values()) == parameters[name]


def converted(state: dict[str, Tensor], depth: int, norm: bool) -> dict[str, Tensor]:
    """What NVlabs' converter makes of their state dict: diffusers' names, in its own words."""
    made = {
        "patch_embed.proj": "x_embedder.proj",
        "caption_projection.linear_1": "y_embedder.y_proj.fc1",
        "caption_projection.linear_2": "y_embedder.y_proj.fc2",
        "time_embed.linear": "t_block.1",
        "time_embed.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_embed.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "proj_out": "final_layer.linear",
    }
    out = {f"{new}.{kind}": state[f"{old}.{kind}"] for new, old in made.items() for kind in ("weight", "bias")}
    out["caption_norm.weight"] = state["attention_y_norm.weight"]
    out["scale_shift_table"] = state["final_layer.scale_shift_table"]
    for i in range(depth):
        old, new = f"blocks.{i}.", f"transformer_blocks.{i}."
        out[new + "scale_shift_table"] = state[old + "scale_shift_table"]
        q, k, v = state[old + "attn.qkv.weight"].chunk(3)
        out |= {new + f"attn1.to_{letter}.weight": one for letter, one in zip("qkv", (q, k, v), strict=True)}
        for kind in ("weight", "bias"):
            out[new + f"attn1.to_out.0.{kind}"] = state[old + f"attn.proj.{kind}"]
            out[new + f"attn2.to_out.0.{kind}"] = state[old + f"cross_attn.proj.{kind}"]
            out[new + f"attn2.to_q.{kind}"] = state[old + f"cross_attn.q_linear.{kind}"]
            k, v = state[old + f"cross_attn.kv_linear.{kind}"].chunk(2)
            out[new + f"attn2.to_k.{kind}"], out[new + f"attn2.to_v.{kind}"] = k, v
            out[new + f"ff.conv_inverted.{kind}"] = state[old + f"mlp.inverted_conv.conv.{kind}"]
            out[new + f"ff.conv_depth.{kind}"] = state[old + f"mlp.depth_conv.conv.{kind}"]
        out[new + "ff.conv_point.weight"] = state[old + "mlp.point_conv.conv.weight"]
        if norm:
            for ours, theirs in (("attn1", "attn"), ("attn2", "cross_attn")):
                for letter in "qk":
                    out[new + f"{ours}.norm_{letter}.weight"] = state[old + f"{theirs}.{letter}_norm.weight"]
    return out


@pytest.mark.parametrize("norm", [None, "rms_norm_across_heads"])
def test_nvlabs_files_hold_the_same_model(norm: str | None, tmp_path: Path) -> None:
    from diffusers import SanaTransformer2DModel

    config = replace(hub_layouts.SMALL, qk_norm=norm)
    model = SanaTransformer.from_scratch(config, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    weights = dict(model.named_parameters())
    save_nvlabs(weights, config, tmp_path, "sana", torch.float32)
    for file in ("sana.pth", "sana.safetensors"):
        again = load_transformer(tmp_path / file)
        assert again.config == config
        assert all(torch.equal(value, weights[name]) for name, value in again.named_parameters()), file
    with pytest.raises(UserError, match=naming(f"model.weights.id={tmp_path / 'sana.safetensors'}")):
        load_transformer(tmp_path)
    state = torch.load(tmp_path / "sana.pth", weights_only=True)["state_dict"]
    side = config.sample_size
    buffers = {"pos_embed": (1, side * side, 32), "y_embedder.y_embedding": (300, 128)}
    shapes = of_nvlabs(2, 32, norm is not None, 16, 128) | buffers
    assert {name: tuple(one.shape) for name, one in state.items()} == shapes, "as their class loads with strict=True"
    assert not state["pos_embed"].any()
    assert abs(float(state["y_embedder.y_embedding"].std()) * 128**0.5 - 1) < 0.02
    save_weights(weights, config, tmp_path / "diffusers", torch.float32)
    with pytest.raises(UserError, match="names are diffusers'"):
        WeightFiles(tmp_path / "diffusers/diffusion_pytorch_model.safetensors")
    theirs = SanaTransformer2DModel.from_pretrained(tmp_path / "diffusers")
    expected = theirs.state_dict()
    for file in ("sana.pth", "sana.safetensors") if norm is None else ():  # diffusers' reader knows no norms
        single = SanaTransformer2DModel.from_single_file(tmp_path / file, config=str(tmp_path), local_files_only=True)
        assert all(torch.equal(one, expected[name]) for name, one in single.state_dict().items()), file
    made = converted(state, 2, norm is not None)
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in expected)
    # a part of a parameter that is itself a part of a tensor, in our order of GLUMBConv's channels
    files = WeightFiles(tmp_path / "sana.pth")
    for name, offsets, lengths in (
        ("transformer_blocks.1.attn2.to_v.bias", [5], [7]),
        ("transformer_blocks.1.attn1.to_k.weight", [9, 3], [4, 20]),
        ("transformer_blocks.0.ff.conv_depth.weight", [7, 0, 0, 1], [11, 1, 3, 2]),
    ):
        box = tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))
        assert torch.equal(files.read(name, offsets, lengths), weights[name][box]), name


def test_a_released_pth_states_its_shape(tmp_path: Path) -> None:
    """Without `config.json`: the registered width says the heads, `pos_embed` the resolution and its base."""
    shapes = of_nvlabs(1, 1152, False)
    state = {name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}
    state |= {"y_embedder.y_embedding": torch.zeros(300, 2304), "pos_embed": torch.zeros(1, 256, 1152)}

    def config(**changes: Tensor | None) -> SanaConfig:
        new = {name: one for name, one in {**state, **changes}.items() if one is not None}
        torch.save({"state_dict": new, "epoch": 1}, tmp_path / "sana.pth")
        return load_weights(tmp_path / "sana.pth")[0]

    result = config()
    assert (result.sample_size, result.interpolation_scale, result.num_cross_attention_heads) == (16, None, 16)
    for side, scale in ((64, 1.0), (128, 2.0)):  # their 2K and 4K models: sin(x / scale) of column 1, base size = side
        table = torch.zeros(1, side * side, 1152)
        table[0, 1, 0] = torch.sin(torch.tensor(1 / scale))
        result = config(pos_embed=table.to(torch.bfloat16))
        assert (result.sample_size, result.interpolation_scale) == (side, scale)
    with pytest.raises(UserError, match="pos_embed") as caught:
        config(pos_embed=None)
    assert "config.json" in str(caught.value)
    with pytest.raises(UserError, match="Sprint"):
        config(**{"cfg_embedder.mlp.0.weight": torch.zeros(1152, 256)})
    with pytest.raises(UserError, match=r"unexpected logvar_linear\.weight"):
        config(**{"logvar_linear.weight": torch.zeros(1, 1152)})
    with pytest.raises(UserError, match=r"missing time_embed\.linear\.bias"):
        config(**{"t_block.1.bias": None})
    narrow = {name: torch.zeros(shape) for name, shape in of_nvlabs(1, 64, False).items()}
    torch.save(narrow, tmp_path / "narrow.pth")  # a plain dictionary is taken, too
    with pytest.raises(UserError, match="how many heads"):
        load_weights(tmp_path / "narrow.pth")


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_an_nvlabs_file_states_its_position_embedding(scale: float, tmp_path: Path) -> None:
    """As NVlabs computes it: get_2d_sincos_pos_embed(width, side, pe_interpolation, base_size=side)."""
    config = SanaConfig(
        num_layers=1, num_attention_heads=36, cross_attention_dim=1152, num_cross_attention_heads=16,
        cross_attention_head_dim=72, mlp_ratio=0.1, caption_channels=8, sample_size=6, interpolation_scale=scale,
    )  # fmt: skip
    weights = dict(SanaTransformer.from_scratch(config, 0).named_parameters())
    save_nvlabs(weights, config, tmp_path, "sana", torch.float32, text_rows=77)
    (tmp_path / "config.json").unlink()
    for file in ("sana.pth", "sana.safetensors"):
        assert load_weights(tmp_path / file)[0].interpolation_scale == scale
    state = torch.load(tmp_path / "sana.pth", weights_only=True)["state_dict"]
    assert len(state["y_embedder.y_embedding"]) == 77
    rates = 1 / 10000 ** (np.arange(288) / 288)
    grid = np.meshgrid(*[np.arange(6, dtype=np.float32) / scale] * 2)
    table = np.concatenate([f(np.outer(axis.ravel(), rates)) for axis in grid for f in (np.sin, np.cos)], axis=1)
    assert np.allclose(state["pos_embed"][0].numpy(), table, atol=1e-6)


def of_small(folder: Path) -> dict[str, Tensor]:
    """A small model with NVlabs' names; its `config.json` is in the folder."""
    weights = dict(SanaTransformer.from_scratch(hub_layouts.SMALL, 0).named_parameters())
    save_nvlabs(weights, hub_layouts.SMALL, folder, "small", torch.float32)
    return load_file(folder / "small.safetensors")


def released(width: int, norm: bool) -> dict[str, Tensor]:
    """A layer of a released size, as their trainer saves it, in a few bytes."""
    shapes = of_nvlabs(1, width, norm) | {"pos_embed": (1, 256, width)}
    return {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}


PREFIXES = ["_orig_mod.", "module.", "model.diffusion_model.", "module._orig_mod."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_names_of_wrappers_are_no_part_of_a_parameters_name(prefix: str, tmp_path: Path) -> None:
    plain = of_small(tmp_path)
    state = {prefix + name: tensor for name, tensor in plain.items()}
    torch.save({"model": state, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}}, tmp_path / "a.pth")
    save_file(state, tmp_path / "a.safetensors")
    inside = {name.replace("blocks.0.", "blocks.0._orig_mod."): tensor for name, tensor in plain.items()}
    torch.save(inside, tmp_path / "b.pth")
    weights = load_weights(tmp_path / "small.pth")[1]
    save_weights(weights, hub_layouts.SMALL, tmp_path / "folder", torch.float32)
    file = tmp_path / "folder" / "diffusion_pytorch_model.safetensors"
    save_file({prefix + name: tensor for name, tensor in load_file(file).items()}, file)
    for place in ("a.pth", "a.safetensors", "b.pth", "folder"):
        again = load_weights(tmp_path / place)[1]
        assert all(torch.equal(again[name], weights[name]) for name in weights), place


def test_averages_in_a_pth_are_named_and_taken_when_asked_for(tmp_path: Path) -> None:
    last, path, name = of_small(tmp_path), tmp_path / "a.pth", "proj_out.bias"
    ema = {name: torch.ones_like(tensor) for name, tensor in last.items()}
    torch.save({"state_dict": last, "state_dict_ema": ema, "epoch": 1}, path)
    assert "state_dict_ema" in WeightFiles(path).description
    for variant, value in ((None, 0), ("state_dict", 0), ("state_dict_ema", 1)):
        assert float(WeightFiles(path, variant).read(name, [0], [1])) == value
    for states, variant in (({"state_dict": last, "state_dict_ema": ema}, "averages"), ({"g": last, "d": ema}, None)):
        torch.save(states, path)
        with pytest.raises(UserError) as caught:
            WeightFiles(path, variant)
        assert all(f"model.weights.variant={name}" in str(caught.value.fix) for name in states)
    torch.save({"state_dict_ema": ema}, path)
    assert float(WeightFiles(path).read(name, [0], [1])) == 1


def test_a_teacher_of_sprint_is_refused_by_its_name_or_shape(tmp_path: Path) -> None:
    """It has the parameters of SANA-1.5 and reads other timesteps. A `config.json` says what it is."""
    repository = tmp_path / "models--Efficient-Large-Model--Sana_Sprint_1.6B_1024px_teacher" / "snapshots" / "1"
    repository.mkdir(parents=True)
    places = [tmp_path / "Sana_Sprint_1.6B_1024px_teacher.pth", repository / "a.pth", tmp_path / "narrow.pth"]
    for path in places:
        torch.save(released(1152 if path.stem == "narrow" else 2240, norm=True), path)
        with pytest.raises(UserError, match="Sprint"):
            WeightFiles(path)
    torch.save(released(2240, norm=True), tmp_path / "sana15.pth")
    config = WeightFiles(tmp_path / "sana15.pth").config
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"timestep_scale": 1000.0}))
    with pytest.raises(UserError, match="Sprint"):
        WeightFiles(tmp_path / "sana15.pth")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert WeightFiles(places[0]).config == config


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_start_weights_that_are_not_finite_are_named(value: float, tmp_path: Path) -> None:
    state = of_small(tmp_path)
    state["blocks.0.attn.proj.bias"][17] = value
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"attn1\.to_out\.0\.bias") as caught:
        load_weights(tmp_path / "a.pth")
    assert "a.pth" in str(caught.value)


def test_a_scalar_in_place_of_a_matrix_is_refused(tmp_path: Path) -> None:
    state = of_small(tmp_path)
    for name in ("blocks.0.attn.qkv.weight", "blocks.0.mlp.inverted_conv.conv.weight"):
        torch.save(state | {name: torch.tensor(1.0)}, tmp_path / "a.pth")
        with pytest.raises(UserError, match="another shape"):
            WeightFiles(tmp_path / "a.pth")


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_a_pth_of_their_trainer_holds_the_state_of_every_generator(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As their `save_checkpoint` writes it, with numpy 1 or numpy 2."""
    builds = np.zeros(0).__reduce__()[0]
    monkeypatch.setitem(sys.modules, module, sys.modules[builds.__module__])
    monkeypatch.setattr(builds, "__module__", module)
    state = {name: torch.zeros(shape) for name, shape in of_nvlabs(1, 1152, False).items()}
    numbers = np.random.get_state()  # noqa: NPY002
    generators = {"torch": torch.get_rng_state(), "numpy": numbers, "python": random.getstate()}
    whole = {"state_dict": state | {"pos_embed": torch.zeros(1, 256, 1152)}, "epoch": 1, "step": 7}
    torch.save(whole | {"rng_state": generators}, tmp_path / "sana.pth")
    assert f"{module}\n".encode() in zipfile.ZipFile(tmp_path / "sana.pth").read("sana/data.pkl")
    assert load_weights(tmp_path / "sana.pth")[0].num_cross_attention_heads == 16


def test_a_pth_that_is_more_than_tensors_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "was run",))

    torch.save({"state_dict": {"x": Evil()}}, tmp_path / "evil.pth")
    torch.save({"state_dict": {}, "rng_state": {"numpy": np.array([Evil()])}}, tmp_path / "array.pth")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "evil.pth").read_bytes()[:50])
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    for name in ("evil.pth", "array.pth", "cut.pth", "other.safetensors"):
        with pytest.raises(UserError) as caught:
            load_weights(tmp_path / name)
        assert name in str(caught.value)
    assert not (tmp_path / "was run").exists()


# ---------------------------------------------------------------- the hub

ASK = """
import json, sys
from sana_pipe.train.models.config import StartWeights; from sana_pipe.data.encoders.config import TextConfig, VaeConfig
from sana_pipe.base.errors import UserError
from sana_pipe.base import hub
told = []
for kind, given in json.loads(sys.argv[1]):
    try:
        path = hub.resolve(globals()[kind](**given), widest=kind == "StartWeights")
        told.append([str(path), None])
    except UserError as error:
        told.append([str(error), error.fix])
print(json.dumps(told))
"""


class Asked:
    """Processes of their own, since huggingface_hub reads the environment when it is imported."""

    def __init__(self, home: Path):
        self.home = home

    def environment(self, server: hub_layouts.Hub, **more: str) -> dict[str, str]:
        plain = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
        return {
            **plain,
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_ETAG_TIMEOUT": "5",
            "HF_HUB_DOWNLOAD_TIMEOUT": "5",
            **more,
        }

    def __call__(
        self, server: hub_layouts.Hub, *asked: tuple[str, dict[str, Any]], **more: str
    ) -> list[tuple[str, str | None]]:
        done = subprocess.run(
            [sys.executable, "-c", ASK, json.dumps(asked)],
            env=self.environment(server, **more),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        server.fetched, fetched = [], server.fetched
        self.fetched = fetched
        return [(printed, fix) for printed, fix in json.loads(done.stdout)]


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path / "home")


def start(**more: Any) -> tuple[str, dict[str, Any]]:
    return "StartWeights", {"id": BIG, **more}


def test_only_what_is_used_is_fetched_and_a_mirror_serves(asked: Asked, repositories: Callable[[str], Path]) -> None:
    with hub_layouts.served(hub_layouts.Hub({BIG: repositories(BIG)})) as server:
        summary = asked(
            server,
            start(),
            ("VaeConfig", {"id": BIG}),
            ("TextConfig", {"id": BIG}),
            start(revision="f" * 40),
            start(id="Efficient-Large-Model/absent"),
        )
        assert {name for name in asked.fetched if not name.endswith(".json")} == {
            *(f"transformer/diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)),
            *(f"text_encoder/model-0000{i}-of-00002.safetensors" for i in (1, 2)),
            "vae/diffusion_pytorch_model.safetensors",
        }
        assert not any(name.startswith("tokenizer/") for name in asked.fetched)
        assert [Path(path).name for path, _ in summary[:3]] == ["transformer", "vae", "text_encoder"]
        assert WeightFiles(Path(summary[0][0])).dtype("proj_out.bias") == "F32"
        for said, fix in summary[3:]:
            assert fix and "correct" in fix, said
        # the same again, offline and then with the hub gone: nothing is asked for
        assert asked(server, start(), HF_HUB_OFFLINE="1") == summary[:1] and not asked.fetched
    assert asked(server, start()) == summary[:1]


def test_a_cache_that_is_partly_filled_says_what_is_missing(asked: Asked, repositories: Callable[[str], Path]) -> None:
    with hub_layouts.served(hub_layouts.Hub({BIG: repositories(BIG)})) as server:
        cache = asked.home / "hub"
        shard = "diffusion_pytorch_model-00001-of-00002.safetensors"
        hub_layouts.cached(cache, BIG, server.revision, repositories(BIG), ["config.json", "*.index*.json", shard])
        (said, fix), (vae, vae_fix) = asked(server, start(), ("VaeConfig", {"id": BIG}), HF_HUB_OFFLINE="1")
        assert "diffusion_pytorch_model-00002-of-00002.safetensors" in said
        assert fix and f"hf download {BIG} --include 'transformer/*'" in fix
        assert "no weights" in vae and vae_fix and "'vae/*'" in vae_fix
        [(path, _)] = asked(server, start())  # with the hub, the rest is fetched
        assert WeightFiles(Path(path)).dtype("proj_out.bias") == "F32"


def test_a_gated_repository_and_an_interrupted_download(asked: Asked, repositories: Callable[[str], Path]) -> None:
    cut = {"00002-of-00002.safetensors": 100}
    closed = hub_layouts.Hub({BIG: repositories(BIG)}, gated=frozenset({BIG}), cut=cut)
    with hub_layouts.served(closed) as server:
        ((said, fix),) = asked(server, start())
        assert "gated" in said and fix and "hf auth login" in fix and "HF_TOKEN" in fix
        ((said, fix),) = asked(server, start(), HF_TOKEN="hf_right")
        assert (fix and "again" in fix) or "network" in (fix or ""), said
        assert "Traceback" not in said
        server.cut.clear()
        ((path, _),) = asked(server, start(), HF_TOKEN="hf_right")
        assert WeightFiles(Path(path)).dtype("proj_out.bias") == "F32"
        assert not any("00001-of-00002" in name for name in asked.fetched), "what was whole is not fetched again"


def test_an_nvlabs_file_of_the_hub(asked: Asked, repositories: Callable[[str], Path], tmp_path: Path) -> None:
    config, weights = load_weights(repositories(BIG) / "transformer")
    save_nvlabs(weights, config, tmp_path / "repo" / "checkpoints", "Sana", torch.float32)
    name = "Efficient-Large-Model/Sana_1600M_1024px_BF16"
    with hub_layouts.served(hub_layouts.Hub({name: tmp_path / "repo"})) as server:
        url = f"hf://{name}/checkpoints/Sana.pth"
        (path, _), (said, fix) = asked(
            server, ("StartWeights", {"id": url}), ("StartWeights", {"id": url.replace("Sana.pth", "none.pth")})
        )
        assert set(asked.fetched) == {"checkpoints/Sana.pth", "checkpoints/config.json"}
        assert all(torch.equal(value, weights[key]) for key, value in load_weights(Path(path))[1].items())
        assert "none.pth" in said and fix


def name_code(tokenizer: Path, mark: Path) -> None:
    """Let a tokenizer name a class in a file of its own, which writes `mark` when it is run."""
    file = tokenizer / "tokenizer_config.json"
    named = {"auto_map": {"AutoTokenizer": ["foreign.Foreign", None]}, "tokenizer_class": "Foreign"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **named}))
    (tokenizer / "foreign.py").write_text(f"open({str(mark)!r}, 'w')\nclass Foreign: ...\n")


def test_check_says_beforehand_what_is_missing(
    repositories: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from huggingface_hub import constants

    def checked(*overrides: str) -> tuple[int, dict[str, Any]]:
        given = [f"{part}.revision=null" for part in ("vae", "text", "model.weights")]
        capsys.readouterr()
        code = check.run(load("sana_1600m_1024", [*given, "data.buckets=[[64, 64]]", *overrides]), as_json=True)
        return code, json.loads(capsys.readouterr().out)

    other = Path(shutil.copytree(repositories(BIG), tmp_path / "other"))
    for path in (other / "vae").glob("*.safetensors"):
        path.unlink()
    coded = Path(shutil.copytree(repositories(BIG), tmp_path / "coded"))
    name_code(coded / "tokenizer", tmp_path / "ran")
    served = {BIG: repositories(BIG), "a/broken": other, "a/closed": repositories(BIG), "a/coded": coded}
    served["a/text"] = repositories(BIG) / "text_encoder"
    with hub_layouts.served(hub_layouts.Hub(served, gated=frozenset({"a/closed"}))) as server:
        for name, value in (
            ("ENDPOINT", server.url),
            ("HF_HUB_CACHE", str(tmp_path / "hub")),
            ("HF_HUB_OFFLINE", False),
            ("HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"),
        ):
            monkeypatch.setattr(constants, name, value)
        code, printed = checked()
        assert (code, printed["ok"], printed["problems"]) == (0, True, [])
        assert {part["part"]: len(part["files"]) for part in printed["parts"] if part["part"] != "tokenizer"} == {
            "VAE": 1,
            "text encoder": 2,
            "transformer": 2,
        }
        assert "names code of its own" in checked("text.id=a/coded")[1]["problems"][0]
        assert not any(name.endswith(".safetensors") for name in server.fetched), "weights were fetched"
        sizes = {p["part"]: p["bytes"] for p in printed["parts"]}
        later = {p["part"]: p["to_fetch"] for p in printed["parts"]}
        assert printed["to_fetch"] == sum(later.values())
        assert 0 < later.pop("tokenizer") < sizes.pop("tokenizer"), "its tokenizer_config.json is here"
        assert later == sizes
        hub.resolve(VaeConfig(id=BIG))
        assert checked()[1]["to_fetch"] == printed["to_fetch"] - sizes["VAE"]
        code, printed = checked("vae.id=a/broken", "text.id=a/closed", "model.weights.id=a/text")
    assert (code, printed["ok"]) == (2, False)
    assert {part["part"] for part in printed["parts"] if part["ok"]} == set()
    for problem, word in zip(printed["problems"], ("no weights", "gated", "gated", "gemma2"), strict=True):
        assert word in problem


def test_check_without_the_hub_says_each_thing_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert check.run(load("sana_1600m_1024", ["text.id=a/other"])) == 2
    printed = capsys.readouterr()
    assert printed.out.count("see below") == 4 and printed.out.endswith("2 problems\n")
    assert printed.err.count("the hub cannot be reached") == 2
    assert printed.err.count("repository a/other at") == printed.err.count("Sana_1600M_1024px_BF16_diffusers at") == 1


def test_check_sees_parts_that_do_not_fit(
    repositories: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = repositories(BIG)
    narrow = replace(hub_layouts.SMALL, in_channels=8, out_channels=8, caption_channels=64)
    save_weights(SanaTransformer.from_scratch(narrow, 0).state_dict(), narrow, tmp_path / "narrow", torch.float32)

    def config(*overrides: str) -> Config:
        own = [f"{part}.id={root}" for part in ("vae", "text", "model.weights")]
        return load("sana_1600m_1024", [*own, "data.buckets=[[64, 64]]", *overrides])

    assert check.run(config()) == 0
    assert "to be fetched" in capsys.readouterr().out
    assert check.run(config("train.adapter={targets: [attn1.to_w]}")) == 2
    said = capsys.readouterr().err
    assert "train.adapter.targets: 'attn1.to_w' matches no name in the model" in said and "attn1.to_" in said
    assert check.run(config("train.adapter={targets: all}")) == 0
    capsys.readouterr()
    narrowed = (f"model.weights.id={tmp_path / 'narrow'}",)
    assert check.run(config(*narrowed)) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("in_channels is 8", "16", "caption_channels is 64", "128"))
    assert check.run(config(f"vae.decoder={root / 'vae'}")) == 0
    assert "decoder" in capsys.readouterr().out
    shutil.copytree(root / "vae", tmp_path / "vae")
    settings = json.loads((tmp_path / "vae" / "config.json").read_text())
    (tmp_path / "vae" / "config.json").write_text(json.dumps({**settings, "latent_channels": 8}))
    assert check.run(config(f"vae.decoder={tmp_path / 'vae'}")) == 2
    said = capsys.readouterr().err
    assert "decodes other latents" in said and "latent channels: 16 | 8" in said and "vae.decoder: null" in said
    assert check.run(config("data.buckets=[[60, 64]]")) == 2
    assert check.run(config(f"text.id={root / 'text_encoder'}")) == 2
    assert "no tokenizer" in capsys.readouterr().err
    assert check.run(config(f"vae.id={root / 'text_encoder'}")) == 2
    assert "AutoencoderDC" in capsys.readouterr().err


# ---------------------------------------------------------------- every stage


@pytest.fixture(scope="module")
def run(photos: Path, repositories: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The shipped 0.6B configuration, on the small weights of its layout, out of a hub cache without network."""
    import huggingface_hub.constants as hub_constants

    root = tmp_path_factory.mktemp("run")
    overrides = [
        f"cache={root / 'cache'}",
        f"train.output={root / 'run'}",
        "train.steps=1",
        "train.device=cpu",
        "train.trackers=[]",
        "encode.device=cpu",
        "encode.workers=1",
        "data.resolution=64",
        "bucket.batch=4",
        "data.buckets=[[64, 64], [48, 80], [80, 48]]",
        "train.microbatch=4",
        "sample.steps=1",
        "train.optim.warmup_steps=0",
    ]
    config = load("sana_600m_512", overrides)
    assert config.vae.revision
    hub_layouts.cached(root / "hub", SMALL, config.vae.revision, repositories(SMALL))
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_constants, "HF_HUB_CACHE", str(root / "hub"))
        patch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
        encode.run(config, str(photos))
        bucket.run(config)
        train.run(config, log=lines.append)
        yield SimpleNamespace(root=root, config=config, lines=lines)


def test_a_run_takes_the_full_precision_and_says_so(run: SimpleNamespace) -> None:
    [said] = [line for line in run.lines if line.startswith("start weights:")]
    assert "diffusion_pytorch_model.safetensors (F32)" in said
    rows = [json.loads(line) for line in (run.root / "run" / "metrics.jsonl").read_text().splitlines()]
    [row] = [row for row in rows if "loss" in row]
    assert 0 < row["loss"] < 100
    files = Cache(run.root / "cache").files
    owners = [path.parent.name for path in (run.root / "cache").glob("segments/*/*.json")]
    # what was encoded knows where its encoders came from
    made_by = [commit.provenance for owner in owners for commit in commits(files, owner, 0)]
    origins = {(each["model"], each["revision"]) for each in made_by}
    assert origins == {(SMALL, run.config.vae.revision)}


def test_an_export_of_it_loads_as_its_readme_says_and_tells_nothing_of_this_machine(run: SimpleNamespace) -> None:
    out = export.run(run.config, "auto", run.root / "export")
    index = json.loads((out / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "SanaTransformer2DModel"]
    code = (out / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(
        code.replace("PATH/OF/THIS/FOLDER", str(out)).replace("num_inference_steps=20", "num_inference_steps=1"), names
    )
    pipe = names["pipe"]
    assert (pipe.transformer.dtype, pipe.vae.dtype, pipe.text_encoder.dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    )
    assert names["image"].size == (64, 64)
    for path in (path for path in out.rglob("*") if path.suffix in (".json", ".md")):
        assert str(run.root) not in path.read_text(), path


def test_sampling_runs_in_what_the_model_bears(run: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(command: list[str], **options: Any) -> SimpleNamespace:
        with pytest.raises(SystemExit) as ended:
            cli.main(command[command.index("decode") :])
        return SimpleNamespace(returncode=ended.value.code)

    used: list[torch.dtype] = []
    to = SanaTransformer.to
    monkeypatch.setattr(SanaTransformer, "to", lambda self, *a: (used.append(a[1]), to(self, *a))[1])
    monkeypatch.setattr(encoder_process.subprocess, "run", here)
    done = sample.run(run.config, "auto", None, run.root / "samples", 1)
    assert done.sheet.is_file() and used == [torch.float32, torch.float32], "the base, and what was trained"


def test_the_base_of_a_run_is_what_model_weights_name(
    run: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = checkpoint.ModelTensors(run.root / "run/checkpoints/step-00000001")
    first = first_weights(stored)
    assert first is not None
    started = stored.architecture.stored(hub.resolve(run.config.model.weights, widest=True))
    assert first.keys() == stored.keys()
    for name, shape in started.shapes.items():
        assert torch.equal(first[name], started.read(name, [0] * len(shape), shape).float()), name
    assert any(not torch.equal(first[name], value) for name, value in stored.items())
    save_weights(stored, hub_layouts.SMALL, tmp_path, torch.float32)
    monkeypatch.setitem(stored.document.config["model"], "weights", {"id": str(tmp_path)})
    copies = first_weights(stored)
    assert copies is not None
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert all(torch.equal(copies[name], value) for name, value in stored.items()), "the file may change"
    monkeypatch.setitem(stored.document.config["model"], "weights", None)
    assert first_weights(stored) is None, "drawn at random"


def test_an_export_takes_a_precision_that_the_weights_bear(run: SimpleNamespace, tmp_path: Path) -> None:
    out = export.run(run.config, "auto", tmp_path / "half", dtype="fp16")
    assert WeightFiles(out / "transformer").dtype("proj_out.weight") == "F16"
    assert "| transformer | the checkpoint; float16 |" in (out / "README.md").read_text()
    whole = load_weights(export.run(run.config, "auto", tmp_path / "whole") / "transformer")[1]
    assert whole["proj_out.weight"].dtype == torch.float32
    half = load_weights(out / "transformer")[1]
    assert all(torch.equal(half[name], value.half()) for name, value in whole.items())
    with pytest.raises(ConfigError, match="fp32 and fp16"):
        export.run(run.config, "auto", tmp_path / "brain", dtype="bf16")
    assert not (tmp_path / "brain").exists()
    huge = {name: value * 1e6 for name, value in whole.items()}
    with pytest.raises(UserError, match="float16 cannot hold"):
        save_weights(huge, hub_layouts.SMALL, tmp_path / "huge", torch.float16)


def test_an_nvlabs_export_starts_a_run(run: SimpleNamespace, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(dump(run.config))
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", "--config", str(config), "--format", "nvlabs", "--out", str(tmp_path / "nvlabs")])
    assert ended.value.code == 0
    assert {p.name for p in (tmp_path / "nvlabs").iterdir()} == {
        "sana_step_1.pth",
        "sana_step_1.safetensors",
        "config.json",
        "README.md",
        export_folder.MARK,
    }
    lines: list[str] = []
    again = load(
        config,
        [
            f"model.weights.id={tmp_path / 'nvlabs' / 'sana_step_1.pth'}",
            "model.weights.revision=null",
            f"train.output={tmp_path / 'run'}",
        ],
    )
    train.run(again, log=lines.append)
    assert any(line.startswith("start weights: sana_step_1.pth (F32)") for line in lines)


def test_the_tokenizer_of_an_export_is_the_fast_one(tmp_path: Path) -> None:
    """transformers 5 writes `GemmaTokenizer`, which transformers 4 takes for the slow class."""
    for given, wanted in (
        ("GemmaTokenizer", "GemmaTokenizerFast"),
        ("GemmaTokenizerFast", "GemmaTokenizerFast"),
        (None, "GemmaTokenizerFast"),
        ("PreTrainedTokenizerFast", "PreTrainedTokenizerFast"),
        ("TokenizersBackend", "PreTrainedTokenizerFast"),  # its name in transformers 5, which 4 lacks
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": given} if given else {}))
        assert export_folder.tokenizer_class(tmp_path) == wanted


def test_paths_of_the_machine_that_wrote_a_model_are_not_passed_on(tmp_path: Path) -> None:
    source, target = tmp_path / "config.json", tmp_path / "copy.json"
    source.write_text(json.dumps({"_name_or_path": "/home/me/model", "hidden_size": 3, "auto_map": {}}))
    export_folder.copy_settings(source, target)
    assert json.loads(target.read_text()) == {"hidden_size": 3}
    source.write_text('{"_name_or_path": "google/gemma-2-2b-it"}')
    export_folder.copy_settings(source, target)
    assert target.read_bytes() == source.read_bytes(), "a hub id is no path"


def test_check_refuses_a_tokenizer_that_names_code(
    repositories: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(shutil.copytree(repositories(BIG), tmp_path / "model"))
    name_code(root / "tokenizer", tmp_path / "ran")
    own = [f"{part}.id={root}" for part in ("vae", "text", "model.weights")]
    assert check.run(load("sana_1600m_1024", [*own, "data.buckets=[[64, 64]]"])) == 2
    assert "names code of its own, which is not run" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
