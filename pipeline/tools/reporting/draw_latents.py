"""Draw latents for captions of a snapshot or for prompts, and check whether each resembles its caption's picture.

`open_model` puts weights into the transformer; `draw_for` reads text rows from the cache and samples with it,
`draw_prompts` does so for a prompt set; `nearest` compares the results with the cached latents. It is apart from the
stage, because tests and reports use the check, too. The model is in memory while it draws; decoding happens elsewhere.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from sana_pipe.base.hub import listed
from sana_pipe.data.cache.prompts import PromptSet
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import TextPlace
from sana_pipe.data.cache.snapshot_samples import Caption, Sample
from sana_pipe.data.loader.loader import bf16
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.tools.reporting.drawing_folder import DRAWN, file_name
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import Adapter
from sana_pipe.train.models.sampler import Sampling, noise_of, prompt_noise, sample
from sana_pipe.train.models.spec import ModelSpec

T = TypeVar("T")


@dataclass(frozen=True)
class DrawnLatent:
    """One caption and the latent drawn for it.

    Attributes:
        row: of the sample in the snapshot.
        caption: as written.
        source, item: where the picture came from.
        bucket: (height, width) in pixels.
        cached: (C, h, w) float32, latent of the sample's picture.
        latent: (C, h, w) float32, drawn.
        control: (C, h, w) float32, latent of the control picture; None without a ControlNet.
    """

    row: int
    sample_id: int
    caption: str
    source: str
    item: str
    bucket: tuple[int, int]
    cached: torch.Tensor
    latent: torch.Tensor
    control: torch.Tensor | None = None


def open_model(
    train: TrainConfig,
    architecture: ModelSpec,
    weights: dict[str, torch.Tensor],
    device: torch.device,
    adapter: Adapter | None = None,
) -> nn.Module:
    """Put weights into a model that draws.

    Args:
        train: with the numerics of the training (`training.checkpoint.as_trained`).
        weights: of `architecture`, in our layout; the model takes them over without a copy.
        adapter: whose parameters are next to the model's in `weights`: a ControlNet, which draws with controls.
    """
    model = architecture.loaded(weights, train, *([] if adapter is None else [adapter.apply]))
    return model.to(device, torch.bfloat16 if train.precision in ("bf16", "bf16_pure") else torch.float32).eval()


def draw_for(
    model: nn.Module, settings: Sampling, seed: int, snapshot: Snapshot, rows: list[int], *, controlled: bool = False
) -> list[DrawnLatent]:
    """Draw a latent for the first of the most probable captions of each row.

    The noise of a picture depends on the seed and the sample alone, not on the other rows.

    Args:
        controlled: the model is given the samples' controls.
    """
    records = SnapshotTensors(snapshot)
    drawn, texts = list[DrawnLatent](), dict[int, torch.Tensor]()
    for row in rows:
        entry = snapshot.sample(row)
        at = max(range(len(entry.captions)), key=lambda i: entry.captions[i].weight)
        caption, bucket = snapshot.captions(row, records.texts)[at], snapshot.buckets[entry.bucket]
        place, cached = snapshot.source_item(row), records.latent(entry)
        size, control = (bucket.height, bucket.width), records.latent(entry, "control") if controlled else None
        drawn.append(DrawnLatent(row, entry.sample_id, caption, *place, size, cached, torch.empty(0), control))
        texts[row] = records.text(entry, at)
    null, latents = records.null(), dict[int, torch.Tensor]()
    for size in sorted({each.bucket for each in drawn}):
        group = [each for each in drawn if each.bucket == size]
        channels, height, width = group[0].cached.shape
        noise = torch.cat([noise_of(each.sample_id, (channels, height, width), seed) for each in group])
        controls = [each.control for each in group if each.control is not None]
        given = torch.stack(controls) if controls else None
        made = _draw(model, settings, [texts[each.row] for each in group], null, noise, given)
        latents.update({each.row: latent for each, latent in zip(group, made, strict=True)})
    return [replace(each, latent=latents[each.row]) for each in drawn]


def draw_prompts(
    model: nn.Module,
    settings: Sampling,
    seed: int,
    prompts: PromptSet,
    shape: tuple[int, int, int],
    control: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Draw a latent of `shape` (C, h, w) for each prompt, float32. The noise of a picture depends on the seed and the
    prompt alone, as in training.

    Args:
        control: (C, h, w), latent of the control picture of all prompts.
    """
    null, mask = prompts.null()
    rows = [bf16(prompts.rows(number)) for number in range(len(prompts))]
    noise = prompt_noise(prompts.texts, shape, seed)
    controls = None if control is None else control.expand(len(rows), *control.shape)
    return list(_draw(model, settings, rows, bf16(null)[torch.from_numpy(mask)], noise, controls))


