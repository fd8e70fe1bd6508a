"""Rounds: what has been verified, so that several processes share one verification, and a killed one is continued.

A round is `rounds/<N>.json`, which says what is verified, and a folder: `<N>/<id>.ok` says that a part is intact,
`<id>.json` what is wrong with it. No lock: each is put if absent. `complete.json` says that all parts have a result
(then those that are intact need no file), `ended-<task>-of-<tasks>` that this share has told it. A new command
continues a round that is not complete, of the same scope and younger than `ROUND_S`, or begins one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sana_pipe.base.errors import AwayError, CacheError
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.findings import Finding, Replaced
from sana_pipe.data.cache.layout import Paths, numbers_of
from sana_pipe.data.cache.object_store import PARALLEL_REQUESTS

ROUND_S = 7 * 24 * 3600.0
"""Age in seconds after which an unfinished round is not continued: what it read then says too little about today."""
COMPLETE = "complete.json"
LATE_S = 3600.0
"""Seconds after the end of a round in which a share of it that starts late, or was killed, still tells its result."""


@dataclass(frozen=True)
class Result:
    """The result of a part.

    Attributes:
        files, bytes: that were read.
        outcomes: path -> outcome of its repair.
        late: findings in snapshots after the repairs.
    """

    files: int = 0
    bytes: int = 0
    findings: tuple[Finding, ...] = ()
    replaced: Replaced = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    late: tuple[Finding, ...] = ()

    def body(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            **vars(self),
            "findings": [vars(finding) for finding in self.findings],
            "replaced": {shard: sorted(key.hex() for key in keys) for shard, keys in self.replaced.items()},
            "late": [vars(finding) for finding in self.late],
        }

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Result:
        """The result from its JSON values."""
        replaced = {shard: set(map(bytes.fromhex, keys)) for shard, keys in body["replaced"].items()}
        return cls(
            body["files"],
            body["bytes"],
            _findings(body["findings"]),
            replaced,
            body["outcomes"],
            _findings(body["late"]),
        )


def _findings(rows: list[dict[str, Any]]) -> tuple[Finding, ...]:
    return tuple(Finding(**{**row, "records": tuple(row["records"])}) for row in rows)


@dataclass(frozen=True)
class Scope:
    """The extent of a verification.

    Attributes:
        snapshot: id of the only snapshot; None: the whole cache.
        sample: share of the shards (0 to 1); None: all.
        repair: whether damage is repaired in the end.
    """

    snapshot: str | None = None
    sample: float | None = None
    repair: bool = False


class Round:
    """The results of one verification, in memory alone: for a cache that nothing can be written to.

    Attributes:
        parts: digest of the ids of all parts; "": not known yet.
        seed: decides which shards are in a sample.
        begun: seconds since 1970, by the clock of the store; None: this process began it.
    """

    begun: float | None = None
    parts = ""

    def __init__(self) -> None:
        self.seed = secrets.token_hex(8)
        self._results: dict[str, Result] = {}

    def done(self) -> set[str] | None:
        """Ids of the parts with a result; None: all."""
        return set(self._results)

    def result(self, part: str, size: tuple[int, int]) -> Result | None:
        """The result of a part; None: there is none, or it cannot be read.

        Args:
            size: files and bytes of the part, which an intact part needs no document for.
        """
        return self._results.get(part)

    def publish(self, part: str, result: Result, size: tuple[int, int]) -> None:
        """Record a result. size: as of `result`."""
        self._results[part] = result

    def end(self, task: int, tasks: int) -> None:
        """Record that every part has a result, and that this share tells it now."""


class StoredRound(Round):
    """A round in the cache. Made by `join`."""

    def __init__(self, files: Files, number: int, head: dict[str, Any], ours: bool):
        super().__init__()
        self.files, self.number, self.seed = files, number, head["seed"]
        self.begun = None if ours else head["begun"]
        self._folder = Paths.round(number)

    def done(self) -> set[str] | None:
        if self._is_complete():
            return None
        names = (name.rpartition("/")[2] for name in self.files.names_below(self._folder))
        return {name.partition(".")[0] for name in names}

    def result(self, part: str, size: tuple[int, int]) -> Result | None:
        intact, damaged = self._names(part)
        try:
            if self.files.has_file(damaged):
                return Result.from_body(layout.unseal(self.files.read(damaged), self.files.where(damaged)))
        except AwayError:
            raise
        except CacheError:  # damaged, or removed by a newer round: the part is verified again
            return None
        return Result(*size) if self.files.has_file(intact) or self._is_complete() else None

    def publish(self, part: str, result: Result, size: tuple[int, int]) -> None:
        intact, damaged = self._names(part)
        if result == Result(*size):
            self.files.put(intact, b"")
            if self.begun is not None:  # by an earlier command, which may have found damage that was put right since
                self.files.remove(damaged)
        elif not self.files.put(damaged, layout.seal(result.body())) and self.result(part, size) is None:
            self.files.replace(damaged, layout.seal(result.body()))

    def end(self, task: int, tasks: int) -> None:
        name = f"{self._folder}/{COMPLETE}"
        if not self.files.put(name, layout.seal({"parts": self.parts})) and not self._is_complete():
            self.files.replace(name, layout.seal({"parts": self.parts}))  # the cache has changed since
        self.files.put(f"{self._folder}/ended-{task}-of-{tasks}", b"")
        _remove(self.files, (name for name in self.files.names_below(self._folder) if name.endswith(".ok")))

    def _is_complete(self) -> bool:
        body = _body(self.files, f"{self._folder}/{COMPLETE}") if self.parts else None
        return body is not None and body["parts"] == self.parts

    def _names(self, part: str) -> tuple[str, str]:
        stem = f"{self._folder}/{part}"
        return f"{stem}.ok", f"{stem}.json"


def join(files: Files, scope: Scope, task: int, tasks: int) -> StoredRound:
    """Continue the round of this scope, or begin one. Processes that begin at the same time join the same.

    Raises:
        CacheError: nothing can be written to the cache.
    """
    now = files.now()
    while True:
        heads = {number: _body(files, _head(number)) for number in numbers_of(files.names(Paths.ROUNDS))}
        for number, head in sorted(heads.items(), reverse=True):
            if head is not None and head["scope"]["repair"] and not scope.repair:
                break  # an earlier round does not know what was repaired
            if head is not None and head["scope"] == vars(scope):
                if _is_open(files, number, head, now, task, tasks):
                    return StoredRound(files, number, head, ours=False)
                break
        number = max(heads, default=-1) + 1
        head = {"scope": vars(scope), "seed": secrets.token_hex(8), "begun": now, "tasks": tasks}
        if files.put(_head(number), layout.seal(head)):
            _remove_earlier(files, heads, now)
            return StoredRound(files, number, head, ours=True)


def _body(files: Files, name: str) -> dict[str, Any] | None:
    """The body of a document of a round; None: it is missing or damaged."""
    try:
        return layout.unseal(files.read(name), files.where(name))
    except AwayError:
        raise
    except CacheError:
        return None


def _is_open(files: Files, number: int, head: dict[str, Any], now: float, task: int, tasks: int) -> bool:
    """Return whether a share belongs to a round: it is not complete, or this share of it has not told its result."""
    complete = files.store.stat(f"{Paths.round(number)}/{COMPLETE}")
    if complete is None:
        return now - float(head["begun"]) < ROUND_S
    told = files.has_file(f"{Paths.round(number)}/ended-{task}-of-{tasks}")
    return not told and head["tasks"] == tasks and now - complete.modified < LATE_S


def _remove_earlier(files: Files, heads: dict[int, dict[str, Any] | None], now: float) -> None:
    """Remove the rounds that nobody continues. Their heads go last: a killed removal is ended by the next round."""
    for number, head in heads.items():
        folder = Paths.round(number)
        if head is None or files.has_file(f"{folder}/{COMPLETE}") or now - float(head["begun"]) >= ROUND_S:
            for name in (f"claims/{folder}", folder):
                _remove(files, files.names_below(name))
                if files.on_disk:
                    with suppress(OSError):  # another process is in it
                        files.path(name).rmdir()
            files.remove(_head(number))


def _head(number: int) -> str:
    return f"{Paths.round(number)}.json"


def _remove(files: Files, names: Iterable[str]) -> None:
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        for _ in pool.map(files.remove, list(names)):
            pass
