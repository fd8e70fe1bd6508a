"""Weight files with NVlabs' names, as their trainer writes (`checkpoints/NAME.pth`) and ComfyUI reads, too.

`parts` maps each of their tensors to our parameters (the names that their `tools/convert_sana_to_diffusers.py` maps to
diffusers'), `read` opens a `.pth` (with `weights_only`, so that no code runs) or safetensors file, `renamed` returns
its tensors under our names, and `buffers` makes what their model stores in addition to its parameters.
Price: a file lacks the number of heads of cross attention (known for the released widths) and, without its `pos_embed`,
the base of a position embedding; a `config.json` next to the file overrides what the shapes say.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sana_pipe.base import hub
from sana_pipe.base.config import setting
from sana_pipe.base.errors import UserError, not_permitted
from sana_pipe.train.models.sana_layers import position_embedding
from sana_pipe.train.models.sana_shape import SanaShape, read_config

BUFFERS = ("pos_embed", "y_embedder.y_embedding")
"""Buffers of their model that ours lacks: a computed table, and rows that take the place of a dropped caption. Their
trainer puts the rows of the empty caption there, and their pipelines encode it anew."""

CROSS_HEADS = {1152: 16, 2240: 20}
"""Width -> heads of cross attention in NVlabs' models. Heads of self attention are `_HEAD` wide."""

_HEAD = 32
_FIRST = "x_embedder.proj.weight"
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""The words that torch.compile, FSDP and checkpointing put into the names of what they wrap."""

_rebuild = np.zeros(0).__reduce__()[0]
_ARRAYS: list[Any] = [
    *((_rebuild, "numpy.core.multiarray._reconstruct"), (_rebuild, "numpy._core.multiarray._reconstruct")),
    *(np.ndarray, np.dtype, type(np.dtype("uint32"))),
]
"""Globals that build an array of numpy 1 or 2: their trainer saves the state of numpy's generator, too."""

_ENDS = {
    "patch_embed.proj": "x_embedder.proj",
    "caption_projection.linear_1": "y_embedder.y_proj.fc1",
    "caption_projection.linear_2": "y_embedder.y_proj.fc2",
    "caption_norm": "attention_y_norm",
    "time_embed.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_embed.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_embed.linear": "t_block.1",
    "proj_out": "final_layer.linear",
    "scale_shift_table": "final_layer.scale_shift_table",
}
_BLOCK = {
    "attn1.to_q": "attn.qkv",
    "attn1.to_k": "attn.qkv",
    "attn1.to_v": "attn.qkv",
    "attn1.norm_q": "attn.q_norm",
    "attn1.norm_k": "attn.k_norm",
    "attn1.to_out.0": "attn.proj",
    "attn2.to_q": "cross_attn.q_linear",
    "attn2.to_k": "cross_attn.kv_linear",
    "attn2.to_v": "cross_attn.kv_linear",
    "attn2.norm_q": "cross_attn.q_norm",
    "attn2.norm_k": "cross_attn.k_norm",
    "attn2.to_out.0": "cross_attn.proj",
    "ff.conv_inverted": "mlp.inverted_conv.conv",
    "ff.conv_depth": "mlp.depth_conv.conv",
    "ff.conv_point": "mlp.point_conv.conv",
    "scale_shift_table": "scale_shift_table",
}
_ORDER = ("to_q", "to_k", "to_v")


def their_name(name: str) -> str:
    """NVlabs' name of the tensor that contains one of our parameters; UserError if their model has no such one."""
    block = re.match(r"transformer_blocks\.(\d+)\.(.+)$", name)
    rest, table, start = (block[2], _BLOCK, f"blocks.{block[1]}.") if block else (name, _ENDS, "")
    module, dot, kind = rest.rpartition(".")
    if rest not in table and module not in table:
        raise UserError(f"NVlabs' format has no place for the parameter {name}", fix="--format diffusers")
    return start + (table[rest] if rest in table else table[module] + dot + kind)


def parts(names: Iterable[str]) -> dict[str, list[str]]:
    """Their tensor -> our parameters that it consists of, from the first row to the last."""
    tensors: dict[str, list[str]] = {}
    for name in names:
        tensors.setdefault(their_name(name), []).append(name)
    for members in tensors.values():
        members.sort(key=lambda name: next((i for i, word in enumerate(_ORDER) if f".{word}." in name), 0))
    return tensors


def buffers(config: SanaShape, text_rows: int) -> dict[str, Tensor]:
    """`BUFFERS` as their model makes them: the table of positions (zeros in a model that adds none), random rows."""
    side, width = config.sample_size // config.patch_size, config.inner_dim
    table = torch.zeros(side * side, width)
    if config.interpolation_scale is not None:
        table = position_embedding(side, side, width, base=side, scale=config.interpolation_scale)
    rows = torch.randn(text_rows, config.caption_channels, generator=torch.Generator().manual_seed(0))
    return dict(zip(BUFFERS, (table[None], rows / config.caption_channels**0.5), strict=True))


def read(path: Path, variant: str | None = None) -> tuple[SanaShape, dict[str, Tensor], str]:
    """The model's shape, its tensors (mapped from the file) by NVlabs' names, and what else the file holds, in words.
    variant: of several models in one `.pth`, the name of the one to be read, such as `state_dict_ema`."""
    stored, note = _open(path, variant)
    return config_of(path, stored), {name: part for name, part in stored.items() if name not in BUFFERS}, note


