"""Sections of `train`: optimizer, EMA, masks, preserved prompts, validation, pictures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from sana_pipe.base.config import NotNegative, Positive, Section, Share, Sides
from sana_pipe.train.training.optimizer_records import OPTIMIZERS


def _known(name: str) -> str:
    if name not in OPTIMIZERS:
        raise ValueError(f"must be {' | '.join(OPTIMIZERS)}")
    return name


class OptimConfig(Section):
    """The optimizer and the learning rate."""

    name: Annotated[str, AfterValidator(_known), " | ".join(OPTIMIZERS)] = "adamw"
    """adamw: 8 bytes of state per parameter. adamw8bit: 2 bytes (torchao). came: 4 bytes; NVlabs use it with
    weight_decay 0. Adafactor is not offered: torch's cannot be sharded."""
    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate. NVlabs' trainer multiplies that of its configuration by sqrt(batch / 256)."""
    betas: Annotated[tuple[Share, ...], Field(min_length=2, max_length=3)] = (0.9, 0.999)
    """Decay of the moments; null: (0.9, 0.999) for AdamW, (0.9, 0.999, 0.9999) for CAME."""
    eps: Annotated[float, Field(gt=0)] | None = 1e-8
    """AdamW's eps; null: 1e-8. CAME needs null (its eps are fixed)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decay of matrices and convolutions; with `numerics: nvlabs` of all parameters."""
    clip: Annotated[float, Field(gt=0)] | None = 0.1
    """Limit on the global norm of the gradient; null: none."""
    warmup_steps: NotNegative = 2000
    """Steps over which the rate rises to its peak."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """The rate after the warm-up. linear, cosine: it falls to 0 at `train.steps`. wsd: it is constant and falls over
    the last tenth of `train.steps` (with 1 - sqrt of the part that is done). A resumed run with another `train.steps`
    follows the new curve from there."""
    in_backward: bool = False
    """Update each parameter as soon as its gradient is complete, and free the gradient: the gradients of the whole
    model are never in memory together. Needs `clip: null`, because the global norm is known only afterwards."""

    @model_validator(mode="before")
    @classmethod
    def _fill_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        name = data.get("name", "adamw")
        known = isinstance(name, str) and name in OPTIMIZERS
        record = OPTIMIZERS[name if known else "adamw"]  # another name is refused afterwards
        betas, eps = data.get("betas"), data.get("eps")
        betas = record.betas if betas is None else betas
        eps = record.eps if eps is None else eps
        return {**data, "betas": tuple(betas) if isinstance(betas, list) else betas, "eps": eps}

    def _conflicts(self) -> Iterator[str]:
        record = OPTIMIZERS[self.name]
        if len(self.betas) != len(record.betas):
            yield f"{self.name} has {len(record.betas)} betas, not {len(self.betas)}; betas: null takes its defaults"
        if record.eps is None and self.eps is not None:
            yield f"the eps of {record.title} are fixed ({record.fixed_eps}): write eps: null"


class EmaConfig(Section):
    """EMA weights: an exponential moving average in fp32, for `export --ema`, `sample --ema` and `train.pictures`."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9999
    """Decay per step; a new average starts with (1 + step) / (10 + step) if that is less."""
    device: Literal["same", "cpu"] = "same"
    """same: next to the parameters. cpu: in host memory."""


class PreserveConfig(Section):
    """Keep what the base knows while an adapter learns: on a share of the samples the target is the base's own
    prediction, computed with the adapter off."""

    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the samples."""
    prompt: str | Annotated[list[str], Field(min_length=1)] | None = None
    """The caption of these samples, such as `a dog` where the pictures' captions say `a sks dog`; of several each
    sample draws one. A prompt of any set in the cache (`encode --prompts`). null: the samples keep their captions."""

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt or []


class MaskConfig(Section):
    """Learn the masked part of each picture: the snapshot has masks (`data.pictures`), one value a latent cell."""

    outside: Share = 0.0
    """Weight of the cells whose mask is 0; the weight of a cell is outside + (1 - outside) mask. A sample's loss is its
    weighted mean, so that it does not depend on the masked area."""


class PreferConfig(Section):
    """Learn from preference pairs (docs/guides/preferences.md): the snapshot has rejected pictures
    (`data.pictures.rejected`). The reference, called the base, is the model without its adapter, or without `adapter` a
    frozen copy of the start weights."""

    beta: Annotated[float, Field(gt=0)] = 2000.0
    """Strength of the bond to the base, in the loss -log sigmoid(beta/2 margin). Larger: the loss is content with a
    smaller change. Diffusion-DPO (arXiv 2311.12908) takes 2000 to 5000, on errors that are means, too."""
    anchor: Annotated[float, Field(ge=0)] = 1.0
    """Weight of beta/2 max(0, loss of the chosen picture - that of the base), so that it does not rise; 0: none."""
    stop: Share | None = 0.05
    """End the run at a validation where the chosen pictures' loss exceeds the base's by more than this share, or where
    the second one in a row has a lower pair accuracy and a higher loss than earlier ones; needs `validation`. null:
    never."""


class ValidationConfig(Section):
    """The loss on held-out samples while a run goes on (see docs/training.md)."""

    snapshot: str | None = None
    """Snapshot of the samples, a name or an id. null: the part that was held out of the snapshot that is
    trained on (`bucket.heldout`)."""
    every: Positive = 500
    """Steps between validations; also before the first step and after the last one."""
    samples: Positive = 512
    """Samples of all buckets together, each bucket in proportion to its size."""


class PicturesConfig(Section):
    """Pictures while a run goes on (see docs/training.md). Steps, guidance and seed are those of `sample`."""

    prompts: str | None = None
    """Name or id of a prompt set (`encode --prompts`). captions: eight captions of the snapshot, and the prompts that
    `encode` made of `data.caption_prefix`. null: the set `prompts` if the cache has it, else captions. With
    `controlnet` always captions, of the samples that the run is validated on, if there are any, and with the controls
    of these samples, in the bucket that has most of them."""
    every: Positive = 500
    """Steps between pictures; also before the first step and after the last one."""
    size: Sides | None = None
    """[height, width] in pixels; null: a square of `data.resolution`. With `controlnet` those of a bucket, null any."""
