"""Text: the rows that the text encoder makes of a caption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.signals import CaptionSignal, Encoders
from sana_pipe.data.sources.config import DataConfig

if TYPE_CHECKING:
    from sana_pipe.data.encoders.text import TextEncoder


@dataclass(frozen=True)
class TextEncoding(CaptionSignal):
    """Values of text rows: hidden states of an encoder of the kind `encoder_kind`, selected by `selection`. template:
    that of a chat, which captions are put into."""

    kind: ClassVar[str] = "text"
    noun: ClassVar[str] = "captions"
    section: ClassVar[str] = "text"
    optional: ClassVar[bool] = False
    later: ClassVar[tuple[str, ...]] = ("encoder_kind", "template")
    weights: str = ""
    tokenizer: str = ""
    dtype: str = "bf16"
    attention: str = "eager"
    instruction: str = ""
    selection: str = "sana"
    encoder_kind: str = "gemma2"
    template: str = ""

    @property
    def pads_null(self) -> bool:
        from sana_pipe.data.encoders.text_kind import kind_class

        return kind_class(self.encoder_kind).pads_null

    @classmethod
    def wanted(cls, encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> Self:
        return cls(**_described(encoders), storage=encode.storage.text)

    def model(self, encoders: Encoders) -> dict[str, Any]:
        return _described(encoders)

    def settings(self, encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> Mapping[str, tuple[Any, Any]]:
        from sana_pipe.data.encoders.text_kind import kind_class

        text, kind = encoders.text, kind_class(self.encoder_kind)
        prompting = {normalisation: name for name, normalisation in kind.normalisations.items()}
        return {
            "text.dtype": (text.dtype, self.dtype),
            "text.prompting": (text.prompting, prompting.get(self.normalisation, self.normalisation)),
            "text.max_length": (kind.rows(text), self.max_length),
            "text.instruction": (kind.instruction(text), self.instruction),
            "encode.storage.text": (encode.storage.text, self.storage),
        }

    def encoder(self, encoders: Encoders, device: Any) -> TextEncoder:
        from sana_pipe.data.encoders.text import TextEncoder

        return TextEncoder.load(encoders.text, device)

    def provenance(self, encoders: Encoders) -> dict[str, Any]:
        from sana_pipe.data.encoders.frozen import provenance_of

        return provenance_of(encoders.text)


def _described(encoders: Encoders) -> dict[str, Any]:
    from sana_pipe.data.encoders.text import describe_text

    return describe_text(encoders.text)
