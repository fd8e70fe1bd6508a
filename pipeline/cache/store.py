"""The cache as a whole: sources, recipes, plans, indexes and snapshots under one root.

What: `Cache` is the one object through which stages read and write a cache.
Why: every rule of publication and identity is applied in one place.
Price: but for the last table read, no answer is kept in memory between calls; callers keep what they need.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.cache import copies, index, layout
from pipeline.cache.arrow import parquet_table, pieces
from pipeline.cache.files import Files
from pipeline.cache.layout import Paths
from pipeline.cache.objects import files_at
from pipeline.cache.snapshot import Head, Snapshot, check_files
from pipeline.config import Config, MirrorConfig
from pipeline.errors import CacheError, IntegrityError, UserError
from pipeline.retrying import PATIENCE_S

RecipeKind = TypeVar("RecipeKind", bound=layout.Recipe)

FORGOTTEN = "forgotten"
"""In a scan document: its source is to be used no more."""
MOVING = ("latest", "latest.heldout")
"""Names that follow the newest snapshot by themselves; every other name stays where it is until it is moved."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_source_name(name: str) -> None:
    """UserError unless a source may be called this."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot name a source",
            expected="letters, digits, '.', '_' and '-', at most 100",
            fix="--source-name NAME",
        )


def name_taken(name: str, found: str, wanted: str) -> UserError:
    """The refusal to move a snapshot's name from `found` to `wanted`."""
    return UserError(
        f"the name {name!r} points to another snapshot already",
        expected=wanted,
        found=found,
        fix="another name, or --move: what no name points to any more is removed by gc",
    )


