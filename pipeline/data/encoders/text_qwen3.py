"""Qwen3, Z-Image's text encoder: captions as a user's turn of a chat, the hidden states before the last layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sana_pipe.base.errors import not_permitted
from sana_pipe.base.hub import ModelError, read_json
from sana_pipe.data.encoders.text_kind import TEMPLATE_FILE, TextKind, layers_and_rope

if TYPE_CHECKING:
    import torch

_ARCHITECTURE: dict[str, Any] = {  # transformers' Qwen3Config
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}


class Qwen3(TextKind):
    """The rows of `ZImagePipeline`: all tokens of the chat (user turn, generation prompt, thinking on)."""

    name: ClassVar[str] = "qwen3"
    called: ClassVar[str] = "Qwen3"
    attention: ClassVar[str] = "sdpa"
    selection: ClassVar[str] = "before-last"
    normalisations: ClassVar[Mapping[str, str]] = {"diffusers": "unchanged"}
    max_length: ClassVar[int] = 512

    @property
    def longest(self) -> int | None:
        return self.settings.get("max_position_embeddings")

    def template(self, tokenizer: Path) -> str:
        """The text that transformers takes: that of the file, else that in `tokenizer_config.json`."""
        file, settings = tokenizer / TEMPLATE_FILE, tokenizer / "tokenizer_config.json"
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise not_permitted(file) or ModelError(f"{file} cannot be read", found=str(error)) from None
        found = read_json(settings).get("chat_template") if settings.is_file() else None
        if isinstance(found, list):
            named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
            found = named[0].get("template") if named else None
        if not isinstance(found, str) or not found:
            raise ModelError(
                f"the tokenizer in {tokenizer} has no chat template, which {self.called} ({self.folder}) puts every "
                "caption into",
                expected=f"{TEMPLATE_FILE}, or chat_template in tokenizer_config.json",
                found=", ".join(sorted(path.name for path in tokenizer.iterdir())),
                fix=f"copy {TEMPLATE_FILE} or tokenizer_config.json from the repository of the model that is trained, "
                "or set text.id to that repository",
            )
        return found

    def texts(self, tokenizer: Any, captions: Sequence[str], template: str) -> list[str]:
        return [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": caption}],
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=True,
            )
            for caption in captions
        ]

    def architecture(self) -> dict[str, Any]:
        architecture = {key: self.settings.get(key, default) for key, default in _ARCHITECTURE.items()}
        layers = architecture["num_hidden_layers"]
        window = self.settings.get("sliding_window") if self.settings.get("use_sliding_window") else None
        full = layers if window is None else self.settings.get("max_window_layers", 28)
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
        return {**architecture, "sliding_window": window, **layers_and_rope(self.settings, kinds)}

    def tensor(self, stored: str) -> str | None:
        name, layers = stored.removeprefix("model."), self.architecture()["num_hidden_layers"]
        unused = ("lm_head.", f"layers.{layers - 1}.", "norm.")  # as `prepared` leaves them out
        return None if name.startswith(unused) else name

    def model_class(self) -> tuple[Any, dict[str, Any]]:
        import transformers

        return transformers.Qwen3Model, {}

    def prepared(self, model: torch.nn.Module) -> torch.nn.Module:
        """Without the last layer and the norm behind it, which no row needs."""
        from torch.nn import Identity, ModuleList

        layers: Any = model.layers
        model.layers, model.norm = ModuleList(list(layers)[:-1]), Identity()
        return model

    def hidden(self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(ids, attention_mask=mask, use_cache=False).last_hidden_state
