"""Files of LoRA and DoRA for those who read them: diffusers (by peft) and ComfyUI's LoraLoader.

Keys of diffusers: `transformer.MODULE.lora_A.weight`, with PEFT's settings in the header. Keys of ComfyUI: the names of
NVlabs' model, in which query, key and value are one tensor, so their changes become one pair of three times the rank.
Why alpha / rank is multiplied into B, and alpha written as the rank: diffusers ignores alpha in files without settings,
and other readers ignore the settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor

from sana_pipe.base.errors import ConfigError
from sana_pipe.base.hub import listed

if TYPE_CHECKING:
    from sana_pipe.train.models.adapters import Merged
    from sana_pipe.train.models.spec import ModelSpec

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
COMFYUI_STEM = "comfyui_lora"
"""The name of a file that is given no other."""
_NOT_APPLIED = re.compile(r"\.attn2\.norm_[qk]\.")
"""Parameters of ours that ComfyUI's nodes for Sana load and never apply."""
PEFT_FILE, PEFT_SETTINGS = "adapter_model.safetensors", "adapter_config.json"
"""The files of a folder that PEFT's `save_pretrained` writes."""
_COMFYUI = "diffusion_model."


@dataclass(frozen=True)
class Change:
    """The change of a layer's weight W: W + b a.

    Attributes:
        a: (rank, in).
        b: (out, rank), multiplied by alpha / rank, rows in the order of files.
        magnitude: (out,) row norms of DoRA; None in LoRA.
        kernel: sides of a convolution's kernel; empty in a linear layer.
    """

    a: Tensor
    b: Tensor
    magnitude: Tensor | None
    kernel: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.a)


def changes(spec: ModelSpec, weights: Mapping[str, Tensor], scaling: float) -> dict[str, Change]:
    """Read the changes by module, from a checkpoint's `MODULE.lora_A`, `.lora_B` and `.lora_magnitude`. scaling: alpha
    / rank."""
    shapes, found = spec.shapes(), {}
    for name in weights:
        module, _, kind = name.rpartition(".")
        if kind == "lora_A":
            weight = f"{module}.weight"
            magnitude = weights.get(f"{module}.lora_magnitude")
            found[module] = Change(
                weights[name],
                scaling * spec.rows_to_file(weight, weights[f"{module}.lora_B"]),
                None if magnitude is None else spec.rows_to_file(weight, magnitude),
                shapes[weight][2:],
            )
    return found


def header(
    title: str, base: str, trigger: str, resolution: int, step: int, rank: int | None = None, family: str | None = None
) -> dict[str, str]:
    """Make the header of a file, by the names that managers of LoRA files show: kohya's (`ss_*`) and `modelspec.*`.

    Args:
        trigger: the text in front of every caption in training; empty: none.
        rank: None: the changes are whole.
        family: of the model; None: not named.
    """
    named = {
        "ss_output_name": title,
        "ss_sd_model_name": base,
        "ss_steps": str(step),
        "ss_resolution": f"({resolution}, {resolution})",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.title": title,
        "modelspec.resolution": f"{resolution}x{resolution}",
        "modelspec.description": f"for {base}, step {step}",
        "modelspec.tags": ", ".join([family, "lora"] if family else ["lora"]),
    }
    if family:
        named |= {"ss_base_model_version": family, "modelspec.architecture": f"{family}/lora"}
    if rank is not None:
        named |= {"ss_network_module": "networks.lora", "ss_network_dim": str(rank), "ss_network_alpha": str(rank)}
    if trigger:
        counts = json.dumps({"captions": {trigger: 1}}, ensure_ascii=False)
        named |= {"modelspec.trigger_phrase": trigger, "ss_tag_frequency": counts}
    return named


def check_applied(spec: ModelSpec, names: Sequence[str]) -> None:
    """Refuse changes that ComfyUI takes and leaves undone: it changes parameters of modules without children only, and
    its nodes for Sana never apply the norms of the cross attention.

    Raises:
        ConfigError: there are some.
    """
    module = spec.module()
    undone = [
        name
        for name in names
        if _NOT_APPLIED.search(name) or any(module.get_submodule(name.rpartition(".")[0]).children())
    ]
    if undone:
        raise ConfigError(
            f"ComfyUI loads changes of {listed(undone, 3)} without a warning and does not apply them",
            expected="parameters of layers (weights and biases) for --format comfyui",
            fix="--format nvlabs (the whole model, which ComfyUI reads), or --format merged",
        )


