"""Filters: select samples by a condition in SQL over their metadata.

`Filter("least(width, height) >= 512 and score > 5")` is what stands after WHERE, in DuckDB's dialect. DuckDB has no
access to files or the network here, and only functions whose result depends on their arguments alone are allowed, so
that equal data give equal snapshots. A sample whose condition is NULL is not selected.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from sana_pipe.base.errors import UserError
from sana_pipe.data.images import buckets
from sana_pipe.data.sources.filenames import escaped, short_repr, shortened

BUILTIN = {
    "source": ("", "name of the source"),
    "item": ("item", "key of the item in it"),
    "width": ("width::DOUBLE", "pixels, after orientation"),
    "height": ("height::DOUBLE", "pixels, after orientation"),
    "aspect": ("width / height", "width / height"),
    "pixels": ("width::DOUBLE * height", "width * height"),
    "bytes": ("size", "size of the file"),
    "captions": ("len(captions)", "how many captions it has"),
    "caption": (
        "array_to_string(list_transform(captions, lambda each: each.text), chr(10))",
        "text of its captions, a line each",
    ),
    "caption_words": (
        r"list_max(list_transform(captions, lambda each: len(regexp_extract_all(each.text, '\S+'))))",
        "words of its longest caption",
    ),
    "folder": ("regexp_extract(item, '^(.*)/[^/]*$', 1)", "folder of the item in its source"),
    "bucket": ("bucket", "its resolution bucket, such as '1024x768' (height x width)"),
    "crop_loss": ("crop_loss", "share of its area that its bucket cuts off"),
    "upscale": ("upscale", "factor by which it is enlarged to cover its bucket; below 1 it is reduced"),
}
"""Column: its expression over a scan table, and its meaning."""
_OF_BUCKET = ("bucket", "crop_loss", "upscale")

HIDDEN = "meta"
"""`meta.width` is the metadata field `width`, which the column of that name hides."""

Path = tuple[str, ...]
"""A column: `exif.iso` is ("exif", "iso"), `"clip-score"` is ("clip-score",)."""

_SYNTAX = {"BETWEEN", "CASE", "CAST", "COMPARISON", "CONJUNCTION", "CONSTANT", "FUNCTION", "OPERATOR", "TYPE"}
_OTHER_NAMES = {"min": "least", "max": "greatest", "startswith": "starts_with", "endswith": "ends_with"}
_INTEGERS = ("BIGINT", "UBIGINT")
_EXACT = 2**53  # up to here every integer is one of fp64
_CLASSES = {"ARRAY": "a list", "BOOLEAN": "true or false", "OBJECT": "an object"}
"""Types of JSON that are neither numbers nor text, as messages name them."""
_SCALAR = "a number or text"
_ODD = 0.01
"""Share of text up to which it counts as missing ("n/a") where all other values are numbers."""
_META = "nullif(meta, '')"
NUMBER = r"-?(0|[1-9][0-9]{0,14})(\.[0-9]+)?([eE][-+]?[0-9]+)?"
"""Text that is a number; one of more digits may be an identifier, which fp64 would round."""
_MAX_LENGTH = 20_000
_MAX_DEPTH = 250  # of nested expressions; far below Python's limit on recursion
_MEMORY = "1GiB"
"""Limit of DuckDB's memory; a batch of rows needs a few MiB."""
_GROWING = "range|generate_series|repeat|repeat_row|lpad|rpad|(list|array)_resize|format|printf|bar"
"""Functions that make long lists or texts from a number, which DuckDB's memory limit does not cover:
`len(range(1000000000)) > 0` took 9.4 GB, and no interrupt ended it."""
_MACROS = "if|nullif|split_part|date_add|days_in_month|(array|list)_.+"
"""Functions that DuckDB defines by others. Those left out aggregate, multiply rows, read the clock or are of no use."""


