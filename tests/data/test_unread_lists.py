"""Files that name pictures and are not read, and names of control pictures and masks in another Unicode form."""

from __future__ import annotations

import json
import subprocess
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sana_pipe.base.errors import UserError
from sana_pipe.config import load
from sana_pipe.data.sources.name_pairs import Pair
from sana_pipe.data.sources.unread_lists import UnreadList
from sana_pipe.stages import init
from sana_pipe.stages.init import Options
from tests.support.messages import naming

SENTENCE = "a brown dog sits on the grass"
NUMBERS = range(4)


def noise(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (300, 300, 3), np.uint8)).save(path)


def rows(form: str) -> str:
    return "".join(form.format(n=number, text=SENTENCE) for number in NUMBERS)


CAPTIONS: dict[str, str] = {
    "captions.csv": rows("{n}.png,{text}\n"),
    "Flickr8k.token.txt": rows("{n}.png#0\t{text}\n"),
    "captions.txt": rows("{n}.png: {text}\n"),
    "notes/all.md": rows("* images/{n}.png {text}\n"),
    "annotations/metadata.jsonl": "".join(
        json.dumps({"file_name": f"{number}.png", "text": SENTENCE}) + "\n" for number in NUMBERS
    ),
    "annotations/metadata.csv": "file_name,text\n" + rows("images/{n}.png,{text}\n"),
}
OTHERS: dict[str, str] = {
    "classes.csv": rows("{n}.png,dog\n"),
    "train.txt": rows("images/{n}.png\n"),
    "LICENSE.txt": "You may use these pictures for research.",
    "about.md": "Pictures of a dog, numbered from zero to three.",
}


def data(place: Path, files: dict[str, str]) -> Path:
    for number in NUMBERS:
        noise(place / f"images/{number}.png", number)
    for name, text in files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    return place


def options(tmp_path: Path, *overrides: str) -> Options:
    return Options(gpu="cpu", trigger="sks dog", out=tmp_path / "a.yaml", overrides=overrides)


@pytest.mark.parametrize("name", CAPTIONS)
def test_a_file_that_names_pictures_is_not_ignored(name: str, tmp_path: Path) -> None:
    place = data(tmp_path / "data", {name: CAPTIONS[name]})
    with pytest.raises(UserError, match=naming(Path(name).name, "data.caption")):
        init.run([str(place)], options(tmp_path))
    assert not (tmp_path / "a.yaml").exists()
    assert init.run([str(place)], options(tmp_path, "data.caption=a picture")) == 0


def test_files_without_captions_are_no_reason_to_refuse(tmp_path: Path) -> None:
    place = data(tmp_path / "data", OTHERS)
    assert init.run([str(place)], options(tmp_path)) == 0
    assert load(tmp_path / "a.yaml").data.caption


@pytest.mark.parametrize("way", ["folder", "suffix"])
def test_masks_in_another_unicode_form_are_masks(way: str, tmp_path: Path) -> None:
    for number in NUMBERS:
        composed, other = (unicodedata.normalize(form, f"Bär {number}") for form in ("NFC", "NFD"))
        noise(tmp_path / f"data/images/{composed}.png", number)
        mask = f"masks/{other}.png" if way == "folder" else f"images/{other}-masklabel.png"
        noise(tmp_path / "data" / mask, number + 9)
    with pytest.raises(UserError, match=naming("masks", f"data.pictures.mask.{way}")):
        init.run([str(tmp_path / "data")], options(tmp_path))


@pytest.mark.parametrize("hostile", ["$(touch hacked)", "a'b\"c `touch hacked`;touch hacked", "-n"])
def test_names_of_files_run_no_command(hostile: str, tmp_path: Path) -> None:
    """Edit: a name that is put between double quotes."""
    masks, home = tmp_path / "masks", tmp_path / f"home {hostile}"
    masks.mkdir()
    (masks / f"{hostile}m_1_.png").touch()
    pair = Pair(f"masks/{hostile}m_1_.png", f"images/{hostile}i_1{hostile}.png", f"{hostile}m_", "_", hostile, hostile)
    subprocess.run(["bash", "-ec", pair.command(str(tmp_path), f"to {hostile}")], check=True, cwd=tmp_path)
    assert [path.name for path in (masks / f"to {hostile}").iterdir()] == [f"{hostile}1{hostile}.png"]

    home.mkdir()
    (tmp_path / f"{hostile}s").mkdir()
    (tmp_path / f"{hostile}s/metadata.jsonl").touch()
    listed = UnreadList(f"{hostile}s/metadata.jsonl", 1, f"home {hostile}/1.png", "1.png")
    subprocess.run(["bash", "-ec", listed.fix(str(tmp_path))], check=True, cwd=tmp_path)
    assert (home / "metadata.jsonl").exists()
    assert not list(tmp_path.rglob("hacked"))
