"""Find what belongs to pictures that are to leave a cache: rows of scans, records of every encoding and size, captions.

A picture is known by the digest of its file. A name stands for every picture that the item ever was in the scans that
the cache still has. A row of a scan goes if its picture, or its control picture or mask, is one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import IntegrityError, UserError, escaped, expanded
from sana_pipe.data.cache import prompts
from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.encodings import CaptionEncoding, Encoding, PictureEncoding
from sana_pipe.data.cache.findings import encoding_names, named_snapshots, skip_damaged
from sana_pipe.data.cache.keys import as_keys, binary, fixed, key_bytes
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.scan_table import ABSENT, control_and_mask_places
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.withdrawn import Takedown
from sana_pipe.data.snapshots.remaking import Changes
from sana_pipe.data.sources import caption_rules

_COLUMNS = ["item", "digest", "captions", "pictures", "reject"]


class Scan(NamedTuple):
    """A scan of a source, the last or an earlier one. table: the digest of its table. last: it is the source's last
    one."""

    source: str
    number: int
    body: dict[str, Any]
    table: str
    last: bool


def scans(cache: Cache) -> Iterator[Scan]:
    """Every scan whose table is there."""
    for source in cache.sources():
        numbers = cache.files.numbers(Paths.scans(source))
        last = cache.last_scan(source)
        for number in numbers:
            body = cache.files.document(Paths.numbered(Paths.scans(source), number))
            table = body["table"]
            if table and any(map(cache.files.has_file, _both(Paths.table(table, "parquet")))):
                yield Scan(source, number, body, table, last is not None and number == numbers[-1])


def _both(name: str) -> tuple[str, str]:
    return name, Paths.copy(name)


def goes(rows: pa.Table, digests: pa.Array, items: Iterable[str]) -> np.ndarray:
    """(n,) bool: which rows of a scan have a picture, or a control picture or mask, with one of these digests, or one
    of these names."""
    mask = pc.is_in(rows.column("digest"), value_set=digests)
    mask = pc.or_(mask, pc.is_in(rows.column("item"), value_set=pa.array(list(items), pa.string())))
    result = mask.to_numpy(zero_copy_only=False).astype(bool)
    start = 0
    for chunk in rows.column("pictures").chunks:
        found = pc.is_in(pc.struct_field(pc.list_flatten(chunk), "digest"), value_set=digests.cast(pa.binary()))
        result[start + pc.list_parent_indices(chunk).to_numpy()[found.to_numpy(zero_copy_only=False)]] = True
        start += len(chunk)
    return result


def find(cache: Cache, items: Sequence[str], digests: Iterable[bytes]) -> Takedown:
    """Everything that belongs to some pictures.

    Args:
        items: names, each `ITEM` or `SOURCE: ITEM`.
        digests: of pictures, 16 bytes each; a cache need not have them.

    Raises:
        UserError: a name is not in the cache, or two sources have it.
    """
    named = _named(cache, items)
    pictures = {*digests, *(digest for found in named.values() for digest in found)}
    every, texts, sizes, extra = set(named), set[str](), set[tuple[int, int]](), set[bytes]()
    wanted = binary(as_keys(sorted(pictures)))
    for scan in scans(cache):
        sizes |= {(height, width) for height, width in scan.body.get("buckets", ())}
        names = {item for source, item in named if source == scan.source}
        for rows in batches(cache.table(scan.table, _COLUMNS)):
            some = rows.filter(pa.array(goes(rows, wanted, names)))
            every |= {(scan.source, item) for item in some.column("item").to_pylist()}
            texts |= {one["text"] for each in some.column("captions").to_pylist() for one in each or ()}
            extra |= set(control_and_mask_places(some).column("digest").to_pylist())
    extra -= {ABSENT, None, *pictures}
    shared = _still_used(cache, extra, wanted, every) if extra else set()
    keys = _picture_keys(cache, pictures, extra - shared, sizes)
    snapshots = _named_snapshots(cache)
    changes = Changes({name: as_keys(sorted(some)) for name, some in keys.items()}, {}, {}, {})
    texts |= {text for snapshot in snapshots for text in _captions_of(snapshot, changes)}
    sets = {known.name for known in prompts.current(cache) if texts & {*known.texts}}
    keys, texts = _with_captions(cache, keys, texts, wanted, every, snapshots)
    return Takedown(
        tuple(sorted(digest.hex() for digest in pictures)),
        {name: tuple(sorted(key.hex() for key in some)) for name, some in sorted(keys.items()) if some},
        tuple(sorted(every)),
        tuple(sorted(texts)),
        tuple(sorted(sets)),
    )


def read_digests(file: str) -> list[bytes]:
    """The digests of pictures in a file: 32 hex digits a line, empty lines and those that begin with `#` aside.

    Raises:
        UserError: the file cannot be read, or a line is no digest.
    """
    path, found = Path(expanded(file)), list[bytes]()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}", fix="--digests FILE, a text file") from None
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text and not text.startswith("#"):
            try:
                found.append(bytes.fromhex(text))
            except ValueError:
                found.append(b"")
            if len(found[-1]) != 16:
                raise UserError(
                    f"{path}, line {number}: is not the digest of a picture",
                    expected="32 hex digits, such as the column digest of a scan's table has",
                    found=escaped(text[:80]),
                    fix=f"correct the line in {path}",
                )
    if not found:
        raise UserError(f"{path}: has no digest", expected="one a line", fix=f"write the digests into {path}")
    return found


def _named(cache: Cache, items: Sequence[str]) -> dict[tuple[str, str], set[bytes]]:
    """(source, item) of each name -> digests of its pictures, in scans and in plans."""
    found: dict[str, dict[tuple[str, str], set[bytes]]] = {name: {} for name in items}
    if not items:
        return {}
    ends = pa.array(sorted(_ends(items)), pa.string())
    for source, rows in _places(cache):
        for row in rows.filter(pc.is_in(rows.column("item"), value_set=ends)).to_pylist():
            of = row.get("source") or source
            for name in items:
                if name in (row["item"], f"{of}: {row['item']}"):
                    digests = found[name].setdefault((of, row["item"]), set())
                    digests.update([row["digest"]] if row["digest"] is not None else [])
    for name, places in found.items():
        if not places:
            raise UserError(
                f"no scan of this cache has an item {name!r}",
                expected="an item's name, as sana-pipe view and the list of rejects show it, or SOURCE: ITEM",
                fix="sana-pipe status names the sources; --digests FILE takes pictures by the digests of their files",
            )
        if len(places) > 1:
            every = [escaped(f"{source}: {item}") for source, item in sorted(places)]
            raise UserError(
                f"{len(places)} sources have an item {name!r}", found=", ".join(every), fix=f"--item '{every[0]}'"
            )
    return {place: digests for places in found.values() for place, digests in places.items()}


def _ends(items: Sequence[str]) -> set[str]:
    """The items that these names may mean."""
    return {name[at:] for name in items for at in (0, *(i + 2 for i in range(len(name)) if name.startswith(": ", i)))}


def _places(cache: Cache) -> Iterator[tuple[str, pa.Table]]:
    """Tables with `item` and `digest`: of scans, with their source, and of plans, which have a column for it."""
    for scan in scans(cache):
        yield from ((scan.source, rows) for rows in batches(cache.table(scan.table, ["item", "digest"])))
    for encoding in encoding_names(cache):
        for plan in cache.plans(encoding):
            table = cache.table(plan.table)
            if {"source", "item", "digest"} <= set(table.column_names):
                yield from (("", rows) for rows in batches(table.select(["source", "item", "digest"])))


def _still_used(cache: Cache, digests: set[bytes], pictures: pa.Array, items: set[tuple[str, str]]) -> set[bytes]:
    """The control pictures and masks among these that another item has, or that are another item's picture."""
    used = set[bytes]()
    for scan in (scan for scan in scans(cache) if scan.last):
        names = {item for source, item in items if source == scan.source}
        for rows in batches(cache.table(scan.table, _COLUMNS)):
            left = rows.filter(pa.array(~goes(rows, pictures, names)))
            used |= digests & {*control_and_mask_places(left).column("digest").to_pylist()}
            used |= digests & {*left.column("digest").to_pylist()}
    return used


