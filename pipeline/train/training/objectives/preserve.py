"""Sana's objective with preservation: on a share of the samples the adapted model is to predict what its base predicts.

What: `train.preserve`. The target of a preserved sample is the prediction of the same weights without the adapter, from
the same noised latents and, with a prompt, for this prompt in place of the sample's caption. No second model is needed.
A sample is drawn by a hash of the visit's other draws, so that every topology and every resume draws the same ones.
Price: a forward pass without gradients of the preserved samples, and at least one sample in each microbatch: under
FSDP2 every process has to run the model equally often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.models.config import FlowConfig
from sana_pipe.train.parallel.microbatch import REFERENCE, Microbatch, Outputs
from sana_pipe.train.training.config import MaskConfig, PreserveConfig
from sana_pipe.train.training.objectives import ToDevice, visit_chosen, visit_hashes
from sana_pipe.train.training.objectives.flow import Flow

_PRESERVED, _ROWS = "preserved", "rows"


class Preserving(Flow):
    """The flow, and on a share of the samples the base's prediction. A validation measures the flow of all samples.
    prompts: (n, D) text rows of each of `train.preserve.prompt`; none: samples keep their captions. mask: of the flow
    alone; the base's prediction is preserved in all cells."""

    def __init__(
        self,
        flow: FlowConfig,
        preserve: PreserveConfig,
        prompts: Sequence[Tensor] = (),
        mask: MaskConfig | None = None,
    ):
        super().__init__(flow, mask)
        self.share, self.prompts = preserve.share, prompts
        self.parts: Mapping[str, float] = {"flow": 1.0, "preserve": 1.0}

    def prepare(self, batch: Batch, place: ToDevice, dtype: torch.dtype, level: float | None = None) -> Microbatch:
        if level is not None:
            inputs, targets, *_ = super().prepare(batch, place, dtype, level)
            none = torch.zeros(len(batch.latents), dtype=torch.bool)
            return Microbatch(inputs, {**targets, _PRESERVED: place(none)})
        chosen = visit_chosen(batch, "preserve", self.share)
        if self.prompts:
            numbers = [value % len(self.prompts) for value in visit_hashes(batch, "prompt")]
            batch = with_captions(batch, {n: self.prompts[numbers[n]] for n in chosen.nonzero().flatten().tolist()})
        inputs, targets, *_ = super().prepare(batch, place, dtype)
        rows = chosen.nonzero().flatten() if bool(chosen.any()) else torch.zeros(1, dtype=torch.long)
        # selected by numbers: the count of a mask would have to be read from the GPU
        placed = place(rows)
        targets = {**targets, _PRESERVED: place(chosen), _ROWS: placed}
        packed = inputs["captions"].ndim == 2
        reference = {name: value[placed] for name, value in inputs.items() if not (packed and name == "captions")}
        if packed:
            owners = torch.arange(len(chosen)).repeat_interleave(batch.mask.sum(1))
            reference["captions"] = inputs["captions"][place(torch.isin(owners, rows).nonzero().flatten())]
        return Microbatch(inputs, targets, reference)

    def losses(self, outputs: Outputs, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flow, kept = super().losses(outputs, targets)["flow"], targets[_PRESERVED]
        preserve = torch.zeros_like(flow)
        if REFERENCE in targets:
            rows = targets[_ROWS]
            values = self.flow.loss(outputs.prediction[rows], targets[REFERENCE])
            preserve = preserve.index_copy(0, rows, values) * kept
        return {"flow": flow * ~kept, "preserve": preserve}


def with_captions(batch: Batch, captions: Mapping[int, Tensor]) -> Batch:
    """The batch with text rows (n, D) as the captions of some samples, padded or packed as it was."""
    width = max([batch.mask.shape[1], *map(len, captions.values())])
    mask = F.pad(batch.mask, (0, width - batch.mask.shape[1]))
    for sample, rows in captions.items():
        mask[sample] = torch.arange(width) < len(rows)
    if batch.cu_seqlens is None:
        padded = F.pad(batch.captions, (0, 0, 0, width - batch.captions.shape[1]))
        for sample, rows in captions.items():
            padded[sample] = F.pad(rows, (0, 0, 0, width - len(rows)))
        return replace(batch, captions=padded, mask=mask)
    parts = batch.captions.split(batch.cu_seqlens.diff().tolist())
    parts = [captions.get(sample, part).to(part.dtype) for sample, part in enumerate(parts)]
    ends = torch.tensor([0, *map(len, parts)], dtype=batch.cu_seqlens.dtype).cumsum(0, dtype=batch.cu_seqlens.dtype)
    return replace(batch, captions=torch.cat(parts), mask=mask, cu_seqlens=ends)
