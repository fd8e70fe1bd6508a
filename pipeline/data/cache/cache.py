"""The cache as a whole: sources, encodings, plans, indexes and snapshots under one root.

`Cache` is the object through which stages read and write a cache, so every rule of publication and identity is applied
in one place. `CacheLocation` is what it is opened from.
Price: only the last table, and the indexes of finished encodings, stay open between calls.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sana_pipe import __version__
from sana_pipe.base.errors import CacheError, IntegrityError, UserError
from sana_pipe.base.retrying import PATIENCE_S
from sana_pipe.base.urls import strip_credentials
from sana_pipe.data.cache import copies, index, layout
from sana_pipe.data.cache.arrow import parquet_batches, write_parquet
from sana_pipe.data.cache.config import MirrorConfig
from sana_pipe.data.cache.encodings import Encoding, encoding_class
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import Head, check_files
from sana_pipe.data.cache.snapshot_lists import ENTRIES, EntryList, publish

FORGOTTEN = "forgotten"
"""Key in a scan or prompt set document: the source, or the set, was forgotten and is not used any more."""
MOVING = ("latest", "latest.heldout")
"""Names that move to each new snapshot; any other name moves only on request."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def as_source_name(folder: str) -> str:
    """The name of a folder or a file with `-` in place of what a source's name may not have, such as spaces."""
    if _NAME.fullmatch(folder):
        return folder
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder).strip("-._")[:100] or folder


def check_source_name(name: str) -> None:
    """Raises a UserError unless the name is allowed for a source."""
    _check_name(name, "a source", "--source-name NAME, or rename the folder")


def check_snapshot_name(name: str) -> None:
    """Raises a UserError unless the name is allowed for a snapshot."""
    _check_name(name, "a snapshot", "--name NAME")


CAPTIONS = "captions"
"""Value of `train.pictures.prompts` for captions of the snapshot."""


def check_prompts_name(name: str) -> None:
    """Raises a UserError unless the name is allowed for a prompt set."""
    if name == CAPTIONS:
        what = f"{name!r} cannot name a prompt set: in train.pictures.prompts it means the captions of the snapshot"
        raise UserError(what, fix="--prompts-name NAME")
    _check_name(name, "a prompt set", "--prompts-name NAME")


def _check_name(name: str, what: str, fix: str) -> None:
    if not _NAME.fullmatch(name):
        expected = "letters, digits, '.', '_' and '-', at most 100"
        raise UserError(f"{name!r} cannot name {what}", expected=expected, fix=fix)


def name_taken(name: str, current: str, wanted: str) -> UserError:
    """The error for moving a snapshot's name from the id `current` to the id `wanted`."""
    return UserError(
        f"the name {name!r} points to another snapshot already",
        expected=wanted,
        found=current,
        fix="use another name, or --move (gc removes snapshots that have no name)",
    )


def _refuse_other(files: Files) -> None:
    """Raise a CacheError if other files are where a cache is to be made."""
    names = files.names("")
    if (
        any(name != "tmp" for name in names)
        and "encodings" not in names  # with encodings it is a cache that lost its format document
        and not files.exists(Paths.FORMAT)  # looked for again: another process may have made the cache meanwhile
    ):
        raise CacheError(
            f"{files.where('')}: is neither empty nor a cache", fix="--set cache=DIR, an empty or new folder"
        )


@dataclass(frozen=True)
class Unit:
    """The work of one commit: rows `start` to `start + count` of its plan's table, encoded in batches of `batch`."""

    unit: str
    start: int
    count: int
    batch: int

    @classmethod
    def of(cls, encoding: str, plan: int, keys: np.ndarray, start: int, batch: int) -> Unit:
        """A unit of these keys, S16 (n,). Its id is the digest of the encoding, the plan's number and the keys."""
        return cls(layout.digest_of_keys(("unit", encoding, str(plan)), keys).hex(), start, len(keys), batch)