class Filter:
    """A condition.

    Args:
        text: see the module.
        setting: its name in messages, such as `bucket.filter`.

    Attributes:
        paths: the columns that it reads.
        column: the column that it is, if it is nothing else.

    Raises:
        UserError: it is no expression of SQL, or uses what a filter may not.
    """

    def __init__(self, text: str, setting: str):
        self.text, self.setting = text, setting
        self.paths: set[Path] = set()
        if len(text) > _MAX_LENGTH:
            raise self.wrong(f"has {len(text):,} characters", expected=f"at most {_MAX_LENGTH:,}")
        try:
            statement, plain = (_parsed(f"SELECT ({expression}\n)") for expression in (text, "1"))
        except duckdb.Error as error:  # bytes that are not UTF-8
            raise self.wrong("is not an SQL condition", found=escaped(str(error))) from None
        if statement["error"]:
            raise self.wrong("is not an SQL condition", found=escaped(statement["error_message"]))
        conditions, _ = (tree["statements"][0]["node"].pop("select_list", ()) for tree in (statement, plain))
        if statement != plain or len(conditions) != 1:
            raise self.wrong("is more than one condition")
        for node in _nodes(conditions[0]):
            self._check(node)
        self.column = next(iter(self.paths)) if conditions[0]["class"] == "COLUMN_REF" else None

    def _check(self, node: dict[str, Any]) -> None:
        if node["class"] not in _SYNTAX | {"COLUMN_REF"}:
            raise self.wrong(f"has a {node['class'].lower()}, which a filter may not have")
        if node["class"] == "COLUMN_REF":
            self.paths.add(tuple(node["column_names"]))
        if node["class"] == "FUNCTION" and (name := node["function_name"].lower()) not in _functions():
            near = _OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, _functions(), 1, 0.8)), None)
            raise self.wrong(
                f"calls {name!r}, which is not a function of the row's values alone",
                fix=f"did you mean {near!r}?" if near else None,
            )

    def check_columns(self, known: set[Path], valid: list[str]) -> None:
        """Refuse columns that are not in `known`. valid: all names, for messages.

        Raises:
            UserError: a column is unknown.
        """
        for path in sorted(self.paths - known):
            name, spelled = ".".join(path), {other.lower(): _column(other) for other in valid}
            # clip-score without quotes is clip minus score
            quoted = [other for other in spelled if _column(other) != other and other in self.text.lower()]
            near = quoted or difflib.get_close_matches(name.lower(), spelled)
            raise self.wrong(
                f"names the column {name!r}, which no item has",
                expected=", ".join(valid),
                fix=f"did you mean {spelled[near[0]]!r}?" if near else f"text goes in single quotes: {_text(name)}",
            )

    def wrong(self, what: str, **more: Any) -> UserError:
        return UserError(f"{self.setting} {short_repr(self.text)} {what}", **more)


@dataclass
class _Values:
    """Values of one JSON type: how many, and the first with its item."""

    count: int = 0
    item: str = ""
    example: str = ""

    def add(self, count: int, item: str, example: str) -> None:
        if not self.count:
            self.item, self.example = item, example
        self.count += count


