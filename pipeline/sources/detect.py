"""Open the source that `--data` names: a folder, tars, tables or a listing, local or remote.

`open_source` takes a path, a URL or a pattern (`{0000..0099}`, `*`, `?`) and detects the format unless it is given.
Why detection: `--data DIR` is what everybody types, for folders of pictures, of tars and of parquet alike. A folder
with several kinds of data, at any depth, is refused with the choice, never guessed. One case is no choice: tables whose
rows name pictures of the folder, with captions, are read, not the pictures alone. Files that are not read are counted
in `Source.left_out`.
Price: a folder is searched until a kind is known and up to `MAX_EXAMINED` files, so what follows may be of another kind
(and is then counted as left out); a folder of pictures is listed again.

Keys are relative to the folder itself; for a file to its folder; for a pattern to the folder before the first part that
varies. So keys do not change when files are added to a set. `image_root` is relative to the same folder.
"""

from __future__ import annotations

import fnmatch
import json
import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import braceexpand

from pipeline.cache import drivers
from pipeline.cache.root import as_source_name
from pipeline.config import DataConfig
from pipeline.errors import UserError, alternatives, not_permitted
from pipeline.retrying import PATIENCE_S
from pipeline.sources import annotation_files
from pipeline.sources.caption_columns import CaptionRule
from pipeline.sources.filenames import EXTENSIONS, error_text, extension, is_url, kind_of_file, lost_picture
from pipeline.sources.filesystem import Filesystem, LocalFilesystem, Unreadable, mode_of, refuse_surrogates, suggestion
from pipeline.sources.folder import FolderSource
from pipeline.sources.link_tables import LINK_CAPTIONS, LinkListing, first_row, is_link, lists_links
from pipeline.sources.links import Links
from pipeline.sources.metadata_files import METADATA_NAMES
from pipeline.sources.reasons import Kinds
from pipeline.sources.remote import RemoteFilesystem, last_part
from pipeline.sources.sidecars import parse_json
from pipeline.sources.source import Source
from pipeline.sources.tables import ListingSource, ParquetSource, is_file
from pipeline.sources.tars import INDEXES, TarSource, tar_of
from pipeline.sources.unread import explain

FORMATS = ("folder", "webdataset", "wids", "parquet", "jsonl", "csv")
WIDS = "wids-meta.json"
MAX_EXAMINED = 10_000
"""Files of a folder that are examined at least, if it has so many."""

_KINDS = {"tar": "webdataset", "parquet": "parquet", "jsonl": "jsonl", "ndjson": "jsonl", "csv": "csv", "tsv": "csv"}
_SUFFIXES = {
    "webdataset": ("tar",),
    "parquet": ("parquet",),
    "jsonl": ("jsonl", "ndjson"),
    "csv": ("csv", "tsv"),
    "wids": ("json",),
}
_INDEX_BYTES = 1 << 16
"""Bytes of a .json file that say what it is."""

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
    if files is None and format is None and not _is_folder(filesystem, data):
        raise _missing(data, data.removeprefix("file://"))
    if settle is not None:
        config, format = settle(name)
    rule = CaptionRule.of(config, raw)
    if files is None:
        format = format or _kind_of_folder(filesystem, data, rule, config)
    elif format is None:
        format = _kind_of_files(filesystem, files, data)
    if format == "folder":
        if files is not None:
            raise UserError(f"{data}: is a file, not a folder of pictures", fix="leave --format out, or give a folder")
        if isinstance(filesystem, LocalFilesystem):
            return FolderSource(Path(data.removeprefix("file://")), rule, name, patience_s)
        return FolderSource(filesystem, rule, name)
    left_out = Kinds()
    if format == "jsonl" and files and annotation_files.form_of(filesystem, files[0]) == "COCO":
        raise annotation_files.refused(filesystem, files[0], "COCO")
    if format == "wids":
        counts = _wids(filesystem, files, data)
        if files is None:
            _, left_out = _tars(filesystem, counts.__contains__)
        source: Source = TarSource(filesystem, counts, replace(rule, fallback=("prompt",)), name, "wids", counts)
    else:
        if files is None:
            files, left_out = _files_of_format(filesystem, format, data)
        source = _of_format(format, filesystem, files, rule, config, name, patience_s)
    pictures = _PICTURES & left_out.counts.keys()
    if pictures and isinstance(source, ListingSource | ParquetSource) and any(map(source.names_files, source.files)):
        for kind in pictures:
            del left_out.counts[kind]
    source.left_out = left_out
    source.named = filesystem.named if isinstance(filesystem, LocalFilesystem) else ()
    return source