def _draw(
    model: nn.Module,
    settings: Sampling,
    rows: list[torch.Tensor],
    null: torch.Tensor,
    noise: torch.Tensor,
    controls: torch.Tensor | None,
) -> torch.Tensor:
    """(N, C, h, w) latents on the CPU, in the precision of the model's parameters."""
    rows = [each.to(next(model.parameters())) for each in rows]
    return sample(model, rows, null, noise, settings, controls).cpu()


def nearest(drawn: list[DrawnLatent]) -> list[bool]:
    """Return whether each drawn latent is nearer to its own picture's latent than to any other's (Euclidean, averaged
    over 4 x 4 regions so that different shapes compare)."""
    ours, theirs = (
        torch.stack([torch.nn.functional.adaptive_avg_pool2d(t, 4).flatten() for t in latents])
        for latents in ([d.latent for d in drawn], [d.cached for d in drawn])
    )
    return (torch.cdist(ours, theirs).argmin(dim=1) == torch.arange(len(drawn))).tolist()


def likeness(drawn: Sequence[DrawnLatent], hits: Sequence[bool], base: list[DrawnLatent] | None) -> Iterator[str]:
    """Say for people what `nearest` returned. base: drawn by the weights before the training."""
    count, right = len(hits), sum(hits)
    before = f"; before the training {sum(nearest(base))}" if base is not None else ""
    if count > 1:
        yield (
            f"likeness: {right} of {count} pictures are closer to the photo of their own caption than to the "
            f"{count - 1} other photos{before}; chance alone gives about 1"
        )
    others = [f"{file_name(number, DRAWN)}.png ({each.item})" for number, each in enumerate(drawn) if not hits[number]]
    if others and right:
        yield f"  closer to another photo: {listed(others)}"
    if count > 1 and right < count:
        yield "  photos of the same subject resemble each other, so a low number is no failure with them"


def draw_columns(
    columns: Mapping[str, Callable[[], Mapping[str, Tensor] | None]], draw: Callable[[str, dict[str, Tensor]], list[T]]
) -> dict[str, list[T]]:
    """Draw the columns of a contact sheet that have weights; one model is in memory at a time.

    Args:
        columns: title -> reads the weights (None: there are none).
        draw: (title, weights) -> what is drawn.
    """
    drawn = {}
    for title, read in columns.items():
        if (weights := read()) is not None:
            drawn[title] = draw(title, dict(weights))
        del weights
        gc.collect()
    return drawn


class SnapshotTensors:
    """Verified tensors of a snapshot, as float32."""

    def __init__(self, snapshot: Snapshot):
        snapshot.check_shards()
        self.snapshot = snapshot
        self.readers = {kind: snapshot.reader(kind) for kind in snapshot.pictures}
        self.texts = snapshot.reader("text")

    def latent(self, sample: Sample, kind: str = "latent") -> torch.Tensor:
        return bf16(self.snapshot.picture(sample, kind, self.readers[kind])).float()

    def text(self, sample: Sample, at: int) -> torch.Tensor:
        return self._text(sample.captions[at])

    def null(self) -> torch.Tensor:
        """(n, D) rows of the null record that its mask shows."""
        return self._text(self.snapshot.null)[: self.snapshot.null.valid]

    def _text(self, place: Caption | TextPlace) -> torch.Tensor:
        into = np.empty((place.rows, self.snapshot.encoding(TextEncoding).width), np.uint16)
        self.texts.read(place.shard, place.offset, place.key, place.checksum, into, place.length)
        return bf16(into).float()
