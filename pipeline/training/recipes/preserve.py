"""Sana's recipe with preservation: on a share of the samples the adapted model is to predict what its base predicts.

What: `train.preserve`. The target of a preserved sample is the prediction of the same weights without the adapter, from
the same noised latents and, with a prompt, for this prompt in place of the sample's caption. No second model is needed.
A sample is drawn by a hash of the visit's other draws, so that every topology and every resume draws the same ones.
Price: a forward pass without gradients of the preserved samples, and at least one sample in each microbatch: under
FSDP2 every process has to run the model equally often.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from pipeline.config import FlowConfig, PreserveConfig
from pipeline.loader.loader import Batch
from pipeline.parallel.microbatch import REFERENCE, Microbatch, Outputs
from pipeline.training.recipes import ToDevice
from pipeline.training.recipes.flow import Flow

_PRESERVED, _ROWS = "preserved", "rows"


class Preserving(Flow):
    """The flow, and on a share of the samples the base's prediction. A validation measures the flow of all samples.

    Args:
        prompt: (n, D) text rows of `train.preserve.prompt`; None: samples keep their captions.
    """

    def __init__(self, flow: FlowConfig, preserve: PreserveConfig, prompt: Tensor | None = None):
        super().__init__(flow)
        self.share, self.prompt = preserve.share, prompt
        self.parts: Mapping[str, float] = {"flow": 1.0, "preserve": preserve.weight}

    def prepare(self, batch: Batch, place: ToDevice, dtype: torch.dtype, level: float | None = None) -> Microbatch:
        if level is not None:
            inputs, targets, _ = super().prepare(batch, place, dtype, level)
            none = torch.zeros(len(batch.latents), dtype=torch.bool)
            return Microbatch(inputs, {**targets, _PRESERVED: place(none)})
        chosen = preserved(batch, self.share)
        if self.prompt is not None:
            batch = with_captions(batch, chosen, self.prompt)
        inputs, targets, _ = super().prepare(batch, place, dtype)
        rows = chosen.nonzero().flatten() if bool(chosen.any()) else torch.zeros(1, dtype=torch.long)
        targets = {**targets, _PRESERVED: place(chosen), _ROWS: place(rows)}
        packed = inputs["captions"].ndim == 2
        owners = torch.arange(len(chosen)).repeat_interleave(batch.mask.sum(1)) if packed else None
        reference = {
            name: value[place(rows if owners is None or name != "captions" else torch.isin(owners, rows))]
            for name, value in inputs.items()
        }
        return Microbatch(inputs, targets, reference)

    def losses(self, outputs: Outputs, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flow, kept = super().losses(outputs, targets)["flow"], targets[_PRESERVED]
        preserve = torch.zeros_like(flow)
        if REFERENCE in targets:
            rows = targets[_ROWS]
            values = self.objective.loss(outputs.prediction[rows], targets[REFERENCE])
            preserve = preserve.index_copy(0, rows, values) * kept
        return {"flow": flow * ~kept, "preserve": preserve}


def preserved(batch: Batch, share: float) -> Tensor:
    """Which samples are preserved, bool (b,)."""
    draws = zip(batch.sample_ids, batch.logit.tolist(), strict=True)
    hashes = [xxhash.xxh3_64_intdigest(f"preserve/{identity}/{logit!r}".encode()) for identity, logit in draws]
    return torch.tensor([value < share * 2**64 for value in hashes])


def with_captions(batch: Batch, chosen: Tensor, rows: Tensor) -> Batch:
    """The batch with text rows (n, D) as the captions of the chosen samples, padded or packed as it was."""
    rows = rows.to(batch.captions.dtype)
    width = max(batch.mask.shape[1], len(rows)) if bool(chosen.any()) else batch.mask.shape[1]
    mask = F.pad(batch.mask, (0, width - batch.mask.shape[1]))
    mask[chosen] = torch.arange(width) < len(rows)
    if batch.cu_seqlens is None:
        captions = F.pad(batch.captions, (0, 0, 0, width - batch.captions.shape[1]))
        captions[chosen] = F.pad(rows, (0, 0, 0, width - len(rows)))
        return replace(batch, captions=captions, mask=mask)
    parts = batch.captions.split(batch.cu_seqlens.diff().tolist())
    parts = [rows if new else part for part, new in zip(parts, chosen.tolist(), strict=True)]
    ends = torch.tensor([0, *map(len, parts)], dtype=batch.cu_seqlens.dtype).cumsum(0, dtype=batch.cu_seqlens.dtype)
    return replace(batch, captions=torch.cat(parts), mask=mask, cu_seqlens=ends)
