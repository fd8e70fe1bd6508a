"""The sections `model` and `sample`, and those of `train` that name an architecture: flow, adapter, ControlNet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from sana_pipe.base.config import Location, NotNegative, Positive, Section, Share, Weights


class StartWeights(Weights):
    """The weights that training starts from."""

    folder: ClassVar[str] = "transformer"
    id: Location
    """A model on the hub or a folder that `save_pretrained` wrote, the transformer's or a pipeline's; or a file of
    NVlabs' trainer (`.pth`, or safetensors with its names), local or as `hf://OWNER/NAME/checkpoints/NAME.pth`."""
    variant: str | None = None
    """The variant of the weight files; null: the files of the highest precision (the run logs which). Of several models
    in one `.pth`, the key of one, such as `state_dict_ema`."""
    runs_in: Annotated[list[Literal["fp32", "bf16", "fp16"]], Field(min_length=1)] | None = None
    """The precisions in which these weights work, the preferred one first; null: unknown. Weights trained in fp16 fail
    in bf16 (NVlabs/Sana #47, #109), and weights trained in bf16 overflow in fp16 (#65)."""

    @property
    def weight_variant(self) -> str | None:
        return self.variant

    def supports(self, precision: str) -> bool:
        """False if the weights are known to fail in this value of `train.precision`."""
        return self.runs_in is None or precision.removesuffix("_pure") in self.runs_in

    @classmethod
    def from_word(cls, word: str) -> Any:
        return {"id": word}


class ModelConfig(Section):
    """The transformer: either `weights` (fine-tuning) or `arch` (from scratch); the other is null."""

    weights: StartWeights | None = None
    """Start weights. `weights: ID` alone is the model in that folder, or the `transformer` of that pipeline; `--set
    model.weights=ID` keeps the file's `runs_in`."""
    arch: dict[str, Any] | None = None
    """A new model: the keys of diffusers' `config.json` of a `SanaTransformer2DModel` that differ from Sana 1.6B's,
    such as `{num_layers: 28}`; `{}`: Sana 1.6B. Widths and `sample_size` follow from the other keys and from
    `data.resolution`."""

    def _conflicts(self) -> Iterator[str]:
        if (self.weights is None) == (self.arch is None):
            yield (
                "give either model.weights (fine-tuning; --set model.arch=null) or model.arch (from scratch; --set "
                "model.weights=null), not both, not none"
            )


class FlowConfig(Section):
    """Flow matching as Sana trains it: logit-normal times, then shifted."""

    shift: Annotated[float, Field(gt=0)] = 3.0
    """Shift of the times towards noise; used in sampling, too."""


class AdapterConfig(Section):
    """Train a low-rank product next to chosen matrices, and nothing else (see docs/training.md)."""

    kind: Literal["lora", "dora"] = "lora"
    """lora: W + alpha / rank * B A. dora: that with a trained length of each row."""
    rank: Positive = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The product is multiplied by alpha / rank; null: the rank, so that a larger one is not weaker. A fixed alpha is
    weaker with each higher rank, which `train` says."""
    targets: Literal["attention", "all"] | Annotated[list[str], Field(min_length=1)] = "attention"
    """The matrices. attention: the projections of all attentions. all: the products of the blocks' second half, too (of
    Sana the two 1x1 convolutions). A list: patterns of module names or their ends, such as `[attn2.to_k,
    "transformer_blocks.1?.attn1.*"]`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the values that are dropped before A in training."""
    start: Location | None = None
    """An export, a LoRA file of diffusers or a folder of PEFT, whose matrices a new run begins with; null: A drawn, B
    zero."""


class ControlNetConfig(Section):
    """Train a ControlNet, a copy of the model's first blocks that reads a control picture, next to the frozen model
    (see docs/guides/controlnet.md). Its samples have `control` records (`data.pictures`)."""

    layers: Positive | None = None
    """Blocks that are copied, fewer than the model has; null: 7, or as many as a smaller model allows."""
    control_drop: Share = 0.0
    """Share of samples that are trained with zeros in place of the control, whatever becomes of their caption."""
    start: Location | None = None
    """An export, or a folder or file of diffusers' `SanaControlNetModel`, whose values a new run begins with; null:
    those of the model's blocks, and zero layers."""


class SampleConfig(Section):
    """Pictures drawn from a checkpoint. Defaults: Sana's."""

    steps: Positive = 20
    """Sampling steps."""
    guidance: Annotated[float, Field(ge=0)] = 4.5
    """Scale of classifier-free guidance."""
    seed: NotNegative = 0
    """Seed of the start noise."""
