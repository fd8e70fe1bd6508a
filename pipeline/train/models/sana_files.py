"""Sana's weights in and out of a diffusers folder, and of files with NVlabs' names.

`WeightFiles` reads any slice of a parameter, so that a process reads only its shards; `save_weights` writes them one at
a time.
Why not safetensors' writer: it needs all tensors of a file at once (5 GB by default). The tests read what is written
here with safetensors and diffusers.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from pipeline.base import hub
from pipeline.base.errors import UserError, writing
from pipeline.train.models import nvlabs
from pipeline.train.models.sana import parameter_shapes
from pipeline.train.models.sana_shape import GLU_PARAMETERS, SanaShape, deinterleave, interleave, read_config
from pipeline.train.models.spec import raw_bytes

WEIGHTS_STEM = "diffusion_pytorch_model"
MAX_SHARD_BYTES = 5_000_000_000  # diffusers' default, "5GB"

_STORED_AS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def _mapped(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The tensors of safetensors files; their bytes are read on access."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        handle = hub.open_tensors(path)
        for name in handle.keys():
            if name in tensors:
                raise UserError(f"{path}: parameter {name} is in another file, too")
            tensors[name] = handle.get_tensor(name)
    return nvlabs.plain_names(tensors)


class WeightFiles:
    """A diffusers transformer folder, opened: `config.json` and safetensors, in one file or in shards with an index. Or
    a file as NVlabs' trainer writes it (`.pth`, or safetensors with its names; see `models.nvlabs`).

    Args:
        variant: the middle part of the file names, such as `fp16` in `diffusion_pytorch_model.fp16.safetensors`; None
            takes the set of the highest precision. In a `.pth`: see `nvlabs.read`.
        config: what the files are of; `config.json` is not read, and a file has diffusers' names.

    Attributes:
        config: as given, or from `config.json`, or from the shapes of NVlabs' file.
        shapes: name and shape of every parameter.
        description: the opened files, for the log.

    Raises:
        UserError: no such folder or files, a damaged file, parameters missing, unexpected or of another shape (named).
    """

    def __init__(self, place: Path, variant: str | None = None, config: SanaShape | None = None):
        place = Path(place)
        note = ""
        if place.is_file() and config is not None:
            self.config, self._tensors = config, _mapped([place])
            names: tuple[str, ...] = (place.name,)
        elif place.is_file():
            self.config, stored, note = nvlabs.read(place, variant)
            self._tensors = nvlabs.renamed(stored, parameter_shapes(self.config))
            names = (place.name,)
        else:
            self.config = config or read_config(place)
            chosen = hub.choose(place, variant, widest=True)
            self._tensors = _mapped([place / name for name in chosen.files])
            names = chosen.files
        self.shapes = {name: tuple(part.shape) for name, part in self._tensors.items()}
        expected = parameter_shapes(self.config)
        _check_names(expected, self.shapes, str(place))
        for name, shape in expected.items():
            _check_shape(name, shape, self.shapes[name], str(place))
        kinds = "/".join(sorted({self.dtype(name) for name in expected}))
        self.place = place
        self.description = f"{', '.join(names)} ({kinds}) of {place}{note}"

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
        stored, rest = self._tensors[name], [slice(a, a + n) for a, n in zip(offsets, lengths, strict=True)][1:]
        begin, end = offsets[0], offsets[0] + lengths[0]
        if not name.endswith(GLU_PARAMETERS):
            return stored[(slice(begin, end), *rest)]
        # With H = 4 the file has the rows v0 v1 v2 v3 g0 g1 g2 g3 (values, then gates), the module v0 g0 v1 g1 v2 g2 v3
        # g3. A process that holds the module's rows 3 to 5 (g1 v2 g2) needs parts of the pairs 1 and 2: first = 1, last
        # = 3. It reads the file's rows 1 and 2 (v1 v2) and 5 and 6 (g1 g2), interleaves them to v1 g1 v2 g2, which are
        # the module's rows 2 to 5, and drops the first. So it reads 4 rows, of a file of any length.
        half, first, last = self.shapes[name][0] // 2, begin // 2, (end + 1) // 2  # the pairs of value and gate
        values, gates = stored[(slice(first, last), *rest)], stored[(slice(half + first, half + last), *rest)]
        return interleave(name, torch.cat([values, gates]))[begin - 2 * first : end - 2 * first]


def save_weights(
    state_dict: Mapping[str, Tensor],
    config: SanaShape,
    folder: Path,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a folder that diffusers' `SanaTransformer2DModel.from_pretrained` reads. The folder is new, or empty.

    Args:
        state_dict: every parameter in full, in our layout; read and converted one at a time.
        max_shard_bytes: files grow no larger than this unless one tensor does.

    Raises:
        UserError: parameters missing, unexpected or of another shape (named); the folder cannot be written.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    folder, shapes = Path(folder), parameter_shapes(config)
    _check_names(shapes, state_dict, "the model to be saved")
    like = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    files, index = f"{WEIGHTS_STEM}{{suffix}}.safetensors", f"{WEIGHTS_STEM}.safetensors.index.json"
    split = split_torch_state_dict_into_shards(like, filename_pattern=files, max_shard_size=max_shard_bytes)
    with writing(folder, "check the permissions, or write to another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for file, names in split.filename_to_tensors.items():
            write_file(folder / file, {name: [name] for name in names}, shapes, state_dict, dtype)
        if split.is_sharded:
            weight_map = dict(sorted(split.tensor_to_filename.items()))
            _write_json(folder / index, {"metadata": split.metadata, "weight_map": weight_map})
        _write_json(folder / "config.json", config.to_dict())


def save_nvlabs(
    state_dict: Mapping[str, Tensor],
    config: SanaShape,
    folder: Path,
    stem: str,
    dtype: torch.dtype,
    text_rows: int = 300,
) -> None:
    """Write STEM.safetensors and STEM.pth as NVlabs' repository writes them, with the buffers of their model, and
    `config.json`, from which `WeightFiles` takes what they lack: the heads of cross attention. text_rows: of a caption.
    Errors as in `save_weights`."""
    shapes = parameter_shapes(config)
    _check_names(shapes, state_dict, "the model to be saved")
    buffers = nvlabs.buffers(config, text_rows)
    tensors = nvlabs.parts(shapes) | {name: [name] for name in buffers}
    shapes |= {name: tuple(each.shape) for name, each in buffers.items()}
    path = folder / f"{stem}.safetensors"
    with writing(folder, "check the permissions, or write to another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, tensors, shapes, ChainMap(buffers, state_dict), dtype)  # type: ignore[arg-type]
        with hub.open_tensors(path) as file:  # mapped: the other file needs no memory for the whole model
            with (folder / f"{stem}.pth").open("wb") as out:  # torch's own file says nothing of a full disk
                torch.save({"state_dict": {name: file.get_tensor(name) for name in file.keys()}}, out)
        _write_json(folder / "config.json", config.to_dict())


def write_file(
    path: Path,
    tensors: Mapping[str, Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    state_dict: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> None:
    """Write one safetensors file. tensors: name in the file -> the parameters whose rows it concatenates. Refused is a
    parameter of another shape, or with values that `dtype` cannot hold."""
    rows = {stored: sum(shapes[name][0] for name in names) for stored, names in tensors.items()}
    with path.open("wb") as out:
        out.write(_header({stored: (rows[stored], *shapes[names[0]][1:]) for stored, names in tensors.items()}, dtype))
        for name in (name for names in tensors.values() for name in names):
            whole = state_dict[name].detach()
            _check_shape(name, shapes[name], tuple(whole.shape), "the model to be saved")
            stored = deinterleave(name, whole).to(device="cpu", dtype=dtype)
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


def _check_names(shapes: Mapping[str, tuple[int, ...]], names: Iterable[str], place: str) -> None:
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


def _check_shape(name: str, expected: tuple[int, ...], found: tuple[int, ...], place: str) -> None:
    if found != expected:
        raise UserError(
            f"{place}: parameter {name} has another shape than its configuration says",
            expected=list(expected),
            found=list(found),
        )


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
