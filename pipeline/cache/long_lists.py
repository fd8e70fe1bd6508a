"""The long lists of documents, in pieces: the units of a plan, the commits of a segment.

At 10^8 pairs there are some 300,000 of each. As objects an entry takes about 2 KB; a `LongList` holds it in 50 to
130 bytes, compressed, and makes objects of a piece at a time. `parse` reads a document piece by piece, `pieces` writes
one.
Why not a table beside the document: a document exists twice, is read without other files, and stays as it was.
Price: entries are parsed again each time that a list is gone through.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from json.encoder import encode_basestring
from typing import Any, TypeVar, overload

import xxhash
import zstandard

from pipeline.cache import layout

T = TypeVar("T")

KEYS = {"plans": "units", "segments": "commits"}
"""Folder of documents -> the key of their long list."""
SMALL = 1 << 18
"""Documents of at most so many bytes are parsed whole."""
PIECE = 1 << 18
"""Bytes that are parsed at a time."""
ENTRIES = 512
"""Entries of a piece that was not read from a document."""
_SHORT = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def by(count: int, entries: Iterable[T]) -> Iterator[list[T]]:
    """Entries in lists of `count`."""
    entries = iter(entries)
    while some := list(islice(entries, count)):
        yield some


class LongList(Sequence[dict[str, Any]]):
    """A list of JSON objects, compressed."""

    def __init__(self, entries: Iterable[dict[str, Any]] = ()):
        self._pieces: list[bytes] = []
        self._ends: list[int] = []
        for some in by(ENTRIES, entries):
            self.extend(some)

    def extend(self, entries: list[dict[str, Any]]) -> bytes:
        """Add entries; returns their canonical JSON."""
        data = layout.canonical(entries)
        packed = zstandard.compress(data, 1)
        self._pieces.append(bytes(memoryview(packed)))  # a copy: zstandard's has room for what does not compress
        self._ends.append(len(self) + len(entries))
        return data

    def piecewise(self) -> Iterator[list[dict[str, Any]]]:
        """The entries, some at a time."""
        for piece in self._pieces:
            yield json.loads(zstandard.decompress(piece))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for entries in self.piecewise():
            yield from entries

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, number: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, number: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, number: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(number, slice):
            return list(self)[number]
        if not -len(self) <= number < len(self):
            raise IndexError(f"the list has {len(self)} entries, not {number + 1}")
        number %= len(self)
        piece = bisect_right(self._ends, number)
        entries: list[dict[str, Any]] = json.loads(zstandard.decompress(self._pieces[piece]))
        return entries[number - self._ends[piece]]


def parse(text: Iterator[bytes], key: str) -> dict[str, Any] | None:
    """A document, as `layout.unseal` returns it, with a `LongList` under `key`.

    Args:
        text: the document in pieces; keys before the list are in the first.

    Returns:
        None unless the bytes are exactly those of a document with a list of objects, of a version that is read:
        `unseal` says what is wrong.
    """
    try:
        return _parse(text, key)
    except (ValueError, KeyError, RecursionError):
        return None


def _parse(text: Iterator[bytes], key: str) -> dict[str, Any] | None:
    # Known by their indentation, since no string in JSON has a newline.
    begin, end, between = f'\n "{key}": ['.encode(), b"\n  }\n ]", b"\n  },\n  {"
    buffer = next(text, b"")
    head, found, buffer = buffer.partition(begin + b"\n")
    if not found:
        return None
    head += begin
    state, items = xxhash.xxh3_128(_before(json.loads(head + b"]}"), key)), LongList()
    while True:
        stop = buffer.find(end)
        cut = stop if stop >= 0 else buffer.rfind(between)
        if cut >= 0:
            _take(items, buffer[: cut + 4], state)
            if stop >= 0:
                break
            buffer = buffer[cut + 6 :]
        if not (more := next(text, b"")):
            return None
        buffer += more
    tail = b"]" + buffer[stop + len(end) :] + b"".join(text)
    body = layout.unpacked(head + tail)
    stated = body.pop("digest")
    state.update(_after(body, key))
    if state.hexdigest() != stated or (body.pop("format"), body.pop("version")) != (layout.FORMAT, layout.VERSION):
        return None
    return {**body, key: items}


def _take(items: LongList, text: bytes, state: xxhash.xxh3_128) -> None:
    """Add entries from their text. Raises ValueError for bytes that `layout.seal` would not write."""
    entries = json.loads(b"[" + text + b"]")
    if not all(entry and isinstance(entry, dict) for entry in entries) or _text(entries) != text:
        raise ValueError("other bytes than those of its entries")
    state.update(b"," * bool(len(items)) + items.extend(entries)[1:-1])


def _text(entries: list[dict[str, Any]]) -> bytes:
    """Entries as `layout.seal` writes and indents them. Its encoder is slow, and entries share most of their nested
    values."""
    known: dict[str, str] = {}

    def text(value: Any) -> str:
        if type(value) is str:
            return encode_basestring(value)
        if type(value) is int:
            return str(value)
        short = _SHORT.encode(value)
        if short[0] not in "[{":
            return short
        if short not in known:
            known[short] = layout.indented(value).decode().rstrip("\n").replace("\n", "\n   ")
        return known[short]

    lines = (",\n".join(f"   {text(name)}: {text(entry[name])}" for name in sorted(entry)) for entry in entries)
    return ",\n".join(f"  {{\n{part}\n  }}" for part in lines).encode()


def _before(body: dict[str, Any], key: str) -> bytes:
    """What the digest of a document covers before the entries of its list, in canonical JSON."""
    rest = {name: value for name, value in body.items() if name < key and name != "digest"}
    return layout.canonical({**rest, key: []})[:-2]


def _after(body: dict[str, Any], key: str) -> bytes:
    rest = {name: value for name, value in body.items() if name > key and name != "digest"}
    return b"]" + (b"," + layout.canonical(rest)[1:] if rest else b"}")


def pieces(body: dict[str, Any], key: str) -> Iterator[bytes]:
    """The bytes of `layout.seal`, in pieces. body: with a `LongList`, which is not empty, under `key`."""
    items: LongList = body[key]
    sealed = {"format": layout.FORMAT, "version": layout.VERSION, **body, key: []}
    state, comma = xxhash.xxh3_128(_before(sealed, key)), b""
    for entries in items.piecewise():
        state.update(comma + layout.canonical(entries)[1:-1])
        comma = b","
    state.update(_after(sealed, key))
    head, begin, tail = layout.indented({**sealed, "digest": state.hexdigest()}).partition(f'\n "{key}": ['.encode())
    yield head + begin + b"\n"
    comma = b""
    for entries in items.piecewise():
        yield comma + _text(entries)
        comma = b",\n"
    yield b"\n " + tail
