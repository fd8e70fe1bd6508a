"""The section `bucket`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from sana_pipe.base.config import LocalPath, Location, Positive, Section, Share


class SourceConfig(Section):
    """The samples that `bucket` takes from a source."""

    weight: Annotated[float, Field(ge=0)] = 1.0
    """Visits of each sample per epoch, with at most three decimals. 0.25: every fourth epoch. 2: twice an epoch. 0: the
    source is left out."""
    filter: str | None = None
    """As `bucket.filter`, for this source alone."""
    repeats: bool | None = None
    """true: the number that a folder begins with multiplies the visits of its pictures, as for kohya's sd-scripts
    (`10_sks dog`: ten times an epoch; not in the held-out part). null: if all pictures of the source lie in such
    folders; `bucket` says so."""

    def _conflicts(self) -> Iterator[str]:
        if round(self.weight, 3) != self.weight:
            yield "weight must have at most three decimals"


class BucketConfig(Section):
    """The samples that are used, and the batches that they form."""

    batch: Positive = 64
    """Global batch of an optimizer step, whatever the number of GPUs."""
    tokens: Positive | None = None
    """Limit on latent tokens of a step, in place of `batch`: large buckets get smaller batches, rounded down to a
    multiple of `batch_multiple`."""
    batch_multiple: Positive = 1
    """Every batch is a multiple of this number. Choose one that all your numbers of GPUs divide."""
    remainder: Literal["carry", "drop"] = "carry"
    """Samples that do not fill the last batch of an epoch. carry: use them in the next epoch. drop: skip them in this
    epoch (others in the next one), and skip buckets smaller than a batch."""
    metadata: LocalPath | None = None
    """A table of scores, tags or votes (.parquet, .csv, .tsv, .jsonl) whose columns become metadata of the pictures,
    for `filter`, `group` and weights of pairs. The cache stores it; the digest of a stored table names it, too."""
    metadata_key: str = "item"
    """The column of that table that names pictures: by item, `SOURCE: ITEM`, file name, its stem, or digest."""
    caches: list[Location] = []
    """Other caches (folders or URLs) whose sources are used, too. The shards that are needed are linked or copied."""
    sources: dict[str, SourceConfig] = {}
    """Settings by source; a source that is not listed has the defaults."""
    filter: str | None = None
    """A condition in SQL that samples must satisfy, such as `least(width, height) >= 512 AND score > 5`
    (docs/snapshots.md)."""
    dedup: Literal["none", "image", "near"] = "none"
    """image: of pictures with equal bytes use one, from the source listed first in `sources`, then by name of source
    and item. near: of pictures that look the same (resized, compressed again, cropped to the middle, mirrored) use the
    one with the most pixels, then with the longest caption; it needs `encode.signals: [phash]`."""
    dedup_captions: Literal["drop", "keep"] = "drop"
    """keep: the captions of pictures that `dedup` leaves out are added to the captions of the one that stays."""
    dedup_keep: list[str] = []
    """Pictures that `dedup` does not leave out, by `ITEM` or `SOURCE: ITEM` as `bucket` lists them: other pictures that
    look the same."""
    balance: Share | None = None
    """Fewer visits for what a data set has much of, more for what is rare: samples are grouped by their latents, and
    those of large groups are visited less. 0.5: by the root of a group's size; 1: every group equally often, as far as
    an eighth of a visit to eight visits of a sample an epoch allow; null: every sample counts the same. Every latent is
    read once."""
    heldout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the pictures, chosen by their digest, that goes into a second snapshot, NAME.heldout. In a cache with
    hashes (`encode.signals: [phash]`) pictures that look the same stay on one side."""
    group: str | None = None
    """A column (as for `bucket.filter`) whose equal values stay on one side of the held-out part: `artist`, `patient`,
    `folder`. Pictures that look the same, or are equal files, join their groups. A picture without a value is a group
    of its own. `subset` and `balance` count pictures, not groups."""
    subset: Positive | None = None
    """Use this many pictures, those with the smallest sample ids. A larger number later keeps them, in the same
    order."""
    grow: str | None = None
    """With `subset`: take the pictures of this earlier snapshot first."""
    resolutions: list[Positive] = []
    """Use Sana's table at each of these, for a cache that was encoded at several `data.resolution`; []: at
    `data.resolution`."""
    pack_mib: Positive = 64
    """`--pack`: size of a shard in MiB. The mirror needs room for sixteen of each bucket."""

    def _conflicts(self) -> Iterator[str]:
        if self.metadata is None and self.metadata_key != "item":
            yield "metadata_key names a column of the table metadata, and metadata names no table"
