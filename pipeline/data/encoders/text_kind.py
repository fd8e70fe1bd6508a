"""All that names a kind of text encoder, behind one class.

A `TextKind` is one encoder's folder: its class in transformers, what of its files enters the encoding, the tokens of a
caption and their hidden states. `text` encodes with any of them and names none. `text.prompting: diffusers` means what
the kind's pipeline in diffusers does at inference. A new kind is a subclass in a file of its own and a line in `KINDS`.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sana_pipe.base.errors import CacheError, ConfigError
from sana_pipe.base.hub import ModelError, is_local, read_settings, resolve
from sana_pipe.data.encoders.config import TextConfig

if TYPE_CHECKING:
    import torch

KINDS: dict[str, str] = {
    "gemma2": "sana_pipe.data.encoders.text_gemma2:Gemma2",
    "qwen3": "sana_pipe.data.encoders.text_qwen3:Qwen3",
    "t5gemma": "sana_pipe.data.encoders.text_t5gemma:T5Gemma",
    "t5_gemma_module": "sana_pipe.data.encoders.text_t5gemma:T5Gemma",
}
"""transformers' `model_type` -> module:class."""
TEMPLATE_FILE = "chat_template.jinja"
MAX_LENGTH = 300
"""The rows of an encoder that cannot be looked at: Sana's."""


@dataclass(frozen=True)
class TextKind(ABC):
    """A text encoder of one kind in a folder.

    Attributes:
        settings: of its `config.json`.
        name: of the kind, in the encoding. called: the same, for people.
        attention: transformers' implementation.
        selection: name of the rule that chooses rows; the rows of a caption are the first position and those from the
            instruction's end on, without padding.
        normalisations: `text.prompting` -> that of captions, see `sources.caption_rules.normalise`.
        instructions: `text.prompting` -> the default text before every caption; empty: captions have none.
        max_length: rows, where the configuration names no number.
        needs_bos: whether the tokenizer must begin every text with <bos>.
        shares_prefix: whether what all captions begin with may be run once (`prefix`).
        pads_null: whether the null record has the rows of the padding.
    """

    folder: Path
    settings: Mapping[str, Any]

    name: ClassVar[str]
    called: ClassVar[str]
    attention: ClassVar[str] = "eager"
    selection: ClassVar[str]
    normalisations: ClassVar[Mapping[str, str]]
    instructions: ClassVar[Mapping[str, str]] = {}
    max_length: ClassVar[int]
    needs_bos: ClassVar[bool] = False
    shares_prefix: ClassVar[bool] = False
    pads_null: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """Values per row."""
        return int(self.architecture()["hidden_size"])

    @property
    def longest(self) -> int | None:
        """The largest `text.max_length`; None: any."""
        return None

    def check(self, config: TextConfig) -> None:
        """Refuse settings that this kind does not have, as ConfigErrors."""
        if config.prompting not in self.normalisations:
            raise ConfigError(
                f"text.prompting: {self.called} ({self.folder}) has no prompting {config.prompting!r}, which is that "
                "of Sana's trainer for Gemma-2",
                expected=" or ".join(self.normalisations),
                found=config.prompting,
                fix=f"--set text.prompting={next(iter(self.normalisations))}",
            )
        if self.longest is not None and self.rows(config) > self.longest:
            raise ConfigError(
                f"text.max_length: {self.called} ({self.folder}) was made for fewer tokens",
                expected=f"at most {self.longest}",
                found=self.rows(config),
                fix=f"--set text.max_length={self.max_length}",
            )
        if config.instruction and not self.instructions:
            raise ConfigError(
                f"text.instruction: {self.called} ({self.folder}) is given captions without an instruction",
                expected="null",
                found=config.instruction[:80],
                fix="--set text.instruction=null",
            )

    @classmethod
    def rows(cls, config: TextConfig) -> int:
        """Rows of a caption at most."""
        return cls.max_length if config.max_length is None else config.max_length

    @classmethod
    def instruction(cls, config: TextConfig) -> str:
        """The text before every caption; "" for none."""
        return cls.instructions.get(config.prompting, "") if config.instruction is None else config.instruction

    def template(self, tokenizer: Path) -> str:
        """The chat template in the tokenizer's folder; "" for a kind that has none."""
        return ""

    def texts(self, tokenizer: Any, captions: Sequence[str], template: str) -> list[str]:
        """Return what the tokenizer is given of captions."""
        return list(captions)

    @abstractmethod
    def architecture(self) -> dict[str, Any]:
        """The settings that decide values, for the digest; `hidden_size` and `num_hidden_layers` among them."""

    @abstractmethod
    def tensor(self, stored: str) -> str | None:
        """The name of a stored tensor in the digest; None: it decides no row."""

    @abstractmethod
    def model_class(self) -> tuple[Any, dict[str, Any]]:
        """transformers' class, and the options of `from_pretrained` that it needs."""

    def prepared(self, model: torch.nn.Module) -> torch.nn.Module:
        """The part of a loaded model that `hidden` runs."""
        return model

    @abstractmethod
    def hidden(self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Hidden states (rows, length, width) of tokens (rows, length); mask: 0 for padding, which is on the right."""

    def prefix(self, model: torch.nn.Module, ids: Sequence[int]) -> Any:
        """Run once what all captions begin with, where the kind `shares_prefix`; see `shared_prefix`."""
        raise NotImplementedError(self.called)


def kind_class(name: str) -> type[TextKind]:
    """The class of a kind. name: transformers' `model_type`, or that in an encoding. CacheError for another."""
    if name not in KINDS:
        raise CacheError(
            f"a text encoder of the kind {name!r}, which this version does not know",
            expected=" or ".join(KINDS),
            fix="read this cache with the version of sana-pipe that wrote it, or a newer one",
        )
    return pkgutil.resolve_name(KINDS[name])


def kind_at(folder: Path) -> TextKind:
    """The text encoder in a folder, read from its `config.json`. Raises ModelError for another model."""
    fix = "set text.id to the text encoder of the model that is trained, or to the pipeline that has it"
    settings = read_settings(folder, "model_type", tuple(KINDS), "text encoder", fix)
    return kind_class(settings["model_type"])(folder, settings)


def kind_of(config: TextConfig) -> TextKind:
    """The configured text encoder, of which only `config.json` is fetched. Raises ModelError, ConfigError."""
    kind = kind_at(resolve(config, ("config.json",)))
    kind.check(config)
    return kind


def max_length(config: TextConfig) -> int:
    """Rows of a caption at most, for estimates: as configured, or as the encoder's kind has it if it can be read."""
    if config.max_length is not None:
        return config.max_length
    try:
        return kind_of(config).max_length
    except ModelError:
        return MAX_LENGTH


def normalisation(config: TextConfig) -> str:
    """The rule of captions, for messages: Sana's for an encoder that is not on this machine."""
    try:
        kind: Any = kind_at(resolve(config)) if is_local(config) else kind_class("gemma2")
    except ModelError:
        kind = kind_class("gemma2")
    return kind.normalisations.get(config.prompting, config.prompting)


def layers_and_rope(settings: Mapping[str, Any], layer_types: Sequence[str]) -> dict[str, Any]:
    """Settings that newer transformers write as `layer_types` and `rope_parameters`; in older files they are implied or
    flat. layer_types: the implied ones."""
    rope = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    return {
        "layer_types": settings.get("layer_types") or list(layer_types),
        "rope_theta": float(rope.pop("rope_theta", None) or settings.get("rope_theta") or 10000.0),
        "rope": {} if rope.get("rope_type", "default") == "default" else rope,
    }
