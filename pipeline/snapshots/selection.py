"""Select which of the joined samples a snapshot takes.

Filters over metadata, deduplication and a held-out part by image digest, subsets by count, and the move of samples out
of buckets that are smaller than a batch. Samples left out are counted in `Joined` by their reason.

Each rule depends on a sample's content or id alone (and on the samples that it is compared with), not on the order of
the listing or on chance: the same data give the same choice, and more data change as little as possible. So a subset
has exactly the size that was asked for, and the held-out part has it on average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.arrow import text
from pipeline.cache.key_columns import binary, fixed, is_first
from pipeline.cache.many_keys import latent_keys
from pipeline.images import buckets
from pipeline.snapshots import filters
from pipeline.snapshots.filters import Filter
from pipeline.snapshots.join import EncodedRecords, Frame, Joined, Resolution, Shape, pieces

_META = "meta."
"""Prefix for a metadata field whose name is that of a built-in column."""


def filtered(
    joined: Joined, scans: dict[str, pa.Table], common: Filter | None, by_source: dict[str, Filter]
) -> dict[str, pa.Table]:
    """The items that satisfy the common filter and that of their source.

    Args:
        scans: usable items by source.

    Raises:
        UserError: a filter names a column that no item has (of the source, for its own filter), or misuses one.
    """
    columns, names, too_large = {}, {}, {}
    for source, scan in scans.items():
        rules = [rule for rule in (common, by_source.get(source)) if rule is not None]
        wanted = {name for rule in rules for name in rule.names}
        columns[source], names[source], too_large[source] = _columns(source, scan, wanted)
    everywhere = sorted({name for source_names in names.values() for name in source_names})
    types: dict[str, pa.DataType] = {}  # of columns that have values in some source
    for by_name in columns.values():
        types.update({name: column.type for name, column in by_name.items() if column.null_count < len(column)})

    def column(source: str, strict: bool, name: str) -> pa.Array:
        values = columns[source].get(name)
        if values is None and (strict or name not in {n for other in columns.values() for n in other}):
            raise KeyError(name)
        if values is None or values.null_count == len(values):  # no values here: the type that it has elsewhere
            return pa.nulls(scans[source].num_rows, types.get(name, pa.float64()))
        return values

    selected = {}
    for source, scan in scans.items():
        keep = np.ones(scan.num_rows, bool)
        for rule, strict in ((common, False), (by_source.get(source), True)):
            if rule is not None:
                valid = names[source] if strict else everywhere
                masks = rule.select(partial(column, source, strict), scan.num_rows, valid)
                chosen, unknown = (mask.to_numpy(zero_copy_only=False) for mask in masks)
                _count_rejected(joined, rule, keep & ~chosen, unknown, too_large[source])
                keep &= chosen
        chosen_rows = (
            scan.slice(piece.start, piece.stop - piece.start).filter(pa.array(keep[piece]))
            for piece in pieces(len(keep))
        )
        selected[source] = joined.scratch.table(scan.schema, chosen_rows)
    return selected


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


def _columns(source: str, scan: pa.Table, wanted: set[str]) -> tuple[dict[str, pa.Array], list[str], np.ndarray]:
    """The wanted columns that a source has, the names of all its columns, and the rows with a number too large."""

    def whole(column: pa.ChunkedArray) -> pa.Array:
        combined = column.combine_chunks()
        return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined

    width, height = (pc.cast(whole(scan.column(name)), pa.float64()) for name in ("width", "height"))
    builtin = {
        "source": lambda: pa.array([source] * scan.num_rows, pa.large_string()),
        "item": lambda: text(scan.column("item")),
        "width": lambda: width,
        "height": lambda: height,
        "aspect": lambda: pc.divide(width, height),
        "pixels": lambda: pc.multiply(width, height),
        "bytes": lambda: whole(scan.column("size")),
        "captions": lambda: whole(pc.list_value_length(scan.column("captions"))),
    }
    assert set(builtin) == set(filters.BUILTIN)
    columns = {name: make() for name, make in builtin.items() if name in wanted}
    rest = wanted - set(builtin)
    valid = list(builtin)
    too_large = np.zeros(scan.num_rows, bool)
    if rest:
        fields = {name: name.removeprefix(_META) for name in rest}
        metadata, names, too_large = filters.fields(scan.column("meta"), set(fields.values()))
        columns |= {name: metadata[field] for name, field in fields.items() if field in metadata}
        valid += [name for name in names if name not in builtin]
    return columns, valid, too_large


def deduplicated(joined: Joined, frame: Frame, order: Sequence[str], earlier: np.ndarray) -> Frame:
    """Keep one picture of each digest: the one in an earlier snapshot (its sample ids), else the one of the source that
    comes first in `order`, else of the first (source, item)."""
    rank = [order.index(name) if name in order else len(order) for name in joined.sources]
    stays = frame.picture_id[places(frame, earlier) < len(earlier)] if len(earlier) else earlier
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
        pictures, known = frame.picture_id[rows].tolist(), np.isin(frame.picture_id[rows], stays).tolist()
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


def heldout(frame: Frame, share: float) -> np.ndarray:
    """(n,) bool: which samples are held out. It depends on the picture's digest alone: equal pictures are on one side,
    more data move nothing, and a larger share contains a smaller one."""
    limit = np.uint64(min(int(share * 2**64), 2**64 - 1))
    held_out = np.empty(len(frame.digest), bool)
    for piece in pieces(len(frame.digest)):
        held_out[piece] = np.ascontiguousarray(frame.digest[piece]).view("<u8")[::2] < limit
    return held_out


def places(frame: Frame, earlier: np.ndarray) -> np.ndarray:
    """(n,) int64 row of each sample in an earlier snapshot (its sample ids by row); `len(earlier)` for new samples."""
    if not len(earlier):
        return np.zeros(len(frame), np.int64)
    order = np.argsort(earlier)
    at = np.minimum(np.searchsorted(earlier, frame.sample_id, sorter=order), len(earlier) - 1)
    return np.where(earlier[order[at]] == frame.sample_id, order[at], len(earlier))


def subset(joined: Joined, frame: Frame, count: int, earlier: np.ndarray) -> tuple[Frame, int]:
    """`count` pictures with all their records: pictures of an earlier snapshot first, then the smallest ids.

    Returns:
        Their samples, and how many pictures there were before.
    """
    known = np.unique(frame.picture_id[places(frame, earlier) < len(earlier)]) if len(earlier) else earlier
    selected = joined.scratch.array(len(frame), bool)

    def keyed() -> Iterator[pa.Table]:
        for piece in pieces(len(frame)):
            ids = frame.picture_id[piece]
            new = (~np.isin(ids, known)).astype(np.uint64)
            keys = np.stack([new << np.uint64(63) | ids >> np.uint64(1), ids], axis=1).astype(">u8").view("S16")[:, 0]
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
    """Move the samples of buckets smaller than one batch into the nearest bucket that is not.

    Samples whose latent does not exist at the new size are left out and returned, to be encoded.

    Args:
        batches: of the resolution's buckets.
    """
    table, first = resolution.table, resolution.first
    inside = np.flatnonzero((frame.bucket >= first) & (frame.bucket < first + len(table)))
    before = frame.bucket[inside] - first
    after = _merged(table, batches, before, frame.height[inside], frame.width[inside])
    moved = np.flatnonzero(after != before)
    if not len(moved):
        return frame, []
    rows = inside[moved]
    records_at = records.latents.find(latent_keys(records.latent.id, frame.digest[rows], table, after[moved]))
    bucket, latent = frame.bucket.copy(), frame.latent.copy()
    bucket[rows], latent[rows] = after[moved] + first, np.maximum(records_at, 0)
    missing = rows[records_at < 0]
    items = frame.item.take(pa.array(missing)).to_pylist()
    moves = [
        (joined.sources[frame.source[row]], item, *table[bucket[row] - first])
        for row, item in zip(missing.tolist(), items, strict=True)
    ]
    joined.leave(
        "its bucket is smaller than one batch, and its latent is not yet encoded for the neighbouring one",
        len(missing),
        "sana-pipe encode --reassign (see above), then sana-pipe bucket again",
    )
    keep = np.ones(len(frame), bool)
    keep[missing] = False
    return replace(frame, bucket=bucket, latent=latent).take(keep, joined.scratch), moves


def _merged(
    table: Sequence[Shape], batches: Sequence[int], bucket: np.ndarray, height: np.ndarray, width: np.ndarray
) -> np.ndarray:
    """The bucket of each sample, (n,) int64, when buckets smaller than one batch are closed. The smallest is closed
    first, and its samples may fill its neighbour; the last open bucket stays."""
    bucket = bucket.copy()
    sizes = np.bincount(bucket, minlength=len(table))
    still_open = [b for b in range(len(table)) if sizes[b]]
    while len(still_open) > 1:
        small = [b for b in still_open if sizes[b] < batches[b]]
        if not small:
            break
        closed = min(small, key=lambda b: (sizes[b], b))
        still_open.remove(closed)
        rows = np.flatnonzero(bucket == closed)
        nearest = buckets.nearest_all([table[b] for b in still_open], height[rows], width[rows])
        bucket[rows] = np.array(still_open)[nearest]
        sizes = np.bincount(bucket, minlength=len(table))
    return bucket
