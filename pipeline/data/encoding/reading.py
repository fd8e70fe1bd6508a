"""Read a source as before: its scan document remembers the settings, and later scans use them again.

Why: captions, pictures and buckets of a source depend on settings that are often given once, by `--set`. A later
`encode` of the same source without them would read every old item another way.

A setting is given on purpose if `--set` (or `--format`) gives it, or if the user's file says something else of it than
at the last scan. Otherwise it is what the last scan used: of a section (`data.tags`) option by option, and null takes a
section away. What differs is printed either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from sana_pipe.base.config import setting
from sana_pipe.base.errors import ConfigError
from sana_pipe.base.options import put, value_at, within
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.sources.config import (
    WAYS,
    ControlPictureConfig,
    DataConfig,
    DataGiven,
    MaskPictureConfig,
    RejectedPictureConfig,
    TagsConfig,
)

GROUPS = (
    ("caption_field", "caption_weights"),
    ("caption_scores",),
    ("caption",),
    ("caption_prefix",),
    ("caption_parts",),
    ("tags",),
    ("image_field",),
    ("image_root",),
    ("key_field",),
    ("pictures.control",),
    ("pictures.mask",),
    ("pictures.rejected",),
    ("resolution", "buckets"),
    ("signals",),
)
"""The options of `data` that are remembered, and `encode.signals`. Those of one group replace each other, so they are
given together. What leaves pictures out (`min_side`, ...) is not remembered: no record changes with it."""

ANOTHER_WAY = "is now read with"
FORMAT, SIGNALS = "format", "signals"
_DATA = sorted({option.partition(".")[0] for group in GROUPS for option in group} - {SIGNALS})
_DEFAULTS: dict[str, Any] = {**DataConfig().model_dump(mode="json"), SIGNALS: []}
_KINDS: tuple[str, ...] = get_args(get_args(EncodeConfig.model_fields[SIGNALS].annotation)[0])
_SECTIONS: dict[str, dict[str, Any]] = {
    "tags": TagsConfig().model_dump(),
    "pictures.control": ControlPictureConfig().model_dump(),
    "pictures.mask": MaskPictureConfig().model_dump(),
    "pictures.rejected": RejectedPictureConfig().model_dump(),
}
"""Sections that may be null, with the defaults of their options."""


@dataclass(frozen=True)
class Reading:
    """The way in which a source is read: as the configuration says it, or, from `settled`, as it is done.

    Attributes:
        data, encode: the sections with the values that are used.
        given: the origin of the configured values.
        format: of `--format`, now or earlier; None: detected.
        notes: what differs from the last scan, or from the configuration, for people.
    """

    data: DataConfig
    encode: EncodeConfig
    given: DataGiven
    format: str | None = None
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return what a scan document remembers: `used`, and what the `file` said; each without defaults. Empty if all
        are."""
        given = self.given
        used = _changed(_values(self.data, self.encode.signals))
        file = {} if given.file is None else _changed(_values(given.file, given.signals))
        parts = {"used": {**used, **({FORMAT: self.format} if self.format else {})}, "file": file}
        return {"read": parts} if any(parts.values()) else {}


def settles(given: DataGiven, option: str) -> bool:
    """Return whether the user gives an option of `data`, or of a section of this name."""
    return option in {name.partition(".")[0] for name in (*given.overridden, *given.named)}


def settled(asked: Reading, name: str, scan: dict[str, Any] | None) -> Reading:
    """Say how to read a source.

    Args:
        asked: as the configuration and `--format` say it.
        name: of the source.
        scan: its last scan document.

    Raises:
        ConfigError: neither the configuration nor the last scan says where a control picture or mask is.
    """
    if scan is None:
        _check_ways(asked.data, name)
        return asked
    now, given, format = _values(asked.data, asked.encode.signals), asked.given, asked.format
    read = scan.get("read", {})
    used, file = ({**_DEFAULTS, **read.get(part, {})} for part in ("used", "file"))
    if SIGNALS not in read.get("used", {}):  # old scans do not remember it
        used[SIGNALS] = [kind for kind in _KINDS if kind in scan.get("encodings", {})]
    base = None if given.file is None else _values(given.file, given.signals)
    result, notes = _values(asked.data, asked.encode.signals), list[str]()
    for group in GROUPS:
        for option in group:
            if base is None:
                value = value_at(now, option)
            elif option in _SECTIONS:
                trees = (value_at(tree, option) for tree in (now, used, base, file))
                value = _of_section(option, list(trees), given)
            elif _is_changed(group, now, base, file, given):
                value = _of_mapping(option, value_at(now, option), value_at(used, option), given)
            else:
                value = value_at(used, option)
            put(result, option, value)
            notes += _notes(name, option, value_at(used, option), value, value_at(now, option))
    before = used.get(FORMAT)
    if format is not None and before is not None and format != before:
        notes.append(f"source {name!r} {ANOTHER_WAY} --format {format} (so far: --format {before})")
    elif format is None and before is not None:
        notes.append(f"source {name!r} is read with --format {before}, as before")
    notes.sort(key=lambda note: ANOTHER_WAY not in note)  # changes first
    signals = result.pop(SIGNALS)
    data, encode = DataConfig.model_validate(result), asked.encode.model_copy(update={SIGNALS: signals})
    _check_ways(data, name)
    return Reading(data, encode, given, format or before, tuple(notes))


