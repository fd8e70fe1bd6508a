"""Repair: make the damaged records of a shard again, and only those.

What: the batches that hold damaged records are encoded again in their old composition; the shard is written anew from
them and from the intact records. On the same kind of machine its digest is the old one: the file is replaced in
place, and every snapshot that refers to it is whole again.
Why: one flipped byte in 100 GB should cost one batch, not a store.
Price: where hardware or libraries differ the bytes differ; then the damaged records go into a new plan (a later plan
wins), and snapshots made before have to be made again with `sana-pipe bucket`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from pipeline.cache import audit, index, layout, shard
from pipeline.cache.layout import Paths
from pipeline.cache.store import Cache, Plan, Unit
from pipeline.encoding import worker
from pipeline.errors import IntegrityError

Encode = Callable[[Plan, Unit, index.Commit, Container[bytes]], Iterable[worker.Made]]
"""Encodes the batches of a unit that hold one of the given keys, in the way that its commit's provenance names."""


def repair_table(cache: Cache, recipe: str, plan: int, name: str) -> bool:
    """Restore a damaged record table (`tables/*.arrow`) of a plan from its shards. Returns whether it is right now."""
    for commit in index.commits(cache.files, recipe, plan):
        if commit.table == name and commit.shard is not None:
            _, table = shard.read_table(cache.files, Paths.shard(recipe, commit.shard))
            return cache.files.put_content(index.table_bytes(table), "tables", "arrow") == name
    segment = Paths.segment(recipe, plan)
    if cache.files.exists(segment) and cache.files.document(segment)["table"] == name:
        return index.merged(cache.files, recipe, index.commits(cache.files, recipe, plan))[0] == name
    return False


def repair_unit(
    cache: Cache,
    recipe: layout.Recipe,
    finding: audit.Finding,
    encode: Encode,
    again: dict[str, set[bytes]],
    records: Callable[[], index.RecordIndex],
) -> str:
    """Restore the shard of one finding.

    Args:
        records: opens the index of the recipe, as it is after the last shard that was `replaced`.
        again: of each shard the keys of damaged records that another shard has; kept true.

    Returns:
        `restored` (byte for byte), `replaced` (the damaged records are in later plans) or `failed: <reason>`.
    """
    plan, unit = audit.unit_of(cache, recipe.name, finding.plan, finding.unit)
    commit = next(c for c in index.commits(cache.files, recipe.name, plan.number) if c.unit == unit.unit)
    assert commit.shard is not None
    damaged = set(audit.bad_records(cache, recipe.name, commit))
    bad = set(map(bytes.fromhex, audit.not_replaced(records, commit, sorted(damaged))))
    made: dict[bytes, worker.Record] = {}
    for done, rejects in encode(plan, unit, commit, damaged):
        made.update((record.key, record) for record in done)
        lost = [reject for reject in rejects if bytes.fromhex(reject.key) in bad]
        if lost:
            return f"failed: {lost[0].item}: {lost[0].reason}"
    if damaged <= made.keys() and _restored(cache, recipe, unit, commit, {key: made[key] for key in damaged}):
        again.pop(commit.shard, None)
        return "restored"
    if not damaged:
        return "failed: the shard's own description is damaged and cannot be made again as it was"
    if bad:  # the others are in a later plan already
        _replace(cache, recipe, plan, unit, commit, bad, made)
    again[commit.shard] = damaged
    return "replaced"


def _restored(
    cache: Cache, recipe: layout.Recipe, unit: Unit, commit: index.Commit, made: dict[bytes, worker.Record]
) -> bool:
    """Write a shard anew from its intact records and those that were made again; whether its bytes are the old ones."""
    assert commit.shard is not None
    reader = shard.Reader(cache.files, recipe.name)
    with shard.ShardWriter(cache.files, recipe, unit.unit) as writer:
        for row in audit.record_rows(cache, commit):
            if row["key"] in made:
                record = made[row["key"]]
                writer.add(record.key, record.array, caption=record.caption, valid=record.valid)
                continue
            array = audit.payload(reader, recipe.name, commit.shard, row)
            where_stored = (commit.shard, row["offset"], row["key"], row["checksum"], row["length"])
            caption = None
            if "caption_offset" in row:
                where = (row["caption_offset"], row["caption_length"], row["key"], row["caption_checksum"])
                caption = reader.caption(commit.shard, *where)
            stored = bytes(reader.stored(*where_stored))  # as it is: encoding a lossy record anew would change it
            writer.add(row["key"], array, caption=caption, valid=row.get("valid"), stored=stored)
        digest, _, _ = writer.finish(only=commit.shard)
    return digest == commit.shard


def _replace(
    cache: Cache,
    recipe: layout.Recipe,
    plan: Plan,
    unit: Unit,
    commit: index.Commit,
    bad: set[bytes],
    made: dict[bytes, worker.Record],
) -> None:
    """Commit the damaged records as a plan of their own."""
    rows = cache.table(plan.table).slice(unit.start, unit.count)
    wanted = [i for i, key in enumerate(rows.column("key").to_pylist()) if key in bad]
    table = rows.take(wanted)
    while True:
        number = len(cache.files.numbers(Paths.plans(recipe.name)))
        keys = table.column("key").to_pylist()
        own = Unit(layout.digest("unit", recipe.name, str(number), *keys).hex(), 0, len(keys), unit.batch)
        if cache.add_plan(recipe.name, number, [own], table):
            break
    added = cache.plan(recipe.name, number)
    how = {name: value for name, value in commit.provenance.items() if name in ("text_mode", *layout.PROVENANCE)}
    records = [made[key] for key in keys]
    again = worker.encode(cache, recipe, added, own, [(records, [])], lambda done, bad: None, how)
    if again.records != len(keys):
        raise IntegrityError(f"plan {number} of {recipe.name}: not every repaired record could be stored")
    index.merge(cache.files, recipe.name, number, [own.unit])
