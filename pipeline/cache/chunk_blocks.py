"""Blocks of a snapshot's chunk: digests of a few rows, so that a process checks only the rows that it uses.

A chunk has its columns one after the other. Block i covers the bytes of `BLOCK_ROWS` rows in every buffer, in the order
of the file:
- a column of samples: the values of the rows;
- offsets of the captions: those of the rows and the next row;
- a column of captions: the values of the rows' captions.
The first block also covers padding before its rows, the last block everything up to the next buffer. All other bytes
are the frame (Arrow's header and footer), which is checked before Arrow parses it. So every byte is in a block or in
the frame.
Price: 16 bytes a block, in the snapshot's list of chunks; some ten small reads for each block that is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from pipeline.cache.arrow import ipc_table
from pipeline.cache.local_files import Handle

BLOCK_ROWS = 1 << 10

Read = Callable[[int, int], bytes]
"""(offset, size) -> bytes of the file; fewer at its end."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """What a snapshot says of a chunk's file.

    Attributes:
        size: bytes of the file. begin, end: the frame is what lies before and after, in bytes.
        frame: its digest, 16 bytes.
        rows: of a block.
        digests: (blocks,) S16; none: only the whole file can be checked.
    """

    size: int
    begin: int
    end: int
    frame: bytes
    rows: int
    digests: np.ndarray

    def frame_of(self, read: Read) -> bytes:
        """The digest of a file's frame as it is now."""
        return xxhash.xxh3_128_digest(read(0, self.begin) + read(self.end, self.size - self.end))


@dataclass(frozen=True)
class _Buffer:
    """start, end: in the file. width: bytes of a value. of: `rows`, `offsets` or `captions`."""

    start: int
    end: int
    width: int
    of: str


class Places:
    """Where the rows of a chunk lie in its file.

    Args:
        table: of the file.
        file: its bytes, of which the table is made.

    Raises:
        ValueError: not one batch of full columns, one after the other.
    """

    def __init__(self, table: pa.Table, file: pa.Buffer):
        self.rows = table.num_rows
        starts: list[tuple[int, int, str]] = []
        last = 0
        for name in table.column_names:
            if table.column(name).num_chunks != 1:
                raise ValueError("several batches")
            array = table.column(name).chunk(0)
            kinds = [("rows", array.type, len(array))]
            if pa.types.is_list(array.type):
                captions = len(array.values)
                kinds = [("offsets", pa.int32(), len(array) + 1)]
                kinds += [("captions", field.type, captions) for field in array.type.value_type]
            buffers = [buffer for buffer in array.buffers() if buffer is not None and buffer.size]
            if len(buffers) != len(kinds):
                raise ValueError("empty columns, or values that are absent")
            for buffer, (of, kind, count) in zip(buffers, kinds, strict=True):
                starts.append((buffer.address - file.address, kind.byte_width, of))
                last = starts[-1][0] + count * kind.byte_width
        ends = [start for start, _, _ in starts[1:]] + [last]
        self.buffers = [_Buffer(start, end, width, of) for (start, width, of), end in zip(starts, ends, strict=True)]
        if any(buffer.end <= buffer.start for buffer in self.buffers) or last > file.size:
            raise ValueError("buffers in another order")

    def digest(self, read: Read, number: int, block_rows: int) -> bytes:
        """The digest of a block as it is now, 16 bytes. Offsets are taken from the bytes that are read."""
        state = xxhash.xxh3_128()
        first, last = number * block_rows, min((number + 1) * block_rows, self.rows)
        captions = (0, 0)
        for buffer in self.buffers:
            begin, end = captions if buffer.of == "captions" else (first, last + (buffer.of == "offsets"))
            start, stop = buffer.start + begin * buffer.width, buffer.start + end * buffer.width
            start = buffer.start if not first else start
            stop = buffer.end if last == self.rows else stop
            if not buffer.start <= start <= stop <= buffer.end:
                break  # damaged offsets, which have been added already
            data = read(start, stop - start)
            state.update(data)
            if buffer.of == "offsets":
                if len(data) < 4 * (last - first + 1):
                    break
                offsets = np.frombuffer(data, "<i4", last - first + 1)
                captions = int(offsets[0]), int(offsets[-1])
        return state.digest()


def blocks_of(data: bytes, block_rows: int) -> Blocks:
    """The blocks of a chunk's file."""
    file = pa.py_buffer(data)

    def read(offset: int, size: int) -> bytes:
        return data[offset : offset + size]

    try:
        places = Places(table := ipc_table(file), file)
    except ValueError:
        return Blocks(len(data), 0, 0, xxhash.xxh3_128_digest(data), block_rows, np.empty(0, "S16"))
    count = -(-table.num_rows // block_rows)
    digests = [places.digest(read, number, block_rows) for number in range(count)]
    blocks = Blocks(
        len(data), places.buffers[0].start, places.buffers[-1].end, b"", block_rows, np.array(digests, "S16")
    )
    return Blocks(blocks.size, blocks.begin, blocks.end, blocks.frame_of(read), block_rows, blocks.digests)


class CheckedBlocks:
    """The blocks of a mapped chunk, each checked when it is first asked for.

    Args:
        identity: of the file that is mapped. places: of its rows.
        done: (blocks,) bool: those that were checked; changed here.

    Safe for several threads: a block may be checked twice.
    """

    def __init__(self, identity: tuple[int, ...], blocks: Blocks, places: Places, done: np.ndarray):
        self.identity, self._blocks, self._places, self._done = identity, blocks, places, done

    def damaged(self, handle: Handle, rows: np.ndarray) -> Iterator[tuple[int, bytes, bytes]]:
        """Check the blocks of some rows of the chunk, (n,) int64; yields (block, digest expected, found) of bad ones.

        Args:
            handle: the file, opened for this check only: many chunks are mapped, and each would keep a descriptor.

        Raises:
            OSError: the disk cannot read it.
        """
        numbers = np.unique(rows // self._blocks.rows)
        for number in numbers[~self._done[numbers]].tolist():
            expected = bytes(self._blocks.digests[number]).ljust(16, b"\0")
            found = self._places.digest(reader(handle), number, self._blocks.rows)
            if found != expected:
                yield number, expected, found
            self._done[number] = found == expected

    def checked(self, rows: np.ndarray) -> bool:
        """Whether the blocks of some rows were checked."""
        return bool(self._done[rows // self._blocks.rows].all())


def reader(handle: Handle) -> Read:
    """Reads of an open file: not through its mapping, where a bad sector would kill the process."""

    def read(offset: int, size: int) -> bytes:
        data = bytearray(size)
        return bytes(memoryview(data)[: handle.read_into(memoryview(data), offset)])

    return read
