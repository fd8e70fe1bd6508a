"""Parquet and Arrow files, read in the calling thread alone, and text columns of any size.

A column of plain text, or of lists of it, holds less than 2 GiB in one piece; Arrow raises an error if more is joined.
`combined` joins tables, and `take_rows` picks rows, in several pieces where one would be too large.

Arrow reads a Python file object ahead on its own threads. Such a thread needs the interpreter; a thread that still
reads when the process ends aborts the process (SIGABRT). Reading ahead gains little here: a table of the cache is in
memory already, and a row group of a source is read whole. Price: columns are decompressed one after the other.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

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


def take_rows(table: pa.Table, rows: np.ndarray, schema: pa.Schema | None = None) -> pa.Table:
    """Some rows of a table of flat columns, in their order.

    Args:
        rows: (n,) numbers.
        schema: of the result (`large_string` is cast to `string`); default: that of the table.
    """
    schema = schema or table.schema
    if _largest(table) <= LIMIT:
        return table.take(pa.array(rows)).cast(schema)
    wide = [field.with_type(pa.large_string()) if field.type == pa.string() else field for field in table.schema]
    return pa.concat_tables(_take_rows(table.cast(pa.schema(wide)).combine_chunks(), rows, schema, ROWS))


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

    def read(self, *args: Any, **kwargs: Any) -> pa.Table:
        with _names_decoded():
            return super().read(*args, **{**kwargs, "use_threads": False})

    def read_row_group(self, *args: Any, **kwargs: Any) -> pa.Table:
        with _names_decoded():
            return super().read_row_group(*args, **{**kwargs, "use_threads": False})

    def read_row_groups(self, *args: Any, **kwargs: Any) -> pa.Table:
        with _names_decoded():
            return super().read_row_groups(*args, **{**kwargs, "use_threads": False})

    def iter_batches(self, *args: Any, **kwargs: Any) -> Iterator[pa.RecordBatch]:
        with _names_decoded():
            yield from super().iter_batches(*args, **{**kwargs, "use_threads": False})


WRITER = b"parquet-cpp-arrow version 26.0.1"
"""Writer that every Parquet file names. The ids of snapshots depend on the bytes of tables, so they must not depend on
the installed pyarrow: from version 22 on its files differ in nothing else."""


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as a Parquet file, equal for every supported version of pyarrow."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", write_page_checksum=True) as file:
        for piece in pieces(table):  # larger columns of text in one row group could not be read
            file.write_table(piece)
    return with_fixed_writer(sink.getvalue())


def with_fixed_writer(data: bytes) -> bytes:
    """A Parquet file with `WRITER` in place of its writer's name.

    The footer (Thrift's compact protocol) holds the name behind its length in one byte, after all other text; the
    footer's length and `PAR1` end the file.
    """
    written = ParquetFile(pa.BufferReader(data)).metadata.created_by.encode()
    body, footer_length = data[:-8], int.from_bytes(data[-8:-4], "little")
    at = body.rfind(bytes([len(written)]) + written)
    if at < len(body) - footer_length:
        raise RuntimeError(f"pyarrow {pa.__version__} writes its name elsewhere in a Parquet file")
    body = body[:at] + bytes([len(WRITER)]) + WRITER + body[at + 1 + len(written) :]
    footer_length += len(WRITER) - len(written)
    return body + footer_length.to_bytes(4, "little") + data[-4:]


def parquet_table(data: bytes) -> pa.Table:
    """The table of a Parquet file in memory. Raises pyarrow.ArrowException for other bytes."""
    file = ParquetFile(pa.BufferReader(data))
    groups = range(file.num_row_groups)
    # Row group by row group: a column of lists with too much text for one piece cannot be read whole.
    return file.read() if len(groups) < 2 else pa.concat_tables([file.read_row_group(group) for group in groups])


def ipc_table(data: bytes | pa.Buffer) -> pa.Table:
    """The table of an Arrow IPC file, without a copy. Raises pyarrow.ArrowException or OSError for other bytes."""
    return pa.ipc.open_file(pa.BufferReader(data), options=pa.ipc.IpcReadOptions(use_threads=False)).read_all()
