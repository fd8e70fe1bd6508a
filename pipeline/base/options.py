"""Option trees: the fields of sections and the values of a mapping, both by dotted name (`train.optim.lr`).

A section is a pydantic model; its fields are options, or sections of their own. A tree is what YAML holds: mappings of
values by option. `sana_pipe.config` has the sections and reads the trees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

MISSING: Any = object()
"""No value: `None` is one."""
_KINDS = {int: "integer", float: "number", str: "text", bool: "true | false", type(None): "null", Any: "any value"}
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def within(option: str, section: str) -> bool:
    """Return whether an option is `section` or one of its options."""
    return option == section or option.startswith(section + ".")


def deepest(tree: Any, name: str | Sequence[str | int]) -> tuple[Any, list[str | int]]:
    """The value of the longest part of `name` that a tree has, and the rest of `name`."""
    keys = list(name.split(".") if isinstance(name, str) else name)
    for depth, key in enumerate(keys):
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return tree, keys[depth:]
    return tree, []


def value_at(tree: Any, name: str | Sequence[str | int], default: Any = None) -> Any:
    """The value of an option or section in a tree; `default` if the tree does not give it."""
    value, rest = deepest(tree, name)
    return default if rest else value


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree by dotted name; an empty mapping is a value."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def put(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set a value in place; sections that are missing or null are added.

    Raises:
        ValueError: a part of `name` has a value that is no section.
    """
    *sections, last = name.split(".")
    for key in sections:
        if tree.get(key) is None:
            tree[key] = {}
        if not isinstance(tree[key], dict):
            raise ValueError(f"{key!r} is a value, not a section (found {tree[key]!r})")
        tree = tree[key]
    tree[last] = value


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section in a field's type (`EmaConfig | None`, `dict[str, SourceConfig]`); None: the field is a value."""
    parts = (field.annotation, *get_args(field.annotation))
    return next((part for part in parts if hasattr(part, "model_fields")), None)


def holds_several(field: FieldInfo) -> bool:
    """Return whether a field is a mapping or a list of sections."""
    return get_origin(field.annotation) in (dict, list)


def fields_below(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every option and section with its field, in the order of the file; a section comes before its options. Below a
    mapping or a list NAME stands for any element (`bucket.sources.NAME.weight`)."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        below = section_of(field)
        if below is not None:
            yield from fields_below(below, f"{prefix}{name}.{'NAME.' if holds_several(field) else ''}")


def field_at(section: type[BaseModel], location: Sequence[str | int]) -> tuple[str, FieldInfo | None, list[str]]:
    """The deepest option on the way to `location`, its field, and the names that are valid next to the last element."""
    option: Sequence[str | int] = ()
    above: type[BaseModel] | None = section
    field, siblings, is_element = None, list[str](), False  # is_element: of a mapping or a list of sections
    for depth, part in enumerate(location, 1):
        if is_element:
            is_element = False
            continue
        siblings = [] if above is None else list(above.model_fields)
        below = None if above is None else above.model_fields.get(str(part))
        if below is None:
            break
        option, field = location[:depth], below
        above, is_element = section_of(below), holds_several(below)
    return ".".join(map(str, option)), field, siblings


def values_of(field: FieldInfo) -> str:
    """The values that an option takes, such as `integer at least 0 | null`."""
    return _values(field.annotation, tuple(field.metadata))


def _values(annotation: Any, constraints: tuple[Any, ...] = ()) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    named = [text for text in constraints if isinstance(text, str)]
    if named:
        return named[0]
    if origin is Annotated:
        return _values(parts[0], parts[1:])
    if origin is Literal:
        return " | ".join(map(str, parts))
    if origin is dict:
        return f"{{NAME: {_values(parts[1])}, ...}}"
    if origin is list:
        return f"[{_values(parts[0])}, ...]"
    if origin is tuple:
        return f"[{', '.join('...' if part is ... else _values(part) for part in parts)}]"
    if parts:  # a union; its constraints are those of the value
        return " | ".join(_values(part, constraints) for part in parts)
    if hasattr(annotation, "model_fields"):
        return "{OPTION: VALUE, ...}"
    limits = [
        f"{word} {getattr(limit, key):g}"
        for constraint in constraints
        for limit in (constraint, *getattr(constraint, "metadata", ()))
        for key, word in _BOUNDS.items()
        if getattr(limit, key, None) is not None and annotation is not type(None)
    ]
    return " ".join([_KINDS[annotation], " and ".join(limits)]).strip()
