"""LoRA and DoRA: `train.adapter`.

Parameters are those of the layer itself: `<module>.lora_A` (rank, inputs), `.lora_B` (outputs, rank), of DoRA
`.lora_magnitude` (outputs,); 1x1 convolutions too. Rows of `ff.conv_inverted` are interleaved, as the module's are.
Why our own layers and not PEFT's, which judge them in the tests: PEFT's modules hide query, key and value from their
joined product, its DoRA reads weights while it is built (not on the meta device), and `peft` would have to be installed
to train; alpha / rank here is in the layer, so that a checkpoint holds nothing but what is trained.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.base.hub import listed, open_tensors, read_json
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import Adapter, Merged, files, matching
from sana_pipe.train.models.adapters.low_rank import add_low_rank, updated
from sana_pipe.train.models.config import AdapterConfig
from sana_pipe.train.models.spec import ModelSpec, Values, generator_of

PARTS: Mapping[str, str] = {
    "lora_A.weight": "lora_A",
    "lora_B.weight": "lora_B",
    "lora_magnitude_vector": "lora_magnitude",
}
"""Ending of a key in diffusers' file (PEFT's) -> name of the parameter."""
_PEFT = re.compile(r"^base_model\.model\.(?:transformer\.)?")
"""Before the names of modules in PEFT's files."""


