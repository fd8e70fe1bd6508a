"""T5Gemma's encoder, PRX's text encoder: it attends in both directions, and captions have no instruction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from sana_pipe.base.hub import ModelError
from sana_pipe.data.encoders.text_gemma2 import architecture_of
from sana_pipe.data.encoders.text_kind import TextKind

if TYPE_CHECKING:
    import torch


class T5Gemma(TextKind):
    """The rows of `PRXPipeline`: all tokens of the cleaned caption, last hidden states. The folder holds a T5Gemma, of
    which the encoder is read, or its encoder alone."""

    name: ClassVar[str] = "t5gemma"
    called: ClassVar[str] = "T5Gemma"
    selection: ClassVar[str] = "last"
    normalisations: ClassVar[Mapping[str, str]] = {"diffusers": "prx"}
    max_length: ClassVar[int] = 256

    @property
    def _alone(self) -> bool:
        return "hidden_size" in self.settings  # diffusers' pipeline writes `model_type: t5gemma` for the encoder, too

    @property
    def _encoder(self) -> Mapping[str, Any]:
        """The settings of the encoder."""
        found = self.settings if self._alone else self.settings.get("encoder")
        if not isinstance(found, dict) or found.get("is_decoder"):
            raise ModelError(
                f"{self.folder} holds no encoder of {self.called}, which is what makes rows of captions",
                expected="the encoder, or a T5Gemma with encoder and decoder",
                found="a decoder" if isinstance(found, dict) else "a config.json without `encoder`",
                fix="set text.id to the text encoder of the model that is trained, or to the pipeline that has it",
            )
        return found

    @property
    def longest(self) -> int | None:
        return self._encoder.get("max_position_embeddings")

    def architecture(self) -> dict[str, Any]:
        return architecture_of(self._encoder)

    def tensor(self, stored: str) -> str | None:
        name = stored.removeprefix("model.")
        return None if name.startswith(("decoder.", "lm_head.")) else name.removeprefix("encoder.")

    def model_class(self) -> tuple[Any, dict[str, Any]]:
        from transformers.models.t5gemma import configuration_t5gemma, modeling_t5gemma

        if self._alone:
            config = configuration_t5gemma.T5GemmaModuleConfig(**{**self._encoder, "model_type": "t5_gemma_module"})
            return modeling_t5gemma.T5GemmaEncoder, {"config": config}

        class Half(modeling_t5gemma.T5GemmaEncoderModel):
            _keys_to_ignore_on_load_unexpected = (r"(^|\.)decoder\.", r"^lm_head\.")

        return Half, {"is_encoder_decoder": False}

    def prepared(self, model: torch.nn.Module) -> torch.nn.Module:
        encoder: Any = model if self._alone else model.encoder
        return encoder

    def hidden(self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(ids, attention_mask=mask).last_hidden_state
