"""Figures as JSON values, for scripts."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any

INLINE = {"inline": True}
"""The metadata of a field whose mapping has no key of its own in JSON: its entries stand among the other fields."""


def json_values(value: Any) -> Any:
    """Turn dataclasses into objects, with the fields in their order. A field that has its default is left out."""
    if isinstance(value, dict):
        return {key: json_values(each) for key, each in value.items()}
    if isinstance(value, list):
        return [json_values(each) for each in value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    values: dict[str, Any] = {}
    for field in fields(value):
        content = getattr(value, field.name)
        if field.default is MISSING or content != field.default:
            made = json_values(content)
            values.update(made if field.metadata == INLINE else {field.name: made})
    return values
