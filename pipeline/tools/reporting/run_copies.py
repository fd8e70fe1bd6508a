"""Copies of captions and pictures in the folder of a run: drawings of captions, reports with thumbnails; and which
checkpoints were trained on a snapshot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from sana_pipe.base.errors import UserError, writing
from sana_pipe.tools.reporting.run_pictures import FOLDER, Drawing
from sana_pipe.train.training import checkpoint


def remove(run: Path, texts: Sequence[str], items: Sequence[str]) -> list[str]:
    """Remove drawings of captions, and reports that show them or items; returns a line for each file that was removed,
    or that has them and stays.

    Args:
        run: its folder; nothing is done if it is not there.
        texts: captions, as written. items: names.
    """
    lines = []
    for path in sorted((run / FOLDER).glob("step-*.safetensors")):
        with writing(path, "check the permissions"):
            if _draws(path, texts):
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink()
                lines.append(f"{path}: drew a caption that goes, and is removed with its pictures")
    for path in _files(run):
        if not _has(path, [*texts, *items] if path.suffix == ".html" else texts):
            continue
        if path.suffix == ".html":
            with writing(path, "check the permissions"):
                path.unlink()
            lines.append(f"{path}: showed what goes, and is removed (sana-pipe report --run {run} writes it again)")
        else:
            lines.append(f"{path}: has a caption that goes; nothing can make this file again, so remove it yourself")
    return lines


def _files(run: Path) -> Iterator[Path]:
    """The files of a run, without its checkpoints, which hold no text of a caption."""
    for path in sorted(run.rglob("*")):
        if path.is_file() and "checkpoints" not in path.relative_to(run).parts[:1]:
            yield path


def _draws(path: Path, texts: Sequence[str]) -> bool:
    """Return whether a file of drawn latents has one of these captions; one that cannot be read counts."""
    try:
        return bool({*Drawing.read(path).facts.prompts} & {*texts})
    except UserError:
        return bool(texts)


def _has(path: Path, words: Sequence[str]) -> bool:
    """Return whether a file has one of these words, also as JSON or HTML writes it."""
    data = path.read_bytes()
    forms = {form for word in words for form in (word, json.dumps(word)[1:-1])}
    return any(form.encode("utf-8", "surrogatepass") in data for form in forms if form)


def checkpoints(run: Path, snapshots: Collection[str]) -> list[Path]:
    """The checkpoints in the folder of a run that were trained on one of these snapshots."""
    found = []
    for folder in checkpoint.complete(run / "checkpoints"):
        try:
            if checkpoint.read_document(folder).state.snapshot in snapshots:
                found.append(folder)
        except UserError:
            found.append(folder)  # it cannot be read to find out
    return found
