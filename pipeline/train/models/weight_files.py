"""Weights in and out of a folder of diffusers: `config.json` and safetensors, in one file or in shards with an index.

`FolderWeights` reads any slice of a parameter, so that a process reads only its shards; `save_folder` writes one
parameter at a time.
Why not safetensors' writer: it needs all tensors of a file at once (5 GB by default). The tests read what is written
here with safetensors and diffusers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from sana_pipe.base import hub
from sana_pipe.base.errors import UserError, writing
from sana_pipe.train.models.spec import raw_bytes

WEIGHTS_STEM = "diffusion_pytorch_model"
MAX_SHARD_BYTES = 5_000_000_000  # diffusers' default, "5GB"

_STORED_AS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
Rows = Callable[[str, Tensor], Tensor]
"""Reorders the rows of a parameter, given its name (`ModelSpec.rows_to_file`)."""


def mapped(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The tensors of safetensors files; their bytes are read on access."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        handle = hub.open_tensors(path)
        for name in handle.keys():
            if name in tensors:
                raise UserError(f"{path}: parameter {name} is in another file, too")
            tensors[name] = handle.get_tensor(name)
    return tensors


class FolderWeights:
    """The weights of a model in a folder that `save_pretrained` of diffusers wrote, opened.

    Args:
        expected: name and shape of every parameter.
        variant: the middle part of the file names, such as `fp16` in `diffusion_pytorch_model.fp16.safetensors`; None
            takes the set of the highest precision.

    Attributes:
        shapes: name and shape of every parameter.
        description: the opened files, for the log.

    Raises:
        UserError: no such folder or files, a damaged file, parameters missing, unexpected or of another shape (named).
    """

    def __init__(self, place: Path, expected: Mapping[str, tuple[int, ...]], variant: str | None = None):
        chosen = hub.choose(place, variant, widest=True)
        self.opened(place, mapped([place / name for name in chosen.files]), expected, chosen.files)

    def opened(
        self,
        place: Path,
        tensors: Mapping[str, Tensor],
        expected: Mapping[str, tuple[int, ...]],
        files: Sequence[str],
        note: str = "",
    ) -> None:
        """Take the tensors of some files of a place, after a check. note: the end of the description."""
        self.place, self._tensors = place, tensors
        self.shapes = {name: tuple(part.shape) for name, part in tensors.items()}
        check_names(expected, self.shapes, str(place))
        for name, shape in expected.items():
            check_shape(name, shape, self.shapes[name], str(place))
        kinds = "/".join(sorted({self.dtype(name) for name in expected}))
        self.description = f"{', '.join(files)} ({kinds}) of {place}{note}"

    def dtype(self, name: str) -> str:
        """The file's dtype of a parameter, as safetensors names it (`F32`, `BF16`)."""
        kind = self._tensors[name].dtype
        return _STORED_AS.get(kind, str(kind))

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """A box of a parameter, in the file's dtype and our layout, on the CPU. It may be a mapping of the file, which
        may change or shrink later: copy it. Values that are not finite numbers are refused."""
        box = self._box(name, offsets, lengths)
        if not torch.isfinite(box.float() if box.itemsize == 1 else box).all():
            raise UserError(
                f"{self.place}: parameter {name} holds values that are not finite numbers",
                fix="give other weights: with these every loss is NaN",
            )
        return box

    def fingerprint(self) -> str:
        """Covers dtype, shape and up to 64 values of the first, middle and last row of every parameter: it
        distinguishes models, not single flipped bits."""
        digest = xxhash.xxh3_128()
        for name, shape in sorted(self.shapes.items()):
            digest.update(f"{name} {shape} {self.dtype(name)}\0".encode())
            for row in sorted({0, shape[0] // 2, shape[0] - 1}):
                lengths = [1, *(min(side, 64) for side in shape[1:])]
                box = self.read(name, [row] + [0] * (len(shape) - 1), lengths)
                digest.update(raw_bytes(box.flatten()[:64]))
        return digest.hexdigest()

    def _box(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        return self._tensors[name][tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))]


def as_stored(name: str, tensor: Tensor) -> Tensor:
    """Rows that files and the module have in the same order."""
    return tensor


def save_folder(
    weights: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    folder: Path,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    rows: Rows = as_stored,
) -> None:
    """Write a folder that `from_pretrained` of diffusers' class reads. The folder is new, or empty.

    Args:
        weights: every parameter in full, in the module's layout; read and converted one at a time.
        shapes: name and shape of every parameter. config: the contents of `config.json`.
        max_shard_bytes: files grow no larger than this unless one tensor does.

    Raises:
        UserError: parameters missing, unexpected or of another shape (named); the folder cannot be written.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    folder = Path(folder)
    check_names(shapes, weights, "the model to be saved")
    like = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    files, index = f"{WEIGHTS_STEM}{{suffix}}.safetensors", f"{WEIGHTS_STEM}.safetensors.index.json"
    split = split_torch_state_dict_into_shards(like, filename_pattern=files, max_shard_size=max_shard_bytes)
    with writing(folder, "check the permissions, or write to another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for file, names in split.filename_to_tensors.items():
            write_file(folder / file, {name: [name] for name in names}, shapes, weights, dtype, rows)
        if split.is_sharded:
            weight_map = dict(sorted(split.tensor_to_filename.items()))
            write_json(folder / index, {"metadata": split.metadata, "weight_map": weight_map})
        write_json(folder / "config.json", config)


def write_file(
    path: Path,
    tensors: Mapping[str, Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    rows: Rows = as_stored,
) -> None:
    """Write one safetensors file. tensors: name in the file -> the parameters whose rows it concatenates. Refused is a
    parameter of another shape, or with values that `dtype` cannot hold."""
    lengths = {stored: sum(shapes[name][0] for name in names) for stored, names in tensors.items()}
    with path.open("wb") as out:
        sides = {stored: (lengths[stored], *shapes[names[0]][1:]) for stored, names in tensors.items()}
        out.write(_header(sides, dtype))
        for name in (name for names in tensors.values() for name in names):
            whole = weights[name].detach()
            check_shape(name, shapes[name], tuple(whole.shape), "the model to be saved")
            stored = rows(name, whole).to(device="cpu", dtype=dtype)
            if dtype == torch.float16 and not torch.isfinite(stored).all() and torch.isfinite(whole).all():
                raise UserError(
                    f"parameter {name} has values that float16 cannot hold",
                    expected="at most 65504",
                    found=f"{float(whole.abs().max()):g}",
                    fix="another --dtype",
                )
            out.write(raw_bytes(stored))


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    """The header of a safetensors file with these tensors, one after the other
    (https://github.com/huggingface/safetensors#format)."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": _STORED_AS[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align the bytes that follow
    return len(text).to_bytes(8, "little") + text


def check_names(shapes: Mapping[str, tuple[int, ...]], names: Iterable[str], place: str) -> None:
    present = set(names)
    missing = [name for name in shapes if name not in present]
    unexpected = sorted(present - shapes.keys())
    if missing or unexpected:
        groups = ("missing", missing), ("unexpected", unexpected)
        parts = [f"{what} {hub.listed(group)}" for what, group in groups if group]
        raise UserError(
            f"{place} does not hold the parameters of its configuration: {'; '.join(parts)}",
            expected=f"{len(shapes)} parameters",
            found=f"{len(present)}",
        )


def check_shape(name: str, expected: tuple[int, ...], found: tuple[int, ...], place: str) -> None:
    if found != expected:
        raise UserError(
            f"{place}: parameter {name} has another shape than its configuration says",
            expected=list(expected),
            found=list(found),
        )


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
