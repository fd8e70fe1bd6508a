"""The samples of a bucket whose pictures look the same, from the hashes in the caches.

What: `near_groups` reads the hash of each picture once (of several resolutions the first) and groups them by
`snapshots.near`. The key of a group is the smallest digest of its files, so it does not depend on the order of
samples, and more data change it only for the groups that they join.
Price: 98 bytes of temporary files a picture for the hashes, and the 310 bytes of memory of the groups; every hash is
  read from its shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sana_pipe.base.errors import CacheError, ConfigError
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.encodings import Encoding
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_samples import CHUNK_ROWS, concatenated, picture_keys, taken
from sana_pipe.data.images.perceptual_hash import LENGTH, RULE, WORDS
from sana_pipe.data.signals.phash import ANEW, HashEncoding
from sana_pipe.data.snapshots import near
from sana_pipe.data.snapshots.frames import Frame, pieces
from sana_pipe.data.snapshots.group_memory import GroupMemory
from sana_pipe.data.snapshots.join import EncodedRecords, Joined
from sana_pipe.data.snapshots.record_values import read_records

LARGEST = 10
"""Groups that a report shows."""


@dataclass(frozen=True)
class NearGroups:
    """The pictures that look the same.

    Attributes:
        keys: (n,) S16, of each sample: the smallest digest of the pictures in its group.
        not_compared: (k,) a row of each picture with too little detail.
        number: (n,) int64, of each sample: the number of its file.
        hashed: (files, 49) uint16.
        memory: has the groups, to be stored.
    """

    keys: np.ndarray
    not_compared: np.ndarray
    number: np.ndarray
    hashed: np.ndarray
    memory: GroupMemory

    def bits(self, rows: np.ndarray, firsts: np.ndarray) -> np.ndarray:
        """Count the bits in which samples differ from others, as `near.distances`. rows, firsts: (k,); returns (k,)."""
        return near.distances(self.hashed[self.number[firsts]], self.hashed[self.number[rows]])


def near_groups(
    joined: Joined, frame: Frame, records: EncodedRecords, caches: Sequence[Cache], report: near.Report
) -> NearGroups:
    """The groups of near-duplicates among samples (see `snapshots.near`).

    Args:
        caches: those that `records` index, in the same order.
        report: as of `near.groups`.

    Raises:
        CacheError: the hashes are of an earlier rule.
        IntegrityError: a hash is damaged.
    """
    check_rule(records.encodings)
    scratch, count = joined.scratch, 0
    number, digests, first = scratch.array(len(frame), np.int64), scratch.writer("S16"), scratch.writer(np.int64)
    for keys, rows, one in scratch.by_key(frame.digest[piece] for piece in pieces(len(frame))):
        number[rows] = count + np.cumsum(one) - 1
        count += int(one.sum())
        digests.add(keys[one])
        first.add(rows[one])
    every, samples = digests.finish(), first.finish()
    hashed = scratch.array(count * LENGTH, np.uint16).reshape(count, LENGTH)
    _read_hashes(records, caches, frame.pictures[HashEncoding.kind][samples], hashed)
    memory = GroupMemory.read(caches[0].files, near.DISTANCE)
    member = near.groups(hashed, near.DISTANCE, report, memory)
    of_samples = scratch.writer("S16")
    for piece in pieces(len(frame)):
        of_samples.add(every[member[number[piece]]])
    return NearGroups(of_samples.finish(), np.sort(samples[is_flat(hashed)]), number, hashed, memory)


def leaked(
    frame: Frame,
    records: EncodedRecords,
    caches: Sequence[Cache],
    part: Snapshot,
    report: near.Report,
) -> tuple[np.ndarray, int]:
    """Find the samples of a held-out part that look like a sample of the training, (n,) bool, and count those with too
    little detail for that; of these the equal files are found. frame: the training's; report: as of `near.groups`.

    Raises:
        CacheError: the hashes are of an earlier rule.
        IntegrityError: a hash is damaged.
    """
    kind = HashEncoding.kind
    rows = np.unique(frame.pictures[kind])
    trained, theirs = np.empty((len(rows), LENGTH), np.uint16), hashes_of(part)
    _read_hashes(records, caches, rows, trained)
    flat = is_flat(theirs)
    member = near.groups(np.concatenate([trained, theirs]), near.DISTANCE, report)
    both = np.isin(member[len(trained) :], member[: len(trained)])
    if flat.any():
        keys = np.concatenate([picture_keys(table, kind) for table in part.tables()])
        both[flat] = np.isin(keys[flat], records.indexes[kind].columns["key"][rows])
    return both, int(flat.sum())


def is_flat(hashed: np.ndarray) -> np.ndarray:
    """(n,) bool: which hashes are of pictures with too little detail to be compared. hashed: (n, 49)."""
    return hashed[:, WORDS] < near.MIN_QUALITY


def hashes_of(snapshot: Snapshot) -> np.ndarray:
    """The hashes of all samples, (n, 49) uint16, read in the order of storage. Errors as of `leaked`."""
    check_rule(snapshot.head.encodings_by_kind.values())
    kind, count = HashEncoding.kind, len(snapshot)
    chunks = (np.arange(start, min(start + CHUNK_ROWS, count)) for start in range(0, count, CHUNK_ROWS))
    places = concatenated([snapshot.columns(rows, [kind]).pictures[kind] for rows in chunks])
    order, reader = np.lexsort((places["offset"], places["shard"])), snapshot.reader(kind)
    hashed = np.empty((count, LENGTH), np.uint16)
    for some in (order[piece] for piece in pieces(count)):
        values, every = np.empty(len(some) * LENGTH, np.uint16), np.arange(len(some))
        begin, shards = every * LENGTH, snapshot.shards[kind]
        bad = reader.read_batch(
            shards, taken(places, some), every, values, begin, begin + LENGTH, verify=True, on_read=None
        )
        if bad:
            raise bad[0][1]
        hashed[some] = values.reshape(-1, LENGTH)
    return hashed


@dataclass(frozen=True)
class Alike:
    """The pictures that look like one.

    Attributes:
        pictures: (row, bits in which they differ), the nearest first.
        is_flat: whether the picture has too little detail to be compared.
        flat: number of others that have.
    """

    pictures: list[tuple[int, int]]
    is_flat: bool
    flat: int


def alike(snapshot: Snapshot, row: int) -> Alike:
    """The pictures that look like a sample's. Reads all hashes.

    Raises:
        ConfigError: the snapshot has no hashes.
        CacheError: they are of an earlier rule.
        IntegrityError: a hash is damaged.
    """
    if HashEncoding.kind not in snapshot.pictures:
        raise ConfigError(
            f"snapshot {snapshot.id[:12]} has no hashes of pictures",
            found=", ".join(snapshot.pictures),
            fix=f"{ANEW}, then sana-pipe bucket",
        )
    every = hashes_of(snapshot)
    bits, flat = near.distances(every[row], every), is_flat(every)
    bits[flat | flat[row]] = 1 << 16
    rows = np.flatnonzero(bits <= near.DISTANCE)
    seen, pictures = {snapshot.source_item(row)}, []
    for at in rows[np.argsort(bits[rows], kind="stable")].tolist():
        if (name := snapshot.source_item(at)) not in seen:  # else another resolution of it
            seen.add(name)
            pictures.append((at, int(bits[at])))
    return Alike(pictures, bool(flat[row]), int(np.count_nonzero(flat)) - int(flat[row]))


def has_hashes(encodings: Iterable[Encoding]) -> bool:
    """Tell whether there are hashes that this version compares."""
    return any(isinstance(encoding, HashEncoding) and encoding.is_compared for encoding in encodings)


def check_rule(encodings: Iterable[Encoding]) -> None:
    """Refuse hashes of an earlier rule.

    Raises:
        CacheError: says how to make them again.
    """
    for encoding in encodings:
        if isinstance(encoding, HashEncoding) and not encoding.is_compared:
            raise CacheError(
                "the hashes of the pictures are of an earlier version, and cannot be compared with those of this one",
                expected=RULE,
                found=encoding.rule,
                fix=f"{ANEW}, then sana-pipe bucket",
            )


def _read_hashes(records: EncodedRecords, caches: Sequence[Cache], rows: np.ndarray, hashed: np.ndarray) -> None:
    """Read the hashes of some rows of the index into (n, 49) uint16."""
    encoding = next(encoding for encoding in records.pictures if encoding.kind == HashEncoding.kind)
    count = np.full(len(rows), LENGTH)
    for some, values, _ in read_records(encoding, records.indexes[encoding.kind], caches, rows, count, ()):
        hashed[some] = values.reshape(-1, LENGTH)