class LoRA(Adapter):
    """A low-rank product next to each chosen matrix. targets: paths of the adapted modules, in the model's order."""

    kind = "lora"
    formats = ("diffusers", "comfyui")
    parts: ClassVar[tuple[str, ...]] = ("lora_A", "lora_B")

    def __init__(self, rank: int, alpha: float, targets: Sequence[str], dropout: float = 0.0):
        self.rank, self.alpha, self.targets, self.dropout = rank, alpha, list(targets), dropout
        self._start: dict[str, Tensor] | None = None

    @classmethod
    def from_config(cls, train: TrainConfig, spec: ModelSpec, start: bool) -> Self:
        given = train.adapter
        assert given is not None
        alpha = float(given.rank if given.alpha is None else given.alpha)
        adapter = cls(given.rank, alpha, _targets(given, spec), given.dropout)
        if start and given.start is not None:
            adapter._start = adapter._read(Path(given.start), spec)
        return adapter

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def apply(self, module: nn.Module) -> None:
        module.requires_grad_(False)
        has_magnitude = "lora_magnitude" in self.parts
        for name in self.targets:
            owner, _, last = name.rpartition(".")
            joined: Sequence[str] = getattr(module.get_submodule(owner), "joined", ())
            masks = f"{owner}.{joined[0]}" if last in joined else name
            add_low_rank(module.get_submodule(name), self.rank, self.scale, self.dropout, has_magnitude, masks)

    def initial(self, name: str, shape: tuple[int, ...], seed: int, base: Values) -> Tensor:
        """A uniform within 1/sqrt(inputs), as PEFT's (Kaiming with a = sqrt(5)); B zero; magnitudes: the norms of the
        base's rows. With `train.adapter.start` those of the file."""
        layer, _, part = name.rpartition(".")
        if self._start is not None:
            return self._start[name]
        if part == "lora_B":
            return torch.zeros(shape)
        if part == "lora_A":
            bound = 1 / math.sqrt(shape[1])
            return torch.empty(shape).uniform_(-bound, bound, generator=generator_of(seed, name))
        weight = f"{layer}.weight"
        whole = base.shapes[weight]
        return base.read(weight, [0] * len(whole), whole).flatten(1).float().norm(dim=1)

    def merged(self, name: str, weight: Tensor, trained: Mapping[str, Tensor], strength: float = 1.0) -> Tensor:
        """W + s B A; of DoRA m (W + s B A) / n, row by row; n: norm of the row."""
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or f"{layer}.lora_A" not in trained:
            return weight
        a, b, *magnitude = (trained[f"{layer}.{part}"].float() for part in self.parts)
        whole = updated(weight, a, b, strength * self.scale)
        if magnitude:
            whole = whole * (magnitude[0] / torch.linalg.vector_norm(whole, dim=1))[:, None]
        return whole.view(weight.shape)

    def change_norms(self, trained: Mapping[str, Tensor]) -> dict[str, float]:
        """|s B A|, from the rank x rank products of each factor with itself; of DoRA without its magnitudes."""
        norms = {}
        for module in self.targets:
            a, b = (trained[f"{module}.{part}"].double() for part in ("lora_A", "lora_B"))
            norms[module] = self.scale * float(((b.T @ b) * (a @ a.T)).sum().clamp_min(0).sqrt())
        return norms

    def to_dict(self) -> dict[str, Any]:
        names = ("kind", "rank", "alpha", "targets", "dropout")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(values["rank"], values["alpha"], values["targets"], values["dropout"])

    def save(
        self,
        form: str,
        weights: Merged,
        folder: Path,
        dtype: torch.dtype,
        header: Mapping[str, str] = {},
        stem: str = "",
    ) -> None:
        changes = files.changes(weights.spec, weights.trained, self.scale)
        if form == "diffusers":
            files.save_diffusers(changes, folder, dtype, header)
        elif "lora_magnitude" in self.parts:
            names = [f"{module}.weight" for module in changes]
            files.save_differences(weights, names, folder, dtype, header, stem)
        else:
            files.save_comfyui(weights.spec, changes, folder, dtype, header, stem)

    def __str__(self) -> str:
        return f"a {type(self).__name__} of rank {self.rank}"

    # ---------------------------------------------------------------------------------------------------- start file

    def _read(self, path: Path, spec: ModelSpec) -> dict[str, Tensor]:
        """The parameters in a LoRA file of diffusers, an export or a folder of PEFT, as they are with alpha / rank of
        this run."""
        option = f"train.adapter.start: {path}"
        tensors, metadata = _opened(path, option)
        wanted = {
            f"transformer.{name}.{ending}": f"{name}.{part}"
            for name in self.targets
            for ending, part in PARTS.items()
            if part in self.parts
        }
        _check_keys(option, tensors, wanted)
        module = spec.module()
        self.apply(module)
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        scale = self._scale_of(option, metadata) / self.scale
        result: dict[str, Tensor] = {}
        for key, name in wanted.items():
            layer, _, part = name.rpartition(".")
            value = tensors[key]
            is_row = part == "lora_magnitude" and value.shape[:1] == (1,)  # of a 1x1 convolution: (1, outputs, 1, 1)
            value = value.flatten(0 if is_row else 1) if value.ndim > 1 else value
            _check_shape(option, key, shapes[name], tuple(value.shape))
            _check_values(option, key, value)
            value = value.float()
            value = value if part == "lora_A" else spec.rows_from_file(f"{layer}.weight", value)
            result[name] = value * scale if part == "lora_B" else value
        return result

    def _scale_of(self, option: str, metadata: Mapping[str, Any]) -> float:
        """alpha / rank of a file; without metadata 1, as diffusers takes it."""
        settings = {name: metadata.get(f"transformer.{name}") for name in ("rank_pattern", "alpha_pattern")}
        if several := [name for name, value in settings.items() if value]:
            fix = "merge it into the model (diffusers' fuse_lora), and give that as model.weights"
            raise ConfigError(
                f"{option}: its modules have different ranks or alphas", found=", ".join(several), fix=fix
            )
        try:
            rank = float(metadata.get("transformer.r", self.rank))
            root = math.sqrt(rank) if metadata.get("transformer.use_rslora") else rank
            scale = float(metadata.get("transformer.lora_alpha", root)) / root
        except (TypeError, ValueError, ZeroDivisionError, OverflowError):
            scale = math.nan
        if not 0 < scale < math.inf:
            given = {name: metadata.get(f"transformer.{name}") for name in ("r", "lora_alpha")}
            raise ConfigError(f"{option}: its rank and alpha must be numbers above 0", found=str(given))
        return scale


class DoRA(LoRA):
    """LoRA with a trained magnitude for each row of the matrix."""

    kind = "dora"
    parts = ("lora_A", "lora_B", "lora_magnitude")


def _targets(given: AdapterConfig, spec: ModelSpec) -> list[str]:
    """Paths of the modules that `train.adapter.targets` chooses."""
    module, option = spec.module(), "train.adapter.targets"
    patterns = given.targets
    if isinstance(patterns, str):
        sets: Mapping[str, Sequence[str]] = getattr(module, "adapter_targets", {})
        if patterns not in sets:
            raise ConfigError(
                f"{option}: {spec.class_name} has no set named {patterns!r}", fix=f"{option}: [PATTERN, ...]"
            )
        patterns = list(sets[patterns])
    layers = {name: part for name, part in module.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d))}
    chosen = matching(patterns, layers, option)
    for name in chosen:
        if reason := _refusal(layers[name]):
            raise ConfigError(f"{option}: {name} cannot be adapted: {reason}", fix="leave it out, or use train.only")
    return chosen


