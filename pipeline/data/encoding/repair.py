"""Repair: make the damaged records of a shard again, and only those.

The batches that hold damaged records are encoded again in their old composition. The shard is written anew from them
and from the intact records. On the same kind of machine its digest is the old digest: the file is replaced in place,
and every snapshot that refers to it is whole again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache as run_once
from functools import cached_property, partial
from pathlib import PurePosixPath

import pyarrow as pa

from sana_pipe.base.errors import IntegrityError, UserError
from sana_pipe.data.cache import audit, index, shard
from sana_pipe.data.cache.adopt import bring
from sana_pipe.data.cache.cache import Cache, Unit
from sana_pipe.data.cache.encodings import Encoding
from sana_pipe.data.cache.findings import BACKUP, Finding, Replaced
from sana_pipe.data.cache.keys import as_keys
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.encoding import plan as planning
from sana_pipe.data.encoding import unit_records
from sana_pipe.data.encoding.scan import reopen
from sana_pipe.data.encoding.unit_encoder import UnitEncoder
from sana_pipe.data.sources.config import DataConfig

BRING = "sana-pipe verify --repair --set 'bucket.caches=[DIR]', where DIR is the cache that the shard was adopted from"


def repair_table(cache: Cache, encoding: str, plan: int, name: str) -> bool:
    """Restore a damaged record table (`tables/*.arrow`) of a plan from its shards. Returns whether it is right now."""
    for commit in index.commits(cache.files, encoding, plan):
        if commit.table == name and commit.shard is not None:
            table = shard.read_table(cache.files, Paths.shard(encoding, commit.shard))
            return cache.files.put_content(shard.to_ipc(table), "tables", "arrow") == name
    segment = Paths.segment(encoding, plan)
    if cache.files.exists(segment) and cache.files.document(segment)["table"] == name:
        return index.merged(cache.files, encoding, index.commits(cache.files, encoding, plan))[0] == name
    return False


class Repairs:
    """Repairs shards of a cache. One encoder at a time is in memory.

    An adopted shard is linked or copied again if another cache has it; only otherwise it is encoded.

    Args:
        encoder: makes the records of the cache again; it is given sources as they are needed.
        data: the settings with which sources are opened that were not scanned into this cache.
        other_caches: opens the caches that shards were adopted from (`bucket.caches`), where a shard needs them.
        locations: source name -> where it is now, for sources that have moved since the scan.
    """

    def __init__(
        self,
        encoder: UnitEncoder,
        data: DataConfig,
        other_caches: Callable[[], list[Cache]],
        locations: Mapping[str, str],
    ):
        self.encoder, self.data, self.locations = encoder, data, locations
        self.cache = encoder.cache
        self._open_others = other_caches
        self._indexes: dict[str, Callable[[], index.RecordIndex]] = {}

    def unit(self, finding: Finding, replaced: Replaced) -> str:
        """Restore the shard of a finding.

        Args:
            replaced: updated.

        Returns:
            `restored` (byte for byte), `replaced` (the damaged records are in later plans) or `failed: <reason>`.

        Raises:
            UserError: the source or the model is not there.
        """
        encoding, digest = self.cache.encoding(finding.encoding), PurePosixPath(finding.path).stem
        adopted = finding.unit == index.adopted_unit(encoding.name, digest)
        if adopted and self._brought(finding.path, digest):
            replaced.pop(digest, None)
            return "restored"
        # Opened at the first damage, and again after a shard was replaced, which may have added a plan.
        open_index = self._indexes.pop(encoding.name, None) or run_once(partial(self.cache.index, encoding.name))
        outcome = self._unit(encoding, finding, replaced, open_index, adopted)
        self._indexes = {encoding.name: open_index} if outcome == "restored" else {}
        return f"{outcome}; {BRING}" if adopted and outcome.startswith("failed") else outcome

    @cached_property
    def _others(self) -> list[Cache]:
        return self._open_others()

    def _brought(self, name: str, digest: str) -> bool:
        """Take over an adopted shard again. Returns whether another cache has it intact."""
        for other in self._others:
            with suppress(IntegrityError):
                bring(self.cache.files, other.files, name, digest)
                return True
        return False

    def _unit(
        self,
        encoding: Encoding,
        finding: Finding,
        replaced: Replaced,
        open_index: Callable[[], index.RecordIndex],
        adopted: bool,
    ) -> str:
        # A shard has the records a, b, c, d, and a later plan has b again. Now a and b are damaged in the shard:
        #   damaged      a b    both are encoded again, in the batches in which they were first encoded
        #   unreplaced   a      the only one of them that no other shard has
        # The shard is written again from the new a, b and the stored c, d. If its bytes are the old ones, the file is
        # put in its place, and every snapshot is whole ("restored"). If they are others (another card), the old shard
        # stays damaged and a new plan gets a alone ("replaced"): snapshots that name the shard for a or b are made
        # again by `bucket`. If a cannot be encoded, as its picture has changed, nothing is written ("failed").
        cache = self.cache
        plan = cache.plan(encoding.name, finding.plan)
        unit = next(unit for unit in plan.units if unit.unit == finding.unit)
        commit = next(c for c in index.commits(cache.files, encoding.name, plan.number) if c.unit == unit.unit)
        assert commit.shard is not None
        damaged = set(audit.bad_records(cache, encoding.name, commit))
        unreplaced = audit.unreplaced_keys(open_index, commit, sorted(damaged))
        rows = planning.with_current_places(cache, cache.unit_rows(plan, unit))
        self._open_sources(rows, f", or {BRING}" if adopted else "")
        made: dict[bytes, unit_records.EncodedRecord] = {}
        for batch, rejects in self.encoder.remake(plan, unit, commit, damaged, rows):
            made.update((record.key, record) for record in batch)
            lost = [reject for reject in rejects if bytes.fromhex(reject.key) in unreplaced]
            if lost:
                return f"failed: {lost[0].item}: {lost[0].reason}"
        if unmade := len(unreplaced - made.keys()):
            return f"failed: its plan lacks {unmade} of its records; {BACKUP}"
        if damaged <= made.keys() and _restored(cache, encoding, unit, commit, {key: made[key] for key in damaged}):
            replaced.pop(commit.shard, None)
            return "restored"
        if not damaged:
            return "failed: the shard's head or table is damaged and cannot be made again as it was"
        if unreplaced:  # the others are in a later plan already
            _replace(cache, encoding, rows, unit, commit, unreplaced, made, self.encoder.limits)
        replaced[commit.shard] = damaged
        return "replaced"

    def _open_sources(self, rows: pa.Table, or_else: str) -> None:
        names = rows.column("source").unique().to_pylist() if "source" in rows.column_names else []
        for name in names:
            if name in self.encoder.sources:
                continue
            try:
                source = reopen(self.cache, name, self.data, self.locations.get(name))
            except UserError as error:
                raise UserError(
                    f"damaged records of pictures need source {name!r}: {error.what}",
                    fix=f"--data {name}=DIR, where it is now{or_else}",
                ) from None
            self.encoder.sources[name] = source


def _restored(
    cache: Cache, encoding: Encoding, unit: Unit, commit: index.Commit, made: dict[bytes, unit_records.EncodedRecord]
) -> bool:
    """Write a shard from its intact records and the remade ones. Returns whether its bytes are the old ones."""
    assert commit.shard is not None
    named, reader = unit.unit, shard.ShardReader(cache.files, encoding.name)
    if named == index.adopted_unit(encoding.name, commit.shard):
        with suppress(IntegrityError):  # the head names the unit of the other cache
            named = str(shard.read_head(cache.files, Paths.shard(encoding.name, commit.shard))["unit"])
    with shard.ShardWriter(cache.files, encoding, named) as writer:
        for row in audit.record_rows(cache, commit):
            if row["key"] in made:
                record = made[row["key"]]
                writer.add(record.key, record.array, caption=record.caption, valid=record.valid)
                continue
            audit.copy_record(writer, reader, commit.shard, row)
        digest, _, _ = writer.finish(only=commit.shard)
    return digest == commit.shard


def _replace(
    cache: Cache,
    encoding: Encoding,
    rows: pa.Table,
    unit: Unit,
    commit: index.Commit,
    keys: set[bytes],
    made: dict[bytes, unit_records.EncodedRecord],
    limits: unit_records.Limits,
) -> None:
    """Commit the remade records of these keys as a new plan. rows: the unit's."""
    table = rows.take([i for i, key in enumerate(rows.column("key").to_pylist()) if key in keys])
    in_order = table.column("key").to_pylist()
    while True:
        number = len(cache.files.numbers(Paths.plans(encoding.name)))
        added_unit = Unit.of(encoding.name, number, as_keys(in_order), 0, unit.batch)
        if cache.add_plan(encoding.name, number, [added_unit], table):
            break
    added = cache.plan(encoding.name, number)
    names = ("model", "revision", f"{encoding.kind}_mode")
    how = {name: commit.provenance[name] for name in names if name in commit.provenance}
    records = [made[key] for key in in_order]
    unit_records.write_unit(
        cache, encoding, added, added_unit, [(records, [])], lambda done, bad: None, how, limits=limits
    )
    index.merge(cache.files, encoding.name, number, [added_unit.unit])
