"""A file that lists pictures of a folder which is read without it: the command that reads the captions in it."""

from __future__ import annotations

import posixpath
import shlex

import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.config import setting
from sana_pipe.base.errors import UserError
from sana_pipe.data.sources.caption_columns import CaptionRule, text_columns
from sana_pipe.data.sources.filenames import EXTENSIONS, escaped, extension, stem
from sana_pipe.data.sources.filesystem import Filesystem
from sana_pipe.data.sources.metadata_files import NAME_COLUMNS, first_row

ENDINGS = ("json", "jsonl", "ndjson", "csv", "tsv", "txt")
CONTROL = {"source": "target", "conditioning_image": "image", "control": "image"}
"""Columns of control pictures, and of the pictures next to them."""


def refuse(filesystem: Filesystem, file: str, pictures: pa.ChunkedArray, rule: CaptionRule) -> None:
    """Raises a UserError if a file lists some of the pictures, with texts. pictures: names, ascending."""
    if extension(file) not in ENDINGS:
        return
    _, row = first_row(filesystem, file, None, any_row=True)
    folders = {column: folder for column in row if (folder := _folder(row[column], file, pictures)) is not None}
    captions = [column for column in text_columns(row) if column not in folders]
    if not folders and (captions or rule.has_caption_column(row)):
        _refuse_elsewhere(filesystem, file, row, pictures)
    if not folders or not (captions or rule.has_caption_column(row)):
        return
    known = [column for column in (*NAME_COLUMNS, *CONTROL.values()) if column in folders][:1]
    command = f"sana-pipe encode --data {shlex.quote(filesystem.full_name(file))}"
    ways = [_settings(column, folders, captions, row, rule) for column in known or folders]
    raise UserError(
        f"{filesystem.location}: no picture has a caption next to it, and {escaped(file)} lists pictures",
        found=f"the columns {', '.join(repr(escaped(column)) for column in row)}",
        fix=" or ".join(" ".join([command, *way]) for way in ways) + ", or move the file away",
    )


def _refuse_elsewhere(filesystem: Filesystem, file: str, row: dict[str, object], pictures: pa.ChunkedArray) -> None:
    """Raises a UserError if a row names a picture of another folder than that of its file and those below."""
    for column, value in row.items():
        name = value.replace("\\", "/") if isinstance(value, str) else ""
        if column not in (*NAME_COLUMNS, *CONTROL.values()) or extension(name) not in EXTENSIONS:
            continue
        there = pictures.filter(pc.or_(pc.equal(pictures, name), pc.ends_with(pictures, f"/{name}")))
        if len(there):
            picture = there[0].as_py()
            folder = f"{filesystem.location}/{picture.removesuffix(name).strip('/')}".rstrip("/")
            raise UserError(
                f"{filesystem.location}: no picture has a caption next to it, and {escaped(file)} lists pictures of "
                "another folder",
                found=f"{escaped(column)}: {escaped(name)}, which is {escaped(picture)}",
                fix=f"{'move' if filesystem.is_remote else 'mv -n'} {shlex.quote(filesystem.full_name(file))} "
                f"{shlex.quote(folder)}/, and then the same command",
            )


def _settings(
    column: str, folders: dict[str, str], captions: list[str], row: dict[str, object], rule: CaptionRule
) -> list[str]:
    """The settings that read a file of such rows. column: names the pictures."""
    settings = [] if column in NAME_COLUMNS else [setting("data.image_field", column)]
    if folders[column]:
        settings.append(setting("data.image_root", folders[column]))
    if captions and not rule.has_caption_column(row):
        settings.append(setting("data.caption_field", captions[0]))
    control = next((each for each in folders if CONTROL.get(each) == column), None)
    return settings + ([] if control is None else [setting("data.pictures.control.column", control)])


def _folder(value: object, file: str, pictures: pa.ChunkedArray) -> str | None:
    """The folder below that of a file in which a value names a picture; "" for that folder itself, None for no name.
    In a .json file a name may lack its ending, as `ListingSource` reads it."""
    if not isinstance(value, str) or not value.strip() or "\n" in value:
        return None
    if extension(value) not in EXTENSIONS and extension(file) != "json":
        return None
    root, name = posixpath.dirname(file), value.replace("\\", "/")
    name = posixpath.normpath(name if extension(name) in EXTENSIONS else f"{name}.")
    ends = pc.ends_with if extension(name) in EXTENSIONS else pc.match_substring
    same = pictures.filter(ends(pictures, posixpath.basename(name)))
    for picture in same.slice(0, 1000).to_pylist():
        below = posixpath.relpath(picture, root or ".")
        whole = below if extension(name) in EXTENSIONS else f"{stem(below)}."
        if whole == name:
            return ""
        if whole.endswith(f"/{name}") and not below.startswith("../"):
            return whole.removesuffix(f"/{name}")
    return None
