"""The data that a training run reads of a cache, opened.

`snapshots.opening` chooses and opens them, `training.inputs` makes the run's task of them: so
training knows no cache, and of the encodings of records only what is said here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from sana_pipe.base.errors import ConfigError
from sana_pipe.data.cache.prompts import PromptSet
from sana_pipe.data.cache.snapshot import Sample, Snapshot
from sana_pipe.data.signals.control import ControlEncoding
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding


@dataclass(frozen=True)
class Inputs:
    """The data that a run reads of a cache.

    Attributes:
        snapshot: the samples that it is trained on.
        resolution: side of a picture at the base resolution, in pixels.
        heldout: the samples that it is validated on. old_heldout: those of them that an earlier run was validated on,
            too. prompts: sets of the pictures that it draws. preserved: text rows of `train.preserve.prompt`.
        phase: the number of runs before this one, each begun from the one before.
    """

    snapshot: Snapshot
    resolution: int
    heldout: Snapshot | None = None
    old_heldout: Snapshot | None = None
    prompts: Sequence[PromptSet] = ()
    preserved: Sequence[np.ndarray] = field(default_factory=list)
    phase: int = 0

    @property
    def latent(self) -> LatentEncoding:
        """The encoding of the latents."""
        return self.snapshot.encoding(LatentEncoding)

    @property
    def text_width(self) -> int:
        """Width of a text row."""
        return self.snapshot.encoding(TextEncoding).width

    @property
    def text_kind(self) -> str:
        """Kind of the text encoder."""
        return self.snapshot.encoding(TextEncoding).encoder_kind

    @property
    def text_rows(self) -> int:
        """Rows of a caption at most."""
        return self.snapshot.encoding(TextEncoding).max_length

    @property
    def sample_size(self) -> int:
        """Side of the latent at the base resolution."""
        return self.resolution // self.latent.compression

    @property
    def patience_s(self) -> float:
        """Seconds to wait for the storage of the cache."""
        return self.snapshot.files.patience_s

    @property
    def leaked(self) -> int:
        """Held-out samples that look like one of the training, as far as `bucket` counted them."""
        return 0 if self.heldout is None else leaked(self.snapshot, self.heldout)

    @property
    def old_samples(self) -> np.ndarray | None:
        """Ids of `old_heldout`, uint64 (n,)."""
        return None if self.old_heldout is None else np.concatenate([*self.old_heldout.sample_ids()])

    def check_pictures(self, kinds: Sequence[str]) -> None:
        """Refuse snapshots that lack the control pictures and masks of a training; see `check_pictures`."""
        check_pictures([self.snapshot] if self.heldout is None else [self.snapshot, self.heldout], kinds)

    # ------------------------------------------------------------- pictures of a ControlNet

    @property
    def _drawn_from(self) -> Snapshot:
        return self.heldout or self.snapshot

    @cached_property
    def _drawn(self) -> list[Sample]:
        """The samples whose captions are the prompts."""
        return [self._drawn_from.sample(row) for row in self.prompts[0].samples]

    @property
    def control_names(self) -> dict[str, Any]:
        """The snapshot and the ids of the samples whose control pictures are drawn with."""
        return {"snapshot": self._drawn_from.id, "samples": [sample.sample_id for sample in self._drawn]}

    @property
    def control_sides(self) -> tuple[int, int]:
        """Height and width of these control pictures, in pixels."""
        bucket = self._drawn_from.buckets[self._drawn[0].bucket]
        return bucket.height, bucket.width

    def control(self, number: int) -> np.ndarray:
        """The record of the control picture of a prompt, verified: bits of bf16, uint16."""
        return self._drawn_from.picture(self._drawn[number], ControlEncoding.kind)


def leaked(snapshot: Snapshot, heldout: Snapshot) -> int:
    """Held-out samples that look like one of a snapshot, as far as `bucket` counted them."""
    return (snapshot.head.leaked or {}).get(heldout.id, 0)


def check_pictures(snapshots: Sequence[Snapshot], kinds: Sequence[str]) -> None:
    """Refuse snapshots without the control pictures and masks that a training reads.

    Raises:
        ConfigError: names the kinds that a snapshot lacks.
    """
    for snapshot in snapshots:
        if lacking := [kind for kind in kinds if kind not in snapshot.pictures]:
            raise ConfigError(
                f"snapshot {snapshot.id[:12]} has no {' or '.join(lacking)} records, which this training reads",
                found=", ".join(snapshot.pictures),
                fix=f"set data.pictures.{lacking[0]}, then sana-pipe encode and sana-pipe bucket",
            )
