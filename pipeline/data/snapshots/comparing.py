"""Comparisons of a snapshot with another, of this or another cache, or with a published list, for people and as JSON.

The words of `snapshots diff`: NAME is a snapshot of the configured cache, CACHE:NAME one of another (a folder or a
URL), FILE.csv and FILE.parquet are lists. Names of snapshots have neither `/` nor `:`, so CACHE:NAME is no name.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sana_pipe.base.errors import UserError, escaped, expanded
from sana_pipe.base.urls import strip_credentials
from sana_pipe.data.cache import compare
from sana_pipe.data.cache.cache import CacheLocation
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.snapshots import item_lists

SHOWN = 20
"""Samples of each kind that are named without `--json`."""

Report = dict[str, Any]
Named = tuple[str, str, tuple[str, ...]]
"""Source, item, and what changed."""


def opened(location: CacheLocation, word: str) -> Snapshot | Path:
    """The snapshot or list that a word of `snapshots diff` names.

    Raises:
        CacheError: no such cache or snapshot.
        UserError: the word has a variable that is not set, or names a file that is missing, a cache without a
            snapshot, or both a snapshot and a list.
    """
    word = expanded(word)
    cache, colon, name = word.rpartition(":")
    if colon and cache and name and "/" not in name:
        return replace(location, root=cache).open().open_snapshot(name)
    if item_lists.is_list(word):
        if "/" not in word and location.open().snapshot_of(word) is not None:
            raise UserError(
                f"{word} is the name of a snapshot, and has the ending of a list",
                fix=f"./{word} for the list, {strip_credentials(location.root)}:{word} for the snapshot",
            )
        if not Path(word).is_file():
            raise UserError(
                f"{word}: there is no such list", fix="sana-pipe snapshots list SNAPSHOT FILE.csv writes one"
            )
        return Path(word)
    if "/" in word or colon:
        raise UserError(
            f"{strip_credentials(word)}: names no snapshot of this cache",
            expected="NAME, CACHE:NAME for a snapshot of another cache, or FILE.csv or FILE.parquet for a list",
            fix=f"sana-pipe snapshots diff NAME {strip_credentials(word.removesuffix(':'))}:NAME",
        )
    return location.open().open_snapshot(word)


def of_snapshots(first: Snapshot, second: Snapshot, everything: bool) -> tuple[bool, Report]:
    """Compare two snapshots. Equal content ids are enough: no sample is read then.

    Args:
        everything: name all samples that differ, not only `SHOWN` of each kind.

    Returns:
        Whether samples differ, and `a`, `b`, `content_a`, `content_b`, `counts`, `signals`, `only_in` (signal -> A or
        B), `encodings`, and for `added`, `removed` and `changed` what `_shown` gives.
    """
    difference = compare.difference(first, second)
    changes = {
        "added": _names(second, ((row, ()) for row in difference.added)),
        "removed": _names(first, ((row, ()) for row in difference.removed)),
        "changed": _names(second, difference.changed),
    }
    report = {
        "a": first.id,
        "b": second.id,
        "content_a": first.head.content_id,
        "content_b": second.head.content_id,
        "counts": {kind: len(getattr(difference, kind)) for kind in changes},
        "signals": list(difference.signals),
        "only_in": {signal: "A" if signal in first.pictures else "B" for signal in difference.signals},
        "encodings": list(difference.encodings),
        **{kind: _shown(names, everything) for kind, names in changes.items()},
    }
    return bool(difference), report


def of_list(snapshot: Snapshot, path: Path, everything: bool) -> tuple[bool, Report]:
    """Compare a snapshot with a list; arguments and result as of `of_snapshots`. Kinds: `missing` (the list has it),
    `additional` (the snapshot has it), `other_bytes`."""
    difference = item_lists.compare(snapshot, path)
    changes: dict[str, Iterable[Named]] = {
        "missing": ((source, item, ()) for source, item in difference.missing_names()),
        "additional": _names(snapshot, ((row, ()) for row in difference.additional.tolist())),
        "other_bytes": _names(snapshot, ((row, ()) for row in difference.other_bytes.tolist())),
    }
    report = {
        "a": snapshot.id,
        "list": str(path),
        "content_a": snapshot.head.content_id,
        "counts": {kind: len(getattr(difference, kind)) for kind in changes},
        "in_both": difference.items,
        **{kind: _shown(names, everything) for kind, names in changes.items()},
    }
    return bool(difference), report


def lines(report: Report) -> Iterator[str]:
    """A report, for people."""
    for side in ("a", "b"):
        if side in report:
            content = report[f"content_{side}"] or "not known: an earlier version made it"
            yield f"{side.upper()}: snapshot {report[side]}, content {content}"
    if "list" in report:
        yield escaped(f"B: list {report['list']}, {report['in_both']} items in both")
    elif report["content_a"] is not None and report["content_a"] == report["content_b"]:
        yield "the content is equal: samples, records, order and policies"
    for kind, count in report["counts"].items():
        yield f"{count} {kind.replace('_', ' ')}"
        for sample in report[kind]:
            what = f" ({', '.join(sample['what'])})" if "what" in sample else ""
            yield escaped(f"  {sample['source']}: {sample['item']}") + what
        if count > len(report[kind]):
            yield f"  and {count - len(report[kind])} more (--json names all)"
    for signal, side in report.get("only_in", {}).items():
        yield f"only {side} has records of the kind {signal}"
    for signal in report.get("encodings", ()):
        yield f"records of the kind {signal} have different encodings and are not compared"


def _names(snapshot: Snapshot, rows: Iterable[tuple[int, Sequence[str]]]) -> Iterator[Named]:
    return ((*snapshot.source_item(row), tuple(what)) for row, what in rows)


def _shown(names: Iterable[Named], everything: bool) -> list[dict[str, Any]]:
    """`source`, `item` and `what` of samples by name: all, or the first `SHOWN`."""
    chosen = sorted(names) if everything else heapq.nsmallest(SHOWN, names)
    return [{"source": s, "item": item, **({"what": list(what)} if what else {})} for s, item, what in chosen]
