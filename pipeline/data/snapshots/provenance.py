"""The history of a snapshot: the rules in its head, the options that its captions and pictures were read with, as the
cache's scans remember them, and what differs between two snapshots in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sana_pipe.base.errors import CacheError, escaped
from sana_pipe.base.options import flat
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.findings import bucket_command
from sana_pipe.data.cache.layout import BUCKET, Paths
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import Head

_PREFIX = "caption_prefix"


def read_options(cache: Cache, head: Head) -> dict[str, dict[str, Any]]:
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


def described(cache: Cache, snapshot: Snapshot) -> dict[str, Any]:
    """Collect how a snapshot was made: `id`, `content`, `names`, `named` (`Cache.first_named`), `parent`, `samples`,
    `packed`, `options` of `bucket` and `data` that were not the defaults, `policies`, `buckets`, `encodings`, `sources`
    (the digest of the scan, and the options that its captions and pictures were read with), `left_out` (reason ->
    items), and `command`, which makes it again."""
    head, names = snapshot.head, cache.names_of(snapshot.id)
    read = read_options(cache, head)
    return {
        "id": snapshot.id,
        "content": head.content_id,
        "names": names,
        "named": cache.first_named(snapshot.id),
        "parent": head.parent,
        "samples": head.samples,
        "packed": head.folder is not None,
        "options": {section: dict(values) for section, values in (head.options or {}).items()},
        "policies": head.policies.values(),
        "buckets": [bucket.values() for bucket in head.buckets],
        "encodings": {kind: encoding.name for kind, encoding in head.encodings_by_kind.items()},
        "sources": {name: {"scan": scan, "read": read.get(name)} for name, scan in head.sources.items()},
        "left_out": dict(head.left_out),
        "command": bucket_command("latest", head)
        if head.folder is None
        else f"{BUCKET} --pack --snapshot {head.parent}",
    }


def lines(made: dict[str, Any]) -> Iterator[str]:
    """The result of `described`, for people."""
    named = f" ({', '.join(made['names'])})" if made["names"] else ""
    yield f"snapshot {made['id']}{named}"
    yield f"  content: {made['content'] or 'not known: an earlier version made it'}"
    if made["named"]:
        yield f"  named here first: {made['named']['at']}, by sana-pipe {made['named']['version']}"
    yield f"  parent: {made['parent'] or 'none'}"
    yield f"  {made['samples']} samples in {len(made['buckets'])} buckets{', packed' if made['packed'] else ''}"
    for name, source in made["sources"].items():
        read = ", ".join(f"data.{option}: {value!r}" for option, value in flat(source["read"] or {}))
        unknown = "the cache does not have the scan" if source["read"] is None else "read with the defaults"
        yield escaped(f"  source {name}: scan {source['scan']}, {read or unknown}")
    for section, options in sorted(made["options"].items()):
        yield from (escaped(f"  {section}.{option}: {value!r}") for option, value in flat(options))
    for kind, encoding in made["encodings"].items():
        yield f"  {kind}: encoding {encoding}"
    if held_out := made["policies"].get("heldout"):
        whole = f", by whole groups of {held_out['group']}" if "group" in held_out else ""
        yield escaped(f"  held out: {held_out['share']:g} of the pictures{whole}; this is the side {held_out['side']}")
    for reason, items in made["left_out"].items():
        yield escaped(f"  left out: {items} items: {reason}")
    yield f"  to make it again: {made['command']}"


def prefixes(cache: Cache, head: Head) -> list[str]:
    """The texts that stand in front of the captions of a snapshot, by what the cache remembers; "" of a source without
    any. Empty: the cache does not know."""
    return list(dict.fromkeys(str(options.get(_PREFIX, "")) for options in read_options(cache, head).values()))


def since(cache: Cache, then: str, now: str | None) -> Iterator[str]:
    """Say what differs between the snapshot that a run was trained on and the one that it would be trained on now.

    Args:
        now: None: there is none.
    """
    if now in (None, then):
        return
    yield f"snapshot: {then[:12]} then, {str(now)[:12]} now"
    try:
        yield from _differing(cache, cache.open_snapshot(then).head, cache.open_snapshot(now).head)
    except CacheError as error:
        yield f"  (what differs between them cannot be read: {error.what})"


def _differing(cache: Cache, then: Head, now: Head) -> Iterator[str]:
    before, after = read_options(cache, then), read_options(cache, now)
    for source in sorted({*then.sources, *now.sources}):
        if source not in now.sources or source not in then.sources:
            yield f"  source {source}: {'new' if source in now.sources else 'left out now'}"
        elif then.sources[source] != now.sources[source]:
            options = [f"data.{line}" for line in _changes(before.get(source, {}), after.get(source, {}))]
            yield f"  source {source}: {'; '.join(options) or 'other pictures or captions'}"
    for line in _changes(dict(then.options or {}), dict(now.options or {})):
        yield f"  {line}"
    samples = [sum(bucket.samples for bucket in head.buckets) for head in (then, now)]
    if samples[0] != samples[1]:
        yield f"  samples: {samples[0]} then, {samples[1]} now"


def _changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    before, after = dict(flat(then)), dict(flat(now))
    return [
        f"{name}: {before.get(name)!r} then, {after.get(name)!r} now"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
