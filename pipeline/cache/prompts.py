"""Prompt sets: immutable lists of prompts with the places of their text records, for pictures during training.

`publish` appends a document to `prompts/<name>/`, `open_prompts` opens the newest set of a name, `current` lists them.
A set refers to records by their places, as a snapshot does, so that training opens no index of all captions. If `verify
--repair` made some of its records anew, it publishes the set again. The shards are those of commits, which `gc` never
removes. Its id depends on the texts and the recipe alone, not on the places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.cache import layout
from pipeline.cache.files import Files
from pipeline.cache.index import as_keys
from pipeline.cache.layout import Paths
from pipeline.cache.recipes import CaptionRecipe
from pipeline.cache.root import CAPTIONS, FORGOTTEN, Cache, check_prompts_name
from pipeline.cache.shard import ShardReader
from pipeline.cache.snapshot import Snapshot, TextPlace
from pipeline.errors import CacheError, IntegrityError

NAME = "prompts"
"""The name of a set that was not given any other."""
TRIGGER = "trigger"
"""The name of the set that `encode` makes of `data.caption_prefix`."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts and the places of their records.

    Attributes:
        path: of its document.
        texts: as written.
        places: of the record of each prompt.
        empty: the place of the null record.
        folder: of the shards, where it is not the recipe's.
    """

    files: Files = field(repr=False, compare=False)
    path: str = field(compare=False)
    name: str
    recipe: CaptionRecipe
    texts: tuple[str, ...]
    places: tuple[TextPlace, ...]
    empty: TextPlace
    folder: str | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def id(self) -> str:
        """32 hex digits over the recipe and the texts."""
        return layout.digest("prompts", self.recipe.id, *self.texts).hex()

    def rows(self, number: int) -> np.ndarray:
        """The verified record of a prompt: bits of bf16, uint16 (rows, width).

        Raises:
            IntegrityError: it is missing or damaged.
        """
        return self._read(self.places[number])

    def null(self) -> tuple[np.ndarray, np.ndarray]:
        """The null record: bits of bf16, uint16 (max_length, width), and its mask, bool (max_length,).

        Raises:
            IntegrityError: it is missing or damaged.
        """
        return self._read(self.empty), np.arange(self.empty.rows) < self.empty.valid

    def body(self) -> dict[str, Any]:
        """The document."""
        prompts = [{"text": text, **place.values()} for text, place in zip(self.texts, self.places, strict=True)]
        return {"name": self.name, "text": self.recipe.name, "prompts": prompts, "null": self.empty.values()}

    @cached_property
    def _reader(self) -> ShardReader:
        return ShardReader(self.files, self.recipe.name, folder=self.folder)

    def _read(self, place: TextPlace) -> np.ndarray:
        into = np.empty((place.rows, self.recipe.width), np.uint16)
        self._reader.read(place.shard, place.offset, place.key, place.checksum, into, place.length)
        return into


def publish(
    cache: Cache, name: str, recipe: CaptionRecipe, texts: Sequence[str], keys: Sequence[bytes]
) -> PromptSet | None:
    """Publish a set, unless the newest of this name and recipe is the same.

    Args:
        texts, keys: the prompts as written, and the keys of their records.

    Returns:
        The set; None if a record is not in the cache yet.

    Raises:
        UserError: the name is not allowed.
    """
    check_prompts_name(name)
    index = cache.index(recipe.name)
    wanted = as_keys([recipe.null_key, *keys])
    if not index.present(wanted).all():
        return None
    empty, *places = (TextPlace.of(index, row, recipe.storage) for row in index.find(wanted).tolist())
    while True:
        numbers = cache.files.numbers(Paths.prompts(name))
        path = Paths.numbered(Paths.prompts(name), len(numbers))
        new = PromptSet(cache.files, path, name, recipe, tuple(texts), tuple(places), empty)
        before = next((known for known in _of(cache, name) if known.recipe == recipe), None)
        if before == new:
            return before
        if cache.files.put(path, layout.seal(new.body())):
            return new


def open_prompts(cache: Cache, name: str | None, recipe: CaptionRecipe) -> PromptSet:
    """The newest set of a name (default: `NAME`) of a recipe; or a set by its id.

    Raises:
        CacheError: there is none.
    """
    wanted = name or NAME
    sets = list(_of(cache, wanted)) or [known for known in _all(cache) if known.id == wanted]
    for known in sets:
        if known.recipe == recipe:
            return known
    fix = "sana-pipe encode --prompts FILE" + (f" --prompts-name {wanted}" if wanted != NAME else "")
    if sets:
        raise CacheError(
            f"{cache.location}: the prompt set {wanted!r} was encoded by another text recipe (wanted | stored)",
            found="; ".join(recipe.difference(sets[0].recipe)),
            fix=f"{fix}, with the text encoder of the snapshot",
        )
    raise CacheError(
        f"{cache.location}: holds no prompt set {wanted!r}",
        expected=", ".join(names(cache)) or "(none)",
        fix=f"{fix} (`--prompts default`: five prompts of ours)",
    )


def of_snapshot(snapshot: Snapshot, count: int) -> PromptSet:
    """A set of captions of a snapshot: the first of the most probable captions of samples that are evenly spaced,
    without repetitions and empty captions. It is not in the cache; its id depends on the captions alone.

    Args:
        count: the most captions.

    Raises:
        IntegrityError: a caption is missing or damaged.
    """
    reader, places = snapshot.reader(snapshot.caption.kind), dict[str, TextPlace]()
    for row in (row for tries in (count, 8 * count) for row in spread(len(snapshot), min(tries, len(snapshot)))):
        captions = snapshot.sample(row).captions
        at = max(range(len(captions)), key=lambda number: captions[number].weight)
        text, place = snapshot.captions(row, reader)[at], captions[at]
        if text.strip() and len(places) < count:
            shown = TextPlace(
                place.shard, place.offset, place.rows, place.rows, place.key, place.checksum, place.length
            )
            places.setdefault(text, shown)
        if len(places) == count:
            break
    recipe, folder = snapshot.caption, snapshot.head.folder
    return PromptSet(snapshot.files, "", CAPTIONS, recipe, tuple(places), tuple(places.values()), snapshot.null, folder)


def spread(samples: int, count: int) -> list[int]:
    """`count` rows, evenly spaced (rows are ordered by bucket, so every shape has its share)."""
    return [(2 * i + 1) * samples // (2 * count) for i in range(count)]


def find_rows(cache: Cache, recipe: CaptionRecipe, normalised: str) -> np.ndarray | None:
    """The verified record of a prompt of any set, as `PromptSet.rows` gives it; None: no set has it.

    Args:
        normalised: the prompt after the recipe's normalisation.
    """
    for known in current(cache):
        if known.recipe == recipe:
            key = known.recipe.key(normalised)
            for number, place in enumerate(known.places):
                if place.key == key:
                    return known.rows(number)
    return None


def newest(cache: Cache, name: str) -> PromptSet | None:
    """The newest set of a name; None if there is none or it was forgotten."""
    return next(_of(cache, name), None)


def names(cache: Cache) -> list[str]:
    """The names of sets that are not forgotten."""
    return [name for name in cache.files.folders("prompts") if newest(cache, name) is not None]


def current(cache: Cache) -> Iterator[PromptSet]:
    """The newest set of every name and recipe."""
    for name in cache.files.folders("prompts"):
        yield from {known.recipe: known for known in reversed(list(_of(cache, name)))}.values()


def forget(cache: Cache, name: str) -> None:
    """Append a document that marks the sets of a name as forgotten. Their records stay.

    Raises:
        CacheError: there is no such set.
    """
    last = newest(cache, name)
    if last is None:
        raise CacheError(
            f"{cache.location}: holds no prompt set {name!r}",
            expected=", ".join(names(cache)) or "(none)",
            fix="sana-pipe status",
        )
    while newest(cache, name) is not None:
        number = len(cache.files.numbers(Paths.prompts(name)))
        body = {"name": name, "text": last.recipe.name, "prompts": [], FORGOTTEN: True}
        cache.files.put(Paths.numbered(Paths.prompts(name), number), layout.seal(body))


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
    recipe = cache.recipe(body["text"])
    if not isinstance(recipe, CaptionRecipe):
        raise IntegrityError(f"{cache.files.where(path)}: names no text recipe", found=body["text"])
    places = tuple(
        TextPlace.parse({key: value for key, value in prompt.items() if key != "text"}) for prompt in body["prompts"]
    )
    texts = tuple(prompt["text"] for prompt in body["prompts"])
    return PromptSet(cache.files, path, body["name"], recipe, texts, places, TextPlace.parse(body["null"]))
