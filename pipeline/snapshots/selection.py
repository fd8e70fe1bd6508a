"""Selection: which of the joined samples a snapshot takes.

What: filters over metadata, deduplication and a held-out part by image digest, subsets by count, and the move of
samples out of buckets that are smaller than a batch. Whatever is left out is counted in `Joined` by its reason.
Why: each rule depends on a sample's own content or id alone (and on what it is compared with), never on listing order
or chance, so that the same data give the same choice and more data change as little as can be.
Price: the held-out part and the subset have the size that was asked for on average, and exactly, respectively.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache import layout
from pipeline.cache.arrow import text
from pipeline.cache.index import RecordIndex
from pipeline.images import buckets
from pipeline.snapshots import filters
from pipeline.snapshots.filters import Filter
from pipeline.snapshots.join import Frame, Joined, latent_keys

_META = "meta."
"""Before the name of a metadata field that is called like a column of every source."""


def filtered(
    joined: Joined, scans: dict[str, pa.Table], common: Filter | None, own: dict[str, Filter]
) -> dict[str, pa.Table]:
    """The items that satisfy the common filter and that of their source.

    Args:
        scans: usable items by source.

    Raises:
        UserError: a filter names a column that no item has (of the source, for its own filter), or misuses one.
    """
    columns, names, too_large = {}, {}, {}
    for source, scan in scans.items():
        wanted = (common.names if common else set()) | (own[source].names if source in own else set())
        columns[source], names[source], too_large[source] = _columns(source, scan, wanted)
    everywhere = sorted({name for found in names.values() for name in found})
    types: dict[str, pa.DataType] = {}  # of columns that have values in some source
    for found in columns.values():
        types.update({name: column.type for name, column in found.items() if column.null_count < len(column)})

    def of(source: str, strict: bool, name: str) -> pa.Array:
        found = columns[source].get(name)
        if found is None and (strict or name not in {n for other in columns.values() for n in other}):
            raise KeyError(name)
        if found is None or found.null_count == len(found):  # no values here: the type that it has elsewhere
            return pa.nulls(scans[source].num_rows, types.get(name, pa.float64()))
        return found

    kept = {}
    for source, scan in scans.items():
        keep = np.ones(scan.num_rows, bool)
        for rule, strict in ((common, False), (own.get(source), True)):
            if rule is None:
                continue
            valid = names[source] if strict else everywhere
            chosen, unknown = rule.select(partial(of, source, strict), scan.num_rows, valid)
            chosen, unknown = (column.to_numpy(zero_copy_only=False) for column in (chosen, unknown))
            shown = " ".join(rule.text.split())
            beyond = too_large[source]
            for reason, rows in (("a value is missing", ~beyond), ("a number is too large", beyond)):
                joined.leave(
                    f"{rule.setting} cannot be decided, {reason}: {shown}",
                    int((keep & unknown & rows).sum()),
                    f"change {rule.setting} (test with `is None`)",
                )
            joined.leave(
                f"not selected by {rule.setting}: {shown}",
                int((keep & ~chosen & ~unknown).sum()),
                f"change {rule.setting}",
            )
            keep &= chosen
        kept[source] = scan.filter(pa.array(keep))
    return kept


def _columns(source: str, scan: pa.Table, wanted: set[str]) -> tuple[dict[str, pa.Array], list[str], np.ndarray]:
    """The wanted columns of a source that are there, the names of all that are, and where a number is too large."""

    def whole(column: pa.ChunkedArray) -> pa.Array:
        found = column.combine_chunks()
        return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found

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
    found = {name: make() for name, make in builtin.items() if name in wanted}
    rest = wanted - set(builtin)
    valid = list(builtin)
    too_large = np.zeros(scan.num_rows, bool)
    if rest:
        fields = {name: name.removeprefix(_META) for name in rest}
        own, there, too_large = filters.fields(scan.column("meta"), set(fields.values()))
        found |= {name: own[field] for name, field in fields.items() if field in own}
        valid += [name for name in there if name not in builtin]
    return found, valid, too_large


def deduplicated(joined: Joined, frame: Frame, order: Sequence[str], earlier: np.ndarray) -> Frame:
    """One picture of each digest: one of an earlier snapshot (its sample ids), else of the source that stands first in
    `order`, then of the first (source, item)."""
    _, inverse, times = np.unique(frame.digest, return_inverse=True, return_counts=True)
    suspects = np.flatnonzero(times[inverse] > 1)
    rank = [order.index(name) if name in order else len(order) for name in joined.sources]
    items = frame.item.take(pa.array(suspects)).to_pylist()
    new = places(frame, earlier) >= len(earlier) if len(earlier) else np.ones(len(frame), bool)
    stays = np.isin(frame.picture_id, frame.picture_id[~new])
    best: dict[bytes, tuple[bool, int, str, str, int]] = {}
    for row, item in zip(suspects.tolist(), items, strict=True):
        source = int(frame.source[row])
        mine = (not stays[row], rank[source], joined.sources[source], item, int(frame.picture_id[row]))
        digest = frame.digest[row]
        best[digest] = min(best.get(digest, mine), mine)
    keep = np.ones(len(frame), bool)
    for row in suspects.tolist():
        keep[row] = frame.picture_id[row] == best[frame.digest[row]][4]
    joined.leave("its picture is the same as another sample's", int((~keep).sum()), "bucket.dedup=none")
    return frame.take(keep)


def heldout(frame: Frame, share: float) -> np.ndarray:
    """(n,) bool: which samples are held out. A matter of the picture's digest alone, so equal pictures are on one side,
    more data move nothing, and a larger share keeps what a smaller one held out."""
    first = np.ascontiguousarray(frame.digest).view("<u8").reshape(-1, 2)[:, 0]
    return first < np.uint64(min(int(share * 2**64), 2**64 - 1))


def places(frame: Frame, earlier: np.ndarray) -> np.ndarray:
    """(n,) int64 place of each sample in an earlier snapshot (its sample ids by row), beyond its end for new ones."""
    if not len(earlier):
        return np.zeros(len(frame), np.int64)
    order = np.argsort(earlier)
    at = np.minimum(np.searchsorted(earlier, frame.sample_id, sorter=order), len(earlier) - 1)
    return np.where(earlier[order[at]] == frame.sample_id, order[at], len(earlier))


def subset(joined: Joined, frame: Frame, count: int, earlier: np.ndarray) -> Frame:
    """`count` pictures with all their records: those of an earlier snapshot, then those with the smallest ids."""
    pictures, first = np.unique(frame.picture_id, return_index=True)
    known = np.unique(frame.picture_id[places(frame, earlier) < len(earlier)]) if len(earlier) else earlier
    order = np.lexsort((pictures, ~np.isin(pictures, known)))
    kept = np.isin(frame.picture_id, pictures[order[:count]])
    joined.leave(f"beyond the first {count} pictures", int((~kept).sum()), "a larger bucket.subset")
    return frame.take(kept)


Move = tuple[str, str, int, int]
"""source, item, and the (height, width) in pixels that its latent is missing at."""


def reassigned(
    joined: Joined,
    frame: Frame,
    table: Sequence[tuple[int, int]],
    batches: Sequence[int],
    first: int,
    recipe: layout.LatentRecipe,
    latents: RecordIndex,
) -> tuple[Frame, list[Move]]:
    """Move the samples of buckets smaller than one batch into the nearest bucket that is not.

    The smallest bucket gives up first, and its samples may fill its neighbour. Samples whose latent does not exist at
    the new size are left out and returned, to be encoded.

    Args:
        table, batches: one bucket table and the batches of its buckets.
        first: the number of its first bucket in the frame.
    """
    inside = np.flatnonzero((frame.bucket >= first) & (frame.bucket < first + len(table)))
    chosen = frame.bucket[inside] - first
    own = chosen.copy()
    held = np.bincount(chosen, minlength=len(table))
    open_buckets = [b for b in range(len(table)) if held[b]]
    while len(open_buckets) > 1:
        small = [b for b in open_buckets if held[b] < batches[b]]
        if not small:
            break
        leaving = min(small, key=lambda b: (held[b], b))
        open_buckets.remove(leaving)
        moving = np.flatnonzero(chosen == leaving)
        rows = inside[moving]
        at = buckets.nearest_all([table[b] for b in open_buckets], frame.height[rows], frame.width[rows])
        chosen[moving] = np.array(open_buckets)[at]
        held = np.bincount(chosen, minlength=len(table))
    moved = np.flatnonzero(chosen != own)
    if not len(moved):
        return frame, []
    rows = inside[moved]
    found = latents.find(latent_keys(recipe, frame.digest[rows], table, chosen[moved]))
    bucket, latent = frame.bucket.copy(), frame.latent.copy()
    bucket[rows], latent[rows] = chosen[moved] + first, np.maximum(found, 0)
    missing = rows[found < 0]
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
    return replace(frame, bucket=bucket, latent=latent).take(keep), moves
