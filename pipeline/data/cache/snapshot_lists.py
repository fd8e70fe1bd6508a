"""Lists of documents as tables: the shards and chunks of a snapshot, the units of a plan, the commits of a segment.

Each list is an Arrow table next to the document, which names it by its digest; the table has a copy, as documents have.
It is read when it is first used, checked whole and mapped, so that the processes of a machine share the memory.
The lists of a snapshot that is being made are in memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Self, TypeVar, overload

import numpy as np
import pyarrow as pa

from sana_pipe.base.errors import CacheError, IntegrityError
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.arrow import ipc_table
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.keys import as_keys, binary, fixed, key_bytes
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.shard import to_ipc, write_ipc

T = TypeVar("T")
_KEY = pa.binary(16)
SHARDS = pa.schema([("name", _KEY), ("bytes", pa.uint64())])
CHUNKS = pa.schema([("rows", pa.uint32()), ("samples", _KEY), ("names", _KEY)])
ENTRIES = 1 << 12
"""Entries of a list that are objects at a time."""


Form = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""The conversions of a field: JSON to value, value to JSON."""


@dataclass(frozen=True)
class HeadObject:
    """One JSON object of a head. A field that is None is not written."""

    forms: ClassVar[Mapping[str, Form]] = {}
    """The conversions of fields whose JSON differs from their value."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Raises a CacheError for keys that this version does not know."""
        if unknown := sorted(values.keys() - set(cls.__match_args__)):
            raise CacheError(
                f"a snapshot's head has keys that this version does not know: {', '.join(unknown)}",
                fix="read this cache with the version of sana-pipe that wrote it, or a newer one",
            )
        read = {name: cls.forms[name][0](values[name]) for name in cls.forms.keys() & values.keys()}
        return cls(**{**values, **read})

    def values(self) -> dict[str, Any]:
        """The JSON object."""
        names: tuple[str, ...] = self.__match_args__
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        for name in self.forms.keys() & values.keys():
            values[name] = self.forms[name][1](values[name])
        return values


def nested(entry: type[HeadObject]) -> Form:
    return entry.parse, lambda value: value.values()


def nested_list(entry: type[HeadObject]) -> Form:
    return lambda items: tuple(map(entry.parse, items)), lambda items: [item.values() for item in items]


HEX = (bytes.fromhex, bytes.hex)


@dataclass(frozen=True)
class Chunk:
    """Digests of the two tables of up to `CHUNK_ROWS` rows."""

    rows: int
    samples: str
    names: str


@dataclass(frozen=True)
class ListTable(HeadObject):
    """The entry of a document for a list in a table.

    Attributes:
        table: its digest (hex).
        count: rows.
        bytes: of all shards of a list of shards.
    """

    table: str
    count: int
    bytes: int | None = None


