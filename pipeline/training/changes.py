"""Compare a run's data and base weights with those of its begin: a finished run would show nothing of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.cache.cache import Cache
from pipeline.cache.layout import Paths
from pipeline.cache.snapshot import Head
from pipeline.config import StartWeights
from pipeline.errors import CacheError, UserError
from pipeline.options import flat, value_at
from pipeline.training.checkpoint import Document, beginning

_WEIGHTS = ("id", "revision", "variant")
_PREFIX = "caption_prefix"


def read_of(cache: Cache, head: Head) -> dict[str, dict[str, Any]]:
    """Source -> the options of `data` that its captions and pictures were read with for a snapshot, without defaults.
    Left out: a source whose scan the cache does not have."""
    read = {}
    for source, table in head.sources.items():
        for number in reversed(cache.files.numbers(Paths.scans(source))):
            scan = cache.files.document(Paths.numbered(Paths.scans(source), number))
            if scan.get("table") == table:
                read[source] = dict(scan.get("read", {}).get("used", {}))
                break
    return read


def prefixes(cache: Cache, head: Head) -> list[str]:
    """The texts that stand in front of the captions of a snapshot, by what the cache remembers; "" of a source without
    any. Empty: the cache does not know."""
    return list(dict.fromkeys(str(options.get(_PREFIX, "")) for options in read_of(cache, head).values()))


def since(weights: StartWeights | None, cache: Cache, document: Document, newest: str | None) -> list[str]:
    """Say what differs between a checkpoint and a run that would begin now.

    Args:
        weights: `model.weights`.
        newest: the snapshot that it would be trained on; None: there is none.
    """
    lines = []
    for name in _WEIGHTS:
        before, now = value_at(document.config, f"model.weights.{name}"), getattr(weights, name, None)
        if before != now:
            lines.append(f"model.weights.{name}: {before!r} then, {now!r} now")
    trained = document.state.snapshot
    if newest not in (None, trained):
        lines.append(f"snapshot: {trained[:12]} then, {str(newest)[:12]} now")
        try:
            lines += _of_snapshots(cache, cache.open_snapshot(trained).head, cache.open_snapshot(newest).head)
        except CacheError as error:
            lines.append(f"  (what differs between them cannot be read: {error.what})")
    return lines


def _of_snapshots(cache: Cache, then: Head, now: Head) -> Iterator[str]:
    before, after = read_of(cache, then), read_of(cache, now)
    for source in sorted({*then.sources, *now.sources}):
        if source not in now.sources or source not in then.sources:
            yield f"  source {source}: {'new' if source in now.sources else 'left out now'}"
        elif then.sources[source] != now.sources[source]:
            options = [f"data.{line}" for line in _differences(before.get(source, {}), after.get(source, {}))]
            yield f"  source {source}: {'; '.join(options) or 'other pictures or captions'}"
    for line in _differences(dict(then.options or {}), dict(now.options or {})):
        yield f"  {line}"
    samples = [sum(bucket.samples for bucket in head.buckets) for head in (then, now)]
    if samples[0] != samples[1]:
        yield f"  samples: {samples[0]} then, {samples[1]} now"


def _differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    before, after = dict(flat(then)), dict(flat(now))
    return [
        f"{name}: {before.get(name)!r} then, {after.get(name)!r} now"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


def refuse(output: Path, lines: Sequence[str]) -> None:
    """Raise a UserError for a run directory whose checkpoints are of other data or weights than the next run's."""
    if lines:
        raise UserError(
            f"{output}: its checkpoints are of other data or weights than those of now, so nothing of these was trained"
            "\n  " + "\n  ".join(lines),
            fix=f"a round that goes on from it: sana-pipe train {beginning(output)}; or a training from the start: the "
            "same command with --set train.output=DIR",
        )