def plain_names(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the names of wrappers, and without what all names begin with, such as `module.`."""
    names = {_WRAPPERS.sub("", name): part for name, part in stored.items()}
    while all("." in name for name in names) and len({name.partition(".")[0] for name in names}) == 1:
        names = {name.partition(".")[2]: part for name, part in names.items()}
    return names


def renamed(stored: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Views by our names, in diffusers' channel order; tensors without a counterpart keep their names."""
    tensors = dict(stored)
    for theirs, ours in parts(names).items():
        if (whole := tensors.pop(theirs, None)) is None:
            continue
        rows = len(whole := torch.atleast_1d(whole))  # a scalar is of another shape, which the caller refuses
        for i, name in enumerate(ours):
            tensors[name] = whole[i * rows // len(ours) : (i + 1) * rows // len(ours)]
    return tensors


def _open(path: Path, variant: str | None) -> tuple[dict[str, Tensor], str]:
    if path.suffix == ".safetensors":
        file = hub.open_tensors(path)
        return plain_names({name: file.get_tensor(name) for name in file.keys()}), ""
    try:
        with torch.serialization.safe_globals(_ARRAYS):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise not_permitted(path) or UserError(
            f"{path} cannot be read as weights",
            expected="a .pth file of tensors (of torch 1.6 or newer) or a safetensors file",
            found=next(iter(str(error).splitlines()), type(error).__name__),
            fix="fetch it again; a file with more than tensors and numbers is not loaded: reading it runs code",
        ) from None
    models = dict(_models(content))
    plain = [name for name in models if "ema" not in name.lower()] or list(models)
    chosen = plain[0] if variant is None and len(plain) == 1 else variant
    if models and chosen not in models:
        raise UserError(
            f"{path} holds several models" if variant is None else f"{path} holds no model {variant!r}",
            found=", ".join(models),
            fix=setting("model.weights.variant", *(name or None for name in models)),
        )
    others = " and ".join(name for name in models if name != chosen)
    note = f"; its {others} is not used (model.weights.variant={others.split(' ')[0]} takes it)" if others else ""
    return plain_names(models.get(chosen or "", {})), note


def _models(content: Any, name: str = "", depth: int = 3) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Tensors of each dictionary in a file that holds a Sana transformer, by the keys that lead to it."""
    if not isinstance(content, dict) or not depth:
        return
    tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if any(key.endswith(_FIRST) for key in tensors):
        yield name, tensors
    for key, value in content.items():
        yield from _models(value, f"{name}.{key}" if name else str(key), depth - 1)


def config_of(path: Path, stored: Mapping[str, Tensor]) -> SanaShape:
    shapes = {name: tuple(part.shape) for name, part in stored.items()}
    try:
        width, channels, patch = shapes["x_embedder.proj.weight"][:3]
        depth = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
        hidden = shapes["blocks.0.mlp.depth_conv.conv.weight"][0] // 2
        captions = shapes["y_embedder.y_proj.fc1.weight"][1]
        out = shapes["final_layer.linear.weight"][0]
    except (KeyError, ValueError, IndexError) as error:
        by_diffusers = "patch_embed.proj.weight" in shapes
        raise UserError(
            f"{path} does not hold a Sana transformer of NVlabs' repository",
            expected="x_embedder.proj.weight, ..",
            found=", ".join(sorted(shapes)[:4]) or f"no {_FIRST}",
            fix="give the folder that it is in: its names are diffusers', and the shape is in the folder's config.json"
            if by_diffusers
            else f"give the file of the transformer alone ({error} is missing)",
        ) from None
    if any(name.startswith("cfg_embedder.") for name in shapes):
        raise UserError(
            f"{path} is a guidance-distilled model (Sana-Sprint: it has cfg_embedder)", expected="Sana or SANA-1.5"
        )
    config_file = path.with_name("config.json")
    if config_file.is_file():
        return read_config(config_file.parent)
    if width not in CROSS_HEADS or width % _HEAD:
        raise UserError(
            f"{path} does not say how many heads the cross attention of a model of width {width} has",
            expected=f"width {' or '.join(map(str, CROSS_HEADS))}",
            fix=f"put the model's diffusers config.json at {config_file}",
        )
    norm = "blocks.0.attn.q_norm.weight" in shapes
    repository = next((part for part in path.parts if part.startswith("models--")), "")
    if "sprint" in (path.name + repository).lower() or (norm and width == min(CROSS_HEADS)):
        raise UserError(
            f"{path} is a model of Sana-Sprint by its {'shape' if norm and width == min(CROSS_HEADS) else 'name'}; its "
            "teachers read timesteps divided by 1000 (timestep_norm_scale_factor)",
            expected="Sana or SANA-1.5",
            fix=f"take the weights of SANA-1.5; if it is another model, put its diffusers config.json at {config_file}",
        )
    side, scale = _positions(path, stored)
    return SanaShape(
        in_channels=channels,
        out_channels=out,
        num_layers=depth,
        caption_channels=captions,
        patch_size=patch,
        num_attention_heads=width // _HEAD,
        attention_head_dim=_HEAD,
        cross_attention_dim=width,
        num_cross_attention_heads=CROSS_HEADS[width],
        cross_attention_head_dim=width // CROSS_HEADS[width],
        mlp_ratio=hidden / width,
        qk_norm="rms_norm_across_heads" if norm else None,
        sample_size=side,
        interpolation_scale=scale,
    )


def _positions(path: Path, stored: Mapping[str, Tensor]) -> tuple[int, float | None]:
    """`sample_size` and `interpolation_scale`, from the buffer `pos_embed` (1, tokens, width): zeros in a model that
    adds none; else its second row begins with sin(1 / scale)."""
    if "pos_embed" not in stored:
        raise UserError(
            f"{path} has no pos_embed, which says whether the model adds a position embedding",
            fix=f"put the model's diffusers config.json at {path.with_name('config.json')}",
        )
    table = stored["pos_embed"]
    value = float(table[0, :2][-1, 0])
    return math.isqrt(table.shape[1]), round(1 / math.asin(value), 1) if value else None