def _encodings(cache: Cache) -> Iterator[Encoding]:
    return map(cache.encoding, encoding_names(cache))


def _picture_keys(
    cache: Cache, pictures: set[bytes], extra: set[bytes], sizes: set[tuple[int, int]]
) -> dict[str, set[bytes]]:
    """Encoding -> keys of the records of pictures, and of control pictures and masks (extra), at every size."""
    keys: dict[str, set[bytes]] = {}
    for snapshot_id in named_snapshots(cache):
        with skip_damaged():
            sizes |= {(bucket.height, bucket.width) for bucket in Snapshot(cache.files, snapshot_id).buckets}
    for encoding in _encodings(cache):
        if not isinstance(encoding, PictureEncoding):
            continue
        wanted = pictures | extra if encoding.picture else pictures
        found = {encoding.key(digest, *size) for digest in wanted for size in sizes}
        value_set = binary(as_keys(sorted(wanted)))
        for plan in cache.plans(encoding.name):
            table = cache.table(plan.table)
            if "digest" in table.column_names:
                for rows in batches(table.select(["key", "digest"])):
                    some = rows.filter(pc.is_in(rows.column("digest"), value_set=value_set))
                    found |= set(some.column("key").to_pylist())
        keys[encoding.name] = found
    return keys


def _with_captions(
    cache: Cache,
    keys: dict[str, set[bytes]],
    texts: set[str],
    pictures: pa.Array,
    items: set[tuple[str, str]],
    snapshots: list[Snapshot],
) -> tuple[dict[str, set[bytes]], set[str]]:
    """Add the keys of captions that nothing else has; returns all keys, and these captions as written.

    Of three samples that go, one has a caption that a fourth sample has, too: its record stays. A prompt set with such
    a caption keeps it, as do the other samples of named snapshots.
    """
    changes = Changes({name: as_keys(sorted(some)) for name, some in keys.items()}, {}, {}, {})
    written = sorted(texts)
    going, shared = {name: set(some) for name, some in keys.items()}, set[int]()
    for encoding in _encodings(cache):
        if not isinstance(encoding, CaptionEncoding):
            continue
        ours = encoding.keys(caption_rules.normalise_all(pa.array(written, pa.string()), encoding.normalisation))
        used = _used_captions(cache, encoding, ours, pictures, items)
        for snapshot in snapshots:
            if snapshot.caption.name == encoding.name:
                used |= _captions_of_others(snapshot, changes, ours)
        used.add(encoding.null_key)
        of = [key_bytes(key) for key in ours]
        shared |= {at for at, key in enumerate(of) if key in used}
        going[encoding.name] = {key for key in of if key not in used}
    return going, {text for at, text in enumerate(written) if at not in shared}


