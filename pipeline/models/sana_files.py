"""Sana's weights in and out of a diffusers folder.

What: `load_weights`, `load_transformer` and `save_weights` for safetensors in one file or in shards with an index;
`interleave` and `deinterleave` between diffusers' channel order, which exists only in files, and ours.
Why: a folder is refused by the file, parameter or key that is wrong with it, not by a tensor's shape deep in a load.
Price: a whole set of weights is in host memory while it is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import UserError
from pipeline.models.sana import SanaTransformer
from pipeline.models.sana_config import SanaConfig, read_config

WEIGHTS_STEM = "diffusion_pytorch_model"
MAX_SHARD_BYTES = 5_000_000_000  # diffusers' own default, "5GB"

_GLU_PARAMETERS = ("conv_inverted.weight", "conv_inverted.bias", "conv_depth.weight", "conv_depth.bias")


def interleave(name: str, tensor: Tensor) -> Tensor:
    """diffusers' order -> ours, for the parameters of GLUMBConv's first two convolutions; others pass unchanged.

    [values 0..H-1, gates 0..H-1] becomes [value 0, gate 0, value 1, gate 1, ..] along dimension 0 (a copy).
    """
    if not name.endswith(_GLU_PARAMETERS):
        return tensor
    return tensor.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def deinterleave(name: str, tensor: Tensor) -> Tensor:
    """Our order -> diffusers'; the inverse of `interleave`."""
    if not name.endswith(_GLU_PARAMETERS):
        return tensor
    return tensor.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1).contiguous()


def expected_shapes(config: SanaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the model's order (nothing is allocated)."""
    return {name: tuple(parameter.shape) for name, parameter in SanaTransformer.on_meta(config).named_parameters()}


def load_weights(folder: Path, variant: str | None = None) -> tuple[SanaConfig, dict[str, Tensor]]:
    """Read a diffusers transformer folder: `config.json` and safetensors, in one file or in shards with an index.

    Args:
        folder: local folder.
        variant: the middle part of the file names, such as `fp16` in `diffusion_pytorch_model.fp16.safetensors`.

    Returns:
        The configuration, and every parameter on the CPU in the file's dtype and our layout.

    Raises:
        UserError: no such folder or files, a damaged file, parameters missing, unexpected or of another shape (named).
    """
    folder = Path(folder)
    config = read_config(folder)
    weights: dict[str, Tensor] = {}
    source: dict[str, str] = {}
    for path in _weight_files(folder, variant):
        try:
            part = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path} cannot be read as safetensors: {error}", fix="download or export it again"
            ) from None
        for name, tensor in part.items():
            if name in source:
                raise UserError(f"{folder}: parameter {name} is in two files", found=f"{source[name]}, {path.name}")
            source[name] = path.name
            weights[name] = interleave(name, tensor)
    _check_names(config, weights, str(folder))
    return config, weights


def load_transformer(
    folder: Path,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
    variant: str | None = None,
) -> SanaTransformer:
    """Build from a diffusers transformer folder; `dtype=None` keeps the file's. Errors as in `load_weights`."""
    config, weights = load_weights(folder, variant)
    for name in list(weights):
        # a copy: what was loaded is a mapping of the file, which may change or shrink later
        weights[name] = weights[name].to(device=device, dtype=dtype, copy=True)
    model = SanaTransformer.on_meta(config)
    model.load_state_dict(weights, assign=True)
    model.requires_grad_(True)
    model.reset_buffers()
    return model


def save_weights(
    state_dict: Mapping[str, Tensor],
    config: SanaConfig,
    folder: Path,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a folder that diffusers' `SanaTransformer2DModel.from_pretrained` and `load_weights` read.

    Each file is written beside its place and renamed; the index and `config.json` come last. Weight files of an
    earlier export in the same folder are removed at the end.

    Args:
        state_dict: every parameter in full, in our layout, on any device; converted one shard at a time.
        config: written as `config.json`.
        folder: created if absent.
        dtype: of the files.
        max_shard_bytes: files grow no larger than this unless one tensor does.

    Raises:
        UserError: parameters missing, unexpected or of another shape (named); the folder cannot be written.
    """
    folder = Path(folder)
    _check_names(config, state_dict, "the model to be saved")
    shards: list[list[str]] = [[]]
    room, total = max_shard_bytes, 0
    for name in expected_shapes(config):
        size = state_dict[name].numel() * dtype.itemsize
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
        total += size

    written: list[str] = []
    place: dict[str, str] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, names in enumerate(shards, 1):
            suffix = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            file = f"{WEIGHTS_STEM}{suffix}.safetensors"
            part = {
                name: deinterleave(name, state_dict[name].detach()).to(device="cpu", dtype=dtype).contiguous()
                for name in names
            }
            temporary = folder / f"{file}.tmp"
            save_file(part, temporary, metadata={"format": "pt"})
            os.replace(temporary, folder / file)
            written.append(file)
            place.update(dict.fromkeys(names, file))
        if len(shards) > 1:
            index = f"{WEIGHTS_STEM}.safetensors.index.json"
            _write_json(folder / index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))})
            written.append(index)
        _write_json(folder / "config.json", config.to_dict())
        for path in folder.glob(f"{WEIGHTS_STEM}*.safetensors*"):
            if path.name not in written:
                path.unlink()
    except OSError as error:
        raise UserError(f"the transformer cannot be written to {folder}: {error}") from error


def _weight_files(folder: Path, variant: str | None) -> list[Path]:
    middle = f".{variant}" if variant else ""
    single = folder / f"{WEIGHTS_STEM}{middle}.safetensors"
    indices = [
        folder / f"{WEIGHTS_STEM}.safetensors.index{middle}.json",
        folder / f"{WEIGHTS_STEM}{middle}.safetensors.index.json",
    ]
    index = next((path for path in indices if path.is_file()), None)
    if single.is_file():
        if index is not None:
            raise UserError(
                f"{folder} has both {single.name} and {index.name}", fix="remove the one that is out of date"
            )
        return [single]
    if index is None:
        there = sorted(path.name for path in folder.glob("*") if ".safetensors" in path.name or path.suffix == ".bin")
        raise UserError(
            f"{folder} has no weights" + (f" of variant {variant!r}" if variant else ""),
            expected=f"{single.name} or {indices[0].name}",
            found=", ".join(there) or "no weight files",
            fix="set model.weights.variant to the middle part of the files' names (null where there is none)",
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index} cannot be read as an index of shards: {error!r}") from None
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise UserError(f"{index} names shards that are not there: {_some(absent)}", fix="download them again")
    return [folder / name for name in names]


def _check_names(config: SanaConfig, weights: Mapping[str, Tensor], where: str) -> None:
    shapes = expected_shapes(config)
    missing = [name for name in shapes if name not in weights]
    unexpected = [name for name in weights if name not in shapes]
    if missing or unexpected:
        parts = [f"missing {_some(missing)}"] * bool(missing) + [f"unexpected {_some(unexpected)}"] * bool(unexpected)
        raise UserError(
            f"{where} does not hold the parameters of its configuration: {'; '.join(parts)}",
            expected=f"{len(shapes)} parameters",
            found=f"{len(weights)}",
        )
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise UserError(
                f"{where}: parameter {name} has another shape than its configuration says",
                expected=list(shape),
                found=list(weights[name].shape),
            )


def _some(names: Iterable[str], limit: int = 8) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
