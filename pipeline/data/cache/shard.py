"""Shards: immutable USTAR tars of .npy members, readable by any webdataset client and by offset.

`ShardWriter` packs records into a tar; `ShardReader` reads a record at a known offset and verifies it.

A shard holds, in this order: `__sana_pipe__/head`; for each record `<key>.npy` (and `<key>.txt` for text: the
original caption); `__sana_pipe__/records`, the record table, from which a lost index can be rebuilt.
bf16 is stored as `<u2` (numpy has no bf16): `torch.from_numpy(array.view("int16")).view(torch.bfloat16)`.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import tarfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa
import xxhash

from sana_pipe.base import counters
from sana_pipe.base.disk import Handle, cache_errors, descriptors_left, is_out_of_resources, raise_if_of_machine, sync
from sana_pipe.base.errors import CacheError, IntegrityError
from sana_pipe.data.cache import codec, layout
from sana_pipe.data.cache.arrow import combined, ipc_table
from sana_pipe.data.cache.encodings import CaptionEncoding, Encoding, records_schema
from sana_pipe.data.cache.files import Files


class NotAShardError(IntegrityError):
    """The first bytes of a file were read, and are not those of a shard."""


BLOCK = 512
TOUCH_S = 3600
"""Seconds between touches of a shard being written, so that sweepers on other machines spare it."""
_HEAD = 4096
"""Bytes at the beginning of a shard that hold its head."""


def npy_header(shape: tuple[int, ...], descr: str = "<u2") -> bytes:
    """The .npy (version 1.0) header of a C-ordered array."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def to_ipc(table: pa.Table) -> bytes:
    """A table as an uncompressed Arrow IPC file with one record batch (more if a column is too large for one)."""
    sink = io.BytesIO()
    write_ipc(table, sink)
    return sink.getvalue()


def write_ipc(table: pa.Table, sink: BinaryIO) -> None:
    """Write the bytes of `to_ipc`, without a copy in memory of a table in one piece."""
    with pa.ipc.new_file(pa.PythonFile(sink, "w"), table.schema) as writer:
        writer.write_table(combined(table))


def from_ipc(data: bytes | pa.Buffer, where: str) -> pa.Table:
    """The table in the bytes of an Arrow IPC file. where: its name, for messages.

    Raises:
        IntegrityError: not a valid Arrow file.
    """
    try:
        table = ipc_table(data)
        table.validate(full=True)  # opening does not check offsets
        return table
    except (pa.ArrowException, OSError, ValueError) as error:
        raise IntegrityError(f"{where}: not an Arrow file: {error}") from None


