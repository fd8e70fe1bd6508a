"""Filters: select samples by an expression over their metadata.

`Filter("min(width, height) >= 512 and score > 5")` is parsed once and computed by pyarrow over whole columns. The
expression is never evaluated as Python; it knows only columns, numbers and text. So data sets can be filtered by
scores, licences or tags without writing or running a program.

An expression has columns (`score`, `exif.iso` for a field inside a field, `column("clip-score")` for other names),
numbers, text, `True`, `False`, comparisons, `and`, `or`, `not`, `in [..]`, `is None`, `is not None`, `+ - * /`, and the
functions `min`, `max`, `abs`, `startswith`, `endswith`, `contains` and `matches` (a regular expression, RE2). A
sample is not selected if a value that decides is missing (test with `is None`).

Columns of every source: see `BUILTIN`. Any other name is a field of the items' metadata: a column of a table or a key
of a JSON file. Only the named fields are read.
"""

from __future__ import annotations

import ast
import difflib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import UserError
from pipeline.sources.filenames import escaped, short_repr

BUILTIN = {
    "source": "name of the source",
    "item": "key of the item in it",
    "width": "pixels, after orientation",
    "height": "pixels, after orientation",
    "aspect": "width / height",
    "pixels": "width * height",
    "bytes": "size of the file",
    "captions": "how many captions it has",
}

_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: pc.add,
    ast.Sub: pc.subtract,
    ast.Mult: pc.multiply,
    ast.Div: pc.divide,
}
_TEXT = {
    "startswith": pc.starts_with,
    "endswith": pc.ends_with,
    "contains": pc.match_substring,
    "matches": pc.match_substring_regex,
}

MAX_PARTS = 500
"""Limit on the parts of an expression; far below Python's limit on recursion."""

Columns = Callable[[str], pa.Array]
"""Name -> column (text as `large_string`); raises KeyError for an unknown name."""


