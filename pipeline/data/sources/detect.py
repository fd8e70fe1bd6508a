"""Open the source that `--data` names: a path, a URL or a pattern (`{0000..0099}`, `*`, `?`).

The format is detected unless it is given; each `Format` says what it looks like, and nothing here names one. A folder
with several kinds of data, at any depth, is refused with the choice; tables whose rows name pictures of the folder,
with captions, are no other kind. Up to `MAX_EXAMINED` files are looked at; what follows of another kind is left out.
Keys are relative to the folder; for a file to its folder; for a pattern to the folder before the first part that
varies, so they do not change when files are added to a set.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import posixpath
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import braceexpand

from sana_pipe.base.errors import ConfigError, UserError, alternatives, not_permitted
from sana_pipe.base.retrying import PATIENCE_S
from sana_pipe.data.cache import connections
from sana_pipe.data.cache.cache import as_source_name
from sana_pipe.data.sources import controls_and_masks
from sana_pipe.data.sources.caption_columns import CaptionRule
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.filenames import (
    EXTENSIONS,
    base,
    error_text,
    escaped,
    extension,
    is_url,
    kind_of_file,
    stem,
)
from sana_pipe.data.sources.filesystem import Filesystem, LocalFilesystem, mode_of, refuse_surrogates
from sana_pipe.data.sources.formats import FORMATS, formats
from sana_pipe.data.sources.metadata_files import METADATA_NAMES
from sana_pipe.data.sources.remote import RemoteFilesystem, last_part
from sana_pipe.data.sources.sidecars import CAPTION_ENDINGS
from sana_pipe.data.sources.source import Format, Given, Source, divided
from sana_pipe.data.sources.unread import explain

MAX_LOOSE = 8
"""Files at the top of a folder that may list its pictures."""

MAX_EXAMINED = 10_000
"""Files of a folder that are examined at least, if it has so many."""

_PICTURES = frozenset(kind_of_file(f"x.{ending}") for ending in EXTENSIONS)
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_PATTERN = re.compile(r"[{*?]")


def open_source(
    data: str,
    config: DataConfig,
    name: str | None = None,
    format: str | None = None,
    patience_s: float = PATIENCE_S,
    raw: bool = False,
    settle: Callable[[str], tuple[DataConfig, str | None]] | None = None,
) -> Source:
    """Open what `--data` names.

    Args:
        data: a path, a URL or a pattern of either.
        name: the source's name; default: the folder's, or the file's without its extension, see `as_source_name`.
        format: one of `FORMATS`; default: detected.
        patience_s: how long to wait for a store that does not answer.
        raw: take captions as NVlabs' trainer does, see `CaptionRule`.
        settle: name -> the configuration and the format to use, where they depend on the source's name.

    Raises:
        UserError: there is no data, data of several kinds, or of another format.
    """
    if format is not None and format not in FORMATS:
        raise UserError(f"unknown --format {format!r}", expected=", ".join(FORMATS))
    filesystem, files, default_name = _resolve(data, patience_s)
    name = name or as_source_name(default_name)
    if settle is not None:
        config, format = settle(name)
    given = Given(filesystem, files, CaptionRule(config, raw), config, name, patience_s)
    listings = list[str]()
    if format is not None:
        chosen = formats()[format]
    elif files is None:
        chosen, listings = _format_of_folder(given, data)
    else:
        chosen = _format_of_files(filesystem, files, data)
    files_of_format, left_out = divided(filesystem, listings.__contains__) if listings else chosen.files(given)
    source = chosen.source(given, files_of_format)
    pictures = _PICTURES & left_out.counts.keys()
    if pictures and source.uses_files:
        source.pictures_next_to = sum(left_out.counts.pop(kind) for kind in pictures)
    source.left_out = left_out
    source.controls_and_masks = controls_and_masks.wanted(config.pictures)
    controls_and_masks.check(source.controls_and_masks, source.paired_by, chosen.name)
    if config.key_field is not None and not source.has_keys:
        raise ConfigError(
            f"data.key_field names the rows of parquet tables; {source.location} is of the format {chosen.name}, whose "
            "pictures have the names of their files",
            fix="--set data.key_field=null",
        )
    source.named = filesystem.named if isinstance(filesystem, LocalFilesystem) else ()
    return source


def reopen(
    document: Mapping[str, Any],
    config: DataConfig,
    name: str,
    location: str | None = None,
    patience_s: float = PATIENCE_S,
) -> Source:
    """Open a source that was scanned before, for reading, without detection and without its list of files.

    Args:
        document: a scan document, with `Source.document`.
        config: with which it was scanned.
        name: of the source.
        location: where it is now; default: where it was.
        patience_s: how long to wait for a store that does not answer.

    Raises:
        UserError: it no longer exists, or another version of this program scanned it in a format of its own.
    """
    root, named = location or document["root"], document.get("named", [])
    filesystem: Filesystem = (
        RemoteFilesystem(root, patience_s) if is_url(root) else _disk(root, root, patience_s, named)
    )
    given = Given(filesystem, [], CaptionRule(config), config, name, patience_s)
    every, format = formats(), document.get("source_format", Source.format)
    if format not in every:
        raise UserError(
            f"source {name!r} was scanned with a format that this version does not read: {format}",
            expected=" or ".join(every),
            fix=f"sana-pipe encode --source-name {shlex.quote(name)} --data DIR, with the pictures in one of them",
        )
    return every[format].source(given, ())


def _resolve(data: str, patience_s: float) -> tuple[Filesystem, list[str] | None, str]:
    """(filesystem, names of the files or None for the whole folder, default name of the source)."""
    remote = is_url(data) and not data.startswith("file://")
    path = data.removeprefix("file://")
    if remote:
        refuse_surrogates(data)
        connections.refuse_credentials(data)
    mode = 0 if remote else mode_of(path, patience_s)
    pattern = _PATTERN.search(path)
    if pattern and not mode:
        head, slash, rest = path[: pattern.start()].rpartition("/")
        # A brace may contain slashes, so split before the pattern.
        rest = path[len(head) + len(slash) :]
        filesystem: Filesystem = (
            RemoteFilesystem(head, patience_s) if remote else _disk(head or ("/" if slash else "."), data, patience_s)
        )
        files = _expand(filesystem, rest, data)
        return filesystem, files, last_part(head) if remote else _folder_name(head or ".")
    if remote:
        if extension(path) in _endings() or path.endswith(_COMPRESSED):
            head, _, base = path.rpartition("/")
            return RemoteFilesystem(head, patience_s), [base], base.partition(".")[0]
        return RemoteFilesystem(path, patience_s), None, last_part(path)
    if stat.S_ISREG(mode):
        file = Path(path)
        return LocalFilesystem(file.parent, patience_s, [file.name]), [file.name], file.name.partition(".")[0]
    return _disk(path, data, patience_s), None, _folder_name(path)


def _endings() -> list[str]:
    """List the endings of all files that may be named."""
    every = [ending for format in formats().values() for ending in (*format.endings, *format.named_endings)]
    return list(dict.fromkeys(every))


def _folder_name(path: str) -> str:
    return os.path.basename(os.path.realpath(path))


def _disk(folder: str, data: str, patience_s: float, named: Iterable[str] = ()) -> LocalFilesystem:
    if not stat.S_ISDIR(mode_of(folder, patience_s)):
        raise _missing(data, folder)
    return LocalFilesystem(folder, patience_s, named)


def _missing(data: str, path: str) -> UserError:
    folder, _, name = path.rstrip("/").rpartition("/")
    others: list[str] = []
    refused = None
    try:
        os.stat(path)
        reason = "neither a folder nor a file"
    except (OSError, ValueError) as error:
        reason = error_text(error)
        refused = not_permitted(Path(path)) if isinstance(error, PermissionError) else None
        with suppress(OSError, ValueError):
            others = os.listdir(folder or ("/" if path.startswith("/") else "."))
    return refused or UserError(
        f"the data folder {data!r} does not exist or may not be read",
        found=reason,
        expected="a folder of pictures with captions, a file that ends in "
        f"{', '.join(f'.{ending}' for ending in _endings())}, a folder of them, or a pattern",
        fix=_other_place(folder, name, others),
    )


def _other_place(folder: str, name: str, others: list[str]) -> str:
    """The place of a similar name as `--data` takes it, or what to give."""
    if near := difflib.get_close_matches(name, others, n=1):
        return f"--data {shlex.quote(escaped(os.path.join(folder, near[0])))}, if you meant that"
    return "give the path of a folder that is there, or of a file in it"


def _expand(filesystem: Filesystem, pattern: str, data: str) -> list[str]:
    try:
        names = list(braceexpand.braceexpand(pattern))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{data}: is not a valid pattern: {error_text(error)}", expected="such as shard-{0000..0099}.tar"
        ) from None
    if not any("*" in name or "?" in name for name in names):
        return names
    matches, others = divided(filesystem, lambda file: any(_matches(file, name) for name in names))
    if not matches:
        raise UserError(
            f"{data}: no file matches",
            found=f"{others.total} files under {filesystem.location}",
            fix="give a pattern of their names, from that folder on: * and ? stay within one part of the path",
        )
    return matches


def _matches(file: str, pattern: str) -> bool:
    """`*` and `?` match within one part of the path, as in a shell."""
    parts, patterns = file.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _format_of_folder(given: Given, data: str) -> tuple[Format, list[str]]:
    """The format of a folder, and its files where their names alone do not show it."""
    every, shown, compressed = formats(), dict[str, list[str]](), list[str]()
    decided, next_to = False, _NextTo()
    for examined, file in enumerate(given.filesystem.find_top_first()):
        if decided and examined >= MAX_EXAMINED:
            break
        if file.lower().endswith(_COMPRESSED):
            compressed.append(file)
            decided = True
        elif format := next((format for format in every.values() if format.shows(file)), None):
            shown.setdefault(format.name, []).append(file)
            decided |= not format.is_listing
            next_to.pictures |= {base(file)} if extension(file) in EXTENSIONS else set()
        elif extension(file) in CAPTION_ENDINGS:
            next_to.captions[file] = base(file)
    for name in list(shown):
        shown.pop(every[name].replaces, None)
    if compressed and not shown:
        raise _is_compressed(data, compressed[0])
    if {*shown} == {"parquet", "webdataset"} and _tell_of(given, shown["parquet"], shown["webdataset"]):
        del shown["parquet"]
    listings = {name: shown.pop(name) for name in list(shown) if every[name].is_listing}
    if not shown:
        files = [file for some in listings.values() for file in some]
        return _format_of_files(given.filesystem, files, data) if files else every[Source.format], []
    pictures = shown.get(Source.format, ())
    if not any(posixpath.basename(file).lower() in METADATA_NAMES for file in pictures):
        for name, files in listings.items():
            if about := [file for file in files if every[name].names(given, file)]:
                shown[name] = about
        if naming := _naming(given, shown):
            return every[naming], []
        if [*shown] == [Source.format] and (loose := next_to.loose):
            for format in every.values():
                named = [file for file in loose if format.may_list(file) and format.names(given, file) == "files"]
                if named:
                    return format, named
    if len(shown) > 1:
        raise UserError(
            f"{data}: holds data of several kinds",
            expected="data of one kind, or the folder that holds it",
            found="; ".join(f"{kind} ({min(files)})" for kind, files in sorted(shown.items())),
            fix=_one_kind(data, shown),
        )
    return every[next(iter(shown))], []


def _tell_of(given: Given, tables: Iterable[str], tars: Iterable[str]) -> bool:
    """Return whether tables without pictures lie next to tars of the same names, as img2dataset writes them."""
    names, parquet = {*map(stem, tars)}, formats()["parquet"]
    return all(stem(table) in names and not parquet.names(given, table) for table in tables)


def _one_kind(data: str, shown: Mapping[str, list[str]]) -> str:
    """The ways to take one of several kinds; for `init`, which has no `--format`, patterns of files of one folder."""
    patterns = []
    for name, files in sorted(shown.items()):
        folders, endings = {posixpath.dirname(file) for file in files}, {extension(file) for file in files}
        if len(folders) == 1 and len(endings) == 1 and endings <= {*formats()[name].endings}:
            pattern = os.path.join(data, *folders, f"*.{max(endings)}")
            patterns.append(f"--data {shlex.quote(pattern)}")
    of_init = f"; init, which has no --format: {' or '.join(patterns)}" if patterns else ""
    return alternatives("--format", sorted(shown)) + of_init


@dataclass
class _NextTo:
    """The names in a folder that are examined: the `base` of pictures, and of files that may have captions."""

    pictures: set[str] = field(default_factory=set)
    captions: dict[str, str] = field(default_factory=dict)

    @property
    def loose(self) -> list[str]:
        """The few files at the top that may have the captions of all pictures, where none has a file next to it."""
        if not self.pictures.isdisjoint(self.captions.values()):
            return []
        files = sorted(file for file in self.captions if "/" not in file)
        if len(files) > MAX_LOOSE:
            return []
        return [file for file in files if not any(self._is_about(file, name) for name in self.pictures)]

    def _is_about(self, file: str, name: str) -> bool:
        """Return whether a file is about a single picture: `X_more.json` about X."""
        return file.startswith(name) and not file[len(name) :][:1].isalnum()


def _naming(given: Given, shown: Mapping[str, list[str]]) -> str | None:
    """The format of a folder whose tables name its pictures; None if it is another folder."""
    every, tables = formats(), [name for name in shown if name != Source.format]
    if len(tables) == 1 and Source.format in shown:
        [name] = tables
        if all(every[name].names(given, file) == "files" for file in shown[name]):
            return name
    return None


def _is_compressed(data: str, file: str) -> UserError:
    return UserError(f"{data}: compressed tars cannot be read by range", found=file, fix="unpack them (.tar)")


def _format_of_files(filesystem: Filesystem, files: list[str], data: str) -> Format:
    if compressed := next((file for file in files if file.lower().endswith(_COMPRESSED)), None):
        raise _is_compressed(data, compressed)
    every = formats()
    matches = [next((format for format in every.values() if format.has(filesystem, file)), None) for file in files]
    names = {format.name for format in matches if format is not None}
    if len(names) > 1 or None in matches:
        what, way = explain(filesystem, files) or (None, None)
        raise UserError(
            f"{data}: the files are of an unknown kind, or of several kinds",
            expected=f"one of {', '.join(f'.{ending}' for ending in _endings())}",
            found=what or ", ".join(sorted({"." + extension(file) for file in files})),
            fix=way or alternatives("--format", FORMATS),
        )
    return every[names.pop()]