def save_diffusers(
    found: Mapping[str, Change], folder: Path, dtype: torch.dtype, header: Mapping[str, str] = {}
) -> None:
    """Write the file that `load_lora_weights` of a pipeline reads."""
    tensors = {}
    for module, change in found.items():
        sides = [None] * len(change.kernel)
        for side, values in (("A", change.a), ("B", change.b)):
            tensors[f"transformer.{module}.lora_{side}.weight"] = values[(..., *sides)]
        if change.magnitude is not None:
            magnitude = change.magnitude[(None, ..., *sides)] if sides else change.magnitude
            tensors[f"transformer.{module}.lora_magnitude_vector"] = magnitude
    rank = next(iter(found.values())).rank
    settings = {
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,  # of training alone: diffusers would draw with it
        "target_modules": list(found),
        "rank_pattern": {},  # diffusers up to 0.40 needs the key
        "use_dora": any(change.magnitude is not None for change in found.values()),
        "bias": "none",
    }
    adapter = json.dumps({f"transformer.{key}": value for key, value in settings.items()})
    _save(tensors, folder / DIFFUSERS_FILE, dtype, {**header, "lora_adapter_metadata": adapter})


def save_comfyui(
    spec: ModelSpec,
    found: Mapping[str, Change],
    folder: Path,
    dtype: torch.dtype,
    header: Mapping[str, str] = {},
    stem: str = "",
) -> None:
    """Write low-rank changes by the names of ComfyUI's model; exact, also where it joins layers."""
    shapes, tensors = spec.shapes(), {}
    for theirs, names in spec.joined_parts().items():
        modules = [name.removesuffix(".weight") for name in names]
        members = [found[module] for module in modules if module in found]
        if not members:
            continue
        rank = sum(member.rank for member in members)
        b, row, column = torch.zeros(sum(shapes[name][0] for name in names), rank), 0, 0
        for module, name in zip(modules, names, strict=True):
            if module in found:
                b[row : row + shapes[name][0], column : column + found[module].rank] = found[module].b
                column += found[module].rank
            row += shapes[name][0]
        key, sides = _COMFYUI + theirs.removesuffix(".weight"), [None] * len(members[0].kernel)
        tensors[f"{key}.lora_A.weight"] = torch.cat([member.a for member in members])[(..., *sides)]
        tensors[f"{key}.lora_B.weight"] = b[(..., *sides)]
        tensors[f"{key}.alpha"] = torch.tensor(float(rank))
    _save(tensors, folder / f"{stem or COMFYUI_STEM}.safetensors", dtype, header)


def save_differences(
    weights: Merged,
    names: Sequence[str],
    folder: Path,
    dtype: torch.dtype,
    header: Mapping[str, str] = {},
    stem: str = "",
) -> None:
    """Write whole differences of parameters by the names of ComfyUI's model: for changes that are no product of two
    matrices, such as DoRA's. names: of the parameters that differ."""
    spec, base, changed, tensors = weights.spec, weights.at(0), set(names), {}
    for theirs, members in spec.joined_parts().items():
        if changed.isdisjoint(members):
            continue
        layer, _, kind = theirs.rpartition(".")
        key = {"weight": f"{layer}.diff", "bias": f"{layer}.diff_b"}.get(kind, f"{theirs}.diff")
        tensors[_COMFYUI + key] = torch.cat([spec.rows_to_file(name, weights[name] - base[name]) for name in members])
    _save(tensors, folder / f"{stem or COMFYUI_STEM}.safetensors", dtype, header)


def _save(tensors: Mapping[str, Tensor], path: Path, dtype: torch.dtype, header: Mapping[str, str] = {}) -> None:
    exact = {name for name in tensors if name.endswith(".alpha")}  # bf16 has no 261, and the reader divides by the rank
    stored = {name: value if name in exact else value.to(dtype).contiguous() for name, value in tensors.items()}
    path.write_bytes(save(stored, metadata={"format": "pt", **header}))  # `save_file` lets only their owner read them
