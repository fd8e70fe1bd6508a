"""The samples of a bucket whose pictures look the same, from the hashes in the caches.

What: `near_groups` reads the hash of each picture once (of several resolutions the first) and groups them by
`pipeline.snapshots.near`. The key of a group is the smallest digest of its files, so it does not depend on the order of
samples, and more data change it only for the groups that they join.
Price: 34 bytes of memory a picture for the hashes, beside the 250 of the groups; every hash is read from its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.cache.root import Cache
from pipeline.cache.shard import ShardReader
from pipeline.cache.snapshot import Places, Snapshot
from pipeline.errors import ConfigError
from pipeline.images.perceptual_hash import WORDS
from pipeline.signals.phash import HashRecipe
from pipeline.snapshots import near
from pipeline.snapshots.join import EncodedRecords, Frame, Joined, pieces

LARGEST = 10
"""Groups that are shown."""


@dataclass(frozen=True)
class Group:
    """Pictures that look the same. example: `source: item` of the one with the most pixels."""

    pictures: int
    example: str


@dataclass(frozen=True)
class NearGroups:
    """Which pictures look the same.

    Attributes:
        keys: (n,) S16, of each sample: the smallest digest of the pictures in its group.
        groups: of several pictures, the largest ten.
        count, pictures: how many such groups there are, and their pictures.
    """

    keys: np.ndarray
    groups: list[Group]
    count: int
    pictures: int


def near_groups(
    joined: Joined, frame: Frame, records: EncodedRecords, caches: Sequence[Cache], distance: int
) -> NearGroups:
    """The groups of near-duplicates among samples (see `pipeline.snapshots.near`).

    Args:
        caches: those that `records` index, in the same order.
        distance: `bucket.dedup_distance`.

    Raises:
        IntegrityError: a hash is damaged.
    """
    scratch, count = joined.scratch, 0
    number, digests, first = scratch.array(len(frame), np.int64), scratch.writer("S16"), scratch.writer(np.int64)
    for keys, rows, one in scratch.by_key(frame.digest[piece] for piece in pieces(len(frame))):
        number[rows] = count + np.cumsum(one) - 1
        count += int(one.sum())
        digests.add(keys[one])
        first.add(rows[one])
    every, samples = digests.finish(), first.finish()
    hashed = record_values(records, HashRecipe.kind, caches, frame.pictures[HashRecipe.kind][samples], (WORDS + 1,))
    member = near.groups(hashed, distance)
    sizes = np.bincount(member, minlength=len(every))
    largest = np.argsort(-sizes, kind="stable")[:LARGEST]
    shown = []
    for group in largest[sizes[largest] > 1].tolist():
        rows = samples[np.flatnonzero(member == group)]
        best = rows[np.argmax(frame.height[rows] * frame.width[rows])]
        shown.append(Group(len(rows), f"{joined.sources[int(frame.source[best])]}: {frame.item[int(best)].as_py()}"))
    several = sizes > 1
    of_samples = scratch.writer("S16")
    for piece in pieces(len(frame)):
        of_samples.add(every[member[number[piece]]])
    return NearGroups(of_samples.finish(), shown, int(several.sum()), int(sizes[several].sum()))


def leaked(frame: Frame, records: EncodedRecords, caches: Sequence[Cache], part: Snapshot, distance: int) -> int:
    """How many samples of a held-out part look like a sample of the training. frame: the training's.

    Raises:
        IntegrityError: a hash is damaged.
    """
    trained = record_values(records, HashRecipe.kind, caches, np.unique(frame.pictures[HashRecipe.kind]), (WORDS + 1,))
    member = near.groups(np.concatenate([trained, hashes_of(part)]), distance)
    return int(np.isin(member[len(trained) :], member[: len(trained)]).sum())


def hashes_of(snapshot: Snapshot) -> np.ndarray:
    """The hashes of all samples, (n, 17) uint16. Errors as of `leaked`."""
    kind = HashRecipe.kind
    places = snapshot.columns(np.arange(len(snapshot)), [kind]).pictures[kind]
    return _read(snapshot.reader(kind), snapshot.shards[kind], places, (WORDS + 1,))


def alike(snapshot: Snapshot, row: int, distance: int) -> list[tuple[int, int]]:
    """The samples that look like one: (row, bits in which they differ), the nearest first. Reads all hashes.

    Raises:
        ConfigError: the snapshot has no hashes.
        IntegrityError: a hash is damaged.
    """
    if HashRecipe.kind not in snapshot.pictures:
        raise ConfigError(
            f"snapshot {snapshot.id[:12]} has no hashes of pictures",
            found=", ".join(snapshot.pictures),
            fix="sana-pipe encode --set 'encode.signals=[phash]', then sana-pipe bucket",
        )
    every = hashes_of(snapshot)
    bits = near.distances(every[row], every)
    bits[(every[:, WORDS] < near.MIN_QUALITY) | (every[row, WORDS] < near.MIN_QUALITY)] = 1 << 16
    rows = np.flatnonzero(bits <= distance)
    return [(at, int(bits[at])) for at in rows[np.argsort(bits[rows], kind="stable")].tolist() if at != row]


def record_values(
    records: EncodedRecords, kind: str, caches: Sequence[Cache], rows: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    """The values of some picture records, (n, *shape) uint16.

    Args:
        rows: (n,) int64 of the kind's index. shape: of each record.
    """
    index = records.indexes[kind]
    values = np.empty((len(rows), *shape), np.uint16)
    cache_of = index.caches[index.columns["shard"][rows]]
    for number, cache in enumerate(caches):
        reader = ShardReader(cache.files, index.recipe)
        ours = np.flatnonzero(cache_of == number)
        places = {name: index.columns[name][rows[ours]] for name in ("shard", "offset")}
        ours = ours[np.lexsort((places["offset"], places["shard"]))]
        for piece in pieces(len(ours)):
            some = ours[piece]
            columns = {name: index.columns[name][rows[some]] for name in ("shard", "offset", "key", "checksum")}
            values[some] = _read(reader, index.shards, columns, shape)
    return values


def _read(reader: ShardReader, shards: Sequence[str], places: Places, shape: tuple[int, ...]) -> np.ndarray:
    """Records in the order of their places, (n, *shape)."""
    count, step = len(places["shard"]), shape[0]
    values, every = np.empty((count * step, *shape[1:]), np.uint16), np.arange(count)
    bad = reader.read_batch(shards, places, every, values, every * step, every * step + step, verify=True, on_read=None)
    if bad:
        raise bad[0][1]
    return values.reshape(count, *shape)
