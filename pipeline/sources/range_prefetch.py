"""Reading ahead: pictures that lie behind a network are asked for before they are needed, neighbours in one request.

What: `RangePrefetch` is told which keys will be read, about in which order. Members of one file with at most `GAP` bytes
between them are fetched by one request of at most `REQUEST` bytes; `TOGETHER` requests are under way at once.
Why: a request costs some 10 to 100 ms wherever it goes, so pictures of 100 KB, one after the other, come at a few MB/s.
Price: up to `WINDOW` bytes (and a request for each thread that reads) wait in memory; the bytes in the gaps are
transferred for nothing.

A request that fails is not the end of its pictures: each is then read on its own, and has its own error. So it is with
a server that turns out to send no ranges: many requests at once would have it send many whole files at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from pipeline.sources.filesystem import Filesystem, Unreadable

GAP = 1 << 20
REQUEST = 32 << 20
WINDOW = 128 << 20
TOGETHER = 16
WHOLE = WINDOW // TOGETHER
"""What a file of unknown size counts for in the window."""


@dataclass(frozen=True)
class Place:
    """Where a picture lies. size: in bytes; None: the whole file."""

    file: str
    offset: int = 0
    size: int | None = None


@dataclass
class _Request:
    file: str
    offset: int
    length: int | None
    left: set[str] = field(default_factory=set)
    future: Future[bytes] | None = None

    @property
    def weight(self) -> int:
        return WHOLE if self.length is None else self.length


class RangePrefetch:
    """Reads each of some keys once.

    Args:
        places: (key, place), about in the order in which they will be read.
        plain: reads a key alone: one that was not named, is asked for again, or whose request failed.
    """

    def __init__(self, filesystem: Filesystem, places: Iterable[tuple[str, Place]], plain: Callable[[str], bytes]):
        self._filesystem, self._plain = filesystem, plain
        self._places = dict(places)
        self._of = {key: request for request in _requests(self._places) for key in request.left}
        self._waiting = deque(dict.fromkeys(id(self._of[key]) for key in self._places))
        self._by_id = {id(request): request for request in self._of.values()}
        self._held = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(TOGETHER, thread_name_prefix="ahead")

    def __enter__(self) -> RangePrefetch:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, key: str) -> bytes:
        """The bytes of a key.

        Raises:
            Unreadable: as `Source.read`.
        """
        with self._lock:
            request = self._of.pop(key, None)
            if request is not None:
                future = self._started(request)
                self._fill()
        if request is None:
            return self._plain(key)
        try:
            data = future.result()
        except Unreadable:
            return self._plain(key)
        finally:
            with self._lock:
                request.left.discard(key)
                if not request.left:
                    self._held -= request.weight
                    self._by_id.pop(id(request), None)
                    self._fill()
        place = self._places[key]
        if place.size is None:
            return data
        start = place.offset - request.offset
        return data[start : start + place.size]

    def _started(self, request: _Request) -> Future[bytes]:
        if request.future is None:
            self._held += request.weight
            request.future = self._pool.submit(self._fetch, request)
        return request.future

    def _fill(self) -> None:
        """Start what comes next, as far as the window goes."""
        while self._waiting:
            request = self._by_id.get(self._waiting[0])
            if request is not None and request.future is None:
                if self._held + request.weight > WINDOW:
                    return
                self._started(request)
            self._waiting.popleft()

    def _fetch(self, request: _Request) -> bytes:
        if not self._filesystem.is_remote:
            raise Unreadable(f"{request.file}: is not read ahead")
        if request.length is None:
            return self._filesystem.read(request.file)
        return self._filesystem.read_range(request.file, request.offset, request.length)


def _requests(places: dict[str, Place]) -> Iterable[_Request]:
    last: _Request | None = None
    for key, place in sorted(places.items(), key=lambda entry: (entry[1].file, entry[1].offset)):
        if last is not None and last.length is not None and place.size is not None and last.file == place.file:
            end = max(last.offset + last.length, place.offset + place.size)
            if place.offset - (last.offset + last.length) <= GAP and end - last.offset <= REQUEST:
                last.length = end - last.offset
                last.left.add(key)
                continue
        if last is not None:
            yield last
        last = _Request(place.file, place.offset, place.size, {key})
    if last is not None:
        yield last
