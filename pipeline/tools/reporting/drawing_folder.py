"""The folder that `sana-pipe sample` writes: PNGs, `samples.jsonl` with a row for each caption, and a contact sheet.

A drawing replaces an earlier drawing in its folder, and never pictures of somebody else. All is made in a temporary
folder first, next to its place.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from sana_pipe.base.errors import UserError, writing
from sana_pipe.tools.reporting.contact_sheet import SheetRow, contact_sheet
from sana_pipe.tools.reporting.source_pictures import SourcePictures

FOLDER = Path("samples")
"""The folder of the pictures, unless another is given."""
SHEET = "contact_sheet.png"
TABLE = "samples.jsonl"
CONTROL, RECONSTRUCTION, BASE, DRAWN = "control", "reconstruction", "base", "drawn"
"""Titles of the columns of the contact sheet."""
Row = dict[str, Any]
"""A row of the table: `caption`, `height`, `width`, `seed`, and of a sample its `source` and `item`."""


def file_name(number: int, title: str) -> str:
    """Return the name of a picture's file, without its ending."""
    return f"{number:04d}" + ("" if title == DRAWN else f"-{title}")


def _drawn_in(out: Path) -> set[Path]:
    """The pictures of the drawing in a folder; empty if there is none."""
    try:
        lines = (out / TABLE).read_text(encoding="utf-8").splitlines()
        stems = {Path(json.loads(line)["file"]).stem for line in lines}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {path for path in out.glob("*.png") if path.stem.partition("-")[0] in stems}


def _free(work: Path, log: Callable[[str], None]) -> Path:
    """`FOLDER`, or with a number the first next to it that is new, empty or holds the drawing in `work`; made."""
    pictures = {path.name: path.read_bytes() for path in (work / "pictures").iterdir()}
    for number in itertools.count(1):
        out = FOLDER if number == 1 else FOLDER.with_name(f"{FOLDER.name}-{number}")
        drawn = _drawn_in(out)
        if not out.exists() or not any(out.iterdir()):
            break
        if (out / TABLE).exists() and {path.name for path in drawn} == set(pictures):
            same_rows = (out / TABLE).read_bytes() == (work / TABLE).read_bytes()
            if same_rows and all(path.read_bytes() == pictures[path.name] for path in drawn):
                break
    if out != FOLDER:
        log(f"{FOLDER} holds another drawing or other files, so this drawing goes to {out}")
    out.mkdir(parents=True, exist_ok=True)
    return out


@contextmanager
def working(out: Path | None) -> Iterator[Path]:
    """A temporary folder in that of the pictures, made before anything is drawn.

    Args:
        out: None: `FOLDER`, or one next to it.

    Raises:
        UserError: it cannot be made; pictures of somebody else would be replaced.
    """
    if out is None:
        with writing(FOLDER, "check the permissions, or give --out"):
            with tempfile.TemporaryDirectory(prefix=f".{FOLDER.name}-partial-", dir=FOLDER.parent) as work:
                yield Path(work)
        return
    if not (out / TABLE).exists() and (others := sorted(out.glob("[0-9][0-9][0-9][0-9]*.png"))):
        raise UserError(
            f"{out} holds pictures that `sample` did not draw",
            expected=f"a folder with {TABLE}, or without pictures that have such names",
            found=others[0].name,
            fix="another --out",
        )
    with writing(out, "check the permissions, or give another --out"):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=out) as work:
            yield Path(work)


def publish(
    titles: Sequence[str],
    rows: Sequence[Row],
    work: Path,
    out: Path | None,
    photos: SourcePictures | None,
    log: Callable[[str], None],
) -> Path:
    """Move the table, its pictures and the contact sheet into place, in this order: the table shows that a folder is
    ours. Nothing of an earlier drawing stays in the folder. Returns the contact sheet.

    Args:
        titles: of the columns; their pictures are in `work`/pictures.
        rows: of the table, a picture each.
        out: None: `FOLDER`, or a folder next to it if that holds another drawing (`_free`).
        photos: of the first column, for rows with a `source`.
    """
    lines = [{"file": f"{file_name(number, DRAWN)}.png", **row} for number, row in enumerate(rows)]
    table = work / TABLE
    table.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    out = _free(work, log) if out is None else out
    earlier = _drawn_in(out)
    os.replace(table, out / TABLE)
    for path in earlier - {out / path.name for path in (work / "pictures").iterdir()}:
        path.unlink(missing_ok=True)
    cards = []
    for number, row in enumerate(rows):
        size = row["height"], row["width"]
        shown = [] if photos is None else [photos.cropped(row["source"], row["item"], size)]
        for title in titles:
            name = f"{file_name(number, title)}.png"
            os.replace(work / "pictures" / name, out / name)
            with Image.open(out / name) as picture:
                shown.append(picture.convert("RGB"))
        cards.append(SheetRow(f"{number:04d}: {row['caption']}", tuple(shown)))
    contact_sheet(cards, (*([] if photos is None else ["photo"]), *titles), out / SHEET)
    last = f" to {file_name(len(rows) - 1, DRAWN)}.png" if len(rows) > 1 else ""
    seed = rows[0]["seed"]
    log(
        f"pictures: {out / file_name(0, DRAWN)}.png{last}, seed {seed} (--set sample.seed={seed + 1} draws others); "
        f"captions: {out / TABLE}"
    )
    log(f"contact sheet: {out / SHEET}")
    return out / SHEET
