"""References: the tables and shards that each document of a cache needs, and what makes lost tables again.

`verify` names what is missing, and `gc` keeps what is needed, by these references.
Price: every document is read, one request after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from sana_pipe.base.errors import CacheError
from sana_pipe.data.cache import index
from sana_pipe.data.cache.cache import FORGOTTEN, Cache
from sana_pipe.data.cache.findings import fix_of_snapshot, named_snapshots, skip_damaged
from sana_pipe.data.cache.layout import ENCODE, METADATA, PROMPTS, REPAIR, Paths, is_document, numbers_of
from sana_pipe.data.cache.snapshot_head import Head


@dataclass(frozen=True)
class Reference:
    """Files that a document needs.

    Attributes:
        document: its path, or the folder of a plan's units for the commits in it.
        files: paths of tables and shards. Going through them reads the document, and raises a CacheError if it is
            damaged.
        fix: what makes a lost table again.
        stored: copies of each table: 2, 1 (it can be made from shards), or 0 (it may be missing).
    """

    document: str
    files: Iterable[str]
    fix: str = REPAIR
    stored: int = 2


def references(cache: Cache) -> Iterator[Reference]:
    """The references of every document: of snapshots without a name, of the other snapshots, then of the rest. Scans
    and prompt sets from before they were forgotten have none."""
    named, sources = named_snapshots(cache), set(cache.sources())
    heads = filter(is_document, (f"snapshots/{name}" for name in cache.files.names("snapshots")))
    for pointing, name in sorted((named.get(PurePosixPath(name).stem, ""), name) for name in heads):
        yield Reference(name, _scans_of_head(cache, name), stored=0)  # only reports read them
        # of sources of another cache, as after `pull`, nothing can be joined with it
        yield Reference(
            name, _metadata_of_head(cache, name), fix=METADATA, stored=2 if _has_source(cache, name, sources) else 0
        )
        fix = fix_of_snapshot(cache, PurePosixPath(name).stem, pointing or None)
        yield Reference(name, _files_of_head(cache, name), fix=fix)
    for source in cache.sources():
        yield from _versions(cache, Paths.scans(source), "table.parquet", ENCODE, REPAIR)
    for set_name in cache.files.folders("prompts"):
        yield from _versions(cache, Paths.prompts(set_name), "rows.arrow", PROMPTS, PROMPTS)
    for owner in owners(cache):
        for number in range(plan_count(cache, owner)):  # a missing plan is an error, too
            plan = Paths.numbered(Paths.plans(owner), number)
            yield Reference(plan, _tables(cache, plan, "units.arrow", "table.parquet"))
            document = segment = Paths.segment(owner, number)
            if cache.files.exists(segment):
                yield Reference(segment, _tables(cache, segment, "commits.arrow"))
            else:
                document = Paths.units(owner, number)
            yield Reference(document, _files_of_commits(cache, owner, number), stored=1)


def owners(cache: Cache) -> list[str]:
    """Names of the encodings and packs with plans or commits."""
    return sorted({name for folder in ("plans", "units", "segments") for name in cache.files.folders(folder)})


def plan_count(cache: Cache, owner: str) -> int:
    """One more than the last number of a plan of an encoding or pack, or of commits."""
    files = cache.files
    numbers = {*numbers_of(files.names(Paths.plans(owner))), *numbers_of(files.names(f"segments/{owner}"))}
    without = {*numbers_of(files.folders(f"units/{owner}"), "")} - numbers
    numbers |= {number for number in without if files.unit_names(Paths.units(owner, number))}
    return max(numbers, default=-1) + 1


def _scans_of_head(cache: Cache, name: str) -> Iterator[str]:
    head = Head.read(cache.files, PurePosixPath(name).stem)
    yield from (Paths.table(table, "parquet") for table in head.sources.values())


def _metadata_of_head(cache: Cache, name: str) -> Iterator[str]:
    table = Head.read(cache.files, PurePosixPath(name).stem).metadata
    yield from () if table is None else (Paths.table(table, "parquet"),)


def _has_source(cache: Cache, name: str, sources: set[str]) -> bool:
    """Return whether a snapshot is of sources of this cache; False if its head is damaged, which is found elsewhere."""
    with suppress(CacheError):
        return bool(Head.read(cache.files, PurePosixPath(name).stem).sources.keys() & sources)
    return False


def _files_of_head(cache: Cache, name: str) -> Iterator[str]:
    head = Head.read(cache.files, PurePosixPath(name).stem)
    yield from tables_of_head(head)
    yield from (path for path, _ in head.each_shard_file())


def tables_of_head(head: Head) -> Iterator[str]:
    """Paths of a head's lists, then of its chunks, whose names are in a list."""
    lists = head.lists()
    yield from (Paths.table(table, "arrow") for table in sorted(lists))
    yield from (Paths.table(table, "arrow") for table in sorted(head.tables() - lists))


def _versions(cache: Cache, folder: str, table: str, fix: str, fix_earlier: str) -> Iterator[Reference]:
    """The references of the documents in a folder to a table, the newest first; none from before `FORGOTTEN`."""
    for number in sorted(numbers_of(cache.files.names(folder)), reverse=True):
        name = Paths.numbered(folder, number)
        with skip_damaged():
            if cache.files.document(name).get(FORGOTTEN):
                return
        yield Reference(name, _tables(cache, name, table), fix=fix)
        fix = fix_earlier


def _tables(cache: Cache, name: str, *wanted: str) -> Iterator[str]:
    """Tables that a document names. wanted: the key and the suffix of each, as `rows.arrow`."""
    body = cache.files.document(name)
    for key, _, suffix in (each.partition(".") for each in wanted):
        table = body[key]
        yield Paths.table(table["table"] if isinstance(table, dict) else table, suffix)


def _files_of_commits(cache: Cache, owner: str, number: int) -> Iterator[str]:
    segment = Paths.segment(owner, number)
    if cache.files.exists(segment):
        yield from _tables(cache, segment, "table.arrow")
    for commit in index.each_commit(cache.files, owner, number):
        if commit.table is not None:
            yield Paths.table(commit.table, "arrow")
        if commit.shard is not None:
            yield Paths.shard(owner, commit.shard)
