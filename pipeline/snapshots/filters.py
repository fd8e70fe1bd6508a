"""Filters: which samples an expression over their metadata selects.

What: `Filter("min(width, height) >= 512 and score > 5")` is parsed once and computed by pyarrow over whole columns.
Why: data sets carry scores, licences and tags; choosing by them must not need a program, nor run one: the expression
is parsed, never evaluated as Python, and knows nothing but columns, numbers and text.
Price: a metadata field is read out of JSON, for the fields that are named only.

An expression has columns (`score`, `exif.iso` for a field inside a field, `column("clip-score")` for other names),
numbers, text, `True`, `False`, comparisons, `and`, `or`, `not`, `in [..]`, `is None`, `is not None`, `+ - * /`, and the
functions `min`, `max`, `abs`, `startswith`, `endswith`, `contains` and `matches` (a regular expression, RE2). A
sample without a value for a column that decides is not selected (test with `is None`).

Columns of every source: see `BUILTIN`. Any other name is a field of the items' metadata: other columns of a table,
other keys of a JSON file.
"""

from __future__ import annotations

import ast
import difflib
import json
import sys
from collections.abc import Callable
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

_LARGEST = 500  # parts of an expression; far below what Python's recursion allows

Columns = Callable[[str], pa.Array]
"""Name -> column (text as `large_string`); raises KeyError for one that is not there."""


