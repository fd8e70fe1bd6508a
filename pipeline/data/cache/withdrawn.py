"""Withdrawn pictures: what `forget --item` takes out of a cache and keeps out.

A takedown is a document `withdrawn/NNNNNNNN.json`. It is written before anything else changes, so that a takedown that
was killed is ended by the next one. Once all is done it is replaced by one without names and texts: what stays are the
digests of the pictures, by which `encode` leaves them out, and the keys of their records, which `forget --check` looks
for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sana_pipe.base.errors import CacheError
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.layout import Paths

REASON = "withdrawn: sana-pipe forget took this picture out of the cache"
"""The reason of rejects whose picture, or control picture or mask, is withdrawn."""


@dataclass(frozen=True)
class Takedown:
    """Pictures that leave a cache.

    Attributes:
        digests: of their files, hex.
        keys: name of an encoding -> keys (hex) of the records that go.
        items: (source, item) of every row of a scan that goes; empty once it is done.
        texts: captions that no other sample has; empty once it is done.
        prompt_sets: names of sets of prompts that have a caption of theirs; they stay.
        shards: paths of the shards that have a successor.
        snapshots: id of a snapshot that named records or rows that go -> id of the one that was made in its place;
            "" where no sample was left or it could not be made.
        runs: (snapshot, host, folder) of the runs that were trained on one of the pictures.
        done: nothing is left to do.
    """

    digests: tuple[str, ...]
    keys: Mapping[str, tuple[str, ...]]
    items: tuple[tuple[str, str], ...] = ()
    texts: tuple[str, ...] = ()
    prompt_sets: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    snapshots: Mapping[str, str] = field(default_factory=dict)
    runs: tuple[tuple[str, str, str], ...] = ()
    done: bool = False

    @classmethod
    def of(cls, body: dict[str, Any]) -> Takedown:
        """The takedown that a document states."""
        return cls(
            tuple(body["digests"]),
            {encoding: tuple(keys) for encoding, keys in body["keys"].items()},
            tuple((source, item) for source, item in body["items"]),
            tuple(body["texts"]),
            tuple(body["prompt_sets"]),
            tuple(body["shards"]),
            body["snapshots"],
            tuple((snapshot, host, run) for snapshot, host, run in body["runs"]),
            body["done"],
        )

    def keys_of(self, encoding: str) -> list[bytes]:
        """Keys of the records of an encoding that go, 16 bytes each."""
        return [bytes.fromhex(key) for key in self.keys.get(encoding, ())]


def takedowns(cache: Cache) -> list[Takedown]:
    """Every takedown of a cache, the first first."""
    numbers = cache.files.numbers(Paths.WITHDRAWN)
    names = [Paths.numbered(Paths.WITHDRAWN, number) for number in numbers]
    return [Takedown.of(body) for body in cache.files.documents(names)]


def withdrawn(cache: Cache) -> frozenset[bytes]:
    """The digests of all withdrawn pictures, 16 bytes each."""
    return frozenset(bytes.fromhex(digest) for each in takedowns(cache) for digest in each.digests)


def begin(cache: Cache, takedown: Takedown) -> int:
    """Publish a takedown; returns its number."""
    while True:
        number = len(cache.files.numbers(Paths.WITHDRAWN))
        name = Paths.numbered(Paths.WITHDRAWN, number)
        if cache.files.put(name, layout.seal(asdict(takedown))):
            return number


def update(cache: Cache, number: int, takedown: Takedown) -> None:
    """Replace a takedown that this process carries out."""
    cache.files.replace_document(Paths.numbered(Paths.WITHDRAWN, number), layout.seal(asdict(takedown)))


def finish(cache: Cache, number: int, takedown: Takedown) -> None:
    """Mark a takedown as done, without the names and texts of its pictures."""
    update(cache, number, replace(takedown, items=(), texts=(), shards=(), done=True))


def check_finished(cache: Cache) -> None:
    """Raise a CacheError if a takedown is not done: what would be made now may hold its pictures.

    `forget` looks for claims once its document is written, so who claims something first sees the document, or `forget`
    the claim.
    """
    for number, takedown in enumerate(takedowns(cache)):
        if not takedown.done:
            name = cache.files.where(Paths.numbered(Paths.WITHDRAWN, number))
            raise CacheError(
                f"{name}: {len(takedown.digests)} pictures are being taken out of this cache, or that was stopped",
                fix=f"wait for it, or end it: {layout.FORGET}",
            )
