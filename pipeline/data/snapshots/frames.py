"""Samples as columns, while a snapshot is made from them: in temporary files, about 170 bytes a sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from sana_pipe.data.cache.arrow import ROWS
from sana_pipe.data.cache.scratch import Scratch

_PER_SAMPLE = {
    "source": np.int32,
    "sample_id": np.uint64,
    "picture_id": np.uint64,
    "digest": "S16",
    "height": np.int64,
    "width": np.int64,
    "bucket": np.int64,
    "cluster": np.int64,
    "group": "S16",
}
_PER_CAPTION = {"text": np.int64, "weight": np.float32}
_PER_PAIR: dict[str, Any] = {"rejected": "S16", "weight": np.float32}


def ranges(begin: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`begin[0]`, `begin[0] + 1`, ...: `counts[0]` numbers, then those from `begin[1]`, and so on."""
    before = np.cumsum(counts) - counts
    return np.repeat(begin - before, counts) + np.arange(counts.sum())


def pieces(count: int) -> Iterator[slice]:
    """Ranges of `ROWS` rows."""
    return (slice(start, min(start + ROWS, count)) for start in range(0, count, ROWS))


@dataclass
class Frame:
    """Samples in columns, in the order in which they were joined. n samples, m captions.

    Attributes:
        source: (n,) int32 into `Joined.sources`.
        item: (n,) large strings.
        sample_id, picture_id: (n,) uint64; they differ for the records of a picture at several resolutions.
        digest: (n,) S16, of the picture's file.
        height, width: (n,) int64 of the picture, in pixels.
        bucket: (n,) int64 into the bucket table.
        cluster: (n,) int64, of samples that are balanced together; 0 until they are.
        pictures: kind -> (n,) int64 rows of its index.
        captions: (n + 1,) int64 offsets into the next two.
        text, weight: (m,) int64 rows of the texts' index; (m,) float32.
        group: (n,) S16, of samples that stay on one side of a held-out part (`snapshots.groups`); zeros: no value.
        pairs: of preference pairs (n,) each: `rejected`, S16 of the rejected picture's file, and `weight`, float32;
            empty where the samples are no pairs.
    """

    source: np.ndarray
    item: pa.Array
    sample_id: np.ndarray
    picture_id: np.ndarray
    digest: np.ndarray
    height: np.ndarray
    width: np.ndarray
    bucket: np.ndarray
    cluster: np.ndarray
    pictures: dict[str, np.ndarray]
    captions: np.ndarray
    text: np.ndarray
    weight: np.ndarray
    group: np.ndarray
    pairs: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sample_id)

    def take(self, rows: np.ndarray, scratch: Scratch) -> Frame:
        """Some rows (a boolean mask, or numbers), in their order. scratch: temporary storage."""
        columns = FrameColumns(scratch, self.pictures, bool(self.pairs))
        for start in range(0, len(rows), ROWS):
            some = rows[start : start + ROWS]
            columns.add(self.take_in_memory(start + np.flatnonzero(some) if rows.dtype == bool else some))
        return columns.frame()

    def captions_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the captions of rows (n,), one row after the other, and (n + 1,) offsets into them."""
        counts = self.captions[rows + 1] - self.captions[rows]
        return ranges(self.captions[rows], counts), np.concatenate([[0], np.cumsum(counts)])

    def take_in_memory(self, rows: np.ndarray) -> Frame:
        """The rows of some numbers, in their order; as few as fit into memory."""
        captions, offsets = self.captions_of(rows)
        return Frame(
            item=self.item.take(pa.array(rows)),
            captions=offsets,
            text=self.text[captions],
            weight=self.weight[captions],
            pictures={kind: column[rows] for kind, column in self.pictures.items()},
            pairs={name: column[rows] for name, column in self.pairs.items()},
            **{name: getattr(self, name)[rows] for name in _PER_SAMPLE},
        )


class FrameColumns:
    """Concatenates frames. kinds: of their picture records; paired: whether they have `Frame.pairs`."""

    def __init__(self, scratch: Scratch, kinds: Iterable[str], paired: bool = False):
        dtypes: dict[str, Any] = {**_PER_SAMPLE, **_PER_CAPTION, "captions": np.int64, "ends": np.int64, "items": "u1"}
        self._writers = {name: scratch.writer(dtype) for name, dtype in dtypes.items()}
        self._pictures = {kind: scratch.writer(np.int64) for kind in kinds}
        self._pairs = {name: scratch.writer(dtype) for name, dtype in _PER_PAIR.items() if paired}
        for name in ("captions", "ends"):
            self._writers[name].add(np.zeros(1))
        self._captions = self._bytes = 0

    def add(self, frame: Frame) -> None:
        for name in (*_PER_SAMPLE, *_PER_CAPTION):
            self._writers[name].add(getattr(frame, name))
        for kind, writer in self._pictures.items():
            writer.add(frame.pictures[kind])
        for name, writer in self._pairs.items():
            writer.add(frame.pairs[name])
        self._writers["captions"].add(frame.captions[1:] + self._captions)
        self._captions += len(frame.text)
        _, ends, data = frame.item.buffers()
        first = frame.item.offset
        ends = np.frombuffer(ends, np.int64, len(frame) + 1, first * 8) if len(frame) else np.zeros(1, np.int64)
        size = int(ends[-1] - ends[0])
        self._writers["ends"].add(ends[1:] - ends[0] + self._bytes)
        self._writers["items"].add(np.frombuffer(data, np.uint8, size, int(ends[0])) if size else np.empty(0, np.uint8))
        self._bytes += size

    def frame(self) -> Frame:
        """All of them; nothing can be added any more."""
        columns = {name: writer.finish() for name, writer in self._writers.items()}
        ends, items = columns.pop("ends"), columns.pop("items")
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(items)]
        return Frame(
            item=pa.LargeStringArray.from_buffers(len(ends) - 1, buffers[1], buffers[2]),
            pictures={kind: writer.finish() for kind, writer in self._pictures.items()},
            pairs={name: writer.finish() for name, writer in self._pairs.items()},
            **columns,
        )