def _named_snapshots(cache: Cache) -> list[Snapshot]:
    """The named snapshots that can be read; others are made again by `bucket`."""
    snapshots = []
    for snapshot_id in named_snapshots(cache):
        with suppress(IntegrityError):
            snapshots.append(Snapshot(cache.files, snapshot_id))
    return snapshots


def _used_captions(
    cache: Cache, encoding: CaptionEncoding, ours: np.ndarray, pictures: pa.Array, items: set[tuple[str, str]]
) -> set[bytes]:
    """The keys among `ours` that usable rows which stay, or prompts, have, too."""
    used = set[bytes]()

    def note(texts: pa.Array) -> None:
        keys = encoding.keys(caption_rules.normalise_all(texts, encoding.normalisation))
        used.update(key_bytes(key) for key in keys[np.isin(keys, ours)])

    for scan in (scan for scan in scans(cache) if scan.last):
        names = {item for source, item in items if source == scan.source}
        for rows in batches(cache.table(scan.table, _COLUMNS)):
            left = rows.filter(pa.array(~goes(rows, pictures, names) & pc.is_null(rows.column("reject")).to_numpy()))
            for chunk in left.column("captions").chunks:
                note(pc.struct_field(pc.list_flatten(chunk), "text").unique())
    for known in prompts.current(cache):
        note(pa.array(known.texts, pa.string()))
    return used


def _captions_of(snapshot: Snapshot, changes: Changes) -> Iterator[str]:
    """The captions of a snapshot's samples that go, as written."""
    rows = np.flatnonzero(changes.samples_of(snapshot)).tolist()
    reader = snapshot.reader(snapshot.caption.kind, ranged=True) if rows else None
    for row in rows:
        assert reader is not None
        yield from snapshot.captions(row, reader)


def _captions_of_others(snapshot: Snapshot, changes: Changes, ours: np.ndarray) -> set[bytes]:
    """The keys among `ours` that samples which stay have, too."""
    used = set[bytes]()
    for samples in snapshot.tables():
        left = samples.filter(pa.array(~changes.goes(snapshot, samples)))
        for chunk in left.column("captions").chunks:
            keys = fixed(pc.struct_field(pc.list_flatten(chunk), "key"))
            used.update(key_bytes(key) for key in keys[np.isin(keys, ours)])
    return used
