"""Range prefetch: fetch remote pictures before they are needed, neighbours in one request.

A request takes some 10 to 100 ms, so pictures of 100 KB fetched one by one arrive at a few MB/s. Members of one file
with at most `GAP` bytes between them are fetched by one request of at most `REQUEST` bytes; up to `PARALLEL_REQUESTS`
are in flight. If a request fails, each of its pictures is read separately and has its own error.
Price: up to `WINDOW` bytes (and one request per reading thread) wait in memory; bytes in gaps are transferred in vain.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sana_pipe.data.sources.filesystem import Unreadable

K = TypeVar("K")

GAP = 1 << 20
REQUEST = 32 << 20
WINDOW = 128 << 20
PARALLEL_REQUESTS = 16


@dataclass(frozen=True)
class FileRange:
    """The position of a picture. offset, size: in bytes; size None: the whole file."""

    file: str
    offset: int = 0
    size: int | None = None


@dataclass(eq=False)
class _Request(Generic[K]):
    file: str
    offset: int
    length: int | None
    keys: set[K] = field(default_factory=set)
    future: Future[bytes] | None = None


class RangePrefetch(Generic[K]):
    """Reads each key once, ahead of its use.

    Args:
        fetch: reads a range of a file.
        ranges: (key, range) in about the order of reading.
        read_alone: reads a single key: one that is not in `ranges`, is read again, or whose request failed.
    """

    def __init__(
        self,
        fetch: Callable[[FileRange], bytes],
        ranges: Iterable[tuple[K, FileRange]],
        read_alone: Callable[[K], bytes],
    ):
        self._whole = WINDOW // PARALLEL_REQUESTS
        self._fetch, self._read_alone = fetch, read_alone
        self._ranges = dict(ranges)
        self._request_of = {key: request for request in _requests(self._ranges) for key in request.keys}
        self._waiting = deque(dict.fromkeys(self._request_of[key] for key in self._ranges))
        self._bytes_in_window = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(PARALLEL_REQUESTS, thread_name_prefix="range-prefetch")

    def __enter__(self) -> RangePrefetch[K]:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, key: K) -> bytes:
        """The bytes of a key.

        Raises:
            Unreadable: as `Source.read`.
        """
        with self._lock:
            request = self._request_of.pop(key, None)
            if request is not None:
                future = self._start(request)
                self._fill()
        if request is None:
            return self._read_alone(key)
        try:
            data = future.result()
        except Unreadable:
            return self._read_alone(key)
        finally:
            with self._lock:
                request.keys.discard(key)
                if not request.keys:
                    self._bytes_in_window -= self._weight(request)
                    request.future = None  # its bytes are not needed any more
                    self._fill()
        wanted = self._ranges[key]
        if wanted.size is None:
            return data
        start = wanted.offset - request.offset
        return data[start : start + wanted.size]

    def _weight(self, request: _Request[K]) -> int:
        return self._whole if request.length is None else request.length

    def _start(self, request: _Request[K]) -> Future[bytes]:
        if request.future is None:
            self._bytes_in_window += self._weight(request)
            at = FileRange(request.file, request.offset, request.length)
            request.future = self._pool.submit(self._fetch, at)
        return request.future

    def _fill(self) -> None:
        """Start requests in order until the window is full."""
        while self._waiting:
            request = self._waiting[0]
            if request.keys and request.future is None:
                if self._bytes_in_window + self._weight(request) > WINDOW:
                    return
                self._start(request)
            self._waiting.popleft()


def _requests(ranges: dict[K, FileRange]) -> Iterable[_Request[K]]:
    last: _Request[K] | None = None
    for key, place in sorted(ranges.items(), key=lambda entry: (entry[1].file, entry[1].offset)):
        if last is not None and last.length is not None and place.size is not None and last.file == place.file:
            end = max(last.offset + last.length, place.offset + place.size)
            if place.offset - (last.offset + last.length) <= GAP and end - last.offset <= REQUEST:
                last.length = end - last.offset
                last.keys.add(key)
                continue
        if last is not None:
            yield last
        last = _Request(place.file, place.offset, place.size, {key})
    if last is not None:
        yield last
