"""Explain files that are not read in place of pictures and captions, and the way to bring it into a form that can."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sana_pipe.base.errors import UserError
from sana_pipe.data.sources.filenames import extension
from sana_pipe.data.sources.filesystem import Filesystem, Unreadable

TURNS = "conversations"
"""The column of LLaVA's rows that holds a list of turns."""

_HEAD_BYTES = 1 << 16
_COCO = re.compile(rb'\s*\{\s*"(?:info|licenses|images|annotations|categories|type)"\s*:')
_COCO_LISTS = re.compile(rb'"(?:images|annotations)"\s*:\s*\[\s*\{')
_TURNS = re.compile(rb'"conversations"\s*:\s*\[')

_WAYS = {
    "data sets of the `datasets` library": (
        {"arrow"},
        'write them as parquet: python -c "from datasets import load_from_disk; '
        "load_from_disk('FOLDER').to_parquet('FOLDER.parquet')\" (of a DatasetDict: load_from_disk('FOLDER')['train'], "
        "of a file of its cache: Dataset.from_file('FILE'))",
    ),
    "archives": ({"zip", "rar", "7z"}, "unpack them: a folder of pictures, or of .tar files"),
    "files of DVC in place of the data": ({"dvc"}, "dvc pull"),
    "TFRecord files": ({"tfrecord", "tfrecords"}, "write their pictures and captions into webdataset tars or parquet"),
    "LMDB databases": ({"mdb", "lmdb"}, "write their pictures and captions into webdataset tars or parquet"),
    "arrays": ({"npy", "npz", "pt", "pth", "h5", "hdf5", "pkl"}, "write the pictures as .png files, captions as .txt"),
    "videos": ({"mp4", "mov", "mkv", "webm", "avi"}, "take pictures out of them: ffmpeg -i VIDEO -r 1 %06d.png"),
}


def explain(filesystem: Filesystem, files: Iterable[str] | None = None) -> tuple[str, str] | None:
    """Return what files without a picture are, with an example, and how to make them readable; None if that is
    unknown."""
    for file in filesystem.find() if files is None else files:
        ending, place = extension(file), f"{filesystem.location}/{file}"
        for what, (endings, way) in _WAYS.items():
            if ending in endings:
                return f"{what} ({place})", way
    return None


def form_of_annotations(filesystem: Filesystem, file: str) -> str | None:
    """`COCO` or `LLaVA` if the first bytes of a .json or .jsonl file are annotations of that form."""
    if extension(file) not in ("json", "jsonl"):
        return None
    try:
        head = filesystem.read(file, _HEAD_BYTES)
    except Unreadable:  # is reported where it is read
        return None
    if _COCO.match(head) and _COCO_LISTS.search(head):
        return "COCO"
    return "LLaVA" if _TURNS.search(head) else None


def annotations_refused(filesystem: Filesystem, file: str, form: str) -> UserError:
    """The error for a file of annotations."""
    return UserError(
        f"{filesystem.full_name(file)}: holds {form} annotations, which are not read",
        expected='a file with a line {"image": FILE, "text": CAPTION} for each caption, FILE relative to it',
        fix="write such a .jsonl and name it as --data; for a table, write a column of text and name it: "
        "--set data.caption_field=COLUMN",
    )
