"""Runs that read a snapshot: which they are, where, and whether they are alive.

A run gives its snapshot the name `trained-ID`, whose documents say which runs had it. While it trains it beats: it
replaces `claims/trained-ID/<token>.json` from time to time, and removes it at its end. A run of this machine counts as
ended when its process has ended; one of another machine when it has not beaten for `STALE_S`.
Price: a cache that cannot be written to knows nothing of its runs.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from sana_pipe.base import process_identity
from sana_pipe.base.errors import CacheError
from sana_pipe.base.processes import beating
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.layout import Paths

BEAT_S = 60.0
"""Seconds between two beats of a run."""
STALE_S = 900.0
"""Seconds without a beat after which a run of another machine counts as ended."""


@dataclass(frozen=True)
class Run:
    """A run that reads a snapshot. run: its folder; host: the machine's name; age_s: seconds since its last beat."""

    snapshot: str
    run: str
    host: str
    age_s: float


def trained_name(snapshot_id: str) -> str:
    """The name that training gives to a snapshot."""
    return f"trained-{snapshot_id[:16]}"


@contextmanager
def reading(cache: Cache, snapshot_ids: list[str], run: str, host: str) -> Iterator[None]:
    """Say that a run reads some snapshots, while the block runs.

    Args:
        run: its folder. host: the name of this machine.
    """
    token = uuid.uuid4().hex
    names = {snapshot: Paths.claim(trained_name(snapshot), token) for snapshot in snapshot_ids}

    def beat() -> None:
        with suppress(CacheError, OSError):  # a cache that cannot be written to; the next beat may succeed
            for snapshot, name in names.items():
                fields = {
                    "snapshot": snapshot,
                    "run": run,
                    "host": host,
                    "time": time.time(),
                    **process_identity.place(),
                }
                cache.files.replace(name, json.dumps(fields).encode() + b"\n")

    beat()
    try:
        with beating(beat, BEAT_S, "reading"):
            yield
    finally:
        with suppress(CacheError, OSError):
            for name in names.values():
                cache.files.remove(name)


def living(cache: Cache) -> Iterator[Run]:
    """The runs that read a snapshot of this cache now, as far as is known."""
    now = cache.files.now()
    for entry in cache.files.walk("claims"):
        if not entry.name.startswith("claims/trained-") or now - entry.modified > STALE_S:
            continue
        with suppress(CacheError, ValueError, TypeError, KeyError):
            fields = json.loads(cache.files.read(entry.name))
            if not process_identity.has_ended(fields):
                yield Run(
                    str(fields["snapshot"]), str(fields["run"]), str(fields["host"]), max(0.0, now - entry.modified)
                )


def runs(cache: Cache, name: str) -> list[tuple[str, str]]:
    """(host, folder) of the runs that were trained on a snapshot, as the documents of a name `trained-ID` of it say."""
    documents = [Paths.numbered(Paths.names(name), number) for number in cache.files.numbers(Paths.names(name))]
    bodies = list(cache.files.documents(documents))
    return list(dict.fromkeys((body["host"], body["run"]) for body in bodies if body.get("run")))