class Filter:
    """An expression.

    Args:
        text: see the module.
        setting: its name in messages, such as `bucket.filter`.

    Attributes:
        names: the columns that it reads.

    Raises:
        UserError: not a valid expression; the message shows the invalid part.
    """

    def __init__(self, text: str, setting: str):
        self.text, self.setting = text, setting
        parsed: ast.Expression | Exception
        try:
            parsed = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            parsed = error
        if isinstance(parsed, Exception):  # outside of the handler: the parser's MemoryError is not the machine's
            raise self._wrong(f"is not an expression: {getattr(parsed, 'msg', None) or parsed}")
        self._tree = parsed.body
        self.names: set[str] = set()
        if sum(1 for _ in ast.walk(self._tree)) > MAX_PARTS:
            raise self._wrong(
                f"has more than {MAX_PARTS} parts",
                fix="store the result as a column of the metadata, and filter by it",
            )
        self._walk(self._tree)

    def select(self, columns: Columns, rows: int, valid: list[str]) -> tuple[pa.Array, pa.Array]:
        """Which rows it selects, and which it cannot decide because a value is missing: booleans, (rows,) each.

        Args:
            columns: of `rows` rows.
            valid: all column names, for messages.

        Raises:
            UserError: a column is unknown, or has values of another kind than the expression needs.
        """
        for name in sorted(self.names):
            try:
                columns(name)
            except KeyError:
                near = difflib.get_close_matches(name, valid)
                raise self._wrong(
                    f"names the column {name!r}, which no item has",
                    expected=", ".join(valid),
                    fix=f"did you mean {near[0]!r}?" if near else None,
                ) from None
        result = self._value(self._tree, columns)
        if isinstance(result, bool):
            return pa.array([result] * rows, pa.bool_()), pa.array([False] * rows, pa.bool_())
        if not isinstance(result, pa.Array) or not pa.types.is_boolean(result.type):
            raise self._wrong("is no condition", fix="add a comparison, such as width >= 512")
        return pc.fill_null(result, False), pc.is_null(result)

    # ------------------------------------------------------------ parsing

    def _walk(self, node: ast.expr) -> None:
        """Collect the columns; refuse all syntax that the module does not list."""
        name = _column(node)
        if name is not None:
            self.names.add(name)
            return
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return
            case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
                pass
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                parts = [operand]
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
                parts = [left, right]
            case ast.Compare(left=left, comparators=others):
                parts = [left, *others]
            case ast.Call(func=ast.Name(id="min" | "max"), args=[_, _, *_] as parts, keywords=[]):
                pass
            case ast.Call(func=ast.Name(id="abs"), args=[_] as parts, keywords=[]):
                pass
            case ast.Call(func=ast.Name(id=called), args=[first, ast.Constant(value=str())], keywords=[]) if (
                called in _TEXT
            ):
                parts = [first]
            case _:
                raise self._wrong(
                    f"has {ast.unparse(node)!r}, which is not understood",
                    expected="columns, numbers, text, comparisons, and, or, not, in [..], is None, + - * /, min, max, "
                    'abs, startswith, endswith, contains, matches, column("name")',
                )
        for part in parts:
            self._walk(part)

    # ------------------------------------------------------------ computing

    def _value(self, node: ast.expr, columns: Columns) -> Any:
        """An array, or a constant of Python."""
        name = _column(node)
        if name is not None:
            return columns(name)
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self._value(part, columns) for part in parts]
            case ast.BoolOp(op=operator, values=parts):
                join = pc.and_kleene if isinstance(operator, ast.And) else pc.or_kleene
                result = self._truth(parts[0], columns)
                for part in parts[1:]:
                    result = join(result, self._truth(part, columns))
                return _array(result)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return _array(pc.invert(self._truth(operand, columns)))
            case ast.UnaryOp(operand=operand):
                return self._call(node, pc.negate, self._number(operand, columns))
            case ast.BinOp(left=left, op=operator, right=right):
                numbers = [self._number(left, columns), self._number(right, columns)]
                return self._call(node, _ARITHMETIC[type(operator)], *numbers)
            case ast.Compare(left=left, ops=operators, comparators=others):
                result = None
                for relation, right in zip(operators, others, strict=True):
                    comparison = self._compare(node, left, relation, right, columns)
                    result = comparison if result is None else pc.and_kleene(result, comparison)
                    left = right
                return _array(result)
            case ast.Call(func=ast.Name(id=called), args=parts):
                if called == "abs":
                    return self._call(node, pc.abs, self._number(parts[0], columns))
                if called in ("min", "max"):
                    join = pc.min_element_wise if called == "min" else pc.max_element_wise
                    numbers = [self._number(part, columns) for part in parts]
                    return self._call(node, lambda *n: join(*n, skip_nulls=False), *numbers)
                text, pattern = self._value(parts[0], columns), self._value(parts[1], columns)
                if not (isinstance(text, pa.Array) and pa.types.is_large_string(text.type)):
                    raise self._wrong(f"applies {ast.unparse(node)!r} to {_kind(text)}, which is not text")
                return self._call(node, lambda column: _TEXT[called](column, pattern), text)
        raise AssertionError(ast.dump(node))

    def _truth(self, node: ast.expr, columns: Columns) -> Any:
        value = self._value(node, columns)
        if isinstance(value, bool):
            return pa.scalar(value)
        if isinstance(value, pa.Array) and pa.types.is_boolean(value.type):
            return value
        raise self._wrong(f"uses {ast.unparse(node)!r}, which is {_kind(value)}, as a condition")

    def _number(self, node: ast.expr, columns: Columns) -> Any:
        value = self._value(node, columns)
        if isinstance(value, pa.Array) and pa.types.is_large_string(value.type):
            value = self._parsed(node, value)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float | pa.Array)
            or (isinstance(value, pa.Array) and not _numeric(value))
        ):
            raise self._wrong(f"uses {ast.unparse(node)!r}, which is {_kind(value)}, as a number")
        return self._call(node, lambda: value.cast(pa.float64()) if isinstance(value, pa.Array) else float(value))

    def _compare(self, whole: ast.expr, left: ast.expr, operator: ast.cmpop, right: ast.expr, columns: Columns) -> Any:
        first, second = self._value(left, columns), self._value(right, columns)
        if isinstance(operator, ast.Is | ast.IsNot):
            if second is not None or not isinstance(first, pa.Array):
                raise self._wrong(f"has {ast.unparse(whole)!r}; only a column can be tested, with `is None`")
            return pc.is_null(first) if isinstance(operator, ast.Is) else pc.is_valid(first)
        if isinstance(operator, ast.In | ast.NotIn):
            if not isinstance(second, list) or any(isinstance(v, pa.Array | list) for v in second):
                raise self._wrong(f"has {ast.unparse(whole)!r}", expected="a list of values after `in`")
            result: Any = pa.scalar(False)
            for value in second:
                constant = ast.Constant(value=value)
                result = pc.or_kleene(result, self._compare(whole, left, ast.Eq(), constant, columns))
            return pc.invert(result) if isinstance(operator, ast.NotIn) else result
        if first is None or second is None:
            raise self._wrong(f"has {ast.unparse(whole)!r}", fix="write `is None` or `is not None`")
        texts = [_textual(first), _textual(second)]
        if texts == [True, False] and isinstance(first, pa.Array) and not isinstance(second, bool):
            first = self._parsed(left, first)  # numbers of a CSV are text
        elif texts == [False, True] and isinstance(second, pa.Array) and not isinstance(first, bool):
            second = self._parsed(right, second)
        elif texts[0] != texts[1]:
            raise self._wrong(f"compares {_kind(first)} with {_kind(second)} in {ast.unparse(whole)!r}")
        if not (isinstance(first, pa.Array) or isinstance(second, pa.Array)):
            first = pa.scalar(first)
        return self._call(whole, _COMPARE[type(operator)], first, second)

    def _parsed(self, node: ast.expr, column: pa.Array) -> pa.Array:
        try:
            return pc.cast(column, pa.float64())
        except pa.ArrowInvalid as error:
            raise self._wrong(
                f"uses {ast.unparse(node)!r} as a number, but it has text", found=escaped(str(error))
            ) from None

    def _call(self, node: ast.expr, work: Callable[..., Any], *values: Any) -> Any:
        try:
            return _array(work(*values))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError, OverflowError) as error:
            raise self._wrong(f"cannot be computed at {ast.unparse(node)!r}", found=escaped(str(error))) from None

    def _wrong(self, what: str, **more: Any) -> UserError:
        return UserError(f"{self.setting} {short_repr(self.text)} {what}", **more)


