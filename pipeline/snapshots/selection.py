"""Select which of the joined samples a snapshot takes.

Filters over metadata, deduplication and a held-out part by image digest, subsets by count, and the move of samples out
of buckets that are smaller than a batch. Samples left out are counted in `Joined` by their reason.

Each rule depends on a sample's content or id alone (and on the samples that it is compared with), not on the order of
the listing or on chance: the same data give the same choice, and more data change as little as possible. A subset has
exactly the requested number of pictures; a held-out part has the requested share on average.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.arrow import batches, text
from pipeline.cache.index import RecordIndex
from pipeline.cache.key_columns import SortedKeys, binary, fixed, halves, is_first, of_halves
from pipeline.cache.many_keys import latent_keys
from pipeline.cache.scratch import Scratch
from pipeline.images import buckets
from pipeline.snapshots import filters
from pipeline.snapshots.filters import Filter
from pipeline.snapshots.join import EncodedRecords, Frame, Joined, Resolution, Shape, pieces

_META = "meta."
"""Prefix for a metadata field that has the name of a built-in column."""


def filtered(
    joined: Joined, scans: dict[str, pa.Table], common: Filter | None, by_source: dict[str, Filter]
) -> dict[str, pa.Table]:
    """The items that satisfy the common filter and that of their source.

    Args:
        scans: usable items by source.

    Raises:
        UserError: a filter names a column that no item has (for a source's own filter: no item of that source), or
            compares a column with a value of another type.
    """
    rules = {
        source: [
            (rule, strict) for rule, strict in ((common, False), (by_source.get(source), True)) if rule is not None
        ]
        for source in scans
    }
    columns = {
        source: _Columns(source, scan, {name for rule, _ in rules[source] for name in rule.names})
        for source, scan in scans.items()
    }
    everywhere = sorted({name for here in columns.values() for name in here.valid})
    types: dict[str, pa.DataType] = {}  # of fields that have values in some source
    for here in columns.values():
        types.update(here.types)

    def column(here: _Columns, values: dict[str, pa.Array], rows: int, strict: bool, name: str) -> pa.Array:
        if name in values:
            return values[name]
        if not any(some.has(name) for some in ([here] if strict else columns.values())):
            raise KeyError(name)
        return pa.nulls(rows, types.get(name, pa.float64()))  # no values here: the type that it has elsewhere

    def chosen(source: str, scan: pa.Table) -> Iterator[pa.Table]:
        here = columns[source]
        for batch in batches(scan) if len(scan) else [scan]:
            values, too_large = here.of(batch)
            keep = np.ones(len(batch), bool)
            for rule, strict in rules[source]:
                read = partial(column, here, values, len(batch), strict)
                masks = rule.select(read, len(batch), here.valid if strict else everywhere)
                true, unknown = (mask.to_numpy(zero_copy_only=False) for mask in masks)
                _count_rejected(joined, rule, keep & ~true, unknown, too_large)
                keep &= true
            yield batch.filter(pa.array(keep))

    return {source: joined.scratch.table(scan.schema, chosen(source, scan)) for source, scan in scans.items()}


def _count_rejected(
    joined: Joined, rule: Filter, rejected: np.ndarray, unknown: np.ndarray, too_large: np.ndarray
) -> None:
    expression = " ".join(rule.text.split())
    for reason, rows in (("a value is missing", ~too_large), ("a number is too large", too_large)):
        joined.leave(
            f"{rule.setting} cannot be decided, {reason}: {expression}",
            int((rejected & unknown & rows).sum()),
            f"change {rule.setting} (test with `is None`)",
        )
    joined.leave(
        f"not selected by {rule.setting}: {expression}", int((rejected & ~unknown).sum()), f"change {rule.setting}"
    )


class _Columns:
    """Columns of a source's items that filters read.

    Args:
        scan: all of its items.
        wanted: names of columns.

    Attributes:
        valid: names of all columns that the source has.
        types: of the wanted fields of metadata that have values.
    """

    def __init__(self, source: str, scan: pa.Table, wanted: set[str]):
        self._source, self._builtin = source, wanted & set(filters.BUILTIN)
        self._fields = {name: name.removeprefix(_META) for name in wanted - self._builtin}
        self._metadata = filters.Fields(set(self._fields.values()))
        for batch in batches(scan.select(["meta"])):
            self._metadata.look(batch.column("meta"))
        self._metadata.finish()
        self.valid = [*filters.BUILTIN, *(name for name in self._metadata.valid if name not in filters.BUILTIN)]
        types = self._metadata.types
        self.types = {name: types[field] for name, field in self._fields.items() if field in types}

    def has(self, name: str) -> bool:
        """Whether some item has the column, be it null."""
        return name in self._builtin or (name in self._fields and self._metadata.has(self._fields[name]))

    def of(self, scan: pa.Table) -> tuple[dict[str, pa.Array], np.ndarray]:
        """The wanted columns that have values, of n items; and which of these have a number too large, (n,) bool."""

        def whole(column: pa.ChunkedArray) -> pa.Array:
            combined = column.combine_chunks()
            return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined

        width, height = (pc.cast(whole(scan.column(name)), pa.float64()) for name in ("width", "height"))
        builtin = {
            "source": lambda: pa.array([self._source] * len(scan), pa.large_string()),
            "item": lambda: text(scan.column("item")),
            "width": lambda: width,
            "height": lambda: height,
            "aspect": lambda: pc.divide(width, height),
            "pixels": lambda: pc.multiply(width, height),
            "bytes": lambda: whole(scan.column("size")),
            "captions": lambda: whole(pc.list_value_length(scan.column("captions"))),
        }
        assert set(builtin) == set(filters.BUILTIN)
        fields, too_large = self._metadata.columns(scan.column("meta"))
        columns = {name: builtin[name]() for name in self._builtin}
        return columns | {name: fields[self._fields[name]] for name in self.types}, too_large


class Earlier:
    """The samples of an earlier snapshot, looked up by id: 16 bytes a sample in temporary files.

    Args:
        ids: sample ids (uint64) in the order of rows, in pieces of any length; none: there is no earlier snapshot.
    """

    def __init__(self, scratch: Scratch, ids: Iterable[np.ndarray] = ()):
        def keyed() -> Iterator[pa.Table]:
            first = 0
            for some in ids:
                for piece in pieces(len(some)):
                    rows = np.arange(first + piece.start, first + piece.stop)
                    yield pa.table({"key": binary(of_halves(some[piece])), "row": rows})
                first += len(some)

        ordered = (
            {"id": halves(fixed(part.column("key")))[0], "row": part.column("row").to_numpy()}
            for part in scratch.sorted_by_key(keyed())
        )
        columns = scratch.arrays(ordered, {"id": np.uint64, "row": np.int64})
        self._ids = SortedKeys(columns["id"], np.broadcast_to(np.uint64(0), len(columns["id"])))
        self._rows = columns["row"]

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Rows (n,) int64 of sample ids; `len(self)` for those that it has not."""
        at = self._ids.find(of_halves(ids))
        rows = np.full(len(ids), len(self), np.int64)
        rows[at >= 0] = self._rows[at[at >= 0]]
        return rows


def places(joined: Joined, frame: Frame, earlier: Earlier) -> np.ndarray:
    """(n,) int64 row of each sample in an earlier snapshot; `len(earlier)` for new samples."""
    rows = joined.scratch.array(len(frame), np.int64)
    for piece in pieces(len(frame)) if len(earlier) else ():
        rows[piece] = earlier.find(frame.sample_id[piece])
    return rows


def in_earlier_snapshot(joined: Joined, frame: Frame, earlier: Earlier) -> np.ndarray:
    """(n,) bool: samples whose picture has a record in an earlier snapshot."""
    stays = joined.scratch.array(len(frame), bool)

    def keyed() -> Iterator[pa.Table]:
        for piece in pieces(len(frame)):
            known = earlier.find(frame.sample_id[piece]) < len(earlier)
            rows = np.arange(piece.start, piece.stop)
            yield pa.table({"key": binary(of_halves(frame.picture_id[piece])), "row": rows, "known": known})

    for part in joined.scratch.sorted_by_key(keyed()) if len(earlier) else ():
        starts = np.flatnonzero(is_first(fixed(part.column("key"))))
        known = np.logical_or.reduceat(part.column("known").to_numpy(), starts)
        stays[part.column("row").to_numpy()] = np.repeat(known, np.diff([*starts, len(part)]))
    return stays


def deduplicated(joined: Joined, frame: Frame, order: Sequence[str], earlier: Earlier) -> Frame:
    """Keep one picture of each digest. A picture in an earlier snapshot precedes; then sources precede as in `order`,
    then items by (source, item)."""
    rank = [order.index(name) if name in order else len(order) for name in joined.sources]
    stays = in_earlier_snapshot(joined, frame, earlier)
    keep = joined.scratch.array(len(frame), bool)

    def keyed() -> Iterator[pa.Table]:
        for piece in pieces(len(frame)):
            yield pa.table({"key": binary(frame.digest[piece]), "row": np.arange(piece.start, piece.stop)})

    for part in joined.scratch.sorted_by_key(keyed()):
        rows, starts = part.column("row").to_numpy(), np.flatnonzero(is_first(fixed(part.column("key"))))
        keep[rows] = True
        times = np.diff([*starts, len(rows)])
        group = np.repeat(np.arange(len(starts)), times)
        suspects = np.flatnonzero(times[group] > 1)
        groups, rows = group[suspects].tolist(), rows[suspects]
        pictures, known = frame.picture_id[rows].tolist(), stays[rows].tolist()
        items = frame.item.take(pa.array(rows)).to_pylist()
        best: dict[int, tuple[bool, int, str, str, int]] = {}
        for at, source in enumerate(frame.source[rows].tolist()):
            candidate = (not known[at], rank[source], joined.sources[source], items[at], pictures[at])
            best[groups[at]] = min(best.get(groups[at], candidate), candidate)
        keep[rows] = [picture == best[of][4] for of, picture in zip(groups, pictures, strict=True)]
    joined.leave(
        "its picture is the same as another sample's", len(keep) - int(np.count_nonzero(keep)), "bucket.dedup=none"
    )
    return frame.take(keep, joined.scratch)


def repeated(joined: Joined, frame: Frame, latents: RecordIndex) -> int:
    """How many samples have the latent of a sample before them."""
    seen, count = joined.scratch.array(len(latents), bool), 0
    for piece in pieces(len(frame)):
        rows = np.unique(frame.latent[piece])
        count += piece.stop - piece.start - len(rows) + int(np.count_nonzero(seen[rows]))
        seen[rows] = True
    return count


def heldout(frame: Frame, share: float, scratch: Scratch | None = None) -> np.ndarray:
    """(n,) bool: which samples are held out, see `is_held_out`. scratch: temporary storage."""
    held_out = (scratch or Scratch()).array(len(frame.digest), bool)
    for piece in pieces(len(frame.digest)):
        held_out[piece] = is_held_out(frame.digest[piece], share)
    return held_out


def is_held_out(digests: np.ndarray, share: float) -> np.ndarray:
    """(n,) bool: which pictures are held out. It depends on the digest alone: equal pictures are on one side, more data
    move nothing, and a larger share contains a smaller share. digests: (n,) S16, of the pictures' files."""
    limit = np.uint64(min(int(share * 2**64), 2**64 - 1))
    return np.ascontiguousarray(digests).view("<u8")[::2] < limit


def subset(joined: Joined, frame: Frame, count: int, earlier: Earlier) -> tuple[Frame, int]:
    """`count` pictures with all their records: pictures of an earlier snapshot first, then the smallest ids.

    Returns:
        Their samples, and how many pictures there were before.
    """
    stays = in_earlier_snapshot(joined, frame, earlier)
    selected = joined.scratch.array(len(frame), bool)

    def keyed() -> Iterator[pa.Table]:
        for piece in pieces(len(frame)):
            ids, new = frame.picture_id[piece], (~stays[piece]).astype(np.uint64)
            keys = of_halves(new << np.uint64(63) | ids >> np.uint64(1), ids)
            yield pa.table({"key": binary(keys), "row": np.arange(piece.start, piece.stop)})

    pictures = 0
    for part in joined.scratch.sorted_by_key(keyed()):
        number = pictures + np.cumsum(is_first(fixed(part.column("key"))))
        selected[part.column("row").to_numpy()[number <= count]] = True
        pictures = int(number[-1])
    left_out = len(selected) - int(np.count_nonzero(selected))
    joined.leave(f"beyond the first {count} pictures", left_out, "a larger bucket.subset")
    return frame.take(selected, joined.scratch), pictures


Move = tuple[str, str, int, int]
"""source, item, and the (height, width) in pixels at which its latent is missing."""


def reassigned(
    joined: Joined, frame: Frame, resolution: Resolution, batches: Sequence[int], records: EncodedRecords
) -> tuple[Frame, list[Move]]:
    """Close buckets smaller than one batch, and move their samples into the nearest bucket that is still open.

    Samples whose latent does not exist at the new size are left out and returned, to be encoded.

    Args:
        batches: of the resolution's buckets.
    """
    table, first = resolution.table, resolution.first
    rows, after = _merged(table, first, batches, frame)
    if not len(rows):
        return frame, []
    records_at = records.latents.find(latent_keys(records.latent.id, frame.digest[rows], table, after))
    bucket, latent = (joined.scratch.array(len(frame), np.int64) for _ in range(2))
    bucket[:], latent[:] = frame.bucket, frame.latent
    bucket[rows], latent[rows] = after + first, np.maximum(records_at, 0)
    missing = rows[records_at < 0]
    items = frame.item.take(pa.array(missing)).to_pylist()
    moves = [
        (joined.sources[frame.source[row]], item, *table[bucket[row] - first])
        for row, item in zip(missing.tolist(), items, strict=True)
    ]
    joined.leave(
        "its bucket is smaller than one batch, and its latent is not yet encoded for the neighbouring one",
        len(missing),
        "sana-pipe encode --data DIR --reassign FILE (FILE: see below), then sana-pipe bucket again",
    )
    keep = joined.scratch.array(len(frame), bool)
    keep[:] = True
    keep[missing] = False
    return replace(frame, bucket=bucket, latent=latent).take(keep, joined.scratch), moves


def _merged(table: Sequence[Shape], first: int, batches: Sequence[int], frame: Frame) -> tuple[np.ndarray, np.ndarray]:
    """The samples that move when buckets smaller than one batch are closed, and their buckets in `table`.

    The smallest is closed first, and its samples may fill its neighbour; the last open bucket stays. Only samples of
    closed buckets are in memory.

    Returns:
        (n,) int64 rows, ascending, and (n,) int64 buckets.
    """

    def rows_in(bucket: int) -> np.ndarray:
        return np.concatenate([part.start + np.flatnonzero(frame.bucket[part] == bucket + first) for part in parts])

    parts = list(pieces(len(frame)))
    sizes = np.zeros(len(table), np.int64)
    for part in parts:
        inside = frame.bucket[part] - first
        sizes += np.bincount(inside[(inside >= 0) & (inside < len(table))], minlength=len(table))
    still_open = [b for b in range(len(table)) if sizes[b]]
    rows, bucket = np.zeros(0, np.int64), np.zeros(0, np.int64)
    while len(still_open) > 1:
        small = [b for b in still_open if sizes[b] < batches[b]]
        if not small:
            break
        closed = min(small, key=lambda b: (sizes[b], b))
        still_open.remove(closed)
        stay = bucket != closed
        leaving = np.concatenate([rows_in(closed), rows[~stay]])
        shapes = [table[b] for b in still_open]
        nearest = np.array(still_open)[buckets.nearest_all(shapes, frame.height[leaving], frame.width[leaving])]
        rows, bucket = np.concatenate([rows[stay], leaving]), np.concatenate([bucket[stay], nearest])
        sizes[closed] = 0
        sizes += np.bincount(nearest, minlength=len(table))
    order = np.argsort(rows)
    return rows[order], bucket[order]
