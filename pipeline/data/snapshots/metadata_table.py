"""Metadata from beside: a table of scores, tags or votes, joined to the items of scans by a key.

`opened` reads the file into a table of two columns, the key and the row as a JSON object, which `stored` puts into the
cache. `joined` adds each row's fields to the metadata of the pictures that its key names. So filters and groups
know them by the rules that hold for metadata of a source. Nothing is encoded or scanned again.
Price: DuckDB holds the keys and the names of items, in temporary files beyond `_MEMORY`.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.config import setting
from sana_pipe.base.disk import file_digest
from sana_pipe.base.errors import CacheError, UserError, escaped
from sana_pipe.data.cache import withdrawn
from sana_pipe.data.cache.adopt import bring
from sana_pipe.data.cache.arrow import ROWS, batches, write_parquet
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.sources.reject_kinds import EXAMPLES

OPTION, KEY_OPTION = "bucket.metadata", "bucket.metadata_key"
SCHEMA = pa.schema([("key", pa.string()), ("row", pa.string())])
"""The columns of a stored table. `key` is null where the row has none; `row` is a JSON object without nulls."""
SAMPLE = 1000
"""Rows in which a column is looked for that names pictures, where that of the option names none."""
_MEMORY = "256MiB"
_DIGEST = "[0-9a-f]{32}"
_STEM = r"([^/]+?)(?:\.[^./]*)?$"
_FORMS = {
    "item": ["item", "source || ': ' || item"],
    "file name": ["regexp_extract(item, '[^/]*$')"],
    "file name stem": [f"regexp_extract(item, '{_STEM}', 1)"],
    "digest": ["digest", "upper(digest)"],
}
"""Forms of a key, and the names of an item that it is compared with. All keys of a table are of one form."""
_READERS = {
    ".parquet": "read_parquet($file)",
    ".csv": "read_csv($file, all_varchar=true, header=true)",
    ".tsv": "read_csv($file, all_varchar=true, header=true, delim='\t')",
    ".jsonl": "read_ndjson_objects($file)",
}


@dataclass(frozen=True)
class MetadataTable:
    """A table that is joined.

    Attributes:
        name: of the file, or of the table in the cache, for messages.
        key: name of the column that names pictures.
        digest: of the stored table.
        rows: `SCHEMA`, in the order of the file.
    """

    name: str
    key: str
    digest: str
    rows: pa.Table


def opened(caches: Sequence[Cache], place: str, key: str) -> MetadataTable:
    """Read the table that `bucket.metadata` names. Rows of withdrawn pictures are left out.

    Args:
        caches: the cache of the configuration, then others.
        place: a file, or the digest of a table that one of the caches has.
        key: name of the column that names pictures.

    Raises:
        UserError: no such file, or not a table of one of the formats.
        CacheError: no cache has the table.
        NoSpaceError: the disk is full.
    """
    if re.fullmatch(_DIGEST, place) and not Path(place).exists():
        path = Paths.table(place, "parquet")
        for cache in caches:
            if _has(cache, path):
                return MetadataTable(f"table {place[:12]}", key, place, cache.table(place))
        raise CacheError(
            f"{OPTION}: {caches[0].location} has no table {place}", fix=f"name the file: {setting(OPTION, 'FILE')}"
        )
    files = caches[0].files
    gone = withdrawn_names(caches[0])
    read = (part.filter(pa.array(~goes(part, gone))) if gone else part for part in _read(Path(place), key))
    rows = files.scratch.table(SCHEMA, read)
    with files.temporary() as temporary, open(temporary, "x+b") as file:
        write_parquet(rows, file)
        file.flush()
        digest = file_digest(temporary)
    return MetadataTable(place, key, digest, rows)


def stored(caches: Sequence[Cache], table: MetadataTable) -> None:
    """Put a table into the first cache, if it is not there: from another cache that has it, or as a new file."""
    path, (cache, *others) = Paths.table(table.digest, "parquet"), caches
    if cache.files.refresh(path):
        return
    for other in (other for other in others if _has(other, path)):
        bring(cache.files, other.files, path, table.digest)
        cache.files.duplicate(path)
        return
    cache.put_table(table.rows)


def _has(cache: Cache, path: str) -> bool:
    return cache.files.has_file(path) or cache.files.has_file(Paths.copy(path))


def _read(file: Path, key: str) -> Iterator[pa.Table]:
    """The rows of a file, `SCHEMA`, some thousands at a time."""
    reader = _READERS.get(file.suffix.lower())
    if reader is None or not file.is_file():
        raise UserError(
            f"{OPTION} {file}: " + ("is not a table" if file.is_file() else "there is no such file"),
            expected=f"a file on a disk that ends with {', '.join(_READERS)}",
            fix=setting(OPTION, "FILE"),
        )
    pointer = "/" + key.replace("~", "~0").replace("/", "~1")
    literal = re.sub(r"([\[*?])", r"[\1]", str(file))  # DuckDB expands patterns
    with _connection() as duck:
        try:
            if file.suffix.lower() == ".jsonl":
                row = f"SELECT json AS r FROM {reader}"
            else:
                columns = duck.execute(f"DESCRIBE SELECT * FROM {reader}", {"file": literal}).fetchall()
                blobs = ", ".join(f"lower(hex({_name(c[0])})) AS {_name(c[0])}" for c in columns if c[1] == "BLOB")
                every = f"SELECT * {f'REPLACE ({blobs})' if blobs else ''} FROM {reader}"
                row = f"SELECT to_json(t) AS r FROM ({every}) t"
            found = duck.sql(
                f"SELECT json_extract_string(r, {_text(pointer)}) AS key, json_merge_patch('{{}}', r)::VARCHAR AS row "
                f"FROM ({row})",
                params={"file": literal},
            )
            for part in _parts(found, SCHEMA):
                if not pc.all(pc.starts_with(part.column("row"), "{")).as_py():
                    raise UserError(f"{OPTION} {file}: has a line that is no JSON object", fix=f"correct {file}")
                yield part
        except (duckdb.Error, pa.ArrowException) as error:
            raise UserError(
                f"{OPTION} {file}: cannot be read",
                found=escaped(" ".join(str(error).split())[:300]),
                fix=f"correct {file}",
            ) from None


# ---------------------------------------------------------------- withdrawn pictures


def names_of(source: str, item: str) -> set[str]:
    """Every key that a table may have for an item, but for its digest."""
    stem = re.search(_STEM, item)
    return {item, f"{source}: {item}", item.rpartition("/")[2], *([stem[1]] if stem else [])}


def goes(rows: pa.Table, names: Collection[str]) -> np.ndarray:
    """(n,) bool: which rows of a table have one of these keys. names: as of `names_of`, and digests in hex."""
    wanted = pa.array(sorted(names), pa.string())
    key = rows.column("key")
    found = pc.or_(pc.is_in(key, value_set=wanted), pc.is_in(pc.utf8_lower(key), value_set=wanted))
    result: np.ndarray = found.to_numpy().astype(bool)
    return result


def withdrawn_names(cache: Cache) -> set[str]:
    """Digests of withdrawn pictures in hex, and the names of those whose files `encode` met again."""
    names = {digest.hex() for digest in withdrawn.withdrawn(cache)}
    for source in cache.sources() if names else ():
        if (scan := cache.last_scan(source)) is not None:
            for rows in batches(cache.table(scan["table"], ["item", "reject"])):
                met = rows.filter(pc.fill_null(pc.equal(rows.column("reject"), withdrawn.REASON), False))
                for item in met.column("item").to_pylist():
                    names |= names_of(source, item)
    return names


# ---------------------------------------------------------------- joining


def joined(
    scratch: Scratch, scans: Mapping[str, pa.Table], table: MetadataTable
) -> tuple[dict[str, pa.Table], dict[str, Any]]:
    """Add the fields of a table's rows to the metadata of the items that their keys name; the table's values win.

    Args:
        scans: scan tables by source.

    Returns:
        The scans, and what `bucket` prints of the table, as JSON values.

    Raises:
        UserError: no key names an item.
        NoSpaceError: the disk is full.
    """
    with _connection() as duck:
        return _Join(duck, scratch, scans, table).run()


class _Join:
    """One join. DuckDB's tables:

    listed (number, key, row): the rows. keyed (key, number): the first row of each key. items (source, place, item,
    digest, usable): those of all scans. named (name, source, place, digest): their names of the chosen form. several
    (name): names of several pictures. found (source, place, number): the row of each item that has one.

    Example: keys a.jpg, a.jpg, b.jpg, z.jpg; items x/a.jpg, x/b.jpg, y/b.jpg. By file name: x/a.jpg gets the first row,
    the second repeats its key; b.jpg names two pictures and is not used; z.jpg names none.
    """

    def __init__(
        self,
        duck: duckdb.DuckDBPyConnection,
        scratch: Scratch,
        scans: Mapping[str, pa.Table],
        table: MetadataTable,
    ):
        self.duck, self.scratch, self.scans, self.table = duck, scratch, scans, table
        self.replaced: set[str] = set()

    def run(self) -> tuple[dict[str, pa.Table], dict[str, Any]]:
        """The result of `joined`."""
        self._load()
        form = self._form()
        self._find(form)
        columns = set(self._column("SELECT DISTINCT unnest(json_keys(row)) FROM listed"))
        scans = {source: self._merged(number, source, columns) for number, source in enumerate(self.scans)}
        usable, matched, without = self._pictures()
        return scans, {
            "file": self.table.name,
            "table": self.table.digest,
            "key": self.table.key,
            "by": form,
            "rows": len(self.table.rows),
            "pictures": usable,
            "matched": matched,
            "pictures_without_row": without,
            "rows_without_key": self.table.rows.column("key").null_count,
            "keys_without_picture": self._counted("keyed", "key NOT IN (SELECT name FROM named)"),
            "repeated_keys": self._counted(
                "(SELECT key, min(number) AS number FROM listed GROUP BY key HAVING count(key) > 1)", "true"
            ),
            "keys_of_several": self._counted("keyed", "key IN (SELECT name FROM several)"),
            "replaced": sorted(self.replaced),
        }

    def _load(self) -> None:
        """Make `listed`, `keyed` and `items`."""
        rows = self.table.rows
        self.duck.register("listed", rows.append_column("number", pa.array(np.arange(len(rows)))))
        self.duck.execute("CREATE TABLE keyed AS SELECT key, min(number) AS number FROM listed GROUP BY key")
        self.duck.execute("DELETE FROM keyed WHERE key IS NULL")
        self.duck.execute("CREATE TABLE items (source INT, place BIGINT, item VARCHAR, digest VARCHAR, usable BOOLEAN)")
        for number, scan in enumerate(self.scans.values()):
            place = pa.array(np.arange(scan.num_rows))
            self.duck.register("scan", scan.select(["item", "digest", "reject"]).append_column("place", place))
            self.duck.execute(
                f"INSERT INTO items SELECT {number}, place, item, lower(hex(digest)), reject IS NULL FROM scan"
            )
            self.duck.unregister("scan")

    def _names(self, form: str) -> str:
        """A query for the names of all items that are of a form."""
        texts = " ".join(f"WHEN {number} THEN {_text(source)}" for number, source in enumerate(self.scans))
        every = f"(SELECT i.* REPLACE (CASE source {texts} END AS source), source AS s FROM items i)"
        return " UNION ALL ".join(
            f"SELECT {name} AS name, s AS source, place, digest FROM {every} WHERE {name} IS NOT NULL"
            for name in _FORMS[form]
        )

    def _form(self) -> str:
        """The form that most keys are of, of several the first.

        Raises:
            UserError: no key names an item.
        """
        counts = {form: self._count(f"keyed WHERE key IN (SELECT name FROM ({self._names(form)}))") for form in _FORMS}
        form = max(counts, key=lambda each: counts[each])
        if not counts[form]:
            raise self._nothing_named()
        return form

    def _find(self, form: str) -> None:
        """Make `named`, `several` and `found`."""
        self.duck.execute(f"CREATE TABLE named AS {self._names(form)}")
        self.duck.execute(
            "CREATE TABLE several AS SELECT name FROM named GROUP BY name "
            "HAVING min(digest) <> max(digest) OR (count(*) > 1 AND bool_or(digest IS NULL))"
        )
        self.duck.execute(
            "CREATE TABLE found AS SELECT source, place, min(number) AS number FROM named JOIN keyed ON name = key "
            "WHERE name NOT IN (SELECT name FROM several) GROUP BY source, place"
        )

    def _merged(self, number: int, source: str, columns: set[str]) -> pa.Table:
        """The scan of a source with the fields of its rows. columns: of the table."""
        scan, schema = self.scans[source], pa.schema([("place", pa.int64()), ("row", pa.string())])
        rows = self.duck.sql(
            f"SELECT place, row FROM found JOIN listed USING (number) WHERE source = {number} ORDER BY place"
        )
        found = self.scratch.table(schema, _parts(rows, schema))
        ends = np.searchsorted(found.column("place").to_numpy(), np.arange(0, scan.num_rows + ROWS, ROWS))

        def merged() -> Iterator[pa.Table]:
            for at, batch in enumerate(batches(scan)):
                some = found.slice(ends[at], ends[at + 1] - ends[at])
                which = np.full(len(batch), -1, np.int64)
                which[some.column("place").to_numpy() - at * ROWS] = np.arange(len(some))
                row = some.column("row").combine_chunks().take(pa.array(which, mask=which < 0))
                yield self._with_fields(batch, row, columns)

        return self.scratch.table(scan.schema, merged())

    def _with_fields(self, batch: pa.Table, row: pa.Array, columns: set[str]) -> pa.Table:
        """Rows of a scan with the fields of rows of the table, null where there is none."""
        self.duck.register("batch", pa.table({"meta": batch.column("meta"), "row": row}))
        own = self._column("SELECT DISTINCT unnest(json_keys(nullif(meta, ''))) FROM batch WHERE row IS NOT NULL")
        self.replaced |= columns & set(own)
        merged = self.duck.sql(
            "SELECT CASE WHEN row IS NULL THEN meta "
            "ELSE json_merge_patch(coalesce(nullif(meta, ''), '{}'), row)::VARCHAR END AS meta FROM batch"
        ).to_arrow_table()
        self.duck.unregister("batch")
        return batch.set_column(batch.schema.get_field_index("meta"), "meta", merged.column("meta").cast(pa.string()))

    # ------------------------------------------------------------ what is said of it

    def _pictures(self) -> tuple[int, int, dict[str, Any]]:
        """Usable items, those of them with a row, and the others, counted and the first of them named."""
        self.duck.execute(
            "CREATE TABLE lacking AS SELECT item AS key, source * 1000000000000 + place AS number FROM items "
            "ANTI JOIN found USING (source, place) WHERE usable"
        )
        usable, without = self._count("items WHERE usable"), self._counted("lacking", "true")
        return usable, usable - without["count"], without

    def _count(self, what: str) -> int:
        [count] = self._column(f"SELECT count(*) FROM {what}")
        return int(count)

    def _counted(self, table: str, condition: str) -> dict[str, Any]:
        """The rows of a table with `key` and `number` that satisfy a condition, and the first of them."""
        first = f"SELECT key FROM {table} WHERE {condition} ORDER BY number LIMIT {EXAMPLES}"
        return {"count": self._count(f"{table} WHERE {condition}"), "examples": self._column(first)}

    def _column(self, query: str) -> list[Any]:
        return [value for [value] in self.duck.execute(query).fetchall()]

    def _nothing_named(self) -> UserError:
        """The error of a table whose keys name no picture, with the column that would, if there is one."""
        key, option = self.table.key, f"{OPTION} {self.table.name}"
        self.duck.execute(
            f"CREATE TABLE fields AS SELECT unnest(json_keys(row)) AS field, row FROM listed WHERE number < {SAMPLE}"
        )
        value = "json_extract_string(row, '/' || replace(replace(field, '~', '~0'), '/', '~1'))"
        names = " UNION ALL ".join(self._names(form) for form in _FORMS)
        fits = self._column(
            f"SELECT field FROM (SELECT field, {value} AS value FROM fields) "
            f"WHERE value IN (SELECT name FROM ({names})) GROUP BY field ORDER BY count(*) DESC, field LIMIT 1"
        )
        fields = self._column("SELECT DISTINCT field FROM fields ORDER BY field")
        fix = setting(KEY_OPTION, fits[0]) if fits else f"{setting(KEY_OPTION, 'COLUMN')}, a column with such names"
        items = self._column(f"SELECT item FROM items ORDER BY source, place LIMIT {EXAMPLES}")
        digests = self._column("SELECT digest FROM items WHERE digest IS NOT NULL ORDER BY source, place LIMIT 1")
        expected = f"items such as {', '.join(map(escaped, items))}, their file names, stems or digests"
        expected += f" such as {digests[0]}" if digests else ""
        if key not in fields:
            found = f"the columns {', '.join(map(escaped, fields))}" if fields else "no rows"
            if len(fields) == 1 and re.search("[,;\t|]", fields[0]):
                found += ": a line has more or fewer cells than the first"
            return UserError(f"{option} has no column {key!r}", expected=expected, found=found, fix=fix)
        keys = self._counted("keyed", "true")["examples"]
        what = f"{option}: its column {key!r} names no picture"
        return UserError(what, expected=expected, found=", ".join(map(escaped, keys)), fix=fix)


@contextmanager
def _connection() -> Iterator[duckdb.DuckDBPyConnection]:
    """DuckDB in memory and a temporary folder, without extensions. One thread: rows stay in order, forks are safe."""
    off = dict.fromkeys(["autoload_known_extensions", "autoinstall_known_extensions"], "false")
    with tempfile.TemporaryDirectory(prefix="sana-pipe-") as folder:
        places = {"memory_limit": _MEMORY, "temp_directory": folder}
        with duckdb.connect(config={**off, "threads": 1, "async_threads": 0, **places}) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            yield connection


def _parts(result: Any, schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of a query's result, some thousands at a time."""
    return (pa.Table.from_batches([batch]).cast(schema) for batch in result.to_arrow_reader(ROWS))


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _name(value: str) -> str:
    return '"' + value.replace('"', '""') + '"'
