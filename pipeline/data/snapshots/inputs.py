"""Read what a snapshot is made from: the last scan and the records of each source, in one cache or several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from sana_pipe.base.errors import CacheError, UserError
from sana_pipe.data.cache import withdrawn
from sana_pipe.data.cache.cache import Cache, CacheLocation
from sana_pipe.data.cache.encodings import Encoding, pictures_of
from sana_pipe.data.cache.index import RecordIndex
from sana_pipe.data.cache.keys import as_keys, binary
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.images import buckets
from sana_pipe.data.signals import Encoders, Signal
from sana_pipe.data.signals.latent import are_imported, compression
from sana_pipe.data.snapshots.assemble import BucketTable
from sana_pipe.data.snapshots.config import BucketConfig
from sana_pipe.data.snapshots.join import EncodedRecords, Resolution
from sana_pipe.data.snapshots.metadata_table import MetadataTable
from sana_pipe.data.sources.config import DataConfig

PLACES = ("caches", "pack_mib")
"""Options of `bucket` that decide where records lie, and not which samples there are."""


@dataclass(frozen=True)
class Scan:
    """The last scan of a source, and the cache that holds it. table: digest of the scan's table; sizes: (height, width)
    of its buckets; weight: column of the weights of its preference pairs."""

    cache: Cache
    table: str
    encodings: dict[str, str]
    sizes: tuple[buckets.Shape, ...] = ()
    weight: str | None = None


@dataclass(frozen=True)
class Inputs:
    """The inputs of a snapshot.

    Attributes:
        caches: the cache of the configuration, then `bucket.caches`.
        scans: last scans by source, also of sources that are not used.
        unused: sources of weight 0.
        resolutions: one after the other, they are `table`.
        options: what the configuration says, as `Head.options`.
        lacking: kind of records that some used sources have -> the others. The snapshot has none of this kind.
        metadata: the table of `bucket.metadata`.
    """

    caches: list[Cache]
    scans: dict[str, Scan]
    unused: set[str]
    records: EncodedRecords
    resolutions: list[Resolution]
    table: BucketTable
    options: dict[str, dict[str, Any]]
    lacking: dict[str, list[str]]
    metadata: MetadataTable | None = None

    def used(self) -> Iterator[tuple[str, Scan]]:
        return ((source, scan) for source, scan in self.scans.items() if source not in self.unused)


def open_caches(location: CacheLocation, others: Sequence[str], dry_run: bool) -> list[Cache]:
    """The cache of the configuration, then those of `bucket.caches` (others: their roots)."""
    opened = location.open_others(others)
    caches = [location.open(create=bool(others) and not dry_run), *opened]
    places = [cache.place for cache in caches]
    if len(set(places)) < len(places):
        raise UserError("bucket.caches names a cache twice, or the one that `cache` names", found=", ".join(places))
    return caches


def read_inputs(
    caches: list[Cache],
    settings: BucketConfig,
    data: DataConfig,
    encoders: Encoders,
    encode: EncodeConfig,
    metadata: MetadataTable | None = None,
) -> Inputs:
    """Read the last scan of every source. data, encoders, encode: the settings that the cache must agree with.
    metadata: the table that `settings` name.

    Raises:
        CacheError: no source yet, or sources of different encodings, or of other settings than the configuration.
        UserError: a setting names what is not there.
    """
    unused = {source for source, setting in settings.sources.items() if not setting.weight}
    scans = _scans(caches, unused)
    if not scans:
        raise CacheError(
            f"{caches[0].location}: no source has been encoded into this cache", fix="sana-pipe encode --data DIR"
        )
    if unknown := sorted(set(settings.sources) - set(scans)):
        raise CacheError(
            f"bucket.sources names {', '.join(unknown)}, which no cache holds", expected=", ".join(sorted(scans))
        )
    used = {source: scan for source, scan in scans.items() if source not in unused}
    encodings, lacking = _encodings(used or scans)
    _check_settings(encodings, encoders, data, encode)
    _check_withdrawn(caches, used or scans, encodings)
    factor = compression(encodings)
    resolutions, shapes = [], list[tuple[int, int]]()
    tables = [("", _sizes(used))] if are_imported(encodings) else buckets.resolutions(settings, data, factor)
    for variant, table in tables:
        policy = data if settings.resolutions else None
        resolutions.append(Resolution(table, len(shapes), variant, policy))
        shapes += table
    batches = buckets.batches(settings, shapes, factor)
    indexes = {one.kind: RecordIndex.union([cache.index(one.name) for cache in caches]) for one in encodings}
    return Inputs(
        caches,
        scans,
        unused,
        records=EncodedRecords(encodings, indexes),
        resolutions=resolutions,
        table=BucketTable(shapes, batches),
        options=options_of(settings, data, caches[0]),
        lacking=lacking,
        metadata=metadata,
    )


def _sizes(scans: dict[str, Scan]) -> list[buckets.Shape]:
    """The sizes of latents of others, which are the buckets."""
    return sorted({size for scan in scans.values() for size in scan.sizes})


def options_of(settings: BucketConfig, data: DataConfig, cache: Cache) -> dict[str, dict[str, Any]]:
    """Return what decides a snapshot besides its scans. Records of other caches lie in its own."""
    bucket = settings.model_dump(mode="json", exclude_defaults=True, exclude=set(PLACES))
    if settings.grow:
        bucket["grow"] = cache.open_snapshot(settings.grow).id  # the name may move
    policy = {"resolution", "buckets", "min_side", "max_upscale", "max_crop_loss"}
    return {"bucket": bucket, "data": data.model_dump(mode="json", include=policy)}


def _scans(caches: list[Cache], unused: set[str]) -> dict[str, Scan]:
    """The last scan of each source. Caches may hold different scans of an unused source."""
    scans: dict[str, Scan] = {}
    for cache in caches:
        for source in cache.sources():
            body = cache.last_scan(source)
            if body is None:
                continue
            sizes = tuple((height, width) for height, width in body["buckets"])
            pictures = body.get("read", {}).get("used", {}).get("pictures", {})  # as `encoding.reading` writes it
            weight = (pictures.get("rejected") or {}).get("weight")
            scan = Scan(cache, body["table"], body["encodings"], sizes, weight)
            first = scans.setdefault(source, scan)
            if first.table != scan.table and source not in unused:
                raise CacheError(
                    f"{first.cache.location} and {cache.location} both have a source {source!r}, with different items",
                    fix="encode one of them with another --source-name: it is part of a sample's id",
                )
    return dict(sorted(scans.items()))


def _encodings(scans: dict[str, Scan]) -> tuple[list[Encoding], dict[str, list[str]]]:
    """The encodings of the sources: of the kinds of records that all of them have; and `Inputs.lacking`. They must be
    equal."""
    chosen, lacking = list[Encoding](), dict[str, list[str]]()
    for kind in dict.fromkeys(kind for scan in scans.values() for kind in scan.encodings):
        if without := [source for source, scan in scans.items() if kind not in scan.encodings]:
            lacking[kind] = without
            continue
        by_source = {source: scan.cache.encoding(scan.encodings[kind]) for source, scan in scans.items()}
        first_source, first = next(iter(sorted(by_source.items())))
        for source, encoding in by_source.items():
            if encoding != first:
                raise CacheError(
                    f"sources {first_source!r} and {source!r} were encoded with different {kind} encodings",
                    found="; ".join(first.difference(encoding)),
                    fix="encode both again with the same configuration and version of sana-pipe",
                )
        chosen.append(first)
    return chosen, lacking


def _check_withdrawn(caches: list[Cache], scans: dict[str, Scan], encodings: list[Encoding]) -> None:
    """Refuse a cache that still has a picture that `forget` took out of the first one: it would come back.

    Raises:
        CacheError: names the cache.
    """
    takedowns = withdrawn.takedowns(caches[0]) if len(caches) > 1 else []
    gone = binary(as_keys(sorted(bytes.fromhex(digest) for each in takedowns for digest in each.digests)))
    for other in caches[1:] if takedowns else ():
        keys = {one.name: as_keys([key for each in takedowns for key in each.keys_of(one.name)]) for one in encodings}
        found = sum(int((other.index(one.name).find(keys[one.name]) >= 0).sum()) for one in pictures_of(encodings))
        for scan in (scan for scan in scans.values() if scan.cache is other):
            table = other.table(scan.table, ["digest", "reject"])
            usable = table.filter(pc.is_null(table.column("reject")))
            found += pc.sum(pc.is_in(usable.column("digest"), value_set=gone)).as_py() or 0
        if found:
            raise CacheError(
                f"{other.location}: has pictures that were taken out of {caches[0].location}",
                found=f"{found} records and rows",
                fix="there, too: sana-pipe forget --digests FILE --set cache=DIR, with the digests of "
                f"{caches[0].files.where(Paths.WITHDRAWN)}",
            )


def _check_settings(encodings: list[Encoding], encoders: Encoders, data: DataConfig, encode: EncodeConfig) -> None:
    """Refuse settings of the encoders that differ from the cache's."""
    sections = encoders, data, encode
    pairs = [pair for one in encodings if isinstance(one, Signal) for pair in one.settings(*sections).items()]
    different = [f"{key}: configuration {ours!r}, cache {theirs!r}" for key, (ours, theirs) in pairs if ours != theirs]
    if different:
        raise CacheError(
            "the cache was encoded with other settings than this configuration has",
            found="; ".join(different),
            fix="run sana-pipe encode with this configuration, or use the configuration of the cache",
        )
