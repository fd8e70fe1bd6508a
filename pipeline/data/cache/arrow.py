"""Parquet and Arrow files, read in the calling thread alone, and text columns of any size.

A column of plain text, or of lists of it, holds less than 2 GiB in one piece; Arrow raises an error if more is joined.
`combined` joins tables, and `take_rows` picks rows, in several pieces where a single piece would be too large.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

pa.set_memory_pool(pa.system_memory_pool())

LIMIT = 1 << 30
"""Limit on the bytes of a column in one piece: half of Arrow's."""
ROWS = 1 << 16
"""Rows that are handled at a time: picked from a table with a larger column, or read from one of any size."""


def _largest(table: pa.Table) -> int:
    """Bytes of the largest column of a limited type."""

    def unlimited(kind: pa.DataType) -> bool:
        return pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind) or pa.types.is_dictionary(kind)

    return max((column.nbytes for column in table.columns if not unlimited(column.type)), default=0)


def pieces(table: pa.Table) -> list[pa.Table]:
    """The rows of a table, in order, as one table or as several with at most `LIMIT` bytes per column."""
    if table.num_rows < 2 or _largest(table) <= LIMIT:
        return [table]
    middle = table.num_rows // 2
    return pieces(table.slice(0, middle)) + pieces(table.slice(middle))


def combined(table: pa.Table) -> pa.Table:
    """The same table with one chunk per column, or one for each of its `pieces`."""
    return pa.concat_tables([piece.combine_chunks() for piece in pieces(table)])


def batches(table: pa.Table) -> Iterator[pa.Table]:
    """The rows of a table, in order, in tables of at most `ROWS` rows, without a copy."""
    for start in range(0, table.num_rows, ROWS):
        yield table.slice(start, ROWS)


def take_rows(table: pa.Table, rows: np.ndarray) -> pa.Table:
    """Some rows of a table of flat columns, in their order.

    Args:
        rows: (n,) numbers.
    """
    if _largest(table) <= LIMIT:
        return table.take(pa.array(rows))
    wide = [field.with_type(pa.large_string()) if field.type == pa.string() else field for field in table.schema]
    return pa.concat_tables(_take_rows(table.cast(pa.schema(wide)).combine_chunks(), rows, table.schema, ROWS))


def pick_rows(table: pa.Table, rows: np.ndarray) -> Iterator[pa.Table]:
    """Some rows of a table of any size and type, in tables of at most `ROWS` rows.

    Args:
        rows: (n,) numbers, ascending.
    """
    ends = np.searchsorted(rows, np.arange(0, table.num_rows + ROWS, ROWS))
    for number in np.flatnonzero(np.diff(ends)).tolist():
        some = rows[ends[number] : ends[number + 1]] - number * ROWS
        piece = table.slice(number * ROWS, ROWS)
        # Taking all is not a copy. Arrow joins the chunks of what it takes from, so it must not be the whole table.
        yield piece if len(some) == len(piece) else piece.take(pa.array(some))


def spread_rows(table: pa.Table, where: pa.ChunkedArray, most: int) -> pa.Table:
    """Up to `most` of some rows of a table of any size, at equal distances. The other rows are not copied.

    Args:
        where: bool, without nulls: which rows.
    """
    total = pc.sum(where).as_py() or 0
    wanted = np.unique(np.linspace(0, total - 1, min(most, total)).astype(np.int64))
    pieces, seen = [table.slice(0, 0)], 0
    for start in range(0, table.num_rows, ROWS):
        rows = np.flatnonzero(where.slice(start, ROWS).to_numpy())
        first, last = np.searchsorted(wanted, [seen, seen + len(rows)])
        piece = table.slice(start, ROWS)
        # Slices, since Arrow's `take` of lists copies all of a piece's.
        pieces += [piece.slice(row, 1) for row in rows[wanted[first:last] - seen].tolist()]
        seen += len(rows)
    return pa.concat_tables(pieces)