UNITS = pa.schema([("unit", pa.string()), ("start", pa.int64()), ("count", pa.int64()), ("batch", pa.int64())])


class Units(EntryList[Unit]):
    """The units of a plan, each made when it is asked for."""

    @staticmethod
    def entries(rows: pa.Table) -> Iterator[Unit]:
        return (Unit(**row) for row in rows.to_pylist())

    @staticmethod
    def table_of(units: Iterable[Unit]) -> pa.Table:
        """The table of a list of units."""
        rows = (pa.Table.from_pylist([vars(unit) for unit in some], UNITS) for some in index.by(ENTRIES, units))
        return pa.concat_tables([UNITS.empty_table(), *rows])


@dataclass(frozen=True)
class WorkList:
    """An append-only list of work of one encoding.

    Attributes:
        table: digest of the table of its work.
        lead: encoding and number of the plan that has the same rows in the same units, whose units are made first; see
            `encoding.plan.plan_following`. None: of no other plan.
    """

    encoding: str
    number: int
    units: Sequence[Unit]
    table: str
    lead: tuple[str, int] | None = None


def list_of(files: Files, name: str, body: dict[str, Any]) -> Units | index.Commits | None:
    """The list that a document names: units of a plan, commits of a segment; None of any other document."""
    folder = name.partition("/")[0]
    if folder == "plans":
        return Units.read(files, body["units"])
    return index.Commits.read(files, body["commits"]) if folder == "segments" else None


@dataclass(frozen=True)
class CacheLocation:
    """The address of a cache, and what it takes to reach it. The attributes are arguments of `Cache`."""

    root: str
    mirror: MirrorConfig
    patience_s: float

    def open(self, *, create: bool = False) -> Cache:
        """Open the cache.

        Raises:
            CacheError: see `Cache`.
        """
        return Cache(self.root, create=create, mirror=self.mirror, patience_s=self.patience_s)

    def open_if_there(self) -> Cache | None:
        """Open the cache; None if it does not exist yet.

        Raises:
            CacheError: the folder has other files, so that no cache can be made there.
        """
        files = Files(self.root, self.mirror, self.patience_s)
        if files.exists(Paths.FORMAT):
            return self.open()
        _refuse_other(files)
        return None

    def open_others(self, roots: Iterable[str]) -> list[Cache]:
        """Open other caches, which are reached in the same way."""
        return [replace(self, root=root).open() for root in roots]