class Metadata:
    """The metadata of a source's items, as filters need it.

    A field has one type for each source, that of most values. Values of another type are missing; `odd` counts them.
    Without a majority there is no type. A field of numbers and text is text, unless the text is odd: fewer than half of
    the values where the others are JSON's numbers, `_ODD` where they are text themselves, as in a CSV.

    Args:
        parts: the columns `item` and `meta` (JSON objects) of all items, in tables of any length.
        paths: columns that filters read.

    Attributes:
        known: those of `paths` that some item has, be it null.
        valid: names of all columns that the source has.
        text: fields of metadata whose values are text that is not a number.
    """

    def __init__(self, parts: Iterable[pa.Table], paths: set[Path]):
        self.known = {path for path in paths if _is_builtin(path)}
        self._exact: set[Path] = set()
        self._values: dict[Path, dict[str, _Values]] = {path: {} for path in sorted(paths - self.known)}
        names: set[str] = set()
        for part in parts if self._values else ():
            with _batch(part):
                names.update(name for [name] in _rows(f"SELECT DISTINCT unnest(json_keys({_META})) FROM batch"))
                for path in self._values:
                    self._look(path)
        self.valid = [*BUILTIN, *sorted(names - set(BUILTIN))]
        self.text = {path for path, values in self._values.items() if self._is_text(values)}

    def _look(self, path: Path) -> None:
        field = _text(_pointer(path))
        value = f"json_extract_string(m, {field})"
        for kind, is_number, count, item, example, largest in _rows(
            f"SELECT json_type(m, {field}), regexp_full_match({value}, {_text(NUMBER)}) IS TRUE, count(*), "
            f"first(item), first(json_extract(m, {field})::VARCHAR), max(abs(TRY_CAST({value} AS HUGEINT))) "
            f"FROM (SELECT item, {_META} AS m FROM batch) WHERE json_exists(m, {field}) GROUP BY 1, 2"
        ):
            self.known.add(path)
            if kind == "VARCHAR":
                kind = "DIGITS" if is_number else "TEXT"
            elif kind in _INTEGERS:
                kind = "HUGEINT"
                self._exact |= {path} if largest > _EXACT else set()
            if kind != "NULL":
                self._values[path].setdefault(kind, _Values()).add(count, item, example)

    @staticmethod
    def _is_text(values: dict[str, _Values]) -> bool:
        counts = {kind: each.count for kind, each in values.items() if kind not in _CLASSES}
        text, every = counts.get("TEXT", 0), sum(counts.values())
        numbers = every - text - counts.get("DIGITS", 0)
        return text > 0 and not (numbers > every / 2 or text <= _ODD * every)

    def types(self, text: set[Path]) -> dict[Path, str]:
        """DuckDB's type of each field of metadata that has values. text: fields that are text in any source; all
        others with text, as in a CSV, are numbers.

        Raises:
            UserError: a field has values of several types and none has most, or objects.
        """
        result = {}
        for path, values in self._values.items():
            if not values:
                continue
            classes = _by_class(values)
            kind, most = max(classes.items(), key=lambda each: each[1].count)
            every = sum(each.count for each in classes.values())
            if kind == _CLASSES["OBJECT"] or 2 * most.count <= every:
                raise UserError(
                    f"the metadata field {'.'.join(path)!r} cannot be used in a filter: its values are "
                    + ("objects" if len(classes) == 1 else "of several types, and none has more than half of them"),
                    expected="numbers, text, booleans or lists",
                    found="; ".join(_shown(name, each) for name, each in classes.items()),
                    fix=f"name a field of it, such as {'.'.join(path)}.NAME" if kind == _CLASSES["OBJECT"] else None,
                )
            if kind == _CLASSES["ARRAY"]:
                result[path] = "VARCHAR[]"
            elif kind == _CLASSES["BOOLEAN"]:
                result[path] = "BOOLEAN"
            elif path in text and values.keys() & {"TEXT", "DIGITS"}:
                result[path] = "VARCHAR"
            else:
                integers = values.keys() - {*_CLASSES, "TEXT"} == {"HUGEINT"} and path in self._exact
                result[path] = "HUGEINT" if integers else "DOUBLE"
        return result

    def odd(self, types: dict[Path, str]) -> list[str]:
        """Count, for each field, the values of another type than its usual one, and name the first of them."""
        lines = []
        for path, kind in types.items():
            values = self._values[path]
            fits = {"VARCHAR[]": {"ARRAY"}, "BOOLEAN": {"BOOLEAN"}}.get(kind, values.keys() - {*_CLASSES})
            fits = fits - {"TEXT"} if kind in ("DOUBLE", "HUGEINT") else fits
            others = {name: each for name, each in values.items() if name not in fits}
            if others:
                name, first = next(iter(others.items()))
                lines.append(
                    f"{sum(each.count for each in others.values())} of {sum(each.count for each in values.values())} "
                    f"values of {'.'.join(path)!r} are of another type than {kind} and count as missing, such as "
                    + _shown(_CLASSES.get(name, "text"), first)
                )
        return lines


def _by_class(values: dict[str, _Values]) -> dict[str, _Values]:
    """The values with numbers and text as one class."""
    classes: dict[str, _Values] = {}
    for kind, each in values.items():
        classes.setdefault(_CLASSES.get(kind, _SCALAR), _Values()).add(each.count, each.item, each.example)
    return classes


def _shown(kind: str, values: _Values) -> str:
    return f"{kind}, {shortened(escaped(values.example))} of {short_repr(values.item)}"