def _take_rows(wide: pa.Table, rows: np.ndarray, schema: pa.Schema, count: int) -> Iterator[pa.Table]:
    for start in range(0, len(rows), count):
        some = rows[start : start + count]
        part = wide.take(pa.array(some))
        if len(some) > 1 and _largest(part) > LIMIT:
            yield from _take_rows(wide, some, schema, -(-len(some) // 2))
        else:
            yield part.cast(schema)


def text(column: pa.ChunkedArray) -> pa.Array:
    """A text column in one piece, as `large_string`, which has no limit."""
    wide = column.cast(pa.large_string())
    return wide.chunk(0) if wide.num_chunks == 1 else pa.concat_arrays([pa.array([], pa.large_string()), *wide.chunks])


@contextmanager
def _names_decoded() -> Iterator[None]:
    """Arrow decodes names in damaged files without a check of theirs."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"a name is not UTF-8: {error}") from None


class ParquetFile(pq.ParquetFile):
    """A `pyarrow.parquet.ParquetFile` that starts no threads. Its errors are pyarrow.ArrowException or OSError."""

    def __init__(self, source: str | BinaryIO | pa.NativeFile):
        with _names_decoded():
            super().__init__(source, pre_buffer=False)

    def read_row_group(self, *args: Any, **kwargs: Any) -> pa.Table:
        with _names_decoded():
            return super().read_row_group(*args, **{**kwargs, "use_threads": False})

    def iter_batches(self, *args: Any, **kwargs: Any) -> Iterator[pa.RecordBatch]:
        with _names_decoded():
            yield from super().iter_batches(*args, **{**kwargs, "use_threads": False})


WRITER = b"parquet-cpp-arrow version 26.0.1"
"""Writer that every Parquet file names. The ids of snapshots depend on the bytes of tables, so they must not depend on
the installed pyarrow: from version 22 on its files of these columns differ in nothing else (`make lowest` compares).

Scans and the work of plans are Parquet and not Arrow IPC with zstd, because they are smaller: a scan of 200,000 items
in tars has 4.2 MB as Parquet and 8.0 MB as IPC (13.3 MB with lz4), the work of its captions 4.1 and 4.6, of its
pictures 7.1 and 8.0 (`benchmarks.large_cache`). Reading the scan takes 35 ms of CPU as Parquet, 13 ms as IPC."""


GROUP_ROWS = 1 << 20
"""Rows of a row group in a Parquet file."""


def write_parquet(table: pa.Table, sink: BinaryIO) -> None:
    """Write a table as a Parquet file, equal for every supported version of pyarrow. sink: empty, also readable."""
    with pq.ParquetWriter(sink, table.schema, compression="zstd", write_page_checksum=True) as file:
        for piece in pieces(table):  # larger columns of text in one row group could not be read
            for start in range(0, max(1, piece.num_rows), GROUP_ROWS):
                file.write_table(piece.slice(start, GROUP_ROWS).combine_chunks())  # bytes depend on chunks
    fix_writer(sink)


def fix_writer(file: BinaryIO) -> None:
    """Put `WRITER` in place of the writer's name in a Parquet file: the last text of it, behind its length in one byte.
    The names of all released versions of pyarrow have one length."""
    start = max(0, file.seek(0, os.SEEK_END) - 1024)
    file.seek(start)
    tail = file.read()
    at = tail.rfind(WRITER[:-6])
    if tail[at - 1] != len(WRITER):
        raise RuntimeError(f"pyarrow {pa.__version__} has a name of another length in a Parquet file; use a release")
    file.seek(start + at)
    file.write(WRITER)


def parquet_batches(data: bytes | pa.Buffer, columns: list[str] | None = None) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """The schema and the rows of a Parquet file, `ROWS` at a time.

    Args:
        columns: names of the columns to read; default: all.

    Raises:
        pyarrow.ArrowException, OSError: at once or while rows are read, for other bytes.
    """
    file = ParquetFile(pa.BufferReader(data))
    schema = file.schema_arrow if columns is None else pa.schema([file.schema_arrow.field(name) for name in columns])
    rows = file.iter_batches(ROWS, columns=columns)
    return schema, (pa.Table.from_batches([batch]).select(schema.names) for batch in rows)


def ipc_table(data: bytes | pa.Buffer) -> pa.Table:
    """The table of an Arrow IPC file, without a copy. Raises pyarrow.ArrowException or OSError for other bytes."""
    return pa.ipc.open_file(pa.BufferReader(data), options=pa.ipc.IpcReadOptions(use_threads=False)).read_all()