def _refusal(layer: nn.Module) -> str | None:
    """Say why a layer is not adapted; None: it is."""
    if isinstance(layer, nn.Linear):
        return None
    assert isinstance(layer, nn.Conv2d)
    if layer.groups > 1:
        return f"it is a convolution of {layer.groups} groups, and a low-rank product would mix them"
    return None if getattr(layer, "of_tokens", False) else "it is a convolution of pictures, not a product of tokens"


def _opened(path: Path, option: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and settings of a file by the keys of diffusers."""
    try:
        return _read(path, option)
    except ConfigError:
        raise
    except UserError as error:
        expected = "an export, a LoRA file of diffusers, or a folder that PEFT's save_pretrained wrote"
        what = f"train.adapter.start: {error.what}"
        raise ConfigError(what, expected=expected, found=error.found, fix=error.fix) from None


def _read(path: Path, option: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    peft = path / files.PEFT_FILE
    if path.is_dir() and not (path / files.DIFFUSERS_FILE).exists() and peft.exists():
        with open_tensors(peft) as file:
            tensors = {_PEFT.sub("transformer.", key): file.get_tensor(key) for key in file.keys()}
        settings = read_json(path / files.PEFT_SETTINGS)
        tensors = {key.removesuffix(".weight") if "magnitude" in key else key: value for key, value in tensors.items()}
        return tensors, {f"transformer.{name}": value for name, value in settings.items()}
    with open_tensors(path / files.DIFFUSERS_FILE if path.is_dir() else path) as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
        described = (file.metadata() or {}).get("lora_adapter_metadata", "{}")
    try:
        return tensors, dict(json.loads(described))
    except (ValueError, TypeError, RecursionError) as error:
        what = f"{option}: its lora_adapter_metadata is not a JSON object: {error}"
        raise ConfigError(what, expected="a LoRA file of diffusers") from None


def _check_values(option: str, key: str, value: Tensor) -> None:
    """Refuse values that no training goes on from."""
    if not value.is_floating_point():
        raise ConfigError(f"{option}: {key} does not hold floating-point numbers", found=str(value.dtype))
    if not bool(torch.isfinite(value.float()).all()):
        count = int((~torch.isfinite(value.float())).sum())
        raise ConfigError(
            f"{option}: {key} holds values that are not finite numbers",
            found=f"{count} of {value.numel()}",
            fix="give another file: the training that wrote this one had failed",
        )


def _check_keys(option: str, keys: Iterable[str], wanted: Mapping[str, str]) -> None:
    """Refuse a file that is not exactly the adapter."""
    keys = set(keys)
    foreign, missing = sorted(keys - wanted.keys()), [key for key in wanted if key not in keys]
    if not foreign and not missing:
        return
    found = [f"{what} {listed(names, 4)}" for what, names in (("unexpected", foreign), ("missing", missing)) if names]
    fix = "give a LoRA file for this model, with keys as diffusers' save_lora_weights writes them"
    if keys & wanted.keys():
        fix = "train.adapter.kind must be that of the file, and train.adapter.targets its modules and no others"
    if any(part in key for part in ("lokr_", "hada_", "dora_scale") for key in foreign):
        fix = "merge it into the model, and give that as model.weights: it is a LoKr, a LoHa or another DoRA"
    raise ConfigError(
        f"{option}: does not hold this adapter",
        expected=f"{len(wanted)} keys, such as {listed(wanted, 1)}",
        found="; ".join(found),
        fix=fix,
    )


def _check_shape(option: str, key: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    if found == expected:
        return
    is_rank = "lora_A" in key and found[1:] == expected[1:] and found[0] > 0
    raise ConfigError(
        f"{option}: {key} has another shape than the adapter of this model",
        expected=str(list(expected)),
        found=str(list(found)),
        fix=f"--set train.adapter.rank={found[0]}" if is_rank else "give a file for this model",
    )