class TableList(Sequence[T]):
    """A list in a table. Two are equal if they are the same table.

    Attributes:
        entry: what the document says.
        files: the cache; None: the list is in memory.
    """

    schema: ClassVar[pa.Schema]

    def __init__(self, entry: ListTable):
        self.entry = entry
        self.files: Files | None = None

    @classmethod
    def made(cls, *columns: pa.Array, **entry: Any) -> Self:
        """A list in memory. entry: more fields of what a document says of it."""
        table = pa.table(columns, schema=cls.schema)
        made = cls(ListTable(layout.content_digest(to_ipc(table)), len(table), **entry))
        made.table = table
        return made

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """The list that a document names."""
        return cls(ListTable.parse(values))

    @classmethod
    def read(cls, files: Files, values: Mapping[str, Any]) -> Self:
        """The list that a document of a cache names."""
        listed = cls.parse(values)
        listed.files = files
        return listed

    def values(self) -> dict[str, Any]:
        """Return what a document says of the list, as JSON."""
        return self.entry.values()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.entry == self.entry

    def __hash__(self) -> int:
        return hash(self.entry.table)

    def __len__(self) -> int:
        return self.entry.count

    @overload
    def __getitem__(self, number: int) -> T: ...
    @overload
    def __getitem__(self, number: slice) -> list[T]: ...
    def __getitem__(self, number: int | slice) -> T | list[T]:
        if isinstance(number, slice):
            return [self.at(i) for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(f"the list has {len(self)} rows, not {number + 1}")
        return self.at(number % len(self))

    def __iter__(self) -> Iterator[T]:
        return map(self.at, range(len(self)))

    @abstractmethod
    def at(self, number: int) -> T:
        """The entry of a row."""

    @cached_property
    def table(self) -> pa.Table:
        """The table, mapped.

        Raises:
            IntegrityError: the table and its copy are missing or damaged.
        """
        assert self.files is not None, "a list of a head that was not read from a cache"
        files, name = self.files, Paths.table(self.entry.table, "arrow")
        try:
            data = files.mapped(name, self.entry.table, mirrored=True)
        except IntegrityError as error:
            try:
                data = files.mapped(Paths.copy(name), self.entry.table, mirrored=True)
            except IntegrityError as of_copy:
                raise IntegrityError(f"{error.what}; {of_copy.what}", fix=layout.REPAIR) from None
        return ipc_table(data)

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """Columns of numbers and digests. Raises as `table`."""
        columns = {}
        for kind in self.schema:
            # One batch: a column in one piece, which is not copied.
            array = self.table.column(kind.name).chunk(0) if len(self) else pa.array([], kind.type)
            columns[kind.name] = fixed(array) if kind.type == _KEY else array.to_numpy()
        return columns


class EntryList(TableList[T]):
    """A list whose entries are objects of any fields, `ENTRIES` at a time."""

    @staticmethod
    @abstractmethod
    def entries(rows: pa.Table) -> Iterable[T]:
        """The entries of some rows."""

    def at(self, number: int) -> T:
        return next(iter(self.entries(self.table.slice(number, 1))))

    def __iter__(self) -> Iterator[T]:
        return self.entries_of(self.table)

    @classmethod
    def entries_of(cls, table: pa.Table) -> Iterator[T]:
        """The entries of a table."""
        for start in range(0, len(table), ENTRIES):
            yield from cls.entries(table.slice(start, ENTRIES))


def publish(files: Files, table: pa.Table) -> ListTable:
    """Publish the table of a list and its copy; returns what a document says of it."""
    digest = files.put_table(partial(write_ipc, table), "arrow", twice=True)
    return ListTable(digest, len(table))


class ShardTable(TableList[str]):
    """The names (digests, hex) of the shards of a kind, each made when it is asked for; and their sizes."""

    schema = SHARDS

    @classmethod
    def of(cls, names: Iterable[str], sizes: Iterable[int]) -> Self:
        """The list of some shards. sizes: in bytes."""
        every = list(sizes)
        keys = binary(as_keys([bytes.fromhex(name) for name in names]))
        return cls.made(keys, pa.array(every, pa.uint64()), bytes=sum(every))

    def at(self, number: int) -> str:
        return key_bytes(self.columns["name"][number]).hex()

    @property
    def sizes(self) -> np.ndarray:
        """Bytes of each shard, (shards,) uint64."""
        return self.columns["bytes"]

    def _places(self, name: object) -> np.ndarray:
        return np.flatnonzero(self.columns["name"] == np.array([bytes.fromhex(str(name))], "S16"))

    def __contains__(self, name: object) -> bool:
        return len(self._places(name)) > 0

    def index(self, name: str, *span: int) -> int:
        return int(self._places(name)[0])


class ChunkTable(TableList[Chunk]):
    """The chunks, as a table."""

    schema = CHUNKS

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Self:
        """The list of some chunks."""
        chunks = tuple(chunks)
        digests = ([bytes.fromhex(getattr(chunk, which)) for chunk in chunks] for which in ("samples", "names"))
        return cls.made(pa.array([chunk.rows for chunk in chunks], pa.uint32()), *map(binary, map(as_keys, digests)))

    def at(self, number: int) -> Chunk:
        samples, names = (key_bytes(self.columns[name][number]).hex() for name in ("samples", "names"))
        return Chunk(int(self.columns["rows"][number]), samples, names)
