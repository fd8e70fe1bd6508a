"""Select which of the joined samples a snapshot takes: filters, deduplication, a held-out part, subsets by count.

Samples left out are counted in `Joined` by their reason. Each rule depends on a sample's content or id alone (and on
the samples that it is compared with), not on the order of the listing or on chance: the same data give the same choice,
and more data change as little as possible. A subset has exactly the requested number of pictures; a held-out part has
the requested share on average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.keys import SortedKeys, halves, of_halves
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.images import buckets
from sana_pipe.data.snapshots import filters
from sana_pipe.data.snapshots.duplicates import Duplicates
from sana_pipe.data.snapshots.filters import Filter
from sana_pipe.data.snapshots.frames import Frame, pieces, ranges
from sana_pipe.data.snapshots.join import EncodedRecords, Joined


def filtered(
    joined: Joined,
    scans: dict[str, pa.Table],
    common: Filter | None,
    by_source: dict[str, Filter],
    tables: Sequence[Sequence[buckets.Shape]] = (),
) -> dict[str, pa.Table]:
    """The items that satisfy the common filter and that of their source.

    Args:
        scans: usable items by source.
        tables: bucket tables of the snapshot.

    Raises:
        UserError: a filter names a column that no item has (for a source's own filter: no item of that source), or
            compares a column with a value of another type, or a column that depends on the bucket where there are
            several bucket tables.
    """
    for rule in (*by_source.values(), *([] if common is None else [common])):
        if (named := filters.of_bucket(rule.paths)) and len(tables) != 1:
            raise rule.wrong(
                f"names {', '.join(named)}, and a picture has a bucket at each of {len(tables)} resolutions",
                fix="data.max_crop_loss, data.max_upscale and data.min_side judge it at each of bucket.resolutions",
            )
    rules = {source: [rule for rule in (common, by_source.get(source)) if rule is not None] for source in scans}
    metadata = {
        source: filters.Metadata(
            batches(scan.select(["item", "meta"])), {path for rule in rules[source] for path in rule.paths}
        )
        for source, scan in scans.items()
    }
    valid = {name: None for here in metadata.values() for name in here.valid}
    if common is not None:
        common.check_columns({path for here in metadata.values() for path in here.known}, sorted(valid))
    for source, rule in by_source.items():
        rule.check_columns(metadata[source].known, sorted(metadata[source].valid))
    text = {path for here in metadata.values() for path in here.text}
    types = {source: here.types(text) for source, here in metadata.items()}
    for source, here in metadata.items():
        joined.notes += [f"source {source!r}: {line}" for line in here.odd(types[source])]
        if lacking := sorted({".".join(path) for rule in rules[source] for path in rule.paths - here.known}):
            joined.notes.append(
                f"source {source!r}: none of its {len(scans[source])} items has {', '.join(lacking)}, so bucket.filter "
                f"takes it as missing; bucket.sources.NAME.filter is a condition for a single source"
            )
    elsewhere: dict[filters.Path, str] = {path: kind for here in types.values() for path, kind in here.items()}

    def chosen(source: str, scan: pa.Table) -> Iterator[pa.Table]:
        here = {path: "DOUBLE" for rule in rules[source] for path in rule.paths} | elsewhere | types[source]
        for batch in batches(scan) if len(scan) else [scan]:
            keep = np.ones(len(batch), bool)
            fitted = filters.with_bucket(batch, tables[0]) if filters.of_bucket(here) else batch
            for rule, (true, unknown) in zip(
                rules[source], filters.select(rules[source], fitted, source, here), strict=True
            ):
                _count_rejected(joined, rule, keep & ~true, unknown)
                keep &= true
            yield batch.filter(pa.array(keep))

    return {source: joined.scratch.table(scan.schema, chosen(source, scan)) for source, scan in scans.items()}


def _count_rejected(joined: Joined, rule: Filter, rejected: np.ndarray, unknown: np.ndarray) -> None:
    expression = " ".join(rule.text.split())
    joined.leave(
        f"{rule.setting} cannot be decided, a value is missing: {expression}",
        int((rejected & unknown).sum()),
        f"change {rule.setting} (test with `IS NULL`)",
    )
    joined.leave(
        f"not selected by {rule.setting}: {expression}", int((rejected & ~unknown).sum()), f"change {rule.setting}"
    )


class Earlier:
    """The samples of an earlier snapshot, looked up by id: 16 bytes a sample in temporary files.

    Args:
        ids: sample ids (uint64) in the order of rows, in pieces of any length; none: there is no earlier snapshot.
    """

    def __init__(self, scratch: Scratch, ids: Iterable[np.ndarray] = ()):
        every = (of_halves(some[piece]) for some in ids for piece in pieces(len(some)))
        ordered = ({"id": halves(keys)[0], "row": rows} for keys, rows, _ in scratch.by_key(every))
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


def in_earlier_snapshot(joined: Joined, frame: Frame, earlier: Earlier, groups: np.ndarray | None = None) -> np.ndarray:
    """(n,) bool: samples whose picture is in an earlier snapshot, or one of their group. groups: (n,) S16 keys."""
    stays = joined.scratch.array(len(frame), bool)
    for piece in pieces(len(frame)) if len(earlier) else ():
        stays[piece] = earlier.find(frame.sample_id[piece]) < len(earlier)
    every = pieces(len(frame))
    keys = (of_halves(frame.picture_id[piece]) if groups is None else groups[piece] for piece in every)
    for _, rows, first in joined.scratch.by_key(keys) if len(earlier) else ():
        known = np.logical_or.reduceat(stays[rows], np.flatnonzero(first))
        stays[rows] = known[np.cumsum(first) - 1]
    return stays


Better = Callable[[np.ndarray], list[np.ndarray]]
"""Rows of a frame -> what makes their pictures better than others of their group, (n,) int64 each, the first counts
first; less is better."""


def larger(frame: Frame, records: EncodedRecords) -> Better:
    """More pixels, then a longer caption."""
    length = records.texts.columns["caption_length"]

    def better(rows: np.ndarray) -> list[np.ndarray]:
        captions, offsets = frame.captions_of(rows)
        longest = np.maximum.reduceat(length[frame.text[captions]].astype(np.int64), offsets[:-1])
        return [-frame.height[rows] * frame.width[rows], -longest]

    return better


def deduplicated(
    joined: Joined,
    frame: Frame,
    order: Sequence[str],
    earlier: Earlier,
    keys: np.ndarray | None = None,
    better: Better | None = None,
    keep_captions: bool = False,
    kept: np.ndarray | None = None,
    listed: Duplicates | None = None,
) -> tuple[Frame, np.ndarray | None]:
    """Keep one picture of each digest, or group. A picture in an earlier snapshot precedes; then a better one; then
    sources precede as in `order`, then items by (source, item).

    Args:
        keys: (n,) S16, of the samples' groups; None: their digests.
        keep_captions: the one picture gets the captions of what is left out.
        kept: (n,) bool, samples that stay next to it; None: none.
        listed: gets all groups.

    Returns:
        What stays; and of `kept` of groups (n,) S16, the digest of the one picture, of others their own; else None.
    """
    ranked = sorted(joined.sources, key=lambda name: (order.index(name) if name in order else len(order), name))
    rank = np.array([ranked.index(name) for name in joined.sources], np.int64)
    sides = None if kept is None or keys is None else joined.scratch.array(len(frame), "S16")
    if sides is not None:
        for piece in pieces(len(frame)):
            sides[piece] = frame.digest[piece]
    stays = in_earlier_snapshot(joined, frame, earlier)
    keep, groups_of = joined.scratch.array(len(frame), bool), frame.digest if keys is None else keys
    heirs, inherited = joined.scratch.writer(np.int64), joined.scratch.writer(np.int64)
    for _, rows, first in joined.scratch.by_key(groups_of[piece] for piece in pieces(len(frame))):
        keep[rows] = True
        group = np.cumsum(first) - 1
        suspects = np.flatnonzero(np.bincount(group)[group] > 1)
        if not len(suspects):
            continue
        rows, group = rows[suspects], group[suspects]
        group = np.cumsum(np.diff(group, prepend=group[0]) != 0)
        merits = better(rows) if better is not None else []
        merits = [(~stays[rows]).astype(np.int8), *merits, rank[frame.source[rows]]]
        pictures, best = frame.picture_id[rows], _best(frame, rows, group, merits)
        chosen = pictures == pictures[best][group]
        keep[rows] = here = chosen if kept is None else chosen | kept[rows]
        if listed is not None:
            listed.add(rows, group, here)
        if sides is not None:
            others = np.flatnonzero(here & ~chosen)
            sides[rows[others]] = frame.digest[rows[best[group[others]]]]
        if keep_captions:
            captions, offsets = frame.captions_of(rows[~here])
            ends = offsets[np.searchsorted(group[~here], np.arange(len(best) + 1))]  # of the groups, in `captions`
            counts = np.diff(ends)[group[chosen]]
            heirs.add(np.repeat(rows[chosen], counts))
            inherited.add(captions[ranges(ends[group[chosen]], counts)])
    what, instead = ("is the same as", "none") if better is None else ("looks the same as", "image")
    left_out = len(keep) - int(np.count_nonzero(keep))
    to_keep = f"name it in bucket.dedup_keep, or bucket.dedup={instead}"
    joined.leave(f"its picture {what} another sample's", left_out, to_keep)
    if listed is not None:
        listed.finish()
    frame = _with_captions(joined, frame, heirs.finish(), inherited.finish())
    return frame.take(keep, joined.scratch), None if sides is None else _taken(joined, sides, keep)


def _taken(joined: Joined, values: np.ndarray, keep: np.ndarray) -> np.ndarray:
    writer = joined.scratch.writer(values.dtype)
    for piece in pieces(len(values)):
        writer.add(values[piece][keep[piece]])
    return writer.finish()


def _best(frame: Frame, rows: np.ndarray, group: np.ndarray, merits: Sequence[np.ndarray]) -> np.ndarray:
    """Find the best row of each group: the least merits, then the least item. Returns (groups,) numbers in `rows`.

    Args:
        group: (n,) numbers of the rows' groups from 0, ascending.
    """
    columns = {"group": group, **{f"merit {number}": column for number, column in enumerate(merits)}}
    table = pa.table({name: pa.array(column) for name, column in columns.items()})
    table = table.append_column("item", frame.item.take(pa.array(rows)))
    ordered = pc.sort_indices(table, [(name, "ascending") for name in table.column_names]).to_numpy()
    return ordered[np.flatnonzero(np.diff(group, prepend=-1))]


def _with_captions(joined: Joined, frame: Frame, heirs: np.ndarray, inherited: np.ndarray) -> Frame:
    """A frame with more captions: row `heirs[i]` gets caption `inherited[i]`. Equal ones are taken once."""
    if not len(heirs):
        return frame
    rows, numbers = joined.scratch.writer(np.int64), joined.scratch.writer(np.int64)
    keys = (of_halves(heirs[piece].astype(np.uint64)) for piece in pieces(len(heirs)))
    for _, at, first in joined.scratch.by_key(keys):
        some, captions, heir = heirs[at], inherited[at], np.cumsum(first) - 1
        present, starts = frame.captions_of(some[first])
        texts = np.concatenate([frame.text[present], frame.text[captions]])
        whose = np.concatenate([np.repeat(np.arange(len(starts) - 1), np.diff(starts)), heir])
        ordered = np.lexsort((texts, whose))  # stable: what the row has, then what it gets in its order
        again = (np.diff(texts[ordered]) == 0) & (np.diff(whose[ordered]) == 0)
        new = np.ones(len(texts), bool)
        new[ordered[1:][again]] = False
        rows.add(some[new[len(present) :]])
        numbers.add(captions[new[len(present) :]])
    heirs, inherited = rows.finish(), numbers.finish()

    offsets, text, weight = (joined.scratch.writer(dtype) for dtype in (np.int64, np.int64, np.float32))
    offsets.add(np.zeros(1))
    total = 0
    for piece in pieces(len(frame)):
        bounds = frame.captions[piece.start : piece.stop + 1]
        here = slice(*np.searchsorted(heirs, [piece.start, piece.stop]))
        heir = heirs[here] - piece.start
        present, more = np.diff(bounds), np.bincount(heir, minlength=piece.stop - piece.start)
        ends, added = np.cumsum(present + more), np.cumsum(more)
        at = np.empty(int(ends[-1]), np.int64)
        at[np.arange(bounds[-1] - bounds[0]) + np.repeat(added - more, present)] = np.arange(bounds[0], bounds[-1])
        at[np.arange(len(heir)) + np.cumsum(present)[heir]] = inherited[here]
        offsets.add(ends + total)
        text.add(frame.text[at])
        weight.add(frame.weight[at])
        total += int(ends[-1])
    return replace(frame, captions=offsets.finish(), text=text.finish(), weight=weight.finish())


def repeated(joined: Joined, frame: Frame, records: EncodedRecords) -> int:
    """Count the samples that have the picture records of a sample before them."""
    kind = records.pictures[0].kind
    seen, count = joined.scratch.array(len(records.indexes[kind]), bool), 0
    for piece in pieces(len(frame)):
        rows = np.unique(frame.pictures[kind][piece])
        count += piece.stop - piece.start - len(rows) + int(np.count_nonzero(seen[rows]))
        seen[rows] = True
    return count


def heldout(digests: np.ndarray, share: float, scratch: Scratch | None = None) -> np.ndarray:
    """(n,) bool: which samples are held out, see `is_held_out`. digests: (n,) S16, of their pictures' files, or of the
    files of their groups; scratch: temporary storage."""
    held_out = (scratch or Scratch()).array(len(digests), bool)
    for piece in pieces(len(digests)):
        held_out[piece] = is_held_out(digests[piece], share)
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

    def keys() -> Iterator[np.ndarray]:
        for piece in pieces(len(frame)):
            ids, new = frame.picture_id[piece], (~stays[piece]).astype(np.uint64)
            yield of_halves(new << np.uint64(63) | ids >> np.uint64(1), ids)

    pictures = 0
    for _, rows, first in joined.scratch.by_key(keys()):
        number = pictures + np.cumsum(first)
        selected[rows[number <= count]] = True
        pictures = int(number[-1])
    left_out = len(selected) - int(np.count_nonzero(selected))
    joined.leave(f"beyond the first {count} pictures", left_out, "a larger bucket.subset")
    return frame.take(selected, joined.scratch), pictures
