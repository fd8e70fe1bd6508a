"""Checks of the values of a model's shape, from `config.json` or `model.arch`, for every model.

Files of people and of other trainers hold nulls, texts and negative numbers; a shape that took them would end in a
traceback far from the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from sana_pipe.base.errors import ConfigError

T = TypeVar("T")
_LIST, _MOST = tuple[int, ...], 1 << 31
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number {}",
    float: "a number {}",
    str: "a text",
    _LIST: "a list of whole numbers {}",
    NoneType: "null",
}
"""Types of fields, for people; in braces the bound of numbers."""


def checked(kind: type, data: Mapping[str, Any], source: str, *, may_be_zero: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a shape that `data` has, with lists as tuples. Other keys are left out; fields that are missing
    take the defaults of the shape, which are diffusers'.

    Args:
        kind: the shape, a dataclass.
        source: where the values stand: a file, or `model.arch`.
        may_be_zero: fields whose number may be 0; any other is above 0.

    Raises:
        ConfigError: a value of another type, or a number out of bounds; it names source, key and value.
    """
    hints, values = get_type_hints(kind), dict[str, Any]()
    for name in (field.name for field in fields(kind)):
        if name in data:
            value = tuple(data[name]) if isinstance(data[name], list) else data[name]
            place = f"{source}.{name}" if source == "model.arch" else f"{source}: {name}"
            _check(place, value, hints[name], name in may_be_zero)
            values[name] = value
    return values


def made(kind: type[T], data: Mapping[str, Any], source: str, *, may_be_zero: Collection[str] = ()) -> T:
    """Make a shape of the fields that `data` has; arguments as of `checked`.

    Raises:
        ConfigError: as `checked`, or a combination that the model does not implement; it names the source.
    """
    values = checked(kind, data, source, may_be_zero=may_be_zero)
    try:
        return kind(**values)
    except ConfigError as error:
        what = f"{source}: {error.what}"
        raise ConfigError(what, expected=error.expected, found=error.found, fix=error.fix) from None


def _check(place: str, value: Any, kind: Any, may_be_zero: bool) -> None:
    bound = f"{'not below' if may_be_zero else 'above'} 0 and below 2^31"
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    expected = " or ".join(_WORDS[each].format(bound) for each in kinds)
    shown = list(value) if isinstance(value, tuple) else value
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        raise ConfigError(f"{place} has a value of another type", expected=expected, found=repr(shown)) from None
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if not (0 < number < _MOST or (may_be_zero and number == 0)):
            raise ConfigError(f"{place} must be {bound}", expected=expected, found=repr(shown))