def _column(node: ast.expr) -> str | None:
    """The name of a column, if the node is one."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner, attr=name):
            outer = _column(inner)
            return None if outer is None else f"{outer}.{name}"
        case ast.Call(func=ast.Name(id="column"), args=[ast.Constant(value=str(name))], keywords=[]):
            return name
    return None


def _array(result: Any) -> Any:
    """A result of pyarrow as an array, or as a constant of Python if it has no columns."""
    if isinstance(result, pa.Scalar):
        return result.as_py()
    return result.combine_chunks() if isinstance(result, pa.ChunkedArray) else result


def _numeric(column: pa.Array) -> bool:
    return pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_null(column.type)


def _textual(value: Any) -> bool:
    return pa.types.is_large_string(value.type) if isinstance(value, pa.Array | pa.Scalar) else isinstance(value, str)


def _kind(value: Any) -> str:
    if isinstance(value, pa.Array):
        kind = "numbers" if _numeric(value) else "booleans" if pa.types.is_boolean(value.type) else "text"
        return f"a column of {kind}"
    return short_repr(value)


class Fields:
    """Fields of items' metadata: first `look` at all of it, piece by piece, then ask for `columns` of each piece.

    Args:
        names: of the wanted fields; a dot leads into an object, unless a field has the whole name.

    Attributes:
        types: name -> type of its column, for each name that some item has a value of; once `finish` was called.
    """

    def __init__(self, names: set[str]):
        self.types: dict[str, pa.DataType] = {}
        self._names = sorted(names)
        self._examples: dict[str, dict[type, Any]] = {name: {} for name in names}  # the first value of each kind
        self._too_large: set[str] = set()
        self._valid: set[str] = set()

    def look(self, meta: pa.ChunkedArray) -> None:
        """Note the kinds of values in JSON objects of the scan."""
        for row in _objects(meta) if self._names else ():
            self._valid.update(row)
            for name in self._names:
                value = _field(row, name)
                if _beyond(value):
                    self._too_large.add(name)
                elif value is not None:
                    self._examples[name].setdefault(type(value), value)

    def finish(self) -> None:
        """Decide the types.

        Raises:
            UserError: a field has values of different kinds, or lists; or all its numbers are too large for float64.
        """
        for name, examples in self._examples.items():
            if examples:
                self.types[name] = _type(name, examples)
            elif name in self._too_large:
                raise UserError(f"every number of the metadata field {name!r} is too large for a filter")

    @property
    def valid(self) -> list[str]:
        """All top-level names."""
        return sorted(self._valid)

    def has(self, name: str) -> bool:
        """Whether some item has the field, be it null."""
        return name in self.types or name in self._valid

    def columns(self, meta: pa.ChunkedArray) -> tuple[dict[str, pa.Array], np.ndarray]:
        """A column for each name with a type, and (n,) bool: items with a number too large for float64, which is null.
        meta: as in `look`, of n items."""
        values: dict[str, list[Any]] = {name: [] for name in self._names}
        too_large = np.zeros(len(meta), bool)
        for number, row in enumerate(_objects(meta) if self._names else ()):
            for name, column in values.items():
                value = _field(row, name)
                too_large[number] |= _beyond(value)
                column.append(None if _beyond(value) else value)
        return {name: _typed(kind, values[name]) for name, kind in self.types.items()}, too_large


def _objects(meta: pa.ChunkedArray) -> Iterator[dict[str, Any]]:
    return (json.loads(text) if text else {} for chunk in meta.chunks for text in chunk.to_pylist())


def _beyond(value: Any) -> bool:
    return isinstance(value, int) and abs(value) > sys.float_info.max


def _field(row: dict[str, Any], name: str) -> Any:
    if name in row or "." not in name:
        return row.get(name)
    outer, _, inner = name.partition(".")
    value = row.get(outer)
    return _field(value, inner) if isinstance(value, dict) else None


def _type(name: str, examples: dict[type, Any]) -> pa.DataType:
    """The type of a field's column. examples: the first value of each kind, in the order of their items."""
    kinds = set(examples)
    if kinds <= {bool}:
        return pa.bool_()
    if kinds <= {int, float}:
        return pa.float64()
    if kinds <= {int, float, str}:  # tables of several origins: some have numbers as text
        return pa.large_string()
    raise UserError(
        f"the metadata field {name!r} cannot be used in a filter: not all of its values are numbers or text",
        found=short_repr(next(value for kind, value in examples.items() if kind not in (int, float, str))),
    )


def _typed(kind: pa.DataType, values: list[Any]) -> pa.Array:
    convert = {pa.bool_(): bool, pa.float64(): float, pa.large_string(): str}[kind]
    return pa.array([None if value is None else convert(value) for value in values], kind)
