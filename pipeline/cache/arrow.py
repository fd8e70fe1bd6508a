"""Parquet and Arrow files, read on the calling thread alone.

Why: Arrow reads a Python file object ahead on its own threads. Such a thread needs the interpreter; one that still
reads when the process ends takes the process down (SIGABRT). Reading ahead gains little here: a table of the cache is
in memory already, a row group of a source is read whole. The price: columns are decompressed one after the other.
"""

from __future__ import annotations

from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq


class ParquetFile(pq.ParquetFile):
    """`pyarrow.parquet.ParquetFile` that starts no threads, whatever is read from it."""

    def __init__(self, source: str | BinaryIO | pa.NativeFile):
        super().__init__(source, pre_buffer=False)

    def read(self, *args: Any, **kwargs: Any) -> pa.Table:
        return super().read(*args, **{**kwargs, "use_threads": False})

    def read_row_group(self, *args: Any, **kwargs: Any) -> pa.Table:
        return super().read_row_group(*args, **{**kwargs, "use_threads": False})

    def read_row_groups(self, *args: Any, **kwargs: Any) -> pa.Table:
        return super().read_row_groups(*args, **{**kwargs, "use_threads": False})

    def iter_batches(self, *args: Any, **kwargs: Any) -> Any:
        return super().iter_batches(*args, **{**kwargs, "use_threads": False})


def parquet_table(data: bytes) -> pa.Table:
    """The table of a Parquet file that is in memory. Raises pyarrow.ArrowException for other bytes."""
    return ParquetFile(pa.BufferReader(data)).read()


def ipc_table(data: bytes | pa.Buffer) -> pa.Table:
    """The table of an Arrow IPC file, without a copy. Raises pyarrow.ArrowException or OSError for other bytes."""
    return pa.ipc.open_file(pa.BufferReader(data), options=pa.ipc.IpcReadOptions(use_threads=False)).read_all()
