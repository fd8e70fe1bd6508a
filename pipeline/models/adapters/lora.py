"""LoRA and DoRA: `train.adapter`.

Parameters are those of the layer itself: `<module>.lora_A` (rank, inputs), `.lora_B` (outputs, rank), of DoRA
`.lora_magnitude` (outputs,); 1x1 convolutions too. Rows of `ff.conv_inverted` are interleaved, as the module's are.
Why our own layers and not PEFT's, which judge them in the tests: PEFT's modules hide query, key and value from their
joined product, its DoRA reads weights while it is built (not on the meta device), and `peft` would have to be installed
to train; alpha / rank here is in the layer, so that a checkpoint holds nothing but what is trained.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pipeline.config import AdapterConfig, TrainConfig
from pipeline.errors import ConfigError
from pipeline.models.adapters import Adapter, Merged, files, matching
from pipeline.models.adapters.low_rank import add_low_rank, updated
from pipeline.models.spec import ModelSpec, Values

PARTS: Mapping[str, str] = {
    "lora_A.weight": "lora_A",
    "lora_B.weight": "lora_B",
    "lora_magnitude_vector": "lora_magnitude",
}
"""Ending of a key in diffusers' file (PEFT's) -> name of the parameter."""


class LoRA(Adapter):
    """A low-rank product beside each chosen matrix.

    Attributes:
        targets: paths of the adapted modules, in the model's order.
    """

    kind = "lora"
    formats = ("diffusers", "comfyui")
    parts: ClassVar[tuple[str, ...]] = ("lora_A", "lora_B")

    def __init__(self, rank: int, alpha: float, targets: Sequence[str], dropout: float = 0.0):
        self.rank, self.alpha, self.targets, self.dropout = rank, alpha, list(targets), dropout
        self._start: dict[str, Tensor] | None = None

    @classmethod
    def from_config(cls, train: TrainConfig, spec: ModelSpec) -> Self:
        given = train.adapter
        assert given is not None
        adapter = cls(
            given.rank, given.rank if given.alpha is None else given.alpha, _targets(given, spec), given.dropout
        )
        if given.start is not None:
            adapter._start = adapter._read(Path(given.start), spec)
        return adapter

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def apply(self, module: nn.Module) -> None:
        module.requires_grad_(False)
        for name in self.targets:
            add_low_rank(
                module.get_submodule(name), self.rank, self.scale, self.dropout, "lora_magnitude" in self.parts
            )

    def initial(self, name: str, shape: tuple[int, ...], seed: int, base: Values) -> Tensor:
        """A uniform within 1/sqrt(inputs), as PEFT's (Kaiming with a = sqrt(5)); B zero; magnitudes: the norms of the
        base's rows. With `train.adapter.start` those of the file."""
        layer, _, part = name.rpartition(".")
        if self._start is not None:
            return self._start[name]
        if part == "lora_B":
            return torch.zeros(shape)
        if part == "lora_A":
            key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
            bound = 1 / math.sqrt(shape[1])
            return torch.empty(shape).uniform_(-bound, bound, generator=generator)
        weight = f"{layer}.weight"
        whole = base.shapes[weight]
        return base.read(weight, [0] * len(whole), whole).flatten(1).float().norm(dim=1)

    def merged(self, name: str, weight: Tensor, trained: Mapping[str, Tensor], strength: float = 1.0) -> Tensor:
        """W + s B A."""
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or f"{layer}.lora_A" not in trained:
            return weight
        a, b = (trained[f"{layer}.{part}"] for part in ("lora_A", "lora_B"))
        return updated(weight, a, b, strength * self.scale).view(weight.shape)

    def to_dict(self) -> dict[str, Any]:
        names = ("kind", "rank", "alpha", "targets", "dropout")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(values["rank"], values["alpha"], values["targets"], values["dropout"])

    def save(self, form: str, weights: Merged, folder: Path, dtype: torch.dtype) -> None:
        changes = files.changes(weights.spec, weights.trained, self.scale)
        if form == "diffusers":
            files.save_diffusers(changes, folder, dtype, self.dropout)
        elif "lora_magnitude" in self.parts:
            files.save_differences(weights, [f"{module}.weight" for module in changes], folder, dtype)
        else:
            files.save_comfyui(weights.spec, changes, folder, dtype)

    def __str__(self) -> str:
        return f"a {type(self).__name__} of rank {self.rank}"

    # ---------------------------------------------------------------------------------------------------- start file

    def _read(self, path: Path, spec: ModelSpec) -> dict[str, Tensor]:
        """The parameters in a LoRA file of diffusers, with alpha / rank of this run."""
        option = f"train.adapter.start: {path}"
        try:
            with safe_open(path, "pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}
                metadata = json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
        except (OSError, SafetensorError, ValueError) as error:
            raise ConfigError(f"{option}: cannot be read: {error}", expected="a LoRA file of diffusers") from None
        wanted = {
            f"transformer.{name}.{ending}": f"{name}.{part}"
            for name in self.targets
            for ending, part in PARTS.items()
            if part in self.parts
        }
        self._check_keys(option, tensors, wanted)
        patterns = [
            f"transformer.{name}" for name in ("rank_pattern", "alpha_pattern") if metadata.get(f"transformer.{name}")
        ]
        if patterns:
            raise ConfigError(f"{option}: modules have ranks or alphas of their own", found=", ".join(patterns))
        own = (
            metadata.get("transformer.lora_alpha", self.rank) / metadata.get("transformer.r", self.rank)
        ) / self.scale
        shapes = {name: p.shape for name, p in self._adapted(spec).named_parameters() if name in set(wanted.values())}
        result: dict[str, Tensor] = {}
        for key, name in wanted.items():
            layer, _, part = name.rpartition(".")
            value = tensors[key].float().flatten(1) if tensors[key].ndim > 1 else tensors[key].float()
            if value.shape != shapes[name]:
                raise ConfigError(
                    f"{option}: {key} has another shape than this adapter of this model",
                    expected=list(shapes[name]),
                    found=list(value.shape),
                    fix=f"--set train.adapter.rank={len(value)}"
                    if part == "lora_A"
                    else "give the file's model and rank",
                )
            value = value if part == "lora_A" else spec.rows_from_file(f"{layer}.weight", value)
            result[name] = value * own if part == "lora_B" else value
        return result

    def _adapted(self, spec: ModelSpec) -> nn.Module:
        module = spec.module()
        self.apply(module)
        return module

    def _check_keys(self, option: str, tensors: Mapping[str, Tensor], wanted: Mapping[str, str]) -> None:
        foreign, missing = sorted(tensors.keys() - wanted.keys()), [key for key in wanted if key not in tensors]
        if not foreign and not missing:
            return
        found = [f"{what} {_listed(keys)}" for what, keys in (("unexpected", foreign), ("missing", missing)) if keys]
        fix = "give a file that diffusers' save_lora_weights or sana-pipe export wrote for this model"
        if any("lokr_" in key or "hada_" in key or "loha_" in key for key in foreign):
            fix = "LoKr and LoHa are not LoRA: merge the file into the model and begin with that as model.weights"
        elif any("dora_scale" in key for key in foreign):
            fix = "dora_scale is not PEFT's DoRA: convert it to lora_magnitude_vector (train.adapter.kind: dora)"
        elif any("lora_magnitude_vector" in key for key in foreign):
            fix = "the file is a DoRA: --set train.adapter.kind=dora"
        elif not foreign or any(key.startswith("transformer.") for key in tensors):
            fix = "train.adapter.targets must be the modules of the file"
        raise ConfigError(
            f"{option}: holds another adapter",
            expected=f"{len(wanted)} keys, such as {_listed(wanted, 1)}",
            found="; ".join(found),
            fix=fix,
        )


class DoRA(LoRA):
    """LoRA with a trained magnitude for each row of the matrix."""

    kind = "dora"
    parts = ("lora_A", "lora_B", "lora_magnitude")

    def merged(self, name: str, weight: Tensor, trained: Mapping[str, Tensor], strength: float = 1.0) -> Tensor:
        """m (W + s B A) / n, row by row; n: norm of the row."""
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or f"{layer}.lora_A" not in trained:
            return weight
        a, b, magnitude = (trained[f"{layer}.{part}"].float() for part in self.parts)
        whole = updated(weight, a, b, strength * self.scale)
        return (whole * (magnitude / torch.linalg.vector_norm(whole, dim=1))[:, None]).view(weight.shape)


def _targets(given: AdapterConfig, spec: ModelSpec) -> list[str]:
    """Paths of the modules that `train.adapter.targets` chooses."""
    module, option = spec.module(), "train.adapter.targets"
    patterns = given.targets
    if isinstance(patterns, str):
        sets: Mapping[str, Sequence[str]] = getattr(module, "adapter_targets", {})
        if patterns not in sets:
            raise ConfigError(f"{option}: {spec.class_name} names no set {patterns!r}", fix=f"{option}: [PATTERN, ...]")
        patterns = list(sets[patterns])
    layers = {name: part for name, part in module.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d))}
    chosen = matching(patterns, layers, option)
    for name in chosen:
        if reason := _refusal(layers[name]):
            raise ConfigError(f"{option}: {name} cannot be adapted: {reason}", fix="leave it out, or use train.only")
    return chosen


def _refusal(layer: nn.Module) -> str | None:
    """Why a layer is not adapted; None: it is."""
    if isinstance(layer, nn.Linear):
        return None
    assert isinstance(layer, nn.Conv2d)
    if layer.groups > 1:
        return f"it is a convolution of {layer.groups} groups, and a low-rank product would mix them"
    return None if getattr(layer, "of_tokens", False) else "it is a convolution of pictures, not a product of tokens"


def _listed(names: Any, limit: int = 4) -> str:
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