def _files_of_format(filesystem: Filesystem, format: str, data: str) -> tuple[list[str], Kinds]:
    """The files of a folder that belong to a format, and the others by kind.

    Raises:
        UserError: there is none.
    """
    if format == "webdataset":
        files, others = _tars(filesystem, lambda file: extension(file) == "tar")
    else:
        nested, suffixes = format not in ("jsonl", "csv"), _SUFFIXES[format]
        files, others = _divided(filesystem, lambda file: extension(file) in suffixes and (nested or "/" not in file))
    if not files:
        raise UserError(
            f"{data}: holds no {' or '.join('.' + suffix for suffix in _SUFFIXES[format])} file",
            found=f"{others.total} other files",
            fix="leave --format out, or give the folder that holds them",
        )
    return files, others


def _tars(filesystem: Filesystem, wanted: Callable[[str], bool]) -> tuple[list[str], Kinds]:
    """As `_divided`; the .json files beside tars are not among the others."""
    files, others = _divided(filesystem, lambda file: wanted(file) or extension(file) == "json")
    tars = [file for file in files if wanted(file)]
    stems = {file.removesuffix(".tar"): file for file in tars}
    for file in files:
        if not wanted(file) and tar_of(file, stems) is None and posixpath.basename(file) not in INDEXES:
            others.note(kind_of_file(file), 1, [file])
    return tars, others