def check_snapshot_name(name: str) -> None:
    """UserError unless a snapshot may be called this."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot name a snapshot",
            expected="letters, digits, '.', '_' and '-', at most 100",
            fix="--name NAME",
        )


def _refuse_other(files: Files) -> None:
    names = files.names("")
    if any(name != "tmp" for name in names) and "recipes" not in names:  # of a cache only the first file was lost
        raise CacheError(
            f"{files.where('')}: is not empty and not a cache", fix="--set cache=DIR, an empty or new folder"
        )


@dataclass(frozen=True)
class Unit:
    """One commit's worth of work: rows `start..start+count` of its plan's table, encoded in batches of `batch`."""

    unit: str
    start: int
    count: int
    batch: int


@dataclass(frozen=True)
class Plan:
    """An append-only list of work of one recipe."""

    recipe: str
    number: int
    units: tuple[Unit, ...]
    table: str


class Cache:
    """A cache folder.

    Args:
        root: its path, or the URL of a place in an object store.
        create: make it if it is not there; whether publication will hold there is probed first.
        mirror: where copies of what an object store holds are kept, and how much of them; None for the default.
        patience_s: how long an object store or a network file system that is away is waited for.

    Raises:
        CacheError: there is no cache (and `create` is false), or it is of another format or version.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        create: bool = False,
        mirror: MirrorConfig | None = None,
        patience_s: float = PATIENCE_S,
    ):
        self.files = files_at(root, mirror, patience_s)
        if create:
            self.files.probe()
        if not self.files.exists(Paths.FORMAT):
            if not create:
                raise CacheError(f"{root}: there is no cache here", fix="sana-pipe encode --data DIR")
            _refuse_other(self.files)
        if create:
            self.files.ensure(Paths.FORMAT, layout.seal({"what": "sana-pipe cache; see cache_layout.md"}))
        try:
            self.files.document(Paths.FORMAT)
        except IntegrityError as error:
            raise IntegrityError(error.what, fix="sana-pipe encode --data DIR: it writes this file again") from None
        self.location = str(root)
        self._last_table: tuple[str, pa.Table] | None = None

    @classmethod
    def of(cls, config: Config, *, create: bool = False) -> Cache:
        """The cache that a configuration names."""
        return cls(config.cache, create=create, mirror=config.mirror, patience_s=config.patience_s)

    @classmethod
    def if_there(cls, config: Config) -> Cache | None:
        """The cache that a configuration names; None if there is none yet.

        Raises:
            CacheError: there is something else, so that none can be made either.
        """
        files = files_at(config.cache, config.mirror, config.patience_s)
        if files.exists(Paths.FORMAT):
            return cls.of(config)
        _refuse_other(files)
        return None

    @property
    def root(self) -> Path:
        """The folder of a cache on a disk."""
        return self.files.root

    # ------------------------------------------------------------ recipes

    def add_recipe(self, recipe: layout.Recipe) -> None:
        self.files.ensure(Paths.recipe(recipe.name), layout.seal({"kind": recipe.kind, "values": recipe.values()}))

    def recipe(self, name: str) -> layout.Recipe:
        """A recipe by name (`latent-<id>`, `text-<id>`)."""
        body = self.files.document(Paths.recipe(name))
        found = layout.RECIPES[body["kind"]].from_values(body["values"])
        if found.name != name:
            raise IntegrityError(
                f"{self.files.where(Paths.recipe(name))}: holds another recipe", expected=name, found=found.name
            )
        return found

    def recipes(self, kind: str) -> list[layout.Recipe]:
        names = [n[:-5] for n in self.files.names("recipes") if n.startswith(f"{kind}-") and n.endswith(".json")]
        return [self.recipe(name) for name in names]

    def known(self, recipe: RecipeKind) -> RecipeKind:
        """The recipe under which this cache has what `recipe` would make: the same values, whatever the weights were
        called; of several the one with the most records. `recipe` itself if there is none."""
        kind = type(recipe)
        same = [one for one in self.recipes(recipe.kind) if isinstance(one, kind) and one.same_values(recipe)]
        if len(same) < 2:
            return same[0] if same else recipe
        return max(same, key=lambda one: (len(self.index(one.name)), one.name))

    # ------------------------------------------------------------ tables (parquet, content-addressed)

    def put_table(self, table: pa.Table) -> str:
        sink = io.BytesIO()
        with pq.ParquetWriter(sink, table.schema, compression="zstd", write_page_checksum=True) as file:
            for piece in pieces(table):  # a row group with more text in a column could not be read
                file.write_table(piece)
        return self.files.put_content(sink.getvalue(), "tables", "parquet")

    def table(self, digest: str) -> pa.Table:
        """A Parquet table by its digest. The last one is kept: the units of a plan ask for the same table in turn."""
        last = self._last_table
        if last is None or last[0] != digest:
            name = Paths.table(digest, "parquet")
            data = self.files.content(name, digest)
            try:
                last = self._last_table = (digest, parquet_table(data))
            except (pa.ArrowException, OSError) as error:
                raise IntegrityError(f"{self.files.where(name)}: not a Parquet table: {error}") from None
        return last[1]

    # ------------------------------------------------------------ sources

    def sources(self) -> list[str]:
        return self.files.folders("sources")

    def last_scan(self, source: str) -> dict[str, Any] | None:
        """The newest scan document of a source: `root`, `table`, `latent`, `text`, `buckets`; None if there is none, or
        the source was forgotten."""
        numbers = self.files.numbers(Paths.scans(source))
        found = self.files.document(Paths.numbered(Paths.scans(source), numbers[-1])) if numbers else None
        return None if found is None or found.get(FORGOTTEN) else found

    def add_scan(self, source: str, body: dict[str, Any]) -> None:
        """Append a scan document unless the newest says the same."""
        check_source_name(source)
        while True:
            if self.last_scan(source) == body:
                return
            number = len(self.files.numbers(Paths.scans(source)))
            if self.files.put(Paths.numbered(Paths.scans(source), number), layout.seal(body)):
                return

    def forget_source(self, source: str) -> None:
        """Append a scan without items that says so: nothing that earlier scans found counts any more.

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
        try:
            empty = self.table(last["table"]).slice(0, 0)
        except IntegrityError:  # a damaged table is no reason to stay
            empty = pa.table({name: pa.array([], pa.string()) for name in ("item", "reject")})
        self.add_scan(source, {**last, "table": self.put_table(empty), FORGOTTEN: True})

    def forgotten_scans(self) -> set[str]:
        """Files of the scans after which their source was forgotten: what they refer to is not needed."""
        found: set[str] = set()
        for source in self.sources():
            names = [Paths.numbered(Paths.scans(source), number) for number in self.files.numbers(Paths.scans(source))]
            for at, name in enumerate(names):
                if self.files.document(name).get(FORGOTTEN):
                    found |= set(names[:at])
        return found

    # ------------------------------------------------------------ plans

    def plans(self, recipe: str) -> list[Plan]:
        return [self.plan(recipe, number) for number in self.files.numbers(Paths.plans(recipe))]

    def plan(self, recipe: str, number: int) -> Plan:
        body = self.files.document(Paths.numbered(Paths.plans(recipe), number))
        return Plan(recipe, number, tuple(Unit(**unit) for unit in body["units"]), body["table"])

    def add_plan(self, recipe: str, number: int, units: list[Unit], table: pa.Table) -> bool:
        """Append a plan. Returns False if another process was first: adopt its plan and look again."""
        digest = self.put_table(table)
        body = {"recipe": recipe, "number": number, "table": digest, "units": [vars(unit) for unit in units]}
        return self.files.put(Paths.numbered(Paths.plans(recipe), number), layout.seal(body))

    def index(self, recipe: str) -> index.RecordIndex:
        return index.RecordIndex(self.files, recipe, self.files.numbers(Paths.plans(recipe)))

    # ------------------------------------------------------------ snapshots

    def add_snapshot(self, head: Head, name: str | None, *, latest: bool = True, move: bool = False) -> str:
        """Publish a snapshot and let `latest` (and `name`) point to it; returns its id.

        Its parent is what the name pointed to before, unless the head has one (a packed snapshot). A head that
        says what the parent's says is the parent; so is one that says what the parent was packed from says.

        Args:
            latest: false for a snapshot that nobody is to train on by default (a held-out part); it needs a name.
            move: let `name` point to it though it points to another one.

        Raises:
            UserError: see `point`.
            IntegrityError: a shard of it is missing or of another size than its commit says.
        """
        if name is not None:
            check_snapshot_name(name)
        check_files(self.files, head)
        self._write_again(head)
        parent = self.snapshot_of(name or "latest")
        before = [] if head.parent is not None else self._readable([parent])
        if before and before[0].packed:
            before += self._readable([before[0].head.parent])
        same = [snapshot.head for snapshot in before if snapshot.head.content == head.content]
        head = same[0] if same else replace(head, parent=head.parent or parent)
        snapshot_id = head.id
        self.files.ensure(Paths.snapshot(snapshot_id), layout.seal(head.values()))
        for pointer in [*([name] if name else []), *(["latest"] if latest else [])]:
            self.point(pointer, snapshot_id, move=move)
        return snapshot_id

    def _readable(self, ids: Iterable[str | None]) -> list[Snapshot]:
        found = []
        for one in ids:
            with suppress(IntegrityError):
                found += [Snapshot(self.files, one)] if one is not None else []
        return found

    def _write_again(self, head: Head) -> None:
        """Write the snapshots again that some name points to, that cannot be read, and that say what this head says;
        their parent may be any that a name points or pointed to."""
        names = self.snapshot_names()
        ids = {found for name in names if (found := self.snapshot_of(name)) is not None}
        lost = ids - {one.id for one in self._readable(sorted(ids))}
        if not lost:
            return
        folders = [(Paths.names(name), self.files.numbers(Paths.names(name))) for name in names]
        pointers = [Paths.numbered(folder, number) for folder, numbers in folders for number in numbers]
        parents = {body["snapshot"] for body in self.files.documents(pointers)}
        for parent in {None, *parents}:
            again = replace(head, parent=head.parent or parent)
            if again.id in lost:
                self.files.ensure(Paths.snapshot(again.id), layout.seal(again.values()))

    def point(self, name: str, snapshot_id: str, *, move: bool = False) -> None:
        """Let a name point to a snapshot. A name that follows the newest moves by itself.

        Raises:
            UserError: it points to another one, and `move` is false.
            IntegrityError: that snapshot is not there.
        """
        while (found := self.snapshot_of(name)) != snapshot_id:
            if found is not None and not move and name not in MOVING:
                raise name_taken(name, found, snapshot_id)
            # Freshened first: a gc that does not see the name yet finds the head young.
            where = Paths.snapshot(snapshot_id)
            if not self.files.freshen(where) and not copies.put_right(self.files, where):
                raise IntegrityError(f"{self.files.where(where)}: is missing", fix="sana-pipe bucket")
            self._append_name(name, snapshot_id)

    def _append_name(self, name: str, snapshot_id: str | None) -> None:
        number = len(self.files.numbers(Paths.names(name)))
        self.files.put(Paths.numbered(Paths.names(name), number), layout.seal({"name": name, "snapshot": snapshot_id}))

    def keep(self, snapshot_id: str) -> None:
        """Give a snapshot that is trained on a name of its own (`trained-ID`), so that `gc` spares it until the name is
        forgotten.

        Raises:
            CacheError: no name can be written here, and no name that stays points to it: gc on a machine that can write
                would remove what is being trained on.
        """
        name = f"trained-{snapshot_id[:16]}"
        try:
            self.point(name, snapshot_id)
        except CacheError as error:
            if not set(self.names_of(snapshot_id)) - set(MOVING):
                raise CacheError(
                    f"{self.location}: snapshot {snapshot_id[:12]} has no name that stays, so that gc on another "
                    f"machine may remove it during the training, and none can be written here: {error.what}",
                    fix=f"where the cache can be written: sana-pipe snapshots name {snapshot_id[:12]} NAME",
                ) from None

    def forget_name(self, name: str) -> str:
        """Let a name point to nothing; returns the id of the snapshot that it pointed to.

        Raises:
            UserError: `latest`, which is always there.
            CacheError: there is no such name.
        """
        if name == "latest":
            raise UserError("`latest` always points to the newest snapshot", fix="sana-pipe bucket makes a newer one")
        pointed = self.snapshot_of(name)
        if pointed is None:
            raise CacheError(
                f"{self.location}: {name!r} is not the name of a snapshot",
                expected=", ".join(one for one in self.snapshot_names() if one != "latest") or "(there are no names)",
                fix="sana-pipe snapshots lists the names",
            )
        while self.snapshot_of(name) is not None:
            self._append_name(name, None)
        return pointed

    def snapshot_of(self, name: str) -> str | None:
        """The id that a name points to; None if there is no such name or it was forgotten."""
        numbers = self.files.numbers(Paths.names(name))
        if not numbers:
            return None
        return self.files.document(Paths.numbered(Paths.names(name), numbers[-1]))["snapshot"]

    def snapshot_names(self) -> list[str]:
        """The names that point to a snapshot, and those whose documents are damaged."""

        def points(name: str) -> bool:
            try:
                return self.snapshot_of(name) is not None
            except CacheError:
                return True  # who asks for it is told

        return [name for name in self.files.folders("names") if points(name)]

    def names_of(self, snapshot_id: str) -> list[str]:
        """The names that point to a snapshot."""
        return [name for name in self.snapshot_names() if self.snapshot_of(name) == snapshot_id]

    def open_snapshot(self, name: str | None = None) -> Snapshot:
        """A snapshot by name, by id or by the beginning of an id; None is the newest."""
        if name is None:
            found = self.snapshot_of("latest")
            if found is None:
                raise CacheError(f"{self.location}: holds no snapshot yet", fix="sana-pipe bucket")
            return Snapshot(self.files, found)
        pointed = self.snapshot_of(name)
        if pointed is not None:
            return Snapshot(self.files, pointed)
        ids = [n[:-5] for n in self.files.names("snapshots") if n.startswith(name) and n.endswith(".json")]
        if len(ids) == 1:
            return Snapshot(self.files, ids[0])
        raise CacheError(
            f"{self.location}: {'no' if not ids else 'more than one'} snapshot is called {name!r}",
            expected="one of the names " + (", ".join(self.snapshot_names()) or "(none yet)") + " or an id",
            fix="sana-pipe snapshots lists names and ids",
        )