class Filter:
    """An expression.

    Args:
        text: see the module.
        setting: what to call it in messages, such as `bucket.filter`.

    Attributes:
        names: the columns that it reads.

    Raises:
        UserError: it is not an expression of this kind; the message shows the part that is not.
    """

    def __init__(self, text: str, setting: str):
        self.text, self.setting = text, setting
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._wrong(f"is not an expression: {getattr(error, 'msg', None) or error}") from None
        self.names: set[str] = set()
        if sum(1 for _ in ast.walk(self._tree)) > _LARGEST:
            raise self._wrong(f"has more than {_LARGEST} parts", fix="keep what it asks in a column of its own")
        self._walk(self._tree)

    def select(self, columns: Columns, rows: int, valid: list[str]) -> tuple[pa.Array, pa.Array]:
        """Which rows it selects, and for which it cannot be decided because a value is missing.

        Args:
            columns: the columns of `rows` rows.
            valid: the names there are, for messages.

        Raises:
            UserError: a column is not there, or has values of another kind than the expression needs.
        """
        for name in sorted(self.names):
            try:
                columns(name)
            except KeyError:
                near = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
                raise self._wrong(
                    f"names the column {name!r}, which no item has",
                    expected=", ".join(valid),
                    fix=f"did you mean {near[0]!r}?" if near else None,
                ) from None
        found = self._value(self._tree, columns)
        if isinstance(found, bool):
            return pa.array([found] * rows, pa.bool_()), pa.array([False] * rows, pa.bool_())
        if not isinstance(found, pa.Array) or not pa.types.is_boolean(found.type):
            raise self._wrong("does not say yes or no", fix="compare with something, such as width >= 512")
        return pc.fill_null(found, False), pc.is_null(found)

    # ------------------------------------------------------------ parsing

    def _walk(self, node: ast.expr) -> None:
        """Collect the columns; refuse everything that is not listed in the module."""
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
                found = self._truth(parts[0], columns)
                for part in parts[1:]:
                    found = join(found, self._truth(part, columns))
                return _array(found)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return _array(pc.invert(self._truth(operand, columns)))
            case ast.UnaryOp(operand=operand):
                return self._call(node, pc.negate, self._number(operand, columns))
            case ast.BinOp(left=left, op=operator, right=right):
                one, other = self._number(left, columns), self._number(right, columns)
                return self._call(node, _ARITHMETIC[type(operator)], one, other)
            case ast.Compare(left=left, ops=operators, comparators=others):
                found = None
                for test, right in zip(operators, others, strict=True):
                    own = self._compare(node, left, test, right, columns)
                    found = own if found is None else pc.and_kleene(found, own)
                    left = right
                return _array(found)
            case ast.Call(func=ast.Name(id=called), args=parts):
                if called == "abs":
                    return self._call(node, pc.abs, self._number(parts[0], columns))
                if called in ("min", "max"):
                    join = pc.min_element_wise if called == "min" else pc.max_element_wise
                    numbers = [self._number(part, columns) for part in parts]
                    return self._call(node, lambda *n: join(*n, skip_nulls=False), *numbers)
                text, pattern = self._value(parts[0], columns), self._value(parts[1], columns)
                if not (isinstance(text, pa.Array) and pa.types.is_large_string(text.type)):
                    raise self._wrong(f"asks {ast.unparse(node)!r} of {_kind(text)}, which is not text")
                return self._call(node, lambda column: _TEXT[called](column, pattern), text)
        raise AssertionError(ast.dump(node))

    def _truth(self, node: ast.expr, columns: Columns) -> Any:
        found = self._value(node, columns)
        if isinstance(found, bool):
            return pa.scalar(found)
        if isinstance(found, pa.Array) and pa.types.is_boolean(found.type):
            return found
        raise self._wrong(f"takes {ast.unparse(node)!r}, which is {_kind(found)}, for yes or no")

    def _number(self, node: ast.expr, columns: Columns) -> Any:
        found = self._value(node, columns)
        if isinstance(found, pa.Array) and pa.types.is_large_string(found.type):
            found = self._parsed(node, found)
        if (
            isinstance(found, bool)
            or not isinstance(found, int | float | pa.Array)
            or (isinstance(found, pa.Array) and not _numeric(found))
        ):
            raise self._wrong(f"takes {ast.unparse(node)!r}, which is {_kind(found)}, for a number")
        return self._call(node, lambda: found.cast(pa.float64()) if isinstance(found, pa.Array) else float(found))

    def _compare(self, whole: ast.expr, left: ast.expr, operator: ast.cmpop, right: ast.expr, columns: Columns) -> Any:
        one, other = self._value(left, columns), self._value(right, columns)
        if isinstance(operator, ast.Is | ast.IsNot):
            if other is not None or not isinstance(one, pa.Array):
                raise self._wrong(f"has {ast.unparse(whole)!r}; only a column can be tested, with `is None`")
            return pc.is_null(one) if isinstance(operator, ast.Is) else pc.is_valid(one)
        if isinstance(operator, ast.In | ast.NotIn):
            if not isinstance(other, list) or any(isinstance(v, pa.Array | list) for v in other):
                raise self._wrong(f"has {ast.unparse(whole)!r}", expected="a list of values after `in`")
            found: Any = pa.scalar(False)
            for value in other:
                constant = ast.Constant(value=value)
                found = pc.or_kleene(found, self._compare(whole, left, ast.Eq(), constant, columns))
            return pc.invert(found) if isinstance(operator, ast.NotIn) else found
        if one is None or other is None:
            raise self._wrong(f"has {ast.unparse(whole)!r}", fix="write `is None` or `is not None`")
        texts = [_textual(one), _textual(other)]
        if texts == [True, False] and isinstance(one, pa.Array) and not isinstance(other, bool):
            one = self._parsed(left, one)  # a CSV has its numbers as text
        elif texts == [False, True] and isinstance(other, pa.Array) and not isinstance(one, bool):
            other = self._parsed(right, other)
        elif texts[0] != texts[1]:
            raise self._wrong(f"compares {_kind(one)} with {_kind(other)} in {ast.unparse(whole)!r}")
        if not (isinstance(one, pa.Array) or isinstance(other, pa.Array)):
            one = pa.scalar(one)
        return self._call(whole, _COMPARE[type(operator)], one, other)

    def _parsed(self, node: ast.expr, column: pa.Array) -> pa.Array:
        try:
            return pc.cast(column, pa.float64())
        except pa.ArrowInvalid as error:
            raise self._wrong(
                f"takes {ast.unparse(node)!r} for a number, but it holds text", found=escaped(str(error))
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


def _array(found: Any) -> Any:
    """What pyarrow computed, as an array or, of constants alone, a constant."""
    if isinstance(found, pa.Scalar):
        return found.as_py()
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def _numeric(column: pa.Array) -> bool:
    return pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_null(column.type)


def _textual(value: Any) -> bool:
    return pa.types.is_large_string(value.type) if isinstance(value, pa.Array | pa.Scalar) else isinstance(value, str)


def _kind(value: Any) -> str:
    if isinstance(value, pa.Array):
        kind = "numbers" if _numeric(value) else "yes or no" if pa.types.is_boolean(value.type) else "text"
        return f"a column of {kind}"
    return short_repr(value)


def fields(meta: pa.ChunkedArray, names: set[str]) -> tuple[dict[str, pa.Array], list[str], np.ndarray]:
    """Fields of items' metadata.

    Args:
        meta: JSON objects, as the scan keeps them.
        names: which; a dot leads into an object, unless a field has the whole name.

    Returns:
        A column for each name that some item has, all top-level names that there are, and (n,) bool: for which items
        a number of these is too large for float64 and therefore null.

    Raises:
        UserError: a field holds values of different kinds, or lists.
    """
    found: dict[str, list[Any]] = {name: [] for name in names}
    valid: set[str] = set()
    for text in (text for chunk in meta.chunks for text in chunk.to_pylist()):
        row = json.loads(text) if text else {}
        valid.update(row)
        for name, values in found.items():
            values.append(_field(row, name))
    columns = {}
    too_large = np.zeros(len(meta), bool)
    for name, values in found.items():
        beyond = [row for row, value in enumerate(values) if isinstance(value, int) and abs(value) > sys.float_info.max]
        if beyond and len(beyond) == sum(value is not None for value in values):
            raise UserError(f"every number of the metadata field {name!r} is too large for a filter")
        for row in beyond:
            too_large[row], values[row] = True, None
        if any(value is not None for value in values):
            columns[name] = _typed(name, values)
        elif name in valid:
            columns[name] = pa.nulls(len(values), pa.float64())
    return columns, sorted(valid), too_large


def _field(row: dict[str, Any], name: str) -> Any:
    if name in row or "." not in name:
        return row.get(name)
    outer, _, inner = name.partition(".")
    below = row.get(outer)
    return _field(below, inner) if isinstance(below, dict) else None


def _typed(name: str, values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {bool}:
        return pa.array(values, pa.bool_())
    if kinds <= {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    if kinds <= {str}:
        return pa.array(values, pa.large_string())
    if kinds <= {int, float, str}:  # tables of several origins: numbers here, numbers as text there
        return pa.array([None if value is None else str(value) for value in values], pa.large_string())
    known = str if str in kinds else float
    odd = next(v for v in values if v is not None and (isinstance(v, bool) or not isinstance(v, known | int)))
    raise UserError(
        f"the metadata field {name!r} cannot be used in a filter: not every value of it is a number or text",
        found=short_repr(odd),
    )
