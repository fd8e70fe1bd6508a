"""Lists of the pictures of a snapshot, as CSV or Parquet: source, item, and the digest of the picture's file.

`write` makes such a list from a snapshot and its scans. `compare` says which items of a list a snapshot lacks, which it
has besides, and which have other bytes. It needs no scan: a record's key follows from the digest of the picture's file
(`PictureEncoding.keys`), so a cache that was pulled can be compared, too. Memory: 230 bytes an item at
10^6 (`benchmarks.lab_content`); lists and chunks are read in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from sana_pipe.base.disk import cache_errors, replacing
from sana_pipe.base.errors import CacheError, UserError, escaped
from sana_pipe.data.cache.arrow import ROWS, ParquetFile, batches
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.encodings import pictures_of
from sana_pipe.data.cache.keys import SortedKeys, as_keys, digests_of, fixed, framed_all, halves, key_bytes
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_samples import picture_keys

SUFFIXES = (".csv", ".parquet")
COLUMNS = ("source", "item", "digest")
_SCHEMA = pa.schema([(name, pa.string()) for name in COLUMNS])
_DIGEST = "^[0-9a-f]{32}$"
_EXAMPLE = "sana-pipe snapshots list SNAPSHOT FILE.csv writes such a list"


def is_list(word: str) -> bool:
    """Return whether a word names a list by its ending."""
    return word.lower().endswith(SUFFIXES)


# ---------------------------------------------------------------- writing


def write(cache: Cache, snapshot: Snapshot, path: Path) -> int:
    """Write the list of a snapshot: a row for each picture, by source, then in the order of the scan.

    Args:
        path: ends in one of `SUFFIXES`; a file that is there is replaced.

    Returns:
        The number of rows. A picture with records of several sizes has one.

    Raises:
        CacheError: the cache does not have the scan of a source that the snapshot was made from.
        UserError: the file has another ending.
    """
    if not is_list(path.name):
        raise UserError(f"{path}: a list is a CSV or Parquet file", expected="FILE.csv or FILE.parquet", fix=_EXAMPLE)
    wanted = SortedKeys(*halves(np.unique(np.concatenate([np.empty(0, "S16"), *_item_keys(snapshot)]))))
    written = np.zeros(len(wanted), bool)
    with replacing(path) as place, cache_errors(path), ExitStack() as stack:
        sink = stack.enter_context(pa.OSFile(str(place), "wb"))
        is_csv = path.name.lower().endswith(".csv")
        writer = stack.enter_context((pyarrow.csv.CSVWriter if is_csv else pq.ParquetWriter)(sink, _SCHEMA))
        for source, digest in sorted(snapshot.head.sources.items()):
            for rows in _scanned(cache, snapshot, source, digest):
                at = wanted.find(_keys(pa.scalar(source), rows.column("item")))
                # Of equal names in one batch the first counts, as over batches.
                first = np.zeros(len(at), bool)
                first[np.unique(at, return_index=True)[1]] = True
                chosen = first & (at >= 0) & ~written[at]
                written[at[chosen]] = True
                writer.write_table(_as_list(source, rows.filter(pa.array(chosen))))
        if lost := int(len(written) - written.sum()):
            raise CacheError(
                f"snapshot {snapshot.id[:12]}: {lost} of its items are in no scan that it names",
                fix="make it again: sana-pipe bucket --like NAME --name OTHER, then list that one",
            )
    return len(written)


def _scanned(cache: Cache, snapshot: Snapshot, source: str, digest: str) -> Iterator[pa.Table]:
    """(item, digest) of the usable rows of a scan, in pieces."""
    names = (Paths.table(digest, "parquet"), Paths.copy(Paths.table(digest, "parquet")))
    if not any(map(cache.files.has_file, names)):
        raise CacheError(
            f"{cache.location}: does not have the scan of the source {escaped(source)} that snapshot "
            f"{snapshot.id[:12]} was made from, and digests of files stand there",
            expected=cache.files.where(names[0]),
            fix="list it in the cache that made it; snapshots diff with a list needs no scan",
        )
    table = cache.table(digest, ["item", "digest", "reject"])
    for rows in batches(table):
        yield rows.filter(pc.and_(pc.is_null(rows.column("reject")), pc.is_valid(rows.column("digest"))))


def _as_list(source: str, rows: pa.Table) -> pa.Table:
    digests = [key_bytes(digest).hex() for digest in fixed(rows.column("digest"))]
    return pa.table([pa.repeat(source, len(rows)), rows.column("item"), pa.array(digests, pa.string())], schema=_SCHEMA)


# ---------------------------------------------------------------- reading


def read(path: Path) -> Iterator[pa.Table]:
    """The rows of a list in pieces: `item` and `digest` (text), and `source` if it has that column.

    Raises:
        UserError: the file cannot be read, lacks a column, or has a row without an item or with another digest.
    """
    first = 1
    try:
        for rows in _csv(path) if path.name.lower().endswith(".csv") else _parquet(path):
            yield _checked(path, rows, first)
            first += len(rows)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: this list cannot be read", found=str(error).splitlines()[0], fix=_EXAMPLE) from None


def _csv(path: Path) -> Iterator[pa.Table]:
    # Columns are text: a digest of digits alone is no number, and NA is a name.
    types = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(COLUMNS, pa.string()), strings_can_be_null=False)
    form = pyarrow.csv.ParseOptions(newlines_in_values=True)
    with pyarrow.csv.open_csv(path, pyarrow.csv.ReadOptions(use_threads=False), form, types) as file:
        yield _listed_columns(path, pa.Table.from_batches([], file.schema))
        yield from (_listed_columns(path, pa.Table.from_batches([batch])) for batch in file)


def _parquet(path: Path) -> Iterator[pa.Table]:
    file = ParquetFile(str(path))
    names = _listed_columns(path, file.schema_arrow.empty_table()).column_names
    for batch in file.iter_batches(ROWS, columns=names):
        yield pa.Table.from_batches([batch]).cast(pa.schema([(field.name, pa.string()) for field in batch.schema]))


def _listed_columns(path: Path, rows: pa.Table) -> pa.Table:
    if missing := [name for name in COLUMNS[1:] if name not in rows.column_names]:
        raise UserError(
            f"{path}: this list has no column {' and none called '.join(missing)}",
            expected=f"the columns {', '.join(COLUMNS)}; source may be left out",
            found=escaped(", ".join(rows.column_names)) or "no columns",
            fix=_EXAMPLE,
        )
    return rows.select([name for name in COLUMNS if name in rows.column_names])


def _checked(path: Path, rows: pa.Table, first: int) -> pa.Table:
    """The rows, if each has an item and a digest. first: the number of the first one."""
    good = pc.fill_null(pc.match_substring_regex(rows.column("digest"), _DIGEST), False)
    for name in rows.column_names[:-1]:
        good = pc.and_(good, pc.fill_null(pc.not_equal(rows.column(name), ""), False))
    wrong = np.flatnonzero(~np.array(good.to_pylist(), bool))
    if len(wrong):
        raise UserError(
            f"{path}: row {first + int(wrong[0])} of this list names no picture",
            expected="an item, and the digest of its file: 32 hex digits in lower case, as encode writes them",
            found=escaped(str(rows.slice(int(wrong[0]), 1).to_pylist()[0])),
            fix=_EXAMPLE,
        )
    return rows


# ---------------------------------------------------------------- comparison


@dataclass(frozen=True)
class ListDifference:
    """Items that differ between a list and a snapshot, as (n,) S16 keys of the list's rows and as rows of the snapshot.

    Attributes:
        missing: keys of items of the list that the snapshot does not have.
        additional: first rows of items that the list does not have.
        other_bytes: first rows of items whose file had another digest.
        items: that the two have in common.
        with_sources: whether the list names sources; without, items alone are compared.
    """

    path: Path
    missing: np.ndarray
    additional: np.ndarray
    other_bytes: np.ndarray
    items: int
    with_sources: bool

    def __bool__(self) -> bool:
        return any(map(len, (self.missing, self.additional, self.other_bytes)))

    def missing_names(self) -> Iterator[tuple[str, str]]:
        """(source, item) of what is missing; the source is "" where the list has none. Reads the list again."""
        left = SortedKeys(*halves(self.missing))
        named = np.zeros(len(left), bool)
        for rows in read(self.path) if len(left) else ():
            at = left.find(_list_keys(rows))
            for row in np.flatnonzero(at >= 0).tolist():
                if not named[at[row]]:
                    named[at[row]] = True
                    one: dict[str, Any] = rows.slice(row, 1).to_pylist()[0]
                    yield one.get("source", ""), one["item"]


def compare(snapshot: Snapshot, path: Path) -> ListDifference:
    """Compare a snapshot with a list.

    Raises:
        UserError: the list cannot be read, or names an item twice with two digests; it names no sources, and the
            snapshot has several.
    """
    keys, digests, with_sources = _loaded(path)
    sources = _source_names(snapshot) if not with_sources else []
    if len(sources) > 1:
        raise UserError(
            f"{path}: this list names no sources, and the snapshot has items of {len(sources)}",
            expected="a column source",
            found=escaped(", ".join(sources)),
            fix=_EXAMPLE,
        )
    listed = SortedKeys(*halves(keys))
    lead = pictures_of(snapshot.head.encodings_by_kind.values())[0]
    sizes = [(bucket.height, bucket.width) for bucket in snapshot.buckets]
    of_bucket = np.repeat(np.arange(len(sizes)), [bucket.samples for bucket in snapshot.buckets])
    seen = np.zeros(len(keys), bool)
    additional, other = _FirstRows(), _FirstRows()
    start = 0
    for samples, items in zip(snapshot.tables(), _item_keys(snapshot, with_sources), strict=True):
        at, rows = listed.find(items), np.arange(start, start + len(items))
        there = at >= 0
        seen[at[there]] = True
        additional.add(items[~there], rows[~there])
        expected = lead.keys(digests[at[there]], sizes, of_bucket[rows[there]])
        differs = picture_keys(samples, lead.kind)[there] != expected
        other.add(items[there][differs], rows[there][differs])
        start += len(items)
    return ListDifference(path, keys[~seen], additional.rows(), other.rows(), int(seen.sum()), with_sources)


class _FirstRows:
    """Rows of a snapshot by item: of an item with records of several sizes the first."""

    def __init__(self) -> None:
        self._keys, self._rows = [np.empty(0, "S16")], [np.empty(0, np.int64)]

    def add(self, keys: np.ndarray, rows: np.ndarray) -> None:
        self._keys.append(keys)
        self._rows.append(rows)

    def rows(self) -> np.ndarray:
        _, first = np.unique(np.concatenate(self._keys), return_index=True)
        return np.concatenate(self._rows)[np.sort(first)]


def _loaded(path: Path) -> tuple[np.ndarray, np.ndarray, bool]:
    """Keys of the items of a list, ascending and unique, their digests, both S16 (n,), and whether it has sources."""
    keys, digests, with_sources = [np.empty(0, "S16")], [np.empty(0, "S16")], False
    for rows in read(path):
        with_sources = "source" in rows.column_names
        keys.append(_list_keys(rows))
        digests.append(as_keys([bytes.fromhex(digest) for digest in rows.column("digest").to_pylist()]))
    of_items, of_files = np.concatenate(keys), np.concatenate(digests)
    order = np.argsort(of_items, kind="stable")
    of_items, of_files = of_items[order], of_files[order]
    again = of_items[1:] == of_items[:-1]
    if (two := np.flatnonzero(again & (of_files[1:] != of_files[:-1]))).size:
        double = order[two[0] : two[0] + 2] + 1
        raise UserError(
            f"{path}: this list names an item twice, with two digests",
            found=f"rows {double[0]} and {double[1]}",
            fix="leave one of them out",
        )
    first = np.append(True, ~again)[: len(of_items)]
    return of_items[first], of_files[first], with_sources


def _list_keys(rows: pa.Table) -> np.ndarray:
    return _keys(rows.column("source") if "source" in rows.column_names else None, rows.column("item"))


def _item_keys(snapshot: Snapshot, with_sources: bool = True) -> Iterator[np.ndarray]:
    """Keys of the items in the order of rows, chunk after chunk."""
    for names in snapshot.name_tables():
        yield _keys(names.column("source") if with_sources else None, names.column("item"))


def _keys(source: pa.ChunkedArray | pa.Scalar | None, items: pa.ChunkedArray) -> np.ndarray:
    """Digests (n,) S16 of source and item, or of the item alone, by which lists and snapshots are joined."""
    plain = items.combine_chunks() if items.num_chunks != 1 else items.chunk(0)
    if source is None:
        return digests_of(b"", *framed_all(plain))
    if isinstance(source, pa.Scalar):
        return digests_of(b"", *framed_all(pa.repeat(source, len(plain))), *framed_all(plain))
    whole = source.combine_chunks() if source.num_chunks != 1 else source.chunk(0)
    return digests_of(b"", *framed_all(whole), *framed_all(plain))


def _source_names(snapshot: Snapshot) -> list[str]:
    """The sources that samples of a snapshot are of."""
    names = set[str]()
    for table in snapshot.name_tables():
        names.update(pc.unique(table.column("source")).to_pylist())
    return sorted(names)
