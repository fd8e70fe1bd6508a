"""Prompt sets: immutable lists of prompts with their text records, for pictures during training.

`publish` appends a document to `prompts/<name>/`, `open_prompts` opens the newest set of a name, `current` lists them.
A set has its records in a table of its own (`ROWS`), which exists twice: training opens no index of all captions, and
neither gc nor a repair of shards concerns it. Its id depends on the texts and the encoding alone.
Price: the rows of a prompt are stored three times, some 300 KB for each prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from sana_pipe.base.errors import CacheError, IntegrityError
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.cache import CAPTIONS, FORGOTTEN, Cache, check_prompts_name
from sana_pipe.data.cache.encodings import CaptionEncoding
from sana_pipe.data.cache.index import as_keys
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.shard import ShardReader, from_ipc, to_ipc
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import TextPlace
from sana_pipe.data.cache.snapshot_samples import Caption

NAME = "prompts"
"""The name of a set that was not given any other."""
TRIGGER = "trigger"
"""The name of the set that `encode` makes of `data.caption_prefix`."""
TRIGGER_CONTEXTS = ("{}", "{} on a beach at sunset", "{} in the snow", "a pencil drawing of {}")
"""Prompts that show whether a trigger word, `{}`, is learnt."""


ROWS = pa.schema([("text", pa.string()), ("valid", pa.uint32()), ("rows", pa.large_binary())])
"""The null record (without a text), then the prompts as written. rows: bits of bf16, (n, width), of which attention
sees the first `valid`."""


TRIGGER_PLACE = r"(?i)[\[{<]trigger(?:[ _-]?word)?[\]}>]"
"""The placeholder of other trainers for the trigger word in a caption: `[trigger]`."""


def filled(text: str, word: str) -> str:
    """The text with the trigger word in the places that it has for it."""
    return re.sub(TRIGGER_PLACE, lambda _: word, text)


def with_prefix(text: str, prefix: str) -> str:
    """The text with the prefix before it, or with the words of the prefix in the places that it has for them."""
    word = prefix.strip().rstrip(",;:. ")
    return filled(text, word) if word and re.search(TRIGGER_PLACE, text) else f"{prefix}{text}"


def has_words(text: str, words: str) -> bool:
    """Return whether a text has the words of a trigger, whole and in order, in any case: `sks dog`, not `ask` in
    `mask`."""
    pattern = r"\s+".join(map(re.escape, words.split()))
    return re.search(rf"(?<!\w){pattern}(?!\w)", text, re.IGNORECASE) is not None


@dataclass(frozen=True)
class PromptSet:
    """Prompts and their records.

    Attributes:
        path: of its document.
        texts: as written.
        open: reads the table, of `ROWS`.
        samples: rows of the snapshot whose captions these are; () of a published set.
    """

    path: str = field(compare=False)
    name: str
    encoding: CaptionEncoding
    texts: tuple[str, ...]
    open: Callable[[], pa.Table] = field(repr=False, compare=False)
    samples: tuple[int, ...] = field(default=(), compare=False)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def id(self) -> str:
        """32 hex digits over the encoding and the texts."""
        return layout.digest("prompts", self.encoding.id, *self.texts).hex()

    def rows(self, number: int) -> np.ndarray:
        """The record of a prompt: bits of bf16, uint16 (rows, width).

        Raises:
            IntegrityError: the table is missing or damaged.
        """
        return self._rows(1 + number)

    def null(self) -> tuple[np.ndarray, np.ndarray]:
        """The null record: bits of bf16, uint16 (rows, width), and its mask, bool (rows,). rows: all of `max_length`
        where the kind of encoder pads it (Gemma-2), else those of the empty caption.

        Raises:
            IntegrityError: the table is missing or damaged.
        """
        rows = self._rows(0)
        return rows, np.arange(len(rows)) < self._table.column("valid")[0].as_py()

    @cached_property
    def _table(self) -> pa.Table:
        return self.open()

    def _rows(self, row: int) -> np.ndarray:
        bits = np.frombuffer(self._table.column("rows")[row].as_buffer(), "<u2")
        return bits.astype(np.uint16).reshape(-1, self.encoding.width)


TextRecord = Caption | TextPlace


def _table(
    texts: Iterable[str], null: TextPlace, places: Iterable[TextRecord], read: Callable[[TextRecord], bytes]
) -> pa.Table:
    """A table of `ROWS`."""
    rows: list[dict[str, Any]] = [{"text": None, "valid": null.valid, "rows": read(null)}]
    rows += [
        {"text": text, "valid": place.rows, "rows": read(place)} for text, place in zip(texts, places, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=ROWS)


def _reading(reader: ShardReader, encoding: CaptionEncoding) -> Callable[[TextRecord], bytes]:
    """Return what reads the verified bits of a record."""

    def read(place: TextRecord) -> bytes:
        into = np.empty((place.rows, encoding.width), np.uint16)
        reader.read(place.shard, place.offset, place.key, place.checksum, into, place.length)
        return into.astype("<u2", copy=False).tobytes()

    return read


def publish(
    cache: Cache, name: str, encoding: CaptionEncoding, texts: Sequence[str], keys: Sequence[bytes]
) -> PromptSet | None:
    """Publish a set, unless the newest of this name and encoding is the same.

    Args:
        texts, keys: the prompts as written, and the keys of their records.

    Returns:
        The set; None if a record is not in the cache yet.

    Raises:
        UserError: the name is not allowed.
        IntegrityError: a record is damaged.
    """
    check_prompts_name(name)
    index = cache.index(encoding.name)
    wanted = as_keys([encoding.null_key, *keys])
    if not index.present(wanted).all():
        return None
    null, *places = (TextPlace.of(index, row, encoding.storage) for row in index.find(wanted).tolist())
    read = _reading(ShardReader(cache.files, encoding.name), encoding)
    table = cache.files.put_content(to_ipc(_table(texts, null, places, read)), "tables", "arrow", twice=True)
    body = {"name": name, "text": encoding.name, "prompts": list(texts), "rows": table}
    while True:
        before = next((known for known in _of(cache, name) if known.encoding == encoding), None)
        if before is not None and cache.files.document(before.path) == body:
            return before
        if path := cache.append(Paths.prompts(name), body):
            return _parse(cache, path, body)


def open_prompts(cache: Cache, name: str | None, encoding: CaptionEncoding) -> PromptSet:
    """The newest set of a name (default: `NAME`) of an encoding; or a set by its id.

    Raises:
        CacheError: there is none.
    """
    wanted = name or NAME
    sets = list(_of(cache, wanted)) or [known for known in _all(cache) if known.id == wanted]
    for known in sets:
        if known.encoding == encoding:
            return known
    fix = "sana-pipe encode --prompts FILE" + (f" --prompts-name {wanted}" if wanted != NAME else "")
    if sets:
        raise CacheError(
            f"{cache.location}: the prompt set {wanted!r} was encoded with another text encoding (wanted | stored)",
            found="; ".join(encoding.difference(sets[0].encoding)),
            fix=f"{fix}, with the text encoder of the snapshot",
        )
    raise CacheError(
        f"{cache.location}: holds no prompt set {wanted!r}",
        expected=", ".join(names(cache)) or "(none)",
        fix=f"{fix} (`--prompts default`: five prompts that come with sana-pipe)",
    )


def of_snapshot(snapshot: Snapshot, count: int, among: range | None = None) -> PromptSet:
    """A set of captions of a snapshot: the first of the most probable captions of samples that are evenly spaced,
    without repetitions and empty captions. It is not in the cache; its id depends on the captions alone.

    Args:
        count: the most captions.
        among: rows of the samples; None: all.

    Raises:
        IntegrityError: a caption is missing or damaged.
    """
    reader, places, samples = snapshot.reader(snapshot.caption.kind), dict[str, Caption](), dict[str, int]()
    among = range(len(snapshot)) if among is None else among
    for row in (among[at] for tries in (count, 8 * count) for at in spread(len(among), min(tries, len(among)))):
        captions = snapshot.sample(row).captions
        at = max(range(len(captions)), key=lambda number: captions[number].weight)
        text = snapshot.captions(row, reader)[at]
        if text.strip() and len(places) < count:
            places.setdefault(text, captions[at])
            samples.setdefault(text, row)
        if len(places) == count:
            break
    read = _reading(reader, snapshot.caption)
    table = _table(places, snapshot.null, places.values(), read)
    return PromptSet("", CAPTIONS, snapshot.caption, tuple(places), lambda: table, tuple(samples.values()))


def spread(samples: int, count: int) -> list[int]:
    """`count` rows, evenly spaced (rows are ordered by bucket, so every shape has its share)."""
    return [(2 * i + 1) * samples // (2 * count) for i in range(count)]


def find_rows(
    cache: Cache, encoding: CaptionEncoding, prompt: str, normalise: Callable[[str, str], str]
) -> np.ndarray | None:
    """The record of a prompt of any set, as `PromptSet.rows` gives it; None: no set has it.

    Args:
        normalise: (text, the encoding's `normalisation`) -> the text by which records are found.
    """
    wanted = normalise(prompt, encoding.normalisation)
    for known in current(cache):
        if known.encoding == encoding:
            for number, text in enumerate(known.texts):
                if normalise(text, encoding.normalisation) == wanted:
                    return known.rows(number)
    return None


def newest(cache: Cache, name: str) -> PromptSet | None:
    """The newest set of a name; None if there is none or it was forgotten."""
    return next(_of(cache, name), None)


def names(cache: Cache) -> list[str]:
    """The names of sets that are not forgotten."""
    return [name for name in cache.files.folders("prompts") if newest(cache, name) is not None]


def current(cache: Cache) -> Iterator[PromptSet]:
    """The newest set of every name and encoding."""
    for name in cache.files.folders("prompts"):
        yield from {known.encoding: known for known in reversed(list(_of(cache, name)))}.values()


def forget(cache: Cache, name: str) -> None:
    """Append a document that marks the sets of a name as forgotten. Their records stay.

    Raises:
        CacheError: there is no such set.
    """
    if newest(cache, name) is None:
        raise CacheError(
            f"{cache.location}: holds no prompt set {name!r}",
            expected=", ".join(names(cache)) or "(none)",
            fix="sana-pipe status",
        )
    while newest(cache, name) is not None:
        cache.append(Paths.prompts(name), {"name": name, "text": "", "prompts": [], "rows": "", FORGOTTEN: True})


def _of(cache: Cache, name: str) -> Iterator[PromptSet]:
    """The sets of a name, the newest first; none from before it was forgotten."""
    for number in reversed(cache.files.numbers(Paths.prompts(name))):
        path = Paths.numbered(Paths.prompts(name), number)
        body = cache.files.document(path)
        if body.get(FORGOTTEN):
            return
        yield _parse(cache, path, body)


def _all(cache: Cache) -> Iterator[PromptSet]:
    for name in cache.files.folders("prompts"):
        yield from _of(cache, name)


def _parse(cache: Cache, path: str, body: dict[str, Any]) -> PromptSet:
    encoding = cache.encoding(body["text"])
    if not isinstance(encoding, CaptionEncoding):
        raise IntegrityError(f"{cache.files.where(path)}: names no text encoding", found=body["text"])

    def open_table() -> pa.Table:
        name = Paths.table(body["rows"], "arrow")
        return from_ipc(cache.files.mapped(name, body["rows"]), cache.files.where(name))

    return PromptSet(path, body["name"], encoding, tuple(body["prompts"]), open_table)
