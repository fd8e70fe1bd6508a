"""Findings of `status`, `verify` and `gc`: something wrong in a cache, and the command that repairs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sana_pipe.base.config import setting
from sana_pipe.base.disk import raise_if_of_machine
from sana_pipe.base.errors import AwayError, CacheError, NoSpaceError, ResourceError
from sana_pipe.data.cache.cache import MOVING, Cache
from sana_pipe.data.cache.layout import BUCKET, PACKED, REPAIR, Paths
from sana_pipe.data.cache.snapshot_head import Head

BACKUP = "restore it from a backup of the cache"
GC = "sana-pipe gc --yes"

Replaced = dict[str, set[bytes]]
"""Shard -> keys of its damaged records that another shard holds intact."""


@dataclass(frozen=True)
class Finding:
    """Something wrong.

    Attributes:
        path: of the file in the cache.
        encoding, plan, unit: of the shard, if the file is the shard of a unit.
        records: hex keys of the damaged records, if the damage is inside a shard.
        fix: the command that repairs it.
    """

    path: str
    problem: str
    encoding: str = ""
    plan: int = -1
    unit: str = ""
    records: tuple[str, ...] = ()
    fix: str = REPAIR


def damage_only(error: CacheError | OSError) -> str:
    """Say what is wrong with a file, as an error of reading it says.

    Raises:
        AwayError, NoSpaceError, ResourceError: `error` is one, or says the same: it says nothing about the file.
    """
    if isinstance(error, AwayError | NoSpaceError | ResourceError):
        raise error
    raise_if_of_machine(error, getattr(error, "filename", None) or "a file of the cache")
    return error.what if isinstance(error, CacheError) else f"cannot be read: {error.strerror or error}"


@contextmanager
def skip_damaged() -> Iterator[None]:
    """End the block at the first damaged file, which is reported elsewhere. Raises as `damage_only`."""
    try:
        yield
    except CacheError as error:
        damage_only(error)


def encoding_names(cache: Cache) -> list[str]:
    return [name.removesuffix(".json") for name in cache.files.names("encodings") if name.endswith(".json")]


def bucket_command(name: str, head: Head) -> str:
    """The command that makes a snapshot again, and lets the name point to what comes out of it.

    Args:
        name: points to it.
    """
    if head.folder is not None:
        named = "--latest" if name == "latest" else f"--name {name} --move"
        return f"{BUCKET} --pack --snapshot {head.parent} {named}"
    made = name.removesuffix(".heldout").removesuffix(".packed")  # a held-out part is made with the other
    named = "" if made == "latest" else f" --name {made} --move"
    options = ((section, values) for section, values in sorted((head.options or {}).items()))
    settings = (setting(f"{section}.{key}", value) for section, values in options for key, value in values.items())
    return " ".join([BUCKET + named, *settings])


def fix_of_head(name: str) -> str:
    """Return what to do about a lost head of a snapshot, which said how it was made. `latest` moves to any snapshot.

    Args:
        name: points to it.
    """
    if name in MOVING:
        return BUCKET
    again = f"{BUCKET} --name {name.removesuffix('.heldout')} --move, with the settings that it was made with"
    return f"{again}; to do without it: sana-pipe forget --snapshot {name}"


def fix_of_snapshot(cache: Cache, snapshot: str, name: str | None) -> str:
    """Say what to do about a snapshot that lacks files.

    Args:
        name: points to it; None: no name does.
    """
    if name is None:
        return GC
    with skip_damaged():
        return bucket_command(name, Head.read(cache.files, snapshot))
    return fix_of_head(name)


def packs(cache: Cache) -> list[str]:
    """Names of the packs, finished or not: folders of plans, units and joint shards."""
    folders = [name for name in cache.files.folders("plans") if name.startswith(PACKED)]
    return [name for name in folders if cache.files.numbers(Paths.plans(name))]


def named_snapshots(cache: Cache) -> dict[str, str]:
    """The snapshots that names point to now, each with one of these names. Unreadable names are left out."""
    names = {}
    for name in cache.snapshot_names():
        with skip_damaged():
            if (snapshot := cache.snapshot_of(name)) is not None:
                names[snapshot] = name
    return names
