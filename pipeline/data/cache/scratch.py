"""Tables and arrays that do not fit into memory: unnamed temporary files, mapped; and sorting by key in such files.

`Scratch` holds rows in memory up to `LIMIT` bytes, and in a file beyond that. `Scratch.sorted_by_key` sorts rows
with a 16-byte key: runs of `RUN` rows are sorted in memory, written, and read side by side, one range of keys after
the other.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from sana_pipe.base import disk
from sana_pipe.base.errors import CacheError
from sana_pipe.data.cache.arrow import combined, ipc_table, take_rows
from sana_pipe.data.cache.keys import binary, fixed, halves, is_first

LIMIT = 4 << 20
"""Bytes of a table or array that stay in memory."""
RUN = 1 << 17
"""Rows that are sorted at a time."""
BINS = 1 << 12
"""Ranges of keys. A range is the least that is merged at a time, so rows over `RUN * BINS` need larger runs."""
SAMPLES = 64
"""Rows of each run of `sorted_rows` that say where ranges of equal size begin."""
TEXTS = 256
"""Rows of text that are Python objects at a time, for each run that is merged and each writer."""

_KEY = "key"


class Scratch:
    """Temporary storage next to a cache.

    Args:
        temporary: gives an unused path, as `Files.temporary`; default: in the system's folder for temporary files.
    """

    def __init__(self, temporary: Callable[[], AbstractContextManager[Path]] | None = None):
        self._temporary = temporary or _in_system_folder

    def array(self, count: int, dtype: Any) -> np.ndarray:
        """A writable array (count,) of zeros. One in a file occupies a file descriptor as long as it exists.

        Raises:
            NoSpaceError: the disk is full.
        """
        size = count * np.dtype(dtype).itemsize
        if size <= LIMIT:
            return np.zeros(count, dtype)
        file = unnamed_file(self._temporary)
        with file, disk.cache_errors(Path(file.name)):
            disk.allocate(file, size)  # writing to a mapped hole of a full disk would be a SIGBUS
            return np.memmap(file, dtype, "r+", shape=(count,)).view(np.ndarray)

    def table(self, schema: pa.Schema, batches: Iterable[pa.Table]) -> pa.Table:
        """One table of all batches; see `TableWriter.finish`.

        Raises:
            NoSpaceError: the disk is full.
        """
        writer = self.table_writer(schema)
        for batch in batches:
            writer.add(batch)
        return writer.finish()

    def arrays(self, chunks: Iterable[dict[str, np.ndarray]], dtypes: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Concatenate columns, each (n,). Those in files are not writable."""
        writers = {name: self.writer(dtype) for name, dtype in dtypes.items()}
        for chunk in chunks:
            for name, values in chunk.items():
                writers[name].add(values)
        return {name: writer.finish() for name, writer in writers.items()}

    def table_writer(self, schema: pa.Schema) -> TableWriter:
        """A table that is written piece by piece."""
        return TableWriter(self._temporary, schema)

    def rows(self, schema: pa.Schema, rows: Iterable[tuple[Any, ...]]) -> pa.Table:
        """A table of rows of Python values."""
        writer = self.row_writer(schema)
        for row in rows:
            writer.add(*row)
        return writer.finish()

    def row_writer(self, schema: pa.Schema) -> RowWriter:
        """A table that is written row by row."""
        return RowWriter(self.table_writer(schema), schema)

    def writer(self, dtype: Any) -> ArrayWriter:
        """An array of unknown length."""
        return ArrayWriter(self._temporary, np.dtype(dtype))

    def sorted_by_key(self, batches: Iterable[pa.Table]) -> Iterator[pa.Table]:
        """Rows in ascending order of the column `key` (fixed 16 bytes), as tables of about `RUN` rows. Rows of equal
        keys keep their order, and are in one table."""
        # An external merge sort without a merge. `RUN` rows at a time are sorted in memory and appended to one file,
        # next to the number of rows before each of 4,096 bins of the key's first 12 bits. Two runs, four bins:
        #   run A  0 0 1 3      rows before the bins  0 2 3 3 4
        #   run B  1 2 2 3      rows before the bins  0 0 1 3 4
        # Bins are joined until they have about `RUN` rows: bins 0 and 1 have 3 + 1 of them (A[0:3] and B[0:1]), bins 2
        # and 3 the rest. The slices of all runs for such a range are read, sorted and yielded. A bin is never divided,
        # so equal keys are in one table. Digests fill the bins evenly, so memory stays near `RUN` rows.
        runs: list[pa.Table] = []
        bins = self.writer(np.int64)  # 32 KiB a run

        def sorted_runs() -> Iterator[pa.Table]:
            for run in _regrouped(batches, RUN):
                ordered, high = _sorted(run)
                bins.add(np.searchsorted(high >> np.uint64(52), np.arange(BINS + 1, dtype=np.uint64)))
                yield ordered

        first = next(source := sorted_runs(), None)
        if first is None:
            return
        second = next(source, None)
        if second is None:
            yield first
            return

        whole = self.table(first.schema, chain([first, second], source))
        bounds = bins.finish().reshape(-1, BINS + 1)
        starts = np.cumsum([0, *bounds[:, -1]])
        runs = [whole.slice(start, bound[-1]) for start, bound in zip(starts.tolist(), bounds, strict=False)]
        for low, high in _ranges(np.sum(bounds, axis=0)):
            parts = [run.slice(bound[low], bound[high] - bound[low]) for run, bound in zip(runs, bounds, strict=True)]
            yield _sorted(pa.concat_tables(parts))[0]

    def by_key(self, keys: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Rows in ascending order of their keys, in pieces; equal keys are in one piece, in the order of their rows.

        Args:
            keys: (n,) S16 each, in the order of rows.

        Yields:
            Keys (n,) S16, rows (n,) int64, and which of them are the first of their key, (n,) bool.
        """

        def keyed() -> Iterator[pa.Table]:
            first = 0
            for some in keys:
                yield pa.table({_KEY: binary(some), "row": np.arange(first, first + len(some))})
                first += len(some)

        for part in self.sorted_by_key(keyed()):
            ordered = fixed(part.column(_KEY))
            yield ordered, part.column("row").to_numpy(), is_first(ordered)

    def absent(self, keys: Iterable[np.ndarray], others: Iterable[np.ndarray], count: int) -> np.ndarray:
        """Find which keys are not among others, (count,) bool.

        Args:
            keys, others: (n,) S16 each, in the order of rows. count: of all keys.
        """
        result = self.array(count, bool)
        for _, rows, first in self.by_key(chain(keys, others)):
            last = np.maximum.reduceat(rows, np.flatnonzero(first))
            result[rows[(last < count)[np.cumsum(first) - 1]]] = True
        return result

    def sorted_rows(self, rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
        """Rows of text (valid UTF-8) in ascending order by code point, as `sorted` gives them."""
        source = iter(rows)
        runs = (_sorted_texts(run) for run in iter(lambda: list(islice(source, RUN)), []))
        if (first := next(runs, None)) is None:
            return
        if len(first) < RUN:
            yield from _rows(first)
            return
        writer = self.table_writer(first.schema)
        lengths = [writer.add(run) for run in chain([first], runs)]
        whole = writer.finish()
        columns, step = whole.columns, max(1, RUN // SAMPLES)

        def row(at: int) -> tuple[str, ...]:
            return tuple(column[at].as_py() for column in columns)

        sample = sorted(row(at) for start, count in lengths for at in range(start, start + count, step))
        low, ends = [start for start, _ in lengths], [start + count for start, count in lengths]
        for bound in [*sample[SAMPLES::SAMPLES], None]:  # about `RUN` rows from one to the next
            spans = zip(low, ends, strict=True)
            high = ends if bound is None else [bisect_left(range(end), bound, at, end, key=row) for at, end in spans]
            parts = (whole.slice(at, to - at) for at, to in zip(low, high, strict=True))
            yield from _rows(sorted_by_all(pa.concat_tables(parts)))
            low = high


class ArrayWriter:
    """Appends to an array of one dimension, which is in a file from `LIMIT` bytes on."""

    def __init__(self, temporary: Callable[[], AbstractContextManager[Path]], dtype: np.dtype):
        self._temporary, self._dtype = temporary, dtype
        self._waiting: list[np.ndarray] = []
        self._size = 0
        self._file: BinaryIO | None = None

    def add(self, values: np.ndarray) -> None:
        """Append values (n,).

        Raises:
            NoSpaceError: the disk is full.
        """
        self._waiting.append(values.astype(self._dtype))
        self._size += self._waiting[-1].nbytes
        if self._size > LIMIT:
            self._flush()

    def _flush(self) -> None:
        if self._file is None:
            self._file = unnamed_file(self._temporary, buffering=0)  # closed by `finish`, or with this object
        with disk.cache_errors(Path(self._file.name)):
            for values in self._waiting:
                disk.write_all(self._file, values.data.cast("B"))
        self._waiting, self._size = [], 0

    def finish(self) -> np.ndarray:
        """The whole array, not writable if it is in a file; nothing can be added any more."""
        if self._file is None:
            return np.concatenate([np.empty(0, self._dtype), *self._waiting])
        self._flush()
        with self._file as file:
            return np.frombuffer(disk.mapped(file.fileno()), self._dtype)


class TableWriter:
    """Appends to a table, which is in a file from `LIMIT` bytes on."""

    def __init__(self, temporary: Callable[[], AbstractContextManager[Path]], schema: pa.Schema):
        self._temporary, self._schema = temporary, schema
        self._waiting: list[pa.Table] = []
        self._size = self._rows = 0
        self._file: BinaryIO | None = None
        self._writer: pa.ipc.RecordBatchFileWriter | None = None

    def add(self, table: pa.Table) -> tuple[int, int]:
        """Append rows. Returns the number of the first, and how many they are.

        Raises:
            NoSpaceError: the disk is full.
        """
        start, self._rows = self._rows, self._rows + len(table)
        self._waiting.append(table)
        self._size += table.nbytes
        if self._size > LIMIT:
            self._flush()
        return start, len(table)

    def _flush(self) -> None:
        if self._file is None:
            self._file = unnamed_file(self._temporary)  # closed by `finish`, or with this object
            self._writer = pa.ipc.new_file(pa.PythonFile(self._file, "w"), self._schema)
        assert self._writer is not None
        with disk.cache_errors(Path(self._file.name)):
            self._writer.write_table(self._joined())  # a batch for each piece would cost memory and time
        self._waiting, self._size = [], 0

    def _joined(self) -> pa.Table:
        return combined(pa.concat_tables([self._schema.empty_table(), *self._waiting]))

    def finish(self) -> pa.Table:
        """The whole table; nothing can be added any more. In memory it is `combined`; in a file it has a chunk for
        about `LIMIT` bytes, however many pieces these were."""
        if self._file is None or self._writer is None:
            return self._joined()
        if self._waiting:
            self._flush()
        with self._file as file, disk.cache_errors(Path(file.name)):
            self._writer.close()
            file.flush()
            return ipc_table(disk.mapped(file.fileno()))


class RowWriter:
    """Appends rows of Python values to a table; see `TableWriter`."""

    def __init__(self, writer: TableWriter, schema: pa.Schema):
        self._writer, self._schema = writer, schema
        self._waiting: list[tuple[Any, ...]] = []

    def add(self, *row: Any) -> None:
        """Append a row, a value for each column.

        Raises:
            NoSpaceError: the disk is full.
        """
        self._waiting.append(row)
        if len(self._waiting) == TEXTS:
            self._flush()

    def _flush(self) -> None:
        columns = zip(*self._waiting, strict=True) if self._waiting else [[] for _ in self._schema]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.add(pa.table(arrays, schema=self._schema))
        self._waiting = []

    def finish(self) -> pa.Table:
        """The whole table; nothing can be added any more."""
        self._flush()
        return self._writer.finish()


def _sorted_texts(rows: list[tuple[str, ...]]) -> pa.Table:
    numbers = range(len(rows[0]))
    columns = [pa.array([row[number] for row in rows], pa.large_string()) for number in numbers]
    return sorted_by_all(pa.table(columns, names=list(map(str, numbers))))


def sorted_by_all(table: pa.Table) -> pa.Table:
    """Rows of text, sorted in memory by the first column, then by the next ones."""
    return table.sort_by([(name, "ascending") for name in table.column_names])


def _rows(table: pa.Table) -> Iterator[tuple[str, ...]]:
    for start in range(0, len(table), TEXTS):
        yield from zip(*(column.to_pylist() for column in table.slice(start, TEXTS).columns), strict=True)


def unnamed_file(temporary: Callable[[], AbstractContextManager[Path]], buffering: int = -1) -> BinaryIO:
    """A new, empty file that has lost its name."""
    with temporary() as path, disk.cache_errors(path):
        return open(path, "x+b", buffering)


def _in_system_folder() -> AbstractContextManager[Path]:
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError:
        raise CacheError(
            "no folder for temporary files can be written", fix="set TMPDIR to a folder with free space"
        ) from None
    return disk.temporary_in(folder)


def _regrouped(batches: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of at least `rows` rows, but for the last."""
    waiting: list[pa.Table] = []
    for batch in batches:
        waiting.append(batch)
        if sum(map(len, waiting)) >= rows:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def _sorted(table: pa.Table) -> tuple[pa.Table, np.ndarray]:
    """A table sorted by key, stable, and the first halves of its keys."""
    high, low = halves(fixed(table.column(_KEY)))
    order = np.argsort(high, kind="stable")  # fast where the table consists of sorted runs
    first = high[order]
    equal = np.flatnonzero(first[1:] == first[:-1])
    if (low[order[equal + 1]] < low[order[equal]]).any():
        order = np.lexsort((low, high))  # the first halves stay where they are
    return take_rows(table.combine_chunks(), order), first


def _ranges(ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of bins with about `RUN` rows each. ends: (BINS + 1,) rows before each bin."""
    low = 0
    while low < BINS:
        high = max(low + 1, int(np.searchsorted(ends, ends[low] + RUN, side="right")) - 1)
        if ends[high] > ends[low]:
            yield low, high
        low = high