def select(
    filters: Sequence[Filter], batch: pa.Table, source: str, types: dict[Path, str]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Find for each filter which rows it selects, and which it cannot decide: booleans, (rows,) each.

    Args:
        batch: rows of a scan table.
        source: its name.
        types: of every field of metadata that a filter reads.

    Raises:
        UserError: a condition cannot be computed, or is none.
    """
    paths = sorted({path for rule in filters for path in rule.paths})
    columns: dict[str, Any] = {}
    for path in paths:
        if _is_builtin(path):
            columns[path[0]] = BUILTIN[path[0]][0] or _text(source)
        else:
            _put(columns, path, _value(path, types[path]))
    spelled: dict[str, str] = {}
    for name in columns:
        if (other := spelled.setdefault(name.lower(), name)) != name:  # for SQL they are one
            raise UserError(
                f"filters use the columns {other!r} and {name!r}, which differ in case only",
                fix=f"write {HIDDEN}.{_column(name if name not in BUILTIN else other)} for the field of the metadata",
            )
    listed = ", ".join(f"{_struct(value)} AS {_name(name)}" for name, value in columns.items()) or "item"
    table = f"(SELECT {listed} FROM (SELECT *, {_META} AS m FROM batch))"
    results = []
    with _interruptible(), _batch(batch):
        for rule in filters:
            try:
                found = engine().execute(f"SELECT ({rule.text}\n) AS selected FROM {table}")
                kind, values = str(found.description[0][1]), found.fetchnumpy()["selected"]
            except duckdb.Error as error:
                raise rule.wrong(
                    "cannot be computed",
                    found=escaped("; ".join([str(error).splitlines()[0], *_described(rule, types)])),
                    fix=_cast(str(error)),
                ) from None
            if kind.upper().strip('"') not in ("BOOLEAN", "BOOL"):
                raise rule.wrong("is not a condition", fix="add a comparison, such as width >= 512")
            results.append((np.ma.filled(values, False).astype(bool), np.ma.getmaskarray(values)))
    return results


def of_bucket(paths: Iterable[Path]) -> list[str]:
    """The names of those columns that depend on the bucket table."""
    return sorted(path[0] for path in paths if len(path) == 1 and path[0] in _OF_BUCKET)


def with_bucket(batch: pa.Table, table: Sequence[buckets.Shape]) -> pa.Table:
    """Rows of a scan table with the columns that depend on the bucket table."""
    height, width = (batch.column(side).to_numpy().astype(np.int64) for side in ("height", "width"))
    nearest, shapes = buckets.nearest_all(table, height, width), np.array(table, np.int64)
    fit = height, width, shapes[nearest].T
    names = pa.array([f"{height}x{width}" for height, width in table])
    columns = names.take(pa.array(nearest)), buckets.crop_loss(*fit), buckets.upscale(*fit)
    for name, column in zip(_OF_BUCKET, columns, strict=True):
        batch = batch.append_column(name, pa.array(column))
    return batch


def texts(path: Path, batch: pa.Table, source: str) -> pa.ListArray:
    """The values of a column as text, a list for each row: of a list its elements, else one, or null.

    Args:
        batch, source: as of `select`.
    """
    field = _text(_pointer(path))
    if _is_builtin(path):
        value = f"[CAST({BUILTIN[path[0]][0] or _text(source)} AS VARCHAR)]"
    else:
        value = (
            f"CASE WHEN json_type(m, {field}) = 'ARRAY' THEN json_extract(m, {field})::VARCHAR[] "
            f"ELSE [json_extract_string(m, {field})] END"
        )
    with _interruptible(), _batch(batch):
        query = f"SELECT {value} AS texts FROM (SELECT *, {_META} AS m FROM batch)"
        return pa.concat_arrays(engine().sql(query).to_arrow_table().column(0).chunks)


def _cast(error: str) -> str | None:
    """The cast for an error of DuckDB that asks for one; it names both types."""
    if "explicit cast" not in error:
        return None
    others = [name for name in re.findall(r"type ([A-Z]+)", error) if name != "VARCHAR"]
    if others and others[0] in ("DATE", "TIMESTAMP", "TIME"):
        return f"TRY_CAST(column AS {others[0]}) turns text into it"
    return "TRY_CAST(column AS DOUBLE) turns text into numbers"


def _described(rule: Filter, types: dict[Path, str]) -> list[str]:
    return [f"{'.'.join(path)} is {types[path]}" for path in sorted(rule.paths) if path in types]


# ---------------------------------------------------------------- DuckDB


@functools.cache
def engine() -> duckdb.DuckDBPyConnection:
    """DuckDB in memory, closed against files, the network and extensions; the machine's time zone does not matter. A
    division by zero is NULL: infinity and NaN would be larger than every number."""
    off = ["enable_external_access", "autoload_known_extensions", "autoinstall_known_extensions"]
    off += ["ieee_floating_point_ops", "error_on_division_by_zero"]
    settings: dict[str, Any] = {**dict.fromkeys(off, "false"), "max_expression_depth": _MAX_DEPTH}
    settings |= {"threads": 1, "async_threads": 0}  # a process that forks while others run leaves a child that hangs
    settings |= {"memory_limit": _MEMORY, "temp_directory": ""}
    connection = duckdb.connect(config=settings)
    connection.execute("SET TimeZone = 'UTC'; SET lock_configuration = true")
    return connection


def _rows(query: str) -> list[tuple[Any, ...]]:
    return engine().execute(query).fetchall()


def _parsed(query: str) -> dict[str, Any]:
    [(tree,)] = engine().execute("SELECT json_serialize_sql($query)", {"query": query}).fetchall()
    result: dict[str, Any] = json.loads(tree)
    return result


@functools.cache
def _functions() -> frozenset[str]:
    """Functions of one row whose result depends on their arguments alone; `age` may count from today."""
    return frozenset(
        name
        for [name] in _rows(
            "SELECT lower(function_name) FROM duckdb_functions() "
            "WHERE function_type = 'scalar' AND function_name <> 'age' "
            f"AND NOT regexp_full_match(lower(function_name), {_text(_GROWING)}) "
            f"OR function_type = 'macro' AND regexp_full_match(function_name, {_text(_MACROS)}) "
            f"AND NOT regexp_full_match(lower(function_name), {_text(_GROWING)}) "
            "GROUP BY ALL HAVING bool_or(stability IS NULL OR stability = 'CONSISTENT') "
            "AND NOT bool_or(coalesce(stability, '') = 'VOLATILE')"
        )
    )


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for the error that DuckDB raises in place of what the handler of a signal raised."""
    try:
        yield
    except RuntimeError as error:
        if "interrupted" not in str(error):
            raise
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def _batch(table: pa.Table) -> Iterator[None]:
    engine().register("batch", table)
    try:
        yield
    finally:
        engine().unregister("batch")


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """The expressions in a part of `json_serialize_sql`'s result."""
    for inner in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(inner)
    if isinstance(tree, dict) and "class" in tree:
        yield tree


def _is_builtin(path: Path) -> bool:
    return len(path) == 1 and path[0] in BUILTIN


def _pointer(path: Path) -> str:
    """The JSON pointer (RFC 6901) of a column's field."""
    field = path[1:] if path[0] == HIDDEN else path
    return "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in field)


def _value(path: Path, kind: str) -> str:
    field = _text(_pointer(path))
    if kind == "DOUBLE":  # NaN is larger than every number for DuckDB
        return f"nullif(TRY_CAST(json_extract_string(m, {field}) AS DOUBLE), 'nan'::DOUBLE)"
    if kind == "HUGEINT":
        return f"TRY_CAST(json_extract_string(m, {field}) AS HUGEINT)"
    fits, value = {
        "VARCHAR": (f"NOT IN {tuple(_CLASSES)}", f"json_extract_string(m, {field})"),
        "VARCHAR[]": ("= 'ARRAY'", f"json_extract(m, {field})::VARCHAR[]"),
        "BOOLEAN": ("= 'BOOLEAN'", f"json_extract(m, {field})::BOOLEAN"),
    }[kind]
    return f"CASE WHEN json_type(m, {field}) {fits} THEN {value} END"


def _put(columns: dict[str, Any], path: Path, value: str) -> None:
    for name in path[:-1]:
        columns = columns.setdefault(name, {})
        if isinstance(columns, str):
            raise UserError(f"filters use the metadata field {name!r} as a value and as an object")
    columns[path[-1]] = value


def _struct(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "struct_pack(" + ", ".join(f"{_name(name)} := {_struct(inner)}" for name, inner in value.items()) + ")"


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _column(name: str) -> str:
    """A column as it stands in a condition."""
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else _name(name)


def _name(value: str) -> str:
    return '"' + value.replace('"', '""') + '"'
