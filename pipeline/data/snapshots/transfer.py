"""Transfer a snapshot with its shards to another cache, which needs neither pictures nor the first cache then.

The other cache is an ordinary one: what is there already is not sent again, a killed transfer is continued by the next,
and the name appears last. Every file is compared with its digest when it is read and when it is stored.
Price: what is there already is read again for that comparison, from an object store, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sana_pipe.base.errors import CacheError
from sana_pipe.data.cache import copies, index, withdrawn
from sana_pipe.data.cache.adopt import adopt, bring
from sana_pipe.data.cache.cache import MOVING, Cache
from sana_pipe.data.cache.keys import as_keys
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import Head, check_files
from sana_pipe.data.cache.snapshot_samples import picture_keys
from sana_pipe.data.snapshots import heldout

OnShard = Callable[[int], None]
"""Called with the bytes of each shard that is in the other cache now."""


@dataclass(frozen=True)
class Parcel:
    """A snapshot that is sent.

    Attributes:
        names: the names that it gets.
        latest: whether it becomes the newest snapshot.
    """

    snapshot: Snapshot
    names: tuple[str, ...]
    latest: bool = False


def parcels(cache: Cache, snapshot: str | None, name: str | None = None) -> list[Parcel]:
    """Return what to send: what was held out of a snapshot, if anything, then the snapshot.

    Args:
        snapshot: its name or id; None: the newest.
        name: the name that it gets; None: the name `snapshot`, else all that it has, but for `latest` and those of
            trainings, else the beginning of its id.

    Raises:
        CacheError: no such snapshot.
    """
    made = cache.open_snapshot(snapshot)
    if name is None and snapshot is not None and snapshot not in MOVING and cache.snapshot_of(snapshot):
        name = snapshot
    named = [each for each in cache.names_of(made.id) if each not in MOVING and not each.startswith("trained-")]
    names = (name,) if name is not None else tuple(named) or (made.id[:12],)
    part = heldout.find(cache, made)
    others = [Parcel(cache.open_snapshot(part), tuple(f"{each}.heldout" for each in names))] if part else []
    return [*others, Parcel(made, names, latest=True)]


def send(cache: Cache, other: Cache, parcel: Parcel, move: bool = False, on_shard: OnShard = lambda size: None) -> None:
    """Transfer a snapshot of `cache` to `other`.

    Args:
        move: let names point to it though they point to other snapshots of `other`.

    Raises:
        CacheError: `forget` took pictures of it out of `other`, or has not ended in one of the two.
        IntegrityError: a file of one of the caches is damaged or missing.
        UserError: a name is taken in `other`.
    """
    snapshot, head = parcel.snapshot, parcel.snapshot.head
    _check_withdrawn(cache, other, snapshot)
    for name in parcel.names:
        if not move and other.snapshot_of(name) not in (None, snapshot.id):
            other.check_taken(head, name)
    copies.repair_all(other.files)  # of documents, which an earlier transfer was killed before
    for encoding in head.encodings_by_kind.values():
        other.add_encoding(encoding)
    if head.folder is not None:
        _send_pack(cache, other, head.folder, on_shard)
    else:
        for kind, shards in head.shards.items():
            _send_shards(cache, other, head.encodings_by_kind[kind].name, set(shards), on_shard)
    for digest in sorted(head.tables()):
        table = Paths.table(digest, "arrow")
        bring(other.files, cache.files, table, digest)
        other.files.duplicate(table)
    check_files(other.files, Head.read(cache.files, snapshot.id))
    other.files.ensure(Paths.snapshot(snapshot.id), head.sealed())
    for name in (*parcel.names, *(("latest",) if parcel.latest else ())):
        other.point(name, snapshot.id, move=move)


def _check_withdrawn(cache: Cache, other: Cache, snapshot: Snapshot) -> None:
    withdrawn.check_finished(cache)
    withdrawn.check_finished(other)
    digests = as_keys(sorted(withdrawn.withdrawn(other)))
    if not len(digests):
        return
    sizes = [(bucket.height, bucket.width) for bucket in snapshot.buckets]
    which = np.tile(np.arange(len(sizes)), len(digests))
    found = 0
    for kind, encoding in snapshot.pictures.items():
        keys = encoding.keys(np.repeat(digests, len(sizes)), sizes, which)
        found += sum(int(np.isin(picture_keys(samples, kind), keys).sum()) for samples in snapshot.tables())
    if found:
        raise CacheError(
            f"snapshot {snapshot.id[:12]} of {cache.location} has pictures that were taken out of {other.location}",
            found=f"{found} records",
            fix="in the first cache, too: sana-pipe forget --digests FILE --set cache=DIR, with the digests of "
            f"{other.files.where(Paths.WITHDRAWN)}",
        )


def _send_shards(cache: Cache, other: Cache, encoding: str, shards: set[str], on_shard: OnShard) -> None:
    """Adopt the shards that the other cache has not committed; a damaged one of the rest is replaced."""
    known = shards.intersection(str(commit.shard) for commit in _commits(other, encoding))
    for name in sorted(known):
        bring(other.files, cache.files, path := Paths.shard(encoding, name), name)
        on_shard(other.files.sizes([path])[path])
    adopt(other, cache, encoding, shards - known, on_shard)


def _send_pack(cache: Cache, other: Cache, folder: str, on_shard: OnShard) -> None:
    """Copy a pack: its joint shards, and its plan and commits as they are."""
    plan = cache.plan(folder, 0)
    commits = index.commits(cache.files, folder, 0)
    for commit in commits:
        assert commit.shard is not None
        assert commit.table is not None
        bring(other.files, cache.files, Paths.shard(folder, commit.shard), commit.shard)
        bring(other.files, cache.files, Paths.table(commit.table, "arrow"), commit.table)
        on_shard(commit.bytes)
    if not other.files.numbers(Paths.plans(folder)):
        other.add_plan(folder, 0, plan.units, cache.table(plan.table), plan.lead)
    for commit in commits:
        index.publish_commit(other.files, folder, 0, commit)


def _commits(cache: Cache, encoding: str) -> Iterator[index.Commit]:
    for number in cache.files.numbers(Paths.plans(encoding)):
        yield from index.each_commit(cache.files, encoding, number)
