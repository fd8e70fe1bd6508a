"""Sana's weights in and out of a diffusers folder, and of files with NVlabs' names, in whose order of rows the module's
differs (`sana_shape.interleave`)."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sana_pipe.base import hub
from sana_pipe.base.errors import writing
from sana_pipe.train.models import nvlabs
from sana_pipe.train.models.sana import parameter_shapes
from sana_pipe.train.models.sana_shape import GLU_PARAMETERS, SanaShape, deinterleave, interleave, read_config
from sana_pipe.train.models.weight_files import (
    MAX_SHARD_BYTES,
    FolderWeights,
    check_names,
    mapped,
    save_folder,
    write_file,
    write_json,
)


class WeightFiles(FolderWeights):
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
            self.config, tensors = config, nvlabs.plain_names(mapped([place]))
            names: tuple[str, ...] = (place.name,)
        elif place.is_file():
            self.config, stored, note = nvlabs.read(place, variant)
            tensors = nvlabs.renamed(stored, parameter_shapes(self.config))
            names = (place.name,)
        else:
            self.config = config or read_config(place)
            chosen = hub.choose(place, variant, widest=True)
            tensors = nvlabs.plain_names(mapped([place / name for name in chosen.files]))
            names = chosen.files
        self.opened(place, tensors, parameter_shapes(self.config), names, note)

    def _box(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        if not name.endswith(GLU_PARAMETERS):
            return super()._box(name, offsets, lengths)
        stored, rest = self._tensors[name], [slice(a, a + n) for a, n in zip(offsets, lengths, strict=True)][1:]
        begin, end = offsets[0], offsets[0] + lengths[0]
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
    """Write a folder that diffusers' `SanaTransformer2DModel.from_pretrained` reads. state_dict: every parameter in
    full, in our layout. The rest as in `save_folder`."""
    shapes = parameter_shapes(config)
    save_folder(state_dict, shapes, config.to_dict(), folder, dtype, max_shard_bytes, deinterleave)


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
    check_names(shapes, state_dict, "the model to be saved")
    buffers = nvlabs.buffers(config, text_rows)
    tensors = nvlabs.parts(shapes) | {name: [name] for name in buffers}
    shapes |= {name: tuple(each.shape) for name, each in buffers.items()}
    path = folder / f"{stem}.safetensors"
    with writing(folder, "check the permissions, or write to another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, tensors, shapes, ChainMap(buffers, state_dict), dtype, deinterleave)  # type: ignore[arg-type]
        with hub.open_tensors(path) as file:  # mapped: the other file needs no memory for the whole model
            with (folder / f"{stem}.pth").open("wb") as out:  # torch's own file says nothing of a full disk
                torch.save({"state_dict": {name: file.get_tensor(name) for name in file.keys()}}, out)
        write_json(folder / "config.json", config.to_dict())