class TarWriter:
    """Writes one shard, which is published as a whole under the digest of its bytes.

    Args:
        files: the cache.
        head: the content of its first member.

    Leaving the `with` block without `close` discards the shard.
    """

    def __init__(self, files: Files, head: dict[str, Any]):
        self.files = files
        self._stack = files.temporary()
        self._path = self._stack.__enter__()
        with cache_errors(self._path):
            self._file = open(self._path, "xb", buffering=4 << 20)  # noqa: SIM115 - closed by close or __exit__
        self._state = xxhash.xxh3_128()
        self._offset = 0
        self._touched = time.monotonic()
        self._member(f"{layout.META}/head", layout.canonical(head) + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # flushing the buffer of a discarded shard may fail
            self._file.close()
        self._stack.__exit__(None, None, None)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._offset

    def close(self, folder: str, records: bytes, *, only: str | None = None) -> str:
        """Add the record table and publish the shard in a folder of `shards/`; returns its digest (hex).

        Args:
            only: publish only if the digest is this one (a repair must restore the same bytes).
        """
        self._member(f"{layout.META}/records", records)
        self._write(bytes(2 * BLOCK))
        with cache_errors(self._path):
            sync(self._file)
            self._file.close()
        digest = self._state.hexdigest()
        if only in (None, digest):
            self.files.publish_content(self._path, layout.Paths.shard(folder, digest), digest)
        return digest

    def _member(self, name: str, *pieces: bytes | memoryview) -> int:
        size = sum(len(piece) for piece in pieces)
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = size, 0, 0o644
        self._write(info.tobuf(tarfile.USTAR_FORMAT))
        start = self._offset
        for piece in pieces:
            self._write(piece)
        self._write(bytes(-size % BLOCK))
        return start

    def _write(self, data: bytes | memoryview) -> None:
        with cache_errors(self._path):
            self._file.write(data)
            if time.monotonic() - self._touched >= TOUCH_S:
                os.utime(self._path)
                self._touched = time.monotonic()
        self._state.update(data)
        self._offset += len(data)


class ShardWriter(TarWriter):
    """Packs the records of one unit into a shard.

    Args:
        files: the cache.
        encoding: the encoding of every record.
        unit: the unit's id, for the shard's head.
        measured: collects size and error of the records (storages other than plain bf16; decodes each record).

    Usage: `add` records, then `finish`. Leaving the `with` block without `finish` discards the shard.
    """

    def __init__(self, files: Files, encoding: Encoding, unit: str, measured: codec.Measured | None = None):
        self.encoding, self.measured = encoding, measured
        self._codec = codec.codec_of(encoding)
        self._columns: dict[str, list[Any]] = {name: [] for name in records_schema(encoding.kind).names}
        head = {"format": layout.FORMAT, "version": layout.VERSION, "encoding": encoding.name, "unit": unit}
        super().__init__(files, head)

    def __len__(self) -> int:
        return len(self._columns["key"])

    def add(
        self,
        key: bytes,
        array: np.ndarray,
        *,
        caption: str | None = None,
        valid: int | None = None,
        stored: bytes | None = None,
    ) -> None:
        """Add a record.

        Args:
            key: 16 bytes.
            array: uint16 (bits of bf16, or plain values), with the encoding's axes.
            caption: the original caption (text records; the null record has "").
            valid: number of rows that attention may see (text records); default: all.
            stored: the encoded payload from another shard of this encoding, to be copied unchanged.

        Raises:
            IntegrityError: NaN or infinity in `array`.
        """
        if array.dtype != np.uint16:
            raise TypeError(f"payload must be uint16, found {array.dtype}")
        array = np.ascontiguousarray(array).astype("<u2", copy=False)
        if self.encoding.bf16 and not finite(array):
            raise IntegrityError(f"record {key.hex()}: holds NaN or infinity, which is never stored")
        payload: bytes | memoryview
        if self._codec is None:
            payload = memoryview(array.data).cast("B")
            header = npy_header(array.shape)
        else:
            payload = self._codec.encode(array) if stored is None else stored
            header = npy_header((len(payload),), "|u1")
            if self.measured is not None and caption != "":  # the null record is not representative
                self.measured.add(self._codec, array, payload)
        start = self._member(f"{key.hex()}.npy", header, payload)
        row: dict[str, Any] = {
            "key": key,
            "offset": start + len(header),
            "length": len(payload),
            "checksum": layout.checksum(self.encoding.id, key, payload),
        }
        row.update(zip(self.encoding.axes, array.shape, strict=True))
        if isinstance(self.encoding, CaptionEncoding):
            text = (caption or "").encode("utf-8")
            row.update(valid=len(array) if valid is None else valid, caption_length=len(text))
            row["caption_offset"] = self._member(f"{key.hex()}.txt", text)
            row["caption_checksum"] = layout.digest("caption", key, text)
        for name, values in self._columns.items():
            values.append(row[name])

    def finish(self, *, only: str | None = None) -> tuple[str, int, pa.Table]:
        """Close and publish the shard. Returns its digest (hex), its size in bytes and the record table.

        Args:
            only: publish only if the digest is this one (a repair must restore the same bytes).
        """
        table = pa.table(self._columns, schema=records_schema(self.encoding.kind))
        digest = self.close(self.encoding.name, to_ipc(table), only=only)
        return digest, self._offset, table


def finite(bits: np.ndarray) -> bool:
    """True if no bf16 value in these uint16 bits is NaN or infinite (exponent all ones)."""
    return not bool(np.any((bits & 0x7F80) == 0x7F80))


GAP = 8192
"""Records with at most this many bytes between them are read in one call."""
RUN = 64
"""Limit on the records in one call."""
_FIX = "sana-pipe verify --repair, with the --config and --set of this cache; or restore this shard from a copy of it"
_thread = threading.local()


def _gap(size: int) -> memoryview:
    """A scratch buffer of this thread for the bytes between two records."""
    if not hasattr(_thread, "gap"):
        _thread.gap = memoryview(bytearray(GAP))
    return _thread.gap[:size]


class _Reads:
    """Records in the order of storage, and how they are grouped into reads. Arguments as for `ShardReader.read_batch`.

    Args:
        apart: read each record by itself.
    """

    def __init__(
        self,
        columns: Mapping[str, np.ndarray],
        which: np.ndarray,
        into: np.ndarray,
        begin: np.ndarray,
        end: np.ndarray,
        *,
        apart: bool,
    ):
        order = which[np.lexsort((columns["offset"][which], columns["shard"][which]))]
        shard, start = columns["shard"][order], columns["offset"][order].astype(np.int64)
        stride = into.strides[0]
        size = (end - begin)[order] * stride
        gap = start[1:] - start[:-1] - size[:-1]
        new_run = (shard[1:] != shard[:-1]) | (gap < 0) | (gap > GAP) | apart
        new_run[RUN - 1 :: RUN] = True
        self.rows: list[int] = order.tolist()  # of the columns
        self.shards: list[int] = shard.tolist()
        self.starts: list[int] = start.tolist()
        self.sizes: list[int] = size.tolist()
        self.gaps: list[int] = gap.tolist()  # bytes between each record and the next
        data, places = into.data.cast("B"), (begin[order] * stride).tolist()
        self.views = [data[at : at + length] for at, length in zip(places, self.sizes, strict=True)]
        self.runs = [0, *(np.flatnonzero(new_run) + 1).tolist(), len(order)]  # where a new read begins, and the end


class RecordError(IntegrityError):
    """The bytes of one record are not those that were written. shard: its name; key: 16 bytes."""

    def __init__(self, shard: str, key: bytes, what: str, **more: Any):
        super().__init__(what, **more)
        self.shard, self.key = shard, key


class ShardReader:
    """Reads verified records by offset. Safe for use by several threads.

    Args:
        files: the cache.
        encoding: the encoding of the records.
        limit: maximum number of open shards; fewer if this process has few file descriptors left.
        folder: the folder of the shards within `shards/`; default: the encoding's.
        ranged: read an object store by range requests instead of whole shards: for records that are read once.
    """

    def __init__(
        self, files: Files, encoding: str, *, limit: int = 256, folder: str | None = None, ranged: bool = False
    ):
        self.files, self.encoding, self.folder = files, encoding, folder or encoding
        self._ranged = ranged
        self.encoding_id = encoding.partition("-")[2]
        self._codec = codec.reader(files, encoding)
        self._limit = max(4, min(limit, descriptors_left() // 2))
        self._open: OrderedDict[str, Handle] = OrderedDict()
        self._reopened: dict[str, float] = {}
        self._lock = threading.Lock()
        files.readers.add(self)

    def read(
        self,
        shard: str,
        offset: int,
        key: bytes,
        expected: bytes,
        into: np.ndarray,
        length: int | None = None,
        attempts: int = 2,
    ) -> None:
        """Read one record and verify it; after a mismatch it is read again.

        Args:
            shard: its name.
            offset: of the payload in the shard, in bytes.
            key: 16 bytes.
            expected: the checksum, 16 bytes.
            into: C-contiguous uint16 array of the record's shape, for the bf16 bits.
            length: of the payload in bytes; required for storages other than plain bf16.
            attempts: number of readings; before the last the shard is reopened.

        Raises:
            IntegrityError: the bytes are too few or wrong; names shard, record and offset.
        """
        if self._codec is None:
            if length not in (None, into.nbytes):
                raise IntegrityError(
                    f"{self.where(shard, offset, key)} is not stored as plain bf16 of shape {into.shape}",
                    expected=f"{into.nbytes} bytes",
                    found=f"{length} bytes",
                    fix=f"{layout.REPAIR} (the encoding's document says how it is stored)",
                )
            self._read(shard, offset, key, expected, memoryview(into.data).cast("B"), attempts)
        else:
            self._codec.decode(self.stored(shard, offset, key, expected, length), into, self.where(shard, offset, key))

    def read_batch(
        self,
        shards: Sequence[str],
        columns: Mapping[str, np.ndarray],
        which: np.ndarray,
        into: np.ndarray,
        begin: np.ndarray,
        end: np.ndarray,
        *,
        verify: bool,
        on_read: Callable[[str, int, bytes], None] | None,
    ) -> list[tuple[int, RecordError]]:
        """Read many records in the order of storage, neighbours in one call. Each is verified; a wrong record is read
        a second time, by itself.

        Args:
            shards: names; the column `shard` is an index into them.
            columns: `shard`, `offset`, `key`, `checksum` of each record, and `length` where they are not plain bf16.
            which: rows of the columns, (n,) int64: the records to read.
            into: C-contiguous uint16; record i goes to `into[begin[i] : end[i]]`.
            verify: False skips the checksums, to measure their cost.
            on_read: called with the place (shard, offset, key) of each record before it is read.

        Returns:
            The records that stay wrong: (row, error), by row.

        Raises:
            IntegrityError: not about one record: a shard is missing, or stored otherwise than its encoding says.
        """
        if not len(which):
            return []
        reads = _Reads(columns, which, into, begin, end, apart=self._codec is not None)
        keys, checksums = columns["key"].tobytes(), columns["checksum"].tobytes()
        lengths = columns["length"].tolist() if "length" in columns else None
        counters.add(read_bytes=sum(reads.sizes) if lengths is None else sum(lengths[row] for row in reads.rows))
        bad: list[tuple[int, RecordError]] = []
        for first, last in pairwise(reads.runs):
            shard = shards[reads.shards[first]]
            if on_read is not None:
                on_read(shard, reads.starts[first], keys[reads.rows[first] * 16 :][:16])
            complete = self._codec is None and self._read_run(shard, reads, first, last)
            if complete and not verify and lengths is None:
                continue
            for i in range(first, last):
                row, offset = reads.rows[i], reads.starts[i]
                key, checksum = keys[row * 16 : row * 16 + 16], checksums[row * 16 : row * 16 + 16]
                length = None if lengths is None else lengths[row]
                right_size = complete and length in (None, reads.sizes[i])
                if right_size and (not verify or self.matches(key, checksum, reads.views[i])):
                    continue
                if on_read is not None:
                    on_read(shard, offset, key)
                try:
                    attempts = 2 if self._codec is not None else 1  # a plain record has been read once already
                    self.read(shard, offset, key, checksum, into[begin[row] : end[row]], length, attempts)
                except RecordError as error:
                    bad.append((row, error))
        return sorted(bad, key=lambda pair: pair[0])

    def _read_run(self, shard: str, reads: _Reads, first: int, last: int) -> bool:
        """Read neighbouring records into their views; False if bytes are missing."""
        pieces = reads.views[first : first + 1]
        for i in range(first + 1, last):
            pieces += (_gap(reads.gaps[i - 1]), reads.views[i])
        start, end = reads.starts[first], reads.starts[last - 1] + reads.sizes[last - 1]
        return self.read_span(shard, start, pieces) == end - start

    def matches(self, key: bytes, checksum: bytes, payload: memoryview) -> bool:
        """Return whether a payload is what was written under this key."""
        return layout.checksum(self.encoding_id, key, payload) == checksum

    def stored(self, shard: str, offset: int, key: bytes, expected: bytes, length: int | None) -> bytearray:
        """The verified payload of a record, still encoded.

        Raises:
            IntegrityError: as `read`.
        """
        if length is None:
            raise IntegrityError(f"{self.where(shard, offset, key)}: the length of its payload was not recorded")
        payload = bytearray(length)
        self._read(shard, offset, key, expected, memoryview(payload))
        return payload

    def where(self, shard: str, offset: int, key: bytes) -> str:
        """The location of a record, for messages."""
        return f"{self.files.where(layout.Paths.shard(self.folder, shard))}: record {key.hex()} at byte {offset}"

    def _read(
        self,
        shard: str,
        offset: int,
        key: bytes,
        expected: bytes,
        view: memoryview,
        attempts: int = 2,
        *,
        caption: bool = False,
    ) -> None:
        """Fill `view` from a shard with a record's payload, or its caption, until its bytes have the expected checksum.
        The last attempt reopens the shard: a file that was replaced (a repair, a restored copy, NFS) keeps its old
        bytes while it is open."""
        problem: dict[str, Any] = {}
        for left in reversed(range(attempts)):

            def fill(reopen: bool = left == 0) -> int:
                handle = self._reopen(shard) if reopen else self._handle(shard)
                try:
                    return handle.read_into(view, offset)
                except OSError:
                    self._open.pop(shard, None)  # it may stay stale when the file system is back
                    raise

            try:
                got = self.files.when_reachable(fill)
            except OSError as error:  # a bad sector, a stale file of NFS
                if not left:
                    raise_if_of_machine(error, self.files.where(layout.Paths.shard(self.folder, shard)))
                what, problem = f"cannot be read: {error.strerror or error}", {}
                continue
            if got != len(view):
                what, problem = "is cut short", {"expected": f"{len(view)} bytes", "found": f"{got} bytes"}
                continue
            actual = (
                layout.digest("caption", key, bytes(view)) if caption else layout.checksum(self.encoding_id, key, view)
            )
            if actual == expected:
                return
            what, problem = "has the wrong checksum", {"expected": expected.hex(), "found": actual.hex()}
        where = self.where(shard, offset, key) + (" (its caption)" if caption else "")
        raise RecordError(shard, key, f"{where} {what}", **problem, fix=_FIX)

    def caption(self, shard: str, offset: int, length: int, key: bytes, expected: bytes) -> str:
        """The original caption of a text record.

        Raises:
            IntegrityError: other bytes than were written.
        """
        data = bytearray(length)
        self._read(shard, offset, key, expected, memoryview(data), caption=True)
        return data.decode("utf-8")

    def close(self) -> None:
        """Close all open shards; a read opens its shard again."""
        self._open.clear()

    def read_span(self, shard: str, offset: int, views: list[Any]) -> int:
        """Fill writable buffers in turn from an offset of a shard, unverified; returns the bytes read, -1 on a disk
        error (reading the records one by one then reports it)."""
        handle = self._handle(shard)  # this reference keeps it open if it is evicted meanwhile
        try:
            return os.preadv(handle.descriptor, views, offset)
        except OSError:
            return -1

    def _handle(self, shard: str) -> Handle:
        handle = self._open.get(shard)
        if handle is not None and len(self._open) <= self._limit // 2:
            return handle  # far below the limit the order of use does not matter
        with self._lock:
            handle = self._open.get(shard)
            if handle is not None:
                with suppress(KeyError):  # another thread closed all shards
                    self._open.move_to_end(shard)
                return handle
            handle = self._open_shard(layout.Paths.shard(self.folder, shard))
            self._open[shard] = handle
            while len(self._open) > self._limit:
                with suppress(KeyError):
                    self._open.popitem(last=False)
            return handle

    def _open_shard(self, name: str, trust: bool = True) -> Handle:
        """Open a shard. If descriptors or disk space run out, close all readers' files and try again."""

        def opened() -> Handle:
            return self.files.ranged(name) if self._ranged else self.files.open(name, trust=trust)

        try:
            try:
                return opened()
            except (OSError, CacheError) as error:
                if not is_out_of_resources(error):
                    raise
            self.files.close_readers()
            return opened()
        except FileNotFoundError:
            raise IntegrityError(f"{self.files.where(name)}: the shard is missing", fix=layout.REPAIR) from None

    def _reopen(self, shard: str) -> Handle:
        """The shard, reopened because a record read from it was wrong."""
        with self._lock:
            now = time.monotonic()
            if now - self._reopened.get(shard, -math.inf) >= self.files.reopen_s:
                self._reopened[shard] = now
                self._open[shard] = self._open_shard(layout.Paths.shard(self.folder, shard), trust=False)
        return self._handle(shard)


def read_head(files: Files, name: str) -> dict[str, Any]:
    """The head of a shard, from its first bytes: `encoding` (or `pack`) and `unit`.

    Raises:
        NotAShardError: not a shard of this format.
        FileNotFoundError: it is missing.
        IntegrityError: the disk cannot read it.
        CacheError: it cannot be read for another reason.
    """
    data = bytearray(_HEAD)
    try:
        got = files.when_reachable(lambda: files.ranged(name).read_into(memoryview(data), 0))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise_if_of_machine(error, files.where(name))
        kind = IntegrityError if error.errno == errno.EIO else CacheError
        raise kind(f"{files.where(name)}: cannot be read: {error.strerror or error}") from None
    try:
        member = tarfile.TarInfo.frombuf(bytes(data[:BLOCK]), "utf-8", "strict")
        head = json.loads(data[BLOCK : min(got, BLOCK + member.size)])
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise NotAShardError(f"{files.where(name)}: not a shard: {error}") from None
    if member.name != f"{layout.META}/head" or not isinstance(head, dict) or "unit" not in head:
        raise NotAShardError(f"{files.where(name)}: not a shard of this format: it does not begin with its description")
    return head


def read_table(files: Files, name: str) -> pa.Table:
    """The record table from a shard itself (when the index is lost). Reads only the headers of records.

    Raises:
        IntegrityError: not a shard of this format.
    """
    where, member = files.where(name), f"{layout.META}/records"

    def contents() -> list[bytes]:
        with files.open(name).file() as file, tarfile.open(fileobj=file, mode="r:") as tar:
            return [tar.extractfile(m).read() for m in tar if m.isreg() and m.name == member]  # type: ignore[union-attr]

    try:
        tables = files.when_reachable(contents)
    except (tarfile.TarError, OSError) as error:
        raise_if_of_machine(error, where)
        raise IntegrityError(f"{where}: not a shard: {error}") from None
    if not tables:
        raise IntegrityError(f"{where}: not a shard of this format: it has no {member}")
    return from_ipc(tables[-1], f"{where}!{member}")
