"""Gemma-2, Sana's text encoder: an instruction before every caption, which is run once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sana_pipe.data.encoders.config import INSTRUCTIONS
from sana_pipe.data.encoders.text_kind import TextKind, layers_and_rope

if TYPE_CHECKING:
    import torch

    from sana_pipe.data.encoders.shared_prefix import Prefix

ARCHITECTURE: dict[str, Any] = {  # transformers' Gemma2Config
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
}


def architecture_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a `config.json` of Gemma-2, or of a part of it with the same fields, that decide values."""
    architecture = {key: settings.get(key, default) for key, default in ARCHITECTURE.items()}
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(architecture["num_hidden_layers"])]
    return {**architecture, **layers_and_rope(settings, alternating)}


class Gemma2(TextKind):
    """The rows that Sana selects: the first position and the last `max_length - 1` of the padded sequence."""

    name: ClassVar[str] = "gemma2"
    called: ClassVar[str] = "Gemma-2"
    selection: ClassVar[str] = "sana"
    normalisations: ClassVar[Mapping[str, str]] = {"diffusers": "diffusers", "nvlabs": "nvlabs"}
    instructions: ClassVar[Mapping[str, str]] = INSTRUCTIONS
    max_length: ClassVar[int] = 300
    needs_bos: ClassVar[bool] = True
    shares_prefix: ClassVar[bool] = True
    pads_null: ClassVar[bool] = True

    def architecture(self) -> dict[str, Any]:
        return architecture_of(self.settings)

    def tensor(self, stored: str) -> str | None:
        name = stored.removeprefix("model.")
        return None if name.startswith("lm_head.") else name

    def model_class(self) -> tuple[Any, dict[str, Any]]:
        import transformers

        return transformers.Gemma2Model, {}

    def hidden(self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(ids, attention_mask=mask, use_cache=False).last_hidden_state

    def prefix(self, model: torch.nn.Module, ids: Sequence[int]) -> Prefix:
        from sana_pipe.data.encoders.shared_prefix import Prefix

        return Prefix(model, ids)