def as_read(config: DataConfig, scan: dict[str, Any]) -> DataConfig:
    """The configuration with which a source was scanned."""
    used = scan.get("read", {}).get("used", {})
    values = {option: used.get(option, _DEFAULTS[option]) for option in _DATA}
    return DataConfig.model_validate({**config.model_dump(mode="json"), **values})


def _values(data: DataConfig, signals: Any) -> dict[str, Any]:
    return {**data.model_dump(mode="json"), SIGNALS: list(signals)}


def _changed(values: dict[str, Any]) -> dict[str, Any]:
    return {option: values[option] for option in (*_DATA, SIGNALS) if values[option] != _DEFAULTS[option]}


def _is_changed(
    group: tuple[str, ...], now: dict[str, Any], base: dict[str, Any], file: dict[str, Any], given: DataGiven
) -> bool:
    """Return whether one of a group's options is given on purpose. base: what the file says; file: what it said."""
    return any(
        any(within(name, option) for name in given.overridden)
        or now[option] != base[option]
        or (option in given.named and base[option] != file[option])
        for option in group
    )


def _of_mapping(option: str, now: Any, used: Any, given: DataGiven) -> Any:
    """The value of an option that is given. Of a mapping (`caption_weights`) single names may be given."""
    names = [name.partition(".")[2] for name in given.overridden if within(name, option)]
    return {**used, **{name: now[name] for name in names}} if names and all(names) else now


def _of_section(option: str, values: list[dict[str, Any] | None], given: DataGiven) -> dict[str, Any] | None:
    """The value of a section that may be null: its options that are given, the others as they were. values: as
    configured, as used in the last scan, as the file says, and as it said."""
    now, used, base, file = values
    defaults = _SECTIONS[option]
    is_set = any(within(option, name) for name in given.overridden)  # to null, or an empty mapping
    names = {name for name in given.overridden if within(name, option)}
    in_file = option.partition(".")[0] in given.named and base != file

    def changed(leaf: str) -> bool:
        ours, said, before = ((tree or defaults)[leaf] for tree in (now, base, file))
        return f"{option}.{leaf}" in names or (ours != said and not names) or (in_file and said != before)

    leaves = [leaf for leaf in defaults if is_set or changed(leaf)]
    if now is None and (is_set or base is not None or (in_file and file is not None)):
        return None
    if not leaves and not (in_file and file is None):
        return used
    if now is None or used is None:
        return now
    merged = {**defaults, **used, **{leaf: now[leaf] for leaf in leaves}}
    if chosen := [way for way in leaves if way in WAYS and now[way] is not None]:
        merged |= {way: None for way in WAYS if way in defaults and way not in chosen}
        if "made" in chosen and "required" not in leaves:
            merged["required"] = True
    return merged


def _check_ways(data: DataConfig, name: str) -> None:
    for kind, given in data.pictures:
        if given is not None and not given.ways:
            option = f"data.pictures.{kind}"
            raise ConfigError(
                f"{option} does not say where the {kind} pictures of source {name!r} are, and no earlier encode did",
                expected=f"one of {', '.join(f'{option}.{way}' for way in WAYS if way in type(given).model_fields)}",
                fix=f"{setting(f'{option}.suffix', f'-{kind}')} for X-{kind}.png next to X.jpg, or "
                f"{setting(f'{option}.folder', f'{kind}s')} for {kind}s/X.png",
            )


def _notes(name: str, option: str, before: Any, value: Any, now: Any) -> list[str]:
    """Say what differs. before: at the last scan; value: in this one; now: in the configuration."""
    full = "encode.signals" if option == SIGNALS else f"data.{option}"
    old, new, ours = (setting(full, _given(each)) for each in (before, value, now))
    if value != before:
        stays = {}
        if isinstance(value, dict) and isinstance(before, dict):
            stays = _given({leaf: each for leaf, each in value.items() if (now or {}).get(leaf) != each})
        as_before = f"; unchanged: {', '.join(sorted(stays))}" if stays else ""
        return [f"source {name!r} {ANOTHER_WAY} {new} (so far: {old}{as_before})"]
    if value != now:
        return [f"source {name!r} is read with {old}, as before (to change that: {ours})"]
    return []


def _given(value: Any) -> Any:
    """A value without the options in it that are null, which is their default."""
    if isinstance(value, dict):
        return {name: _given(one) for name, one in value.items() if one is not None}
    return value
