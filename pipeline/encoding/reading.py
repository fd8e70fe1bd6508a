"""How a source is read: its scan document remembers the settings, and later scans use them again.

Why: captions, pictures and buckets of a source depend on settings that are often given once, by `--set`. A later
`encode` of the same source without them would read every old item another way.

A setting is given on purpose if `--set` (or `--format`) gives it, or if the user's file says something else of it than
at the last scan. Otherwise it is what the last scan used. What differs is printed either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.config import Config, DataConfig, setting

GROUPS = (
    ("caption_field", "caption_weights"),
    ("caption_scores",),
    ("score_threshold",),
    ("score_power",),
    ("caption",),
    ("caption_prefix",),
    ("caption_suffix",),
    ("caption_parts",),
    ("tags",),
    ("image_field",),
    ("image_root",),
    ("pictures",),
    ("resolution", "buckets"),
)
"""The options of `data` that are remembered. Those of one group replace each other, so they are given together. What
leaves pictures out (`min_side`, ...) is not remembered: no record changes with it."""

FORMAT = "format"
_DEFAULTS = DataConfig().model_dump(mode="json")


@dataclass(frozen=True)
class Reading:
    """How a source is read.

    Attributes:
        config: with the values that are used.
        format: of `--format`, now or earlier; None: detected.
        notes: what differs from the last scan, or from the configuration, for people.
    """

    config: Config
    format: str | None
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """What a scan document remembers: `used`, and what the `file` said; each without defaults. Empty if all are."""
        file = self.config._data_given.file
        used = {**_changed(self.config.data), **({FORMAT: self.format} if self.format else {})}
        parts = {"used": used, "file": _changed(file) if file is not None else {}}
        return {"read": parts} if any(parts.values()) else {}


def settled(config: Config, format: str | None, name: str, scan: dict[str, Any] | None) -> Reading:
    """How to read a source.

    Args:
        format: as `--format` gives it.
        name: of the source.
        scan: its last scan document.
    """
    if scan is None:
        return Reading(config, format)
    now, given = config.data.model_dump(mode="json"), config._data_given
    read = scan.get("read", {})
    used, file = ({**_DEFAULTS, **read.get(part, {})} for part in ("used", "file"))
    base = None if given.file is None else given.file.model_dump(mode="json")
    kept: dict[str, Any] = {}
    notes = []
    for group in GROUPS:
        on_purpose = base is None or any(
            option in given.overridden
            or now[option] != base[option]
            or (option in given.named and base[option] != file[option])
            for option in group
        )
        different = [option for option in group if now[option] != used[option]]
        kept |= {} if on_purpose else {option: used[option] for option in different}
        notes += [_note(name, f"data.{option}", used[option], now[option], on_purpose) for option in different]
    before = used.get(FORMAT)
    if format is not None and before is not None and format != before:
        notes.append(f"source {name!r} is read another way: --format {format} (so far: --format {before})")
    elif format is None and before is not None:
        notes.append(f"source {name!r} is read as before: --format {before}")
    data = DataConfig.model_validate({**now, **kept})
    return Reading(config.model_copy(update={"data": data}), format or before, tuple(notes))


def as_read(config: DataConfig, scan: dict[str, Any]) -> DataConfig:
    """The configuration with which a source was scanned."""
    used = scan.get("read", {}).get("used", {})
    values = {option: used.get(option, _DEFAULTS[option]) for group in GROUPS for option in group}
    return DataConfig.model_validate({**config.model_dump(mode="json"), **values})


def _changed(data: DataConfig) -> dict[str, Any]:
    values = data.model_dump(mode="json")
    return {option: values[option] for group in GROUPS for option in group if values[option] != _DEFAULTS[option]}


def _note(name: str, option: str, before: Any, now: Any, on_purpose: bool) -> str:
    old, new = (setting(option, _given(value)) for value in (before, now))
    if on_purpose:
        return f"source {name!r} is read another way: {new} (so far: {old})"
    return f"source {name!r} is read as before: {old} (another way: {new})"


def _given(value: Any) -> Any:
    """A value without the options in it that are null, which is their default."""
    if isinstance(value, dict):
        return {name: _given(one) for name, one in value.items() if one is not None}
    return value
