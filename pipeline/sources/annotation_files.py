"""JSON files of COCO and LLaVA: their rows are not of the form {picture, caption}; the command that makes such rows."""

from __future__ import annotations

import json
import os
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress

from pipeline.errors import UserError
from pipeline.sources.filenames import extension, is_url, stem
from pipeline.sources.filesystem import Filesystem, Unreadable

TURNS = "conversations"
"""The column of LLaVA's rows that holds a list of turns."""

_HEAD_BYTES = 1 << 16
_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"(?:\s*(:)\s*(\[)?)?|[\[\]{}]')
_COCO = (
    'import json; coco = json.load(open({file})); names = {{i["id"]: i["file_name"] for i in coco["images"]}}; '
    'kinds = {{c["id"]: c["name"] for c in coco.get("categories", [])}}; open({out}, "w").writelines(json.dumps('
    '{{"image": {folder} + names[a["image_id"]], "text": a.get("caption") or kinds[a["category_id"]]}}) + "\\n" '
    'for a in coco["annotations"])'
)
_LLAVA = (
    'import json; file = open({file}); open({out}, "w").writelines(json.dumps({{"image": {folder} + r["image"], '
    '"text": next(t["value"] for t in r["conversations"] if t["from"] == "gpt")}}) + "\\n" for r in {rows} '
    'if "image" in r)'
)
_CODE = {"COCO": _COCO, "LLaVA": _LLAVA}


def form_of(filesystem: Filesystem, file: str) -> str | None:
    """`COCO` or `LLaVA` if the first bytes of a .json or .jsonl file are of that form."""
    head = _head(filesystem, file) if extension(file) in ("json", "jsonl") else ""
    lists = dict(_lists(head))
    if lists.get(TURNS, 3) <= 2:
        return "LLaVA"
    is_coco = 1 in (lists.get("images"), lists.get("annotations")) and not re.match(r'\s*\{\s*"image"', head)
    return "COCO" if is_coco else None


def _head(filesystem: Filesystem, file: str) -> str:
    with suppress(Unreadable):  # is reported where it is read
        return filesystem.read(file, _HEAD_BYTES).decode("utf-8-sig", "replace")
    return ""


def _lists(text: str) -> Iterator[tuple[str, int]]:
    """Keys whose value is a list, and how deep they are; 1: in the outermost object."""
    depth = 0
    for match in _TOKEN.finditer(text):
        if match[2] and match[3]:
            yield match[1], depth
        depth += 1 if match[3] or match[0] in ("{", "[") else -1 if match[0] in ("}", "]") else 0


def refused(filesystem: Filesystem, file: str, form: str, pictures: Iterable[str] = ()) -> UserError:
    """The error for a file of one of these forms. pictures: names in the filesystem, to find those of the file."""
    return UserError(
        f"{filesystem.full_name(file)}: holds {form} annotations, which are not read",
        expected='a file with a line {"image": FILE, "text": CAPTION} for each caption',
        fix=_way(filesystem, file, form, pictures),
    )


def _way(filesystem: Filesystem, file: str, form: str, pictures: Iterable[str]) -> str:
    """The command that writes such a file where the names of the pictures lead to them, and encodes it."""
    root, note = filesystem.location.rstrip("/"), ""
    if extension(file) not in ("json", "jsonl"):
        return "write a column with one answer of each row as text, and name it: --set data.caption_field=COLUMN"
    if is_url(root):
        return "write such a .jsonl beside the pictures, and name it as --data"
    path, head = f"{root}/{file}", _head(filesystem, file)
    rows = "json.load(file)" if head.lstrip().startswith("[") else "map(json.loads, file)"
    named = re.search(r'"(?:file_name|image)"\s*:\s*"([^"\\]+)"', head)
    name = named[1] if named else ""
    folder = next((key.removesuffix(name) for key in pictures if name and f"/{key}".endswith(f"/{name}")), None)
    if folder is None:
        root, folder = next(_folders(posixpath.dirname(path), name), (posixpath.dirname(path), None))
    if folder is None:
        folder, note = "IMAGES/", ", where IMAGES is the folder of the pictures, relative to the new file"
    out = f"{root}/{posixpath.basename(stem(file))}-captions.jsonl"
    code = _CODE[form].format(file=json.dumps(path), out=json.dumps(out), folder=json.dumps(folder), rows=rows)
    return f"python -c {shlex.quote(code)} && sana-pipe encode --data {shlex.quote(out)}{note}"


def _folders(beside: str, name: str) -> Iterator[tuple[str, str]]:
    """(a folder, the path from there to the folder of a picture's name): the file's folder, one below it or beside."""
    for root in (beside, posixpath.dirname(beside)):
        with suppress(OSError):
            below = sorted(f"{entry.name}/" for entry in os.scandir(root or ".") if entry.is_dir())
            for folder in ["", *below]:
                if name and os.path.isfile(os.path.join(root, folder, name)):
                    yield root or ".", folder
