"""The folder that `sana-pipe sample --for-pairs` writes: pictures, `candidates.jsonl`, and a page to mark pairs on.

A person marks the better and the worse picture of a caption; the page's button saves the CSV file `FILE` with the
columns `COLUMNS`, which `encode` reads as preference pairs. A script may write the same file from `candidates.jsonl`.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from sana_pipe.base.errors import UserError, writing
from sana_pipe.tools.reporting.page import render

FILE = "pairs.csv"
COLUMNS = ("chosen", "rejected", "caption", "weight")
"""The columns of `FILE`: names of the better and the worse picture, next to the file; the caption; the weight."""
OPTIONS = (
    *("data.image_field=chosen", "data.caption_field=caption"),
    *("data.pictures.rejected.column=rejected", "data.pictures.rejected.weight=weight"),
)
"""The options with which `encode` reads `FILE`."""
PAGE, TABLE = "pairs.html", "candidates.jsonl"


def file_name(number: int, picture: int) -> str:
    """Return the name of a picture's file, without its ending. number: of the caption; picture: of its pictures."""
    return f"{number:04d}-{picture}"


def check_new(out: Path) -> None:
    """Raise a UserError if `out` is there and not an empty folder: marks belong to the pictures that they were made
    for."""
    with writing(out, "check the permissions, or give another --for-pairs"):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(
                f"{out} is no new folder",
                expected="a new or empty folder for each drawing",
                fix="another --for-pairs DIR",
            )


def command(out: Path) -> str:
    """The shell command that encodes the pairs."""
    return shlex.join(["sana-pipe", "encode", "--data", str(out / FILE), *(w for o in OPTIONS for w in ("--set", o))])


def publish(rows: Sequence[dict[str, Any]], pictures: Path, out: Path, log: Callable[[str], None]) -> Path:
    """Move the pictures into their folder, then the table and last the page, which is returned.

    Args:
        rows: of each picture, those of a caption one after the other: `caption`, its `number`, `picture`, and what else
            the table says.
        pictures: a folder with the pictures, called `file_name`.
    """
    table = [{"file": f"{file_name(row['number'], row['picture'])}.png", **row} for row in rows]
    groups = [
        {"caption": of[0]["caption"], "files": [row["file"] for row in of]}
        for of in (list(some) for _, some in groupby(table, lambda row: row["number"]))
    ]
    data = {"file": FILE, "columns": COLUMNS, "groups": groups}
    text = render(
        "pairs.html", data=json.dumps(data).replace("<", "\\u003c"), file=FILE, folder=out, command=command(out)
    )
    with writing(out, "check the permissions, or give another --for-pairs"):
        for row in table:
            os.replace(pictures / row["file"], out / row["file"])
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table)
        (out / TABLE).write_text(lines, encoding="utf-8")
        (out / PAGE).write_text(text, encoding="utf-8")
    log(f"mark the pairs on {out / PAGE}, save {FILE} into {out}, then: {command(out)}")
    return out / PAGE
