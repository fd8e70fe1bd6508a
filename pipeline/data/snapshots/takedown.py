"""Takedown: pictures leave a cache, with every record and row of theirs, and the snapshots are made again without them.

`begin` finds what belongs to the pictures and publishes that as a document. `carry_out` then acts, in an order in which
a reader always finds whole files: new shards and tables, snapshots on them, then plans, commits and scans without the
pictures, at last the removal of what nothing needs. Each part does nothing where it is done, so a killed takedown is
ended by the next call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base import process_identity
from sana_pipe.base.errors import CacheError, IntegrityError, UserError
from sana_pipe.data.cache import garbage, index, layout, listed, withdrawn
from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.cache import MOVING, Cache
from sana_pipe.data.cache.contradictions import contradictions
from sana_pipe.data.cache.findings import bucket_command, named_snapshots, packs
from sana_pipe.data.cache.keys import as_keys, binary
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.readers import living, runs
from sana_pipe.data.cache.rewriting import Rewriter
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import Head
from sana_pipe.data.cache.withdrawn import Takedown
from sana_pipe.data.snapshots import group_memory, metadata_table, packing, takedown_search
from sana_pipe.data.snapshots.remaking import Changes, remade

TRAINED = "trained-"
"""The beginning of the names that training gives to snapshots."""
CLAIM = "takedown"
"""The claim of the process that carries out takedowns."""
CLAIM_S = 900.0
"""Age of a claim from which on its process on another machine counts as ended."""

Log = Callable[[str], None]


def begin(cache: Cache, items: Sequence[str], digests: Iterable[bytes]) -> tuple[int, Takedown]:
    """Publish the takedown of some pictures. Arguments: of `takedown_search.find`.

    Raises:
        UserError: an item is not known, a run reads a snapshot that would change, or other processes write here.
        IntegrityError: documents and shards contradict each other.
    """
    _check_whole(cache)
    takedown = takedown_search.find(cache, items, digests)
    _Work(cache, takedown, lambda line: None).check_unused()
    return withdrawn.begin(cache, takedown), takedown


def carry_out(cache: Cache, number: int, takedown: Takedown, log: Log) -> Takedown:
    """Carry out a published takedown, all of it or what is left. `withdrawn.finish` marks it as done.

    Args:
        log: prints one line.

    Returns:
        The takedown with the snapshots that were made again.

    Raises:
        UserError: as `begin`. IntegrityError: a record that stays is damaged.
    """
    work = _Work(cache, takedown, log)
    work.check_unused()
    work.write_shards()
    withdrawn.update(cache, number, work.takedown)
    work.write_scans()
    work.write_metadata()
    work.remake_snapshots(lambda made: withdrawn.update(cache, number, made))
    for rewriter in work.rewriters:
        rewriter.replace_documents()
    work.replace_scans()
    work.remove()
    return work.takedown


def _check_whole(cache: Cache) -> None:
    """Raise IntegrityError where documents and shards contradict each other: what belongs to a picture is not known."""
    found = next(contradictions(cache), None)
    if found is not None:
        raise IntegrityError(
            f"{cache.files.where(found.path)}: {found.problem}", expected="a whole cache", fix=found.fix
        )


class _Work:
    """A takedown in progress.

    Attributes:
        takedown: what is known of it so far.
        rewriters: of the encodings with records that go.
        tables: digest of the table of a scan, or of metadata -> that of the table without the rows that go.
    """

    def __init__(self, cache: Cache, takedown: Takedown, log: Log):
        self.cache, self.takedown, self.log = cache, takedown, log
        encodings = takedown_search.encoding_names(cache)
        self.rewriters = [Rewriter(cache, name, keys) for name in encodings if (keys := takedown.keys_of(name))]
        self.tables: dict[str, str] = {}
        self._digests = binary(as_keys([bytes.fromhex(digest) for digest in takedown.digests]))

    @property
    def changes(self) -> Changes:
        """The changes in snapshots, as far as they are known."""
        keys = {name: as_keys(self.takedown.keys_of(name)) for name in self.takedown.keys}
        successors = {rewriter.name: rewriter.successors for rewriter in self.rewriters}
        return Changes(keys, successors, self.tables, self.takedown.snapshots)

    # ------------------------------------------------------------ who else is here

    def check_unused(self) -> None:
        """Refuse while another process encodes, packs, verifies or makes a snapshot here, or a run reads a snapshot
        that may change.

        Raises:
            UserError: names the process or the run.
        """
        now = self.cache.files.now()
        for entry in self.cache.files.walk("claims"):
            ours = entry.name == Paths.claim(CLAIM) or entry.name.startswith((f"claims/{TRAINED}", "claims/launch-"))
            if not ours and now - entry.modified < CLAIM_S:
                fields = _claim(self.cache, entry.name)
                if fields is not None and not process_identity.has_ended(fields):
                    raise UserError(
                        f"{self.cache.files.where(entry.name)}: another process works in this cache",
                        found=f"process {fields.get('process', '?')} on {str(fields.get('machine', '?')).split()[0]}",
                        fix=f"wait until it has ended; if it has, the claim is old in {CLAIM_S / 60:.0f} minutes",
                    )
        for run in living(self.cache):
            raise UserError(
                f"a run reads snapshot {run.snapshot[:12]} of this cache: its records would go while it trains",
                found=f"run {run.run} on {run.host}, last beat {run.age_s:.0f} s ago",
                fix="stop the run, or wait until it has ended",
            )

    # ------------------------------------------------------------ new files

    def write_shards(self) -> None:
        """Write the shards without the records that go."""
        for rewriter in self.rewriters:
            rewriter.write_shards()
            if rewriter.successors:
                self.log(f"{rewriter.name}: {len(rewriter.successors)} shards are written without the records that go")
        paths = {Paths.shard(rewriter.name, old) for rewriter in self.rewriters for old in rewriter.successors}
        self.takedown = replace(self.takedown, shards=tuple(sorted({*self.takedown.shards, *paths})))

    def write_scans(self) -> None:
        """Write the tables of scans without the rows that go; also of scans that only snapshots still name."""
        by_table: dict[str, set[str]] = {}
        for scan in takedown_search.scans(self.cache):
            by_table.setdefault(scan.table, set()).add(scan.source)
        for head in self._heads():
            for source, table in head.sources.items():
                by_table.setdefault(table, set()).add(source)
        for table, sources in sorted(by_table.items()):
            names = {item for source, item in self.takedown.items if source in sources}
            with suppress(IntegrityError):  # its table is lost; only reports miss it
                self._write_scan(table, names)

    def _write_scan(self, name: str, items: set[str]) -> None:
        table = self.cache.table(name)

        def left() -> Iterator[pa.Table]:
            for rows in batches(table):
                goes = takedown_search.goes(rows, self._digests, items)
                yield _with_listing(rows, goes) if goes.any() else rows

        new = self.cache.files.scratch.table(table.schema, left())
        if len(new) < len(table):
            self.tables[name] = self.cache.put_table(new)

    def write_metadata(self) -> None:
        """Write the tables of `bucket.metadata` without the rows that go: of keys that may name one of the items."""
        names = set(self.takedown.digests)
        names |= {name for source, item in self.takedown.items for name in metadata_table.names_of(source, item)}
        for digest in sorted({head.metadata for head in self._heads() if head.metadata is not None}):
            with suppress(IntegrityError):  # it is lost; `verify` says so
                table = self.cache.table(digest)
                left = (rows.filter(pa.array(~metadata_table.goes(rows, names))) for rows in batches(table))
                new = self.cache.files.scratch.table(table.schema, left)
                if len(new) < len(table):
                    self.tables[digest] = self.cache.put_table(new)
                    self.log(f"table {digest[:12]} of metadata is written without {len(table) - len(new)} rows")

    def _heads(self) -> Iterator[Head]:
        for snapshot_id in named_snapshots(self.cache):
            with suppress(IntegrityError):
                yield Head.read(self.cache.files, snapshot_id)

    # ------------------------------------------------------------ snapshots

    def remake_snapshots(self, note: Callable[[Takedown], None]) -> None:
        """Make the named snapshots again that have a sample, shard or scan that goes, and move their names.

        Held-out parts come before those that name them, packs after what they are packed from.

        Args:
            note: called with the takedown after each, before its names move.
        """
        for old in self.takedown.snapshots:  # of a process that was killed
            self._move_names(old)
        found = []
        for snapshot_id in named_snapshots(self.cache):
            snapshot = Snapshot(self.cache.files, snapshot_id)
            order = (snapshot.packed, bool(snapshot.head.leaked), snapshot_id)
            if (lost := int(self.changes.samples_of(snapshot).sum())) or self.changes.concern(snapshot.head):
                found.append((order, lost, snapshot))
        for _, lost, snapshot in sorted(found, key=lambda each: each[0]):
            again = snapshot.packed and lost
            made = self._packed_again(snapshot) if again else remade(self.cache, snapshot, self.changes)
            learned = self.takedown.runs + (_trained(self.cache, snapshot.id) if lost else ())
            self.takedown = replace(self.takedown, runs=tuple(dict.fromkeys(learned)))
            self.takedown = replace(self.takedown, snapshots={**self.takedown.snapshots, snapshot.id: made or ""})
            note(self.takedown)
            self._say(snapshot, lost, made)
            self._move_names(snapshot.id)
        self._rename_in_packs()

    def _say(self, snapshot: Snapshot, lost: int, made: str | None) -> None:
        names = ", ".join(self.cache.names_of(snapshot.id))
        what = f"snapshot {snapshot.id[:12]} ({names})"
        if made is not None:
            kept = f"without {lost} samples" if lost else "with the same samples and content id"
            self.log(f"{what} was made again {kept}: {made[:12]}")
        elif snapshot.packed:
            self.log(f"{what} is gone. To make it again: {bucket_command('NAME', snapshot.head)}")
        else:
            self.log(f"{what} is gone: no sample of it is left")

    def _packed_again(self, snapshot: Snapshot) -> str | None:
        """Pack what a pack was packed from again; None if that cannot be read any more."""
        cache, old = self.cache, snapshot.head
        parent = self.takedown.snapshots.get(str(old.parent)) or str(old.parent)
        try:
            source = Snapshot(cache.files, parent)
        except IntegrityError:
            return None
        if self.changes.samples_of(source).any():
            made = remade(cache, source, self.changes)
            if made is None:
                return None
            source = Snapshot(cache.files, made)
        mib = cache.table(cache.plan(str(old.folder), 0).table).column("mib")[0].as_py()
        plan = packing.planned(cache, source, mib)
        packer = packing.Packer(cache, source, plan)
        done = index.committed(cache.files, plan.encoding, plan.number)
        for unit in plan.units:
            if unit.unit not in done:
                packer.pack_unit(unit)
        head = packing.assembled(cache, source, plan)
        head.put_lists(cache.files)
        cache.files.ensure(Paths.snapshot(head.id), head.sealed())
        return head.id

    def _move_names(self, old: str) -> None:
        """Let the names of a snapshot point to the one in its place. Where both have the same samples, the old id
        becomes a name, too: a run that began with it goes on."""
        cache, new = self.cache, self.takedown.snapshots[old]
        keep_id = bool(new) and _same_content(cache, old, new)
        for name in cache.names_of(old):
            if new and (not name.startswith(TRAINED) or keep_id):
                cache.point(name, new, move=True)
            elif name in MOVING:
                cache.append(Paths.names(name), {"name": name, "snapshot": None})
            else:
                cache.forget_name(name)
        if keep_id:
            cache.point(old, new, move=True)

    def _rename_in_packs(self) -> None:
        """Let plans of packs name the snapshots that took the place of what they pack."""
        for pack in packs(self.cache):
            name = Paths.numbered(Paths.plans(pack), 0)
            body = self.cache.files.document(name)
            table = self.cache.table(body["table"])
            new = self.takedown.snapshots.get(table.column("snapshot")[0].as_py())
            if new:
                at = table.column_names.index("snapshot")
                body["table"] = self.cache.put_table(table.set_column(at, "snapshot", pa.array([new])))
                self.cache.files.replace_document(name, layout.seal(body))

    # ------------------------------------------------------------ what goes

    def replace_scans(self) -> None:
        """Let the documents of scans name the tables without the rows that go."""
        for scan in list(takedown_search.scans(self.cache)):
            if scan.table in self.tables:
                body = {**scan.body, "table": self.tables[scan.table]}
                body.pop("counts", None)  # of the table before
                name = Paths.numbered(Paths.scans(scan.source), scan.number)
                self.cache.files.replace_document(name, layout.seal(body))

    def remove(self) -> None:
        """Remove what nothing needs now, lists and reports, files that were set aside, and local copies of objects."""
        cache, now = self.cache, self.cache.files.now()
        for shard in self.takedown.shards:  # those of units of which nothing is left would look like lost work
            cache.files.remove(shard)
        unneeded = [entry for entry in garbage.unneeded(cache, 0.0, now) if not entry[0].startswith("claims/")]
        removed = garbage.remove(cache, unneeded, 0.0, now)
        for folder in ("damaged", Paths.ROUNDS):  # rounds name the keys of damaged records
            for entry in list(cache.files.walk(folder)):
                cache.files.remove(entry.name)
                removed.append((entry.name, entry.size, "unreadable or advice"))
        for entry in list(cache.files.walk("reports")):  # in an object store they are not in the local folder
            if entry.name == group_memory.PATH or self._is_named_in(cache.files.read(entry.name)):
                cache.files.remove(entry.name)
                self.log(f"{cache.files.where(entry.name)}: was made of a picture that goes, and is removed")
        for path in sorted(cache.files.reports.rglob("*")):
            if path.is_file() and self._is_named_in(path.read_bytes()):
                path.unlink()
                self.log(f"{path}: named a picture that goes, and is removed")
        listed.discard(cache.files)
        mirrored = cache.files.drop_mirrored()
        size = sum(entry[1] for entry in removed)
        self.log(f"{len(removed)} files, {size} bytes removed" + (f", and {mirrored} local copies" if mirrored else ""))

    def _is_named_in(self, data: bytes) -> bool:
        words = [item for _, item in self.takedown.items] + list(self.takedown.texts)
        words += [word.replace('"', '""') for word in words if '"' in word]  # as a CSV writes it
        return any(word.encode("utf-8", "surrogatepass") in data for word in words)


def _with_listing(rows: pa.Table, goes: np.ndarray) -> pa.Table:
    """The rows that stay. What the listing of a part skipped stands in its first row: the next row takes it over."""
    mask = pa.array(goes)
    left, gone = rows.filter(pc.invert(mask)), rows.filter(mask).select(["part", "ignored"]).to_pylist()
    ignored, parts = left.column("ignored").to_pylist(), left.column("part").to_pylist()
    for row in gone:
        if row["ignored"] is not None and row["part"] in parts:
            ignored[parts.index(row["part"])] = row["ignored"]
    at = rows.schema.get_field_index("ignored")
    return left.set_column(at, rows.schema.field(at), pa.array(ignored, pa.string()))


def _trained(cache: Cache, snapshot_id: str) -> tuple[tuple[str, str, str], ...]:
    """(snapshot, host, folder) of the runs that were trained on a snapshot, under its id or an earlier one that is a
    name of it; host and folder are "" where the cache knows only that there was one."""
    names = cache.names_of(snapshot_id)
    trained = [name for name in names if name.startswith(TRAINED)]
    ids = [snapshot_id, *(name for name in names if re.fullmatch("[0-9a-f]{32}", name))]
    known = [run for name in trained for run in runs(cache, name) or [("", "")]]
    return tuple((each, host, run) for each in ids for host, run in known)


def _same_content(cache: Cache, old: str, new: str) -> bool:
    """Return whether two snapshots have the same samples and records; False if a head is gone."""
    with suppress(IntegrityError):
        before, after = Head.read(cache.files, old), Head.read(cache.files, new)
        return before.content_id is not None and before.content_id == after.content_id
    return False


def _claim(cache: Cache, name: str) -> dict[str, object] | None:
    """The fields of a claim; None if it is gone or unreadable."""
    try:
        fields = json.loads(cache.files.read(name))
    except (CacheError, ValueError):
        return None
    return fields if isinstance(fields, dict) else None
