"""A low-rank layer through `Adapter`, and an objective with a second loss, for tests of the seams."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from sana_pipe.base.layer_classes import LayerMixin, add_mixin
from sana_pipe.train.models.adapters import Adapter, Merged
from sana_pipe.train.models.config import FlowConfig
from sana_pipe.train.models.spec import ModelSpec, Values
from sana_pipe.train.parallel.microbatch import Outputs
from sana_pipe.train.training.objectives.flow import Flow

LAYER = "transformer_blocks.1.attn2.to_q"


class LowRankLayer(LayerMixin):
    place = "adapter"
    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)  # type: ignore[misc]
        return out + F.linear(F.linear(x, self.lora_A), self.lora_B)


class LowRank(Adapter):
    kind = "low rank"
    formats = ("diffusers",)

    def __init__(self, rank: int = 2):
        self.rank = rank

    def __str__(self) -> str:
        return f"a low-rank layer of rank {self.rank}"

    def apply(self, module: nn.Module) -> None:
        module.requires_grad_(False)
        layer: Any = module.get_submodule(LAYER)
        results, inputs = layer.weight.shape
        layer.lora_A = nn.Parameter(torch.empty(self.rank, inputs, device="meta"))
        layer.lora_B = nn.Parameter(torch.empty(results, self.rank, device="meta"))
        add_mixin(layer, LowRankLayer)

    def initial(self, name: str, shape: tuple[int, ...], seed: int, base: Values) -> Tensor:
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return drawn if name.endswith("lora_A") else torch.zeros(shape)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "rank": self.rank}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(values["rank"])

    def merged(self, name: str, weight: Tensor, trained: Mapping[str, Tensor], strength: float = 1.0) -> Tensor:
        if name != f"{LAYER}.weight":
            return weight
        return weight + strength * trained[f"{LAYER}.lora_B"] @ trained[f"{LAYER}.lora_A"]

    def save(
        self,
        form: str,
        weights: Merged,
        folder: Path,
        dtype: torch.dtype,
        header: Mapping[str, str] = {},
        stem: str = "",
    ) -> None:
        save_file({name: each.to(dtype) for name, each in weights.trained.items()}, folder / "low_rank.safetensors")


class Aligned(Flow):
    """The flow, and the mean of the latents from a block's tokens by a head of its own."""

    parts: Mapping[str, float] = {"flow": 1.0, "aligned": 0.5}
    taps = (1,)

    def __init__(self, config: FlowConfig):
        super().__init__(config)

    def modules(self, spec: ModelSpec) -> dict[str, nn.Module]:
        return {"head": nn.Linear(spec.inner_dim, spec.in_channels)}

    def initial(self, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
        return 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)))

    def losses(self, outputs: Outputs, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        guess = outputs.modules["head"](outputs.taps[1].mean(1).to(outputs.prediction.dtype))
        wanted = targets["flow"].mean((2, 3))
        return {**super().losses(outputs, targets), "aligned": (guess.float() - wanted).square().mean(1)}