def _of_format(
    format: str,
    filesystem: Filesystem,
    files: Iterable[str],
    rule: CaptionRule,
    config: DataConfig,
    name: str,
    patience_s: float,
) -> Source:
    """The source of some files, of any format but `folder`."""
    if format in ("webdataset", "wids"):
        return TarSource(filesystem, files, rule, name, format)
    field, root = config.image_field, config.image_root
    links = Links(config.max_bytes, config.link_timeout_s, patience_s, config.allow_links)
    if format == "parquet":
        tables = ParquetSource(filesystem, files, rule, name, image_field=field, image_root=root, links=links)
        tables.retries_links = config.retry_links
        return tables
    files = sorted(set(files))
    if format == LinkListing.format or (files and lists_links(filesystem, files[0], field)):
        listing = LinkListing(filesystem, files, rule, name, image_field=field, links=links)
        listing.retries_links = config.retry_links
        return listing
    return ListingSource(filesystem, files, rule, name, image_field=field, image_root=root, format=format)


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
        UserError: it no longer exists.
    """
    root, named = location or document["root"], document.get("named", [])
    filesystem: Filesystem = (
        RemoteFilesystem(root, patience_s) if is_url(root) else _disk(root, root, patience_s, named)
    )
    rule, format = CaptionRule.of(config), document.get("source_format", "folder")
    if format == "folder":
        return FolderSource(filesystem, rule, name)
    return _of_format(format, filesystem, (), rule, config, name, patience_s)


def _resolve(data: str, patience_s: float) -> tuple[Filesystem, list[str] | None, str]:
    """(filesystem, names of the files or None for the whole folder, default name of the source)."""
    remote = is_url(data) and not data.startswith("file://")
    path = data.removeprefix("file://")
    if remote:
        refuse_surrogates(data)
        drivers.refuse_credentials(data)
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
        ending = extension(path)
        if ending in _KINDS or path.endswith((*_COMPRESSED, ".json")):
            head, _, base = path.rpartition("/")
            return RemoteFilesystem(head, patience_s), [base], base.partition(".")[0]
        return RemoteFilesystem(path, patience_s), None, last_part(path)
    if stat.S_ISREG(mode):
        file = Path(path)
        return LocalFilesystem(file.parent, patience_s, [file.name]), [file.name], file.name.partition(".")[0]
    return LocalFilesystem(path, patience_s), None, _folder_name(path)


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
        expected="a folder of pictures with captions, tars, parquet files, a listing (.jsonl, .csv), or a pattern",
        fix=suggestion(name, others, "sana-pipe encode --data DIR"),
    )


def _is_folder(filesystem: Filesystem, data: str) -> bool:
    if not isinstance(filesystem, LocalFilesystem):
        return True
    return stat.S_ISDIR(mode_of(filesystem.root, filesystem.patience_s))


def _expand(filesystem: Filesystem, pattern: str, data: str) -> list[str]:
    try:
        names = list(braceexpand.braceexpand(pattern))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{data}: is no pattern: {error_text(error)}", expected="such as shard-{0000..0099}.tar"
        ) from None
    if not any("*" in name or "?" in name for name in names):
        return names
    matches, others = _divided(filesystem, lambda file: any(_matches(file, name) for name in names))
    if not matches:
        raise UserError(
            f"{data}: matches no file",
            found=f"{others.total} files under {filesystem.location}",
            fix="give a pattern of their names, from that folder on: * and ? stay within one part of the path",
        )
    return matches


def _divided(filesystem: Filesystem, wanted: Callable[[str], bool]) -> tuple[list[str], Kinds]:
    """The files that are wanted, sorted, and the others by kind."""
    chosen, others = [], Kinds()
    for file in filesystem.find():
        if wanted(file):
            chosen.append(file)
        else:
            others.note(kind_of_file(file), 1, [file])
    return sorted(chosen), others


def _matches(file: str, pattern: str) -> bool:
    """`*` and `?` match within one part of the path, as in a shell."""
    parts, patterns = file.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _kind(file: str) -> str | None:
    base = posixpath.basename(file)
    if file == WIDS:
        return "wids"
    if base.lower() in METADATA_NAMES or extension(file) in EXTENSIONS or lost_picture(file):
        return "folder"
    if base.lower().endswith(_COMPRESSED):
        return "compressed"
    kind = _KINDS.get(extension(file))
    return kind if kind in ("webdataset", "parquet") else None


def _kind_of_folder(filesystem: Filesystem, data: str, rule: CaptionRule, config: DataConfig) -> str:
    kinds: dict[str, list[str]] = {}
    listings: list[str] = []
    for file in _sample(filesystem):
        kind = _kind(file)
        if kind is not None:
            kinds.setdefault(kind, []).append(file)
        elif "/" not in file and extension(file) in _KINDS:
            listings.append(file)
    if "wids" in kinds:
        kinds.pop("webdataset", None)  # the index says which
    compressed = kinds.pop("compressed", None)
    if compressed and not kinds and not listings:
        raise UserError(
            f"{data}: holds compressed tars, which cannot be read by range",
            found=compressed[0],
            fix="unpack them (.tar)",
        )
    if not kinds:
        return _kind_of_files(filesystem, listings, data) if listings else "folder"
    metadata = any(posixpath.basename(file).lower() in METADATA_NAMES for file in kinds.get("folder", ()))
    naming = set()
    for file in [] if metadata else listings:
        said = _said(filesystem, file, rule, config)
        if said is not None:
            kinds.setdefault(_KINDS[extension(file)], []).append(file)
            naming |= {_KINDS[extension(file)]} if said == "files" else set()
    if "parquet" in kinds and "folder" in kinds and not metadata:
        tables = ParquetSource(
            filesystem, kinds["parquet"], rule, "", image_field=config.image_field, image_root=config.image_root
        )
        naming |= {"parquet"} if all(map(tables.names_files, tables.files)) else set()
    if len(naming) == 1 and kinds.keys() - naming == {"folder"}:
        return naming.pop()
    if len(kinds) > 1:
        raise UserError(
            f"{data}: holds data of several kinds",
            expected="one kind, or the folder that holds it",
            found="; ".join(f"{kind} ({min(files)})" for kind, files in sorted(kinds.items())),
            fix=alternatives("--format", sorted(kinds)),
        )
    return next(iter(kinds))


def _said(filesystem: Filesystem, file: str, rule: CaptionRule, config: DataConfig) -> str | None:
    """Whether a listing names `links` or `files` of the folder, with captions; None if it is about something else."""
    name, row = first_row(filesystem, file, config.image_field)
    if is_link(name):
        return "links" if not row.keys().isdisjoint((*rule.columns, *LINK_CAPTIONS)) else None
    if not name or row.keys().isdisjoint(rule.columns):
        return None
    return "files" if is_file(filesystem, name, config.image_root or "") else None


def _sample(filesystem: Filesystem) -> Iterator[str]:
    """Files of a folder, those of the top level first: at least `MAX_EXAMINED`, and more while no kind is known."""
    decided = False
    names = filesystem.find_top_first() if isinstance(filesystem, RemoteFilesystem) else _by_level(filesystem)
    for examined, name in enumerate(names):
        if decided and examined >= MAX_EXAMINED:
            return
        decided = decided or _kind(name) is not None
        yield name


def _by_level(filesystem: Filesystem) -> Iterator[str]:
    """Files of a folder on a disk, level by level."""
    assert isinstance(filesystem, LocalFilesystem)
    waiting = [""]
    while waiting:
        below: list[str] = []
        for folder in waiting:
            with suppress(OSError):
                path = os.path.join(filesystem.root, folder)
                with filesystem.when_reachable(partial(os.scandir, path)) as entries:
                    for entry in entries:
                        if entry.name.startswith("."):
                            continue
                        name = f"{folder}/{entry.name}" if folder else entry.name
                        if entry.is_dir(follow_symlinks=False):
                            below.append(name)
                            continue
                        yield name
        waiting = sorted(below)


def _kind_of_files(filesystem: Filesystem, files: list[str], data: str) -> str:
    compressed = [file for file in files if file.lower().endswith(_COMPRESSED)]
    if compressed:
        raise UserError(
            f"{data}: is a compressed tar, which cannot be read by range", found=compressed[0], fix="unpack it"
        )
    kinds = {
        _kind_of_json(filesystem, file) if extension(file) == "json" else _KINDS.get(extension(file)) for file in files
    }
    kind = next(iter(kinds))
    if len(kinds) > 1 or kind is None:
        what, way = explain(filesystem, files) or (None, None)
        raise UserError(
            f"{data}: the files are of an unknown kind, or of several kinds",
            expected="one of .tar, .parquet, .jsonl, .json, .csv, .tsv, or wids-meta.json",
            found=what or ", ".join(sorted({"." + extension(file) for file in files})),
            fix=way or alternatives("--format", FORMATS),
        )
    return kind


def _kind_of_json(filesystem: Filesystem, file: str) -> str:
    """An index of tars is known by its name or its first bytes; other .json files are listings."""
    if posixpath.basename(file) == WIDS:
        return "wids"
    try:
        return "wids" if b'"shardlist"' in filesystem.read(file, _INDEX_BYTES) else "jsonl"
    except Unreadable:  # is reported where it is read
        return "jsonl"


def _wids(filesystem: Filesystem, files: list[str] | None, data: str) -> dict[str, Any]:
    """Tar -> its number of samples (None if unknown), from an index of NVlabs' loader."""
    index = files[0] if files else WIDS
    try:
        value = parse_json(filesystem.read(index).decode("utf-8-sig"))
    except (Unreadable, UnicodeDecodeError) as error:
        raise UserError(
            f"{data}: the index of its tars cannot be read",
            expected=f"a folder with {WIDS}, or that file",
            found=error_text(error),
            fix="make it readable, or read the tars without it: --format webdataset",
        ) from None
    shards = value.get("shardlist") if isinstance(value, dict) else None
    urls = [shard.get("url") for shard in shards if isinstance(shard, dict)] if isinstance(shards, list) else []
    if not urls or not all(isinstance(url, str) for url in urls):
        raise UserError(
            f"{filesystem.location}/{index}: is no index of tars",
            expected='{"shardlist": [{"url": "0000.tar", ...}, ...]}',
            found=value if isinstance(value, str) else json.dumps(value)[:80],
        )
    folder = posixpath.dirname(index)
    assert isinstance(shards, list)
    counts = [shard.get("nsamples") for shard in shards if isinstance(shard, dict)]
    tars = [posixpath.normpath(posixpath.join(folder, str(url))) for url in urls]
    return dict(zip(tars, counts, strict=True))