class Cache:
    """A cache folder.

    Args:
        root: its path, or the URL of a place in an object store.
        create: make it if it does not exist; whether files can be published there is tested first.
        mirror: local folder and size for copies of an object store's files; None for the default.
        patience_s: seconds to wait for an object store or network file system that does not answer.

    Raises:
        CacheError: there is no cache (and `create` is false), or it is of another format or version.

    Attributes:
        reuses_indexes: see `index`. A record table that is lost meanwhile is not noticed.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        create: bool = False,
        mirror: MirrorConfig | None = None,
        patience_s: float = PATIENCE_S,
    ):
        self.files = Files(root, mirror, patience_s)
        if create:
            self.files.probe()
        if not self.files.exists(Paths.FORMAT):
            if not create:
                self.files.names("")  # a bucket that does not exist is an error here
                where = os.path.abspath(self.files.root) if self.files.on_disk else root
                raise CacheError(f"{where}: there is no cache here", fix="sana-pipe encode --data DIR")
            _refuse_other(self.files)
        if create:
            self.files.ensure(Paths.FORMAT, layout.seal({"what": "sana-pipe cache; see cache_layout.md"}))
            self.files.check_writable()
        try:
            self.files.document(Paths.FORMAT)
        except IntegrityError as error:
            raise IntegrityError(error.what, fix="sana-pipe encode --data DIR: it writes this file again") from None
        self.location = str(root)
        self._last_table: tuple[str, pa.Table] | None = None
        self.reuses_indexes = False
        self._indexes: dict[str, tuple[int, index.RecordIndex]] = {}

    @property
    def place(self) -> str:
        """The path without links, or the URL without credentials: of one cache the same."""
        files = self.files
        return os.path.realpath(files.root) if files.on_disk else strip_credentials(self.location)

    @property
    def patience_s(self) -> float:
        """Seconds to wait for storage that does not answer."""
        return self.files.patience_s

    @property
    def root(self) -> Path:
        """The folder of a cache on a disk."""
        return self.files.root

    # ------------------------------------------------------------ encodings

    def add_encoding(self, encoding: Encoding) -> None:
        self.files.ensure(
            Paths.encoding(encoding.name), layout.seal({"kind": encoding.kind, "values": encoding.values()})
        )

    def encoding(self, name: str) -> Encoding:
        """An encoding by name (`latent-<id>`, `text-<id>`)."""
        body = self.files.document(Paths.encoding(name))
        encoding = encoding_class(body["kind"]).from_values(body["values"])
        if encoding.name != name:
            raise IntegrityError(
                f"{self.files.where(Paths.encoding(name))}: holds another encoding", expected=name, found=encoding.name
            )
        return encoding

    def encodings(self, kind: str) -> list[Encoding]:
        names = [n[:-5] for n in self.files.names("encodings") if n.startswith(f"{kind}-") and n.endswith(".json")]
        return [self.encoding(name) for name in names]

    # ------------------------------------------------------------ tables (parquet, content-addressed)

    def put_table(self, table: pa.Table) -> str:
        last = self._last_table
        if last is not None and table.equals(last[1]) and self.files.refresh(Paths.table(last[0], "parquet")):
            return last[0]  # an unchanged scan
        return self.files.put_table(partial(write_parquet, table), "parquet", twice=True)

    def table(self, digest: str, columns: list[str] | None = None) -> pa.Table:
        """A Parquet table by its digest; the rows of a large table are in a temporary file (see `Scratch`). The last
        one stays open, since the units of a plan share a table.

        Args:
            columns: names of the columns to read; default: all.
        """
        last = self._last_table
        if last is not None and last[0] == digest:
            return last[1] if columns is None else last[1].select(columns)
        with self._parquet(digest, columns) as (schema, batches):
            table = self.files.scratch.table(schema, batches)
        if columns is None:
            self._last_table = digest, table
        return table

    def nulls(self, digest: str, column: str) -> tuple[int, int]:
        """Rows of a Parquet table, and how many of them have a null in a column. Needs no temporary file."""
        rows = nulls = 0
        with self._parquet(digest, [column]) as (_, batches):
            for batch in batches:
                rows, nulls = rows + len(batch), nulls + batch.column(column).null_count
        return rows, nulls

    @contextmanager
    def _parquet(self, digest: str, columns: list[str] | None) -> Iterator[tuple[pa.Schema, Iterator[pa.Table]]]:
        name = Paths.table(digest, "parquet")
        data = self.files.mapped(name, digest)
        try:
            yield parquet_batches(data, columns)
        except (pa.ArrowException, OSError) as error:
            raise IntegrityError(f"{self.files.where(name)}: not a Parquet table: {error}") from None

    # ------------------------------------------------------------ sources

    def sources(self) -> list[str]:
        return self.files.folders("sources")

    def last_scan(self, source: str) -> dict[str, Any] | None:
        """The newest scan document of a source: `root`, `table`, `items` and `rejects` (counts of the table),
        `encodings` (names by kind), `buckets`; None if there is none or the source was forgotten."""
        scan = self._newest(Paths.scans(source))
        return None if scan is None or scan.get(FORGOTTEN) else scan

    def _newest(self, folder: str) -> dict[str, Any] | None:
        """The last numbered document in a folder; None if there is none."""
        numbers = self.files.numbers(folder)
        return self.files.document(Paths.numbered(folder, numbers[-1])) if numbers else None

    def append(self, folder: str, body: dict[str, Any]) -> str | None:
        """Publish a document under the next number in a folder. Returns its path; None if another process took it."""
        path = Paths.numbered(folder, len(self.files.numbers(folder)))
        return path if self.files.put(path, layout.seal(body)) else None

    def add_scan(self, source: str, body: dict[str, Any]) -> None:
        """Append a scan document unless the newest is equal."""
        check_source_name(source)
        body = {**body, "source": source}
        while self.last_scan(source) != body:
            if self.append(Paths.scans(source), body):
                return

    def forget_source(self, source: str) -> None:
        """Append a document that marks the source as forgotten; earlier scans no longer count.

        Raises:
            CacheError: there is no such source.
        """
        last = self.last_scan(source)
        if last is None:
            known = [name for name in self.sources() if self.last_scan(name) is not None]
            raise CacheError(
                f"{self.location}: holds no source {source!r}",
                expected=", ".join(known) or "(none)",
                fix="sana-pipe status",
            )
        self.add_scan(source, {**last, "table": "", FORGOTTEN: True})

    # ------------------------------------------------------------ plans

    def plans(self, encoding: str) -> list[WorkList]:
        return [self.plan(encoding, number) for number in self.files.numbers(Paths.plans(encoding))]

    def plan(self, encoding: str, number: int) -> WorkList:
        body = self.files.document(Paths.numbered(Paths.plans(encoding), number))
        lead = (*body["lead"],) if "lead" in body else None
        return WorkList(encoding, number, Units.read(self.files, body["units"]), body["table"], lead)

    def unit_rows(self, plan: WorkList, unit: Unit) -> pa.Table:
        """The rows of the plan's table that a unit encodes."""
        return self.table(plan.table).slice(unit.start, unit.count)

    def add_plan(
        self,
        encoding: str,
        number: int,
        units: Iterable[Unit],
        table: pa.Table,
        lead: tuple[str, int] | None = None,
    ) -> bool:
        """Append a plan. Returns False if another process has appended a plan with this number. lead: as in
        `WorkList`.

        Raises:
            IntegrityError: there are commits of a plan with this number, which is lost.
        """
        name = Paths.numbered(Paths.plans(encoding), number)
        if index.committed(self.files, encoding, number) and not self.files.exists(name):
            raise IntegrityError(
                f"{self.files.where(name)}: is missing, as is its copy, but there are commits of its units",
                fix=f"{layout.REPAIR}, then {layout.way_out(name)}",
            )
        body: dict[str, Any] = {"encoding": encoding, "number": number, "table": self.put_table(table)}
        if lead is not None:
            body["lead"] = list(lead)
        body["units"] = publish(self.files, Units.table_of(units)).values()
        return self.files.put(name, layout.seal(body))

    def index(self, encoding: str) -> index.RecordIndex:
        """The records of an encoding. With `reuses_indexes`, the index of an encoding whose plans all have a segment is
        not built again."""
        plans = self.files.numbers(Paths.plans(encoding))
        known = self._indexes.pop(encoding, None)
        finished = self.reuses_indexes and all(self.files.exists(Paths.segment(encoding, plan)) for plan in plans)
        if known is None or not finished or known[0] != len(plans):
            known = len(plans), index.RecordIndex(self.files, encoding, plans)
        if finished:
            self._indexes[encoding] = known
        return known[1]

    # ------------------------------------------------------------ snapshots

    def add_snapshot(self, head: Head, name: str | None, *, latest: bool = True, move: bool = False) -> str:
        """Publish a snapshot and let `latest` (and `name`) point to it; returns its id.

        Its parent is the snapshot to which the name pointed, unless the head has a parent (a packed snapshot). If the
        head equals that of the parent, or of the snapshot from which the parent was packed, that snapshot is used.

        Args:
            latest: False for a snapshot that is not trained on by default (a held-out part); it needs a name.
            move: let `name` point to it even if it points to another snapshot.

        Raises:
            UserError: see `point`.
            IntegrityError: a shard of it is missing or has another size than its commit says.
        """
        if name is not None:
            check_snapshot_name(name)
        head.put_lists(self.files)
        check_files(self.files, head)
        head = self._published(head, name)
        snapshot_id = head.id
        self.files.ensure(Paths.snapshot(snapshot_id), head.sealed())
        for pointer in [*([name] if name else []), *(["latest"] if latest else [])]:
            self.point(pointer, snapshot_id, move=move)
        return snapshot_id

    def check_taken(self, head: Head, name: str) -> None:
        """Raises the UserError of `add_snapshot` for a name that points to another snapshot, of which the head can be
        read."""
        current, snapshot_id = self.snapshot_of(name), self._published(head, name).id
        if current not in (None, snapshot_id) and name not in MOVING and self._readable([current]):
            raise name_taken(name, str(current), snapshot_id)

    def _published(self, head: Head, name: str | None) -> Head:
        """The head as `add_snapshot` publishes it."""
        parent = self.snapshot_of(name or "latest")
        before = self._readable([parent])
        if head.parent is not None:
            before = [snapshot for snapshot in before if snapshot.head.parent == head.parent]
        elif before and before[0].packed:
            before += self._readable([before[0].head.parent])
        leaked = (head.leaked or {}).items()  # a head that does not say as much is not used
        heads = [snapshot.head for snapshot in before if leaked <= (snapshot.head.leaked or {}).items()]
        heads = [known for known in heads if known.options == head.options]  # a rule may change nothing yet
        same = [known for known in heads if known.without_history == head.without_history]
        return same[0] if same else replace(head, parent=head.parent or parent)

    def _readable(self, ids: Iterable[str | None]) -> list[Snapshot]:
        snapshots = []
        for snapshot_id in ids:
            with suppress(IntegrityError):
                snapshots += [Snapshot(self.files, snapshot_id)] if snapshot_id is not None else []
        return snapshots

    def point(self, name: str, snapshot_id: str, *, move: bool = False) -> None:
        """Let a name point to a snapshot.

        Raises:
            UserError: it points to another snapshot, `move` is False and it is not one of `MOVING`.
            IntegrityError: the snapshot does not exist.
        """
        while (current := self.snapshot_of(name)) != snapshot_id:
            if current is not None and not move and name not in MOVING:
                raise name_taken(name, current, snapshot_id)
            # Refresh first: a gc that does not see the name yet spares the young head.
            where = Paths.snapshot(snapshot_id)
            if not self.files.refresh(where) and not copies.repair(self.files, where):
                raise IntegrityError(f"{self.files.where(where)}: is missing", fix="sana-pipe bucket")
            body = {"name": name, "snapshot": snapshot_id, "by": __version__}
            self.append(Paths.names(name), body)

    def keep(self, snapshot_id: str, run: str = "", host: str = "") -> None:
        """Name a snapshot that is being trained on `trained-ID`, so that `gc` spares it until the name is forgotten.
        The documents of the name say which runs had it.

        Args:
            run: the folder of the run. host: the name of its machine. "": not said.

        Raises:
            CacheError: the name cannot be written, and no other permanent name points to the snapshot: gc on a machine
                with write access would remove it during the training.
        """
        name = f"trained-{snapshot_id[:16]}"
        try:
            self.point(name, snapshot_id)
            documents = [Paths.numbered(Paths.names(name), n) for n in self.files.numbers(Paths.names(name))]
            known = {(body.get("run"), body.get("host")) for body in self.files.documents(documents)}
            if run and (run, host) not in known:
                self.append(Paths.names(name), {"name": name, "snapshot": snapshot_id, "run": run, "host": host})
        except CacheError as error:
            if not set(self.names_of(snapshot_id)) - set(MOVING):
                raise CacheError(
                    f"{self.location}: snapshot {snapshot_id[:12]} has no permanent name, so gc on another "
                    f"machine may remove it during the training, and no name can be written here: {error.what}",
                    fix=f"on a machine that can write to the cache: sana-pipe snapshots name {snapshot_id[:12]} NAME",
                ) from None

    def forget_name(self, name: str) -> str:
        """Let a name point to nothing; returns the id of the snapshot that it pointed to.

        Raises:
            UserError: `latest` cannot be forgotten.
            CacheError: there is no such name.
        """
        if name == "latest":
            raise UserError("`latest` always points to the newest snapshot", fix="sana-pipe bucket makes a newer one")
        pointed = self.snapshot_of(name)
        if pointed is None:
            raise CacheError(
                f"{self.location}: {name!r} is not the name of a snapshot",
                expected=", ".join(known for known in self.snapshot_names() if known != "latest")
                or "(there are no names)",
                fix="sana-pipe snapshots lists the names",
            )
        while self.snapshot_of(name) is not None:
            self.append(Paths.names(name), {"name": name, "snapshot": None})
        return pointed

    def snapshot_of(self, name: str) -> str | None:
        """The snapshot id to which a name points; None if the name does not exist or was forgotten."""
        newest = self._newest(Paths.names(name))
        return None if newest is None else newest["snapshot"]

    def history(self, name: str) -> list[str]:
        """The snapshot ids to which a name points and pointed, the oldest first."""
        numbers = self.files.numbers(Paths.names(name))
        documents = self.files.documents([Paths.numbered(Paths.names(name), number) for number in numbers])
        return [body["snapshot"] for body in documents if body["snapshot"] is not None]

    def first_named(self, snapshot_id: str) -> dict[str, str] | None:
        """Return the time of a snapshot's first name in this cache, `at` (UTC, ISO 8601), and the `version` of
        sana-pipe that gave it. None: an earlier version did, or its names were forgotten.

        The time is that of the document's file: equal work leaves equal bytes.
        """
        entries = [entry for entry in self.files.walk("names") if layout.is_document(entry.name)]
        bodies = self.files.documents([entry.name for entry in entries])
        pairs = zip(entries, bodies, strict=True)
        given = [
            (entry.modified, body["by"]) for entry, body in pairs if body["snapshot"] == snapshot_id and "by" in body
        ]
        if not given:
            return None
        modified, version = min(given)
        return {"at": datetime.fromtimestamp(modified, UTC).isoformat(timespec="seconds"), "version": version}

    def snapshot_names(self) -> list[str]:
        """The names that point to a snapshot, and those whose documents are damaged."""

        def points(name: str) -> bool:
            try:
                return self.snapshot_of(name) is not None
            except CacheError:
                return True  # using the name raises the error

        return [name for name in self.files.folders("names") if points(name)]

    def names_of(self, snapshot_id: str) -> list[str]:
        """The names that point to a snapshot."""
        return [name for name in self.snapshot_names() if self.snapshot_of(name) == snapshot_id]

    def open_snapshot(self, name: str | None = None) -> Snapshot:
        """A snapshot by name, by id or by the beginning of an id; None is the newest."""
        return Snapshot(self.files, self.snapshot_id(name))

    def snapshot_id(self, name: str | None = None) -> str:
        """The id of a snapshot by name, id or the beginning of its id; None is the newest."""
        if (pointed := self.snapshot_of(name or "latest")) is not None:
            return pointed
        if name is None:
            raise CacheError(f"{self.location}: holds no snapshot yet", fix="sana-pipe bucket")
        ids = [n[:-5] for n in self.files.names("snapshots") if n.startswith(name) and n.endswith(".json")]
        if len(ids) == 1:
            return ids[0]
        raise CacheError(
            f"{self.location}: {'no' if not ids else 'more than one'} snapshot is called {name!r}",
            expected="one of the names " + (", ".join(self.snapshot_names()) or "(none yet)") + " or an id",
            fix="sana-pipe snapshots lists names and ids",
        )
