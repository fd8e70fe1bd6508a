"""All that names an architecture, behind one class.

A `ModelSpec` is one model: its shape, and what depends on its kind. Training, planning and the stages name no
architecture; they call `spec_at`, `spec_of` and `spec_from_arch`.
A new architecture is a subclass in a file of its own and a line in `KINDS`. Its module is called with the inputs of
`Objective.prepare` by name, keeps diffusers' parameter names, and has what `parallel.parallelize.Model` states.
"""

from __future__ import annotations

import hashlib
import math
import pkgutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
import xxhash
from torch import Tensor, nn

from sana_pipe.base import hub
from sana_pipe.base.config import Weights
from sana_pipe.base.errors import ConfigError
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.sana_shape import CLASS_NAME

KINDS: dict[str, str] = {
    CLASS_NAME: "sana_pipe.train.models.sana_config:SanaConfig",
    "ZImageTransformer2DModel": "sana_pipe.train.models.zimage_config:ZImageConfig",
    "PRXTransformer2DModel": "sana_pipe.train.models.prx:PRX",
}
"""diffusers' `_class_name` -> module:class."""

TEXT_KIND = "_text_kind"
"""The key of an exported `config.json` that names another text encoder than that of the released weights. diffusers
passes over keys that begin so."""


class Values(Protocol):
    """A source of parameter values, slice by slice, so that a process reads only its shards."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every parameter."""
        ...

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """The box of a parameter that begins at `offsets`, in the module's layout, on the CPU."""
        ...

    def fingerprint(self) -> str:
        """Equal on processes with equal values."""
        ...

    @property
    def description(self) -> str:
        """Describe the values for the log; empty for values that are drawn."""
        ...


class DrawnValues:
    """Values that `draw(name, shape, seed)` makes, on the CPU. largest: size of the largest parameter that the
    fingerprint covers, since it has to be drawn."""

    description = ""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        draw: Callable[[str, tuple[int, ...], int], Tensor],
        seed: int,
        largest: int = sys.maxsize,
    ):
        self.shapes, self._draw, self._seed, self._largest = shapes, draw, seed, largest

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        whole = self._draw(name, self.shapes[name], self._seed)
        return whole[tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))]

    def fingerprint(self) -> str:
        digest = xxhash.xxh3_128(f"{self._seed}".encode())
        for name, shape in sorted(self.shapes.items()):
            digest.update(f"{name} {shape}\0".encode())
            if math.prod(shape) <= self._largest:
                digest.update(raw_bytes(self._draw(name, shape, self._seed)))
        return digest.hexdigest()


@dataclass(frozen=True)
class Call:
    """The values that the call of an exported pipeline depends on.

    Attributes:
        compression: of the VAE; None: not known.
        table: pictures have the shapes of Sana's table at this resolution.
        instruction: in front of captions; None: the one of diffusers' pipeline.
        max_length: text rows, where the configuration names a number.
    """

    resolution: int
    compression: int | None
    table: bool
    steps: int
    guidance: float
    max_length: int | None
    instruction: str | None


class ModelSpec(ABC):
    """One model. A frozen dataclass with the fields of diffusers' config.json.

    Attributes:
        class_name: diffusers', in config.json.
        free: fields that decide no parameter; a run may begin from a checkpoint with other values.
        pipeline: class of diffusers' pipeline that an export is for; None: an export holds the transformer alone.
        formats: what `save` writes.
        readme: template of a whole pipeline's README.
        family: of the model, a tag of that README, and in the headers of files of adapters; None: not named.
        overflow_in_fp16: what of the pipeline has values beyond the range of fp16, in words; empty: nothing known.
        text_kind: kind of the text encoder that its released weights were trained with; None: not known.
        libraries: class of a part -> the module of diffusers' pipelines that has it, for those not of transformers.
        unread: formats of adapters that no program reads for this model.
    """

    class_name: ClassVar[str]
    free: ClassVar[tuple[str, ...]] = ()
    pipeline: ClassVar[str | None] = None
    formats: ClassVar[tuple[str, ...]] = ("diffusers",)
    readme: ClassVar[str] = "pipeline"
    family: ClassVar[str | None] = None
    overflow_in_fp16: ClassVar[str] = ""
    text_kind: ClassVar[str | None] = None
    libraries: ClassVar[Mapping[str, str]] = {}
    unread: ClassVar[tuple[str, ...]] = ()

    # fields or properties of every kind
    in_channels: Any
    caption_channels: Any
    num_layers: Any
    patch_size: Any
    dropout: Any
    inner_dim: Any

    @classmethod
    @abstractmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config.json") -> Self:
        """Make the spec from the contents of `config.json`. What the class does not implement is a ConfigError."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The contents of `config.json`."""

    @abstractmethod
    def module(self, train: TrainConfig | None = None) -> nn.Module:
        """The model on the meta device, with the numerics of a run (None: diffusers')."""

    @abstractmethod
    def stored(self, place: Path, variant: str | None = None) -> Values:
        """The values in a folder or file."""

    @abstractmethod
    def initial(self, seed: int) -> Values:
        """Values of a model from scratch."""

    @abstractmethod
    def training_flops(self, samples: int, tokens: int, text_rows: int) -> int:
        """Operations of one forward and backward pass.

        Args:
            tokens: image tokens of one sample. text_rows: of all samples, with the padding that is computed.
        """

    @abstractmethod
    def save(
        self,
        weights: Mapping[str, Tensor],
        folder: Path,
        dtype: torch.dtype,
        form: str = "diffusers",
        stem: str = "",
        max_length: int = 300,
    ) -> None:
        """Write the weights, in the module's layout, in one of `formats`.

        Args:
            stem: of the file names, where they are free. max_length: caption rows of a form that has them.

        Raises:
            UserError: parameters missing, unexpected or of another shape; the folder cannot be written.
        """

    def rows_from_file(self, name: str, tensor: Tensor) -> Tensor:
        """Reorder what belongs to the rows of a parameter, from diffusers' order to the module's."""
        return tensor

    @property
    def tensor_parallel_parts(self) -> dict[str, int]:
        """Number of equal parts of what tensor parallelism shards, by name."""
        return {}

    def rows_to_file(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of `rows_from_file`."""
        return tensor

    def controlnet(self, layers: int | None = None) -> ModelSpec:
        """The shape of a ControlNet of this model, which its module adds by `add_controlnet`. layers: number of blocks;
        None: the usual one. A model without ControlNets is a ConfigError."""
        raise ConfigError(f"train.controlnet: {self.class_name} has no ControlNet", fix="--set train.controlnet=null")

    def joined_parts(self) -> dict[str, list[str]]:
        """Tensors of ComfyUI's model of this kind -> the parameters whose rows they consist of; empty: it has none."""
        return {}

    def check_base(self, names: Sequence[str]) -> None:  # noqa: B027  most models have no such weights
        """Refuse weights that a training would spoil. names: what is known of their origin: the folder, and the name in
        their `config.json`."""

    def check_parallel(self, tp_size: int, pp_size: int) -> None:
        """Refuse strategies that the module has no plan for."""
        if not self.tensor_parallel_parts and max(tp_size, pp_size) > 1:
            name = "tp_size" if tp_size > 1 else "pp_size"
            raise ConfigError(
                f"{self.class_name} cannot be divided by train.parallel.{name}", fix=f"--set train.parallel.{name}=1"
            )

    @property
    def longest_caption(self) -> int | None:
        """The most text rows of a caption; None: any number."""
        return None

    @property
    def vae_factors(self) -> tuple[float, float] | None:
        """Scaling and shift factor of the VAE that the released weights were trained with; None: not known."""
        return None

    @property
    def described(self) -> str:
        """The shape, for people who set up another trainer."""
        return f"depth {self.num_layers}"

    def adapter_note(self, formats: Sequence[str]) -> str:
        """Say what becomes of an adapter's file that no program reads for this model; empty: one does, or an adapter
        has none. formats: those that the adapter writes."""
        if not formats or not set(formats) <= set(self.unread):
            return ""
        return (
            f"no program loads an adapter's file for {self.class_name}: what is trained is exported in its base, by "
            "sana-pipe export --format merged"
        )

    @property
    def comfyui_warning(self) -> str:
        """Say why ComfyUI computes another function with this model's files, for people; empty: it does not."""
        return ""

    def with_layers(self, count: int) -> Self:
        """Return the spec with other blocks, for predictions."""
        return replace(self, num_layers=count)  # type: ignore[type-var]

    def with_sample_size(self, sample_size: int) -> Self:
        """Return the spec for a run at another resolution: the same, unless the model has a field of this name."""
        if "sample_size" not in {field.name for field in fields(self)}:  # type: ignore[arg-type]
            return self
        return replace(self, sample_size=sample_size)  # type: ignore[type-var]

    def scheduler(self, shift: float) -> Any:
        """The solver that draws with this model, a scheduler of diffusers, which an exported pipeline has, too.

        Args:
            shift: `train.flow.shift`.
        """
        from sana_pipe.train.models.sampler import euler

        return euler(shift)

    def sigmas(self, steps: int) -> list[float] | None:
        """The noise levels, before the shift, that the model's pipeline gives its scheduler; None: the scheduler's."""
        return None

    def call_arguments(self, call: Call) -> dict[str, str]:
        """Return what the call of `pipeline` must be given, as Python source by argument."""
        multiple = (call.compression or 1) * self.patch_size
        side = -(-call.resolution // multiple) * multiple  # pipelines refuse others
        return {
            "height": str(side),
            "width": str(side),
            "num_inference_steps": str(call.steps),
            "guidance_scale": str(call.guidance),
        }

    def pipeline_settings(self, call: Call) -> dict[str, Any]:
        """Entries of the pipeline's `model_index.json` next to those of its parts."""
        return {}

    def tokens(self, height: int, width: int) -> int:
        """Image tokens of latents of this size."""
        return height * width // self.patch_size**2

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter, in the model's order."""
        return {name: tuple(parameter.shape) for name, parameter in self.module().named_parameters()}

    def loaded(
        self,
        weights: Mapping[str, Tensor],
        train: TrainConfig | None = None,
        prepare: Callable[[nn.Module], None] = lambda module: None,
    ) -> nn.Module:
        """The model with these values, which it takes over without a copy. prepare: adds the parameters that are not
        the model's (`Adapter.apply` of an adapter that `stays`)."""
        module = self.module(train)
        prepare(module)
        module.load_state_dict(weights, assign=True)
        reset_buffers(module)
        return module

    def check_widths(self, what: str, fix: str, *, channels: int | None = None, text_width: int | None = None) -> None:
        """Refuse latents or text rows of other widths than the model's (None: not known). what: that they are from."""
        for name, of_model, kind, found in (
            ("in_channels", self.in_channels, "latents", channels),
            ("caption_channels", self.caption_channels, "text rows", text_width),
        ):
            if found is not None and found != of_model:
                raise ConfigError(
                    f"the model and {what} do not fit together: the model's {name} is {of_model}, the {kind} have "
                    f"{found}",
                    fix=fix,
                )

    def check_text_kind(self, what: str, fix: str, found: str, trained: str | None) -> None:
        """Refuse rows of another text encoder than the weights were trained with, which may be as wide. what: that they
        are from. found: the encoder's kind. trained: that of the weights' training; None: not known."""
        if trained not in (None, found):
            raise ConfigError(
                f"the weights and {what} do not fit together: this {self.class_name} reads text rows of {trained}, "
                f"and these are of {found}",
                expected=trained,
                found=found,
                fix=fix,
            )

    def check_factors(self, what: str, fix: str, scaling: float, shift: float) -> None:
        """Refuse latents of another VAE than the weights were trained with, which may have as many channels, but has
        another scale and shift. what: that they are from. Models whose `vae_factors` are None take any."""
        of_model = self.vae_factors
        if of_model is None or all(abs(a - b) < 1e-3 for a, b in zip(of_model, (scaling, shift), strict=True)):
            return
        raise ConfigError(
            f"the weights and {what} do not fit together: {self.class_name} was trained on latents of another VAE",
            expected=f"scaling_factor {of_model[0]:g} and shift_factor {of_model[1]:g}",
            found=f"scaling_factor {scaling:g} and shift_factor {shift:g}",
            fix=fix,
        )

    def check_rows(self, what: str, rows: int) -> None:
        """Refuse captions of more rows than the model has positions for. what: the option or data that allows them."""
        if self.longest_caption is not None and rows > self.longest_caption:
            raise ConfigError(
                f"{what}: {self.class_name} has positions for fewer text rows",
                expected=f"at most {self.longest_caption}",
                found=rows,
                fix=f"--set text.max_length={self.longest_caption}, then sana-pipe encode and sana-pipe bucket",
            )

    def check_sides(self, height: int, width: int, compression: int, option: str) -> None:
        """Refuse pictures of a height and width in pixels that the model cannot draw. compression: pixels per latent
        side. option: how the sides are set, with `{height}` and `{width}`."""
        multiple = compression * self.patch_size
        if height % multiple or width % multiple:
            nearest = [max(multiple, round(side / multiple) * multiple) for side in (height, width)]
            raise ConfigError(
                f"the model draws pictures whose sides are multiples of {multiple} pixels",
                found=f"{height}x{width}",
                fix=option.format(height=nearest[0], width=nearest[1]),
            )


def generator_of(seed: int, name: str) -> torch.Generator:
    """Make the generator of a parameter's start value, alike on every process."""
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)


def digest_of(values: Values) -> str:
    """Over every value, so that one flipped bit is noticed (`fingerprint` covers a sample). Reads all of them: seconds
    for Sana 1.6B."""
    digest = xxhash.xxh3_128()
    for name, shape in sorted(values.shapes.items()):
        whole = values.read(name, [0] * len(shape), shape)
        digest.update(f"{name} {tuple(shape)} {whole.dtype}\0".encode())
        digest.update(raw_bytes(whole))
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor on the CPU, row by row."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def reset_buffers(module: nn.Module) -> None:
    """Call it after `to_empty`, which leaves buffers undefined: a module that has any computes them."""
    for part in module.modules():
        reset: Any = getattr(part, "reset_buffers", None)
        if reset is not None:
            reset()


def spec_class(name: str | None, source: str) -> type[ModelSpec]:
    """The class for a `_class_name`; an unknown one is refused."""
    if not isinstance(name, str) or name not in KINDS:
        fix = "name it as train.controlnet.start, and its base as model.weights.id" if "Control" in str(name) else None
        raise ConfigError(f"{source} describes another model", expected=" or ".join(KINDS), found=name, fix=fix)
    return pkgutil.resolve_name(KINDS[name])


def spec_of(data: Mapping[str, Any], source: str = "config.json") -> ModelSpec:
    """Make a spec from the contents of a `config.json` or of a checkpoint's document."""
    name = data.get("_class_name") or data.get("model_type") or CLASS_NAME  # the second key is transformers'
    return spec_class(name, source).from_dict(data, source)


def spec_at(place: Path, variant: str | None = None) -> ModelSpec:
    """Read the spec of the model in a diffusers folder, or in a file of NVlabs. variant: as in `WeightFiles`."""
    if place.is_file():
        from sana_pipe.train.models import nvlabs  # with the layers, which take seconds to import

        return spec_of(nvlabs.read(place, variant)[0].to_dict(), str(place))
    data = hub.read_json(place / "config.json")
    spec = spec_of(data, str(place / "config.json"))
    parts = place.resolve().parts  # folders above the model's have names of people's choice
    folders = [*parts[-2:], *(part for part in parts if part.startswith("models--"))]
    spec.check_base((*folders, str(data.get("_name_or_path", ""))))
    return spec


def text_kind_of_weights(weights: Weights, spec: ModelSpec) -> str | None:
    """The kind of text encoder that `model.weights` were trained with: what an export records, else that of the
    released weights; None: not known."""
    place = hub.resolve(weights, ("config.json",))
    if place.is_file():
        return spec.text_kind
    kind = hub.read_json(place / "config.json").get(TEXT_KIND, spec.text_kind)
    return None if kind is None else str(kind)


def spec_from_arch(arch: Mapping[str, Any], sample_size: int) -> ModelSpec:
    """The spec of a model from scratch. sample_size: the default of that key of `model.arch`."""
    return spec_class(CLASS_NAME, "model.arch").from_arch(arch, sample_size)  # type: ignore[attr-defined]
