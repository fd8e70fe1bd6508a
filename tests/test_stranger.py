"""A stranger's walk: pictures, captions, masks and controls as people lay them out, through `init`, `encode` and
`bucket`. What the snapshot trains on is what the data say, or the command refuses, and its fix works when pasted."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
from sana_pipe.base.errors import UserError
from sana_pipe.config import load
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.layout import content_digest
from sana_pipe.data.encoders.frozen import from_bits
from sana_pipe.stages import init
from tests.support.messages import naming

SIDE, CELLS, PIXELS = 64, 8, 256
"""Of a bucket: its pixels, its cells in a latent; and of a picture: the least that `init` takes."""
FEW, MANY = 4, 40
"""Pictures of a walk, and from which number on those of another subject are."""
WORD, WARM = "sks dog", "warm"
"""The trigger word, and the source of a cache that has the records of the short walks already."""


def sentence(number: int) -> str:
    return f"a dog at place {number}"


def share(number: int) -> float:
    """The part of a picture that its mask learns."""
    return (number % (CELLS - 1) + 1) / CELLS


class Trained(NamedTuple):
    """What a picture is trained with. captions: with their shares. mask, control: of which picture, by number."""

    captions: dict[str, float]
    mask: int | None = None
    control: int | None = None


def alone(text: str, mask: int | None = None, control: int | None = None) -> Trained:
    return Trained({text: 1.0}, mask, control)


def data_of(number: int, kind: str = "picture", format: str = "PNG") -> bytes:
    """A picture, its mask or its control picture: no two are equal."""
    pixels = np.zeros((PIXELS, PIXELS, 3), np.uint8)
    if kind == "mask":
        pixels[:, : round(PIXELS * share(number))] = 255
    else:
        pixels[:] = (number * 6 % 256, number // 42 * 80 + 40, 200 if kind == "control" else 90)
        pixels[number, :, 1] = 255
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format)
    return out.getvalue() + (str(number).encode() if kind == "mask" else b"")


class Folder:
    """Writes what people have into a folder. numbers: of its pictures."""

    def __init__(self, root: Path, count: int):
        self.root, self.numbers = root, range(count)

    def write(self, name: str, data: bytes | str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())

    def pictures(self, name: str, kind: str = "picture") -> list[str]:
        """A picture for each number; their names, without the number in braces."""
        for number in self.numbers:
            self.write(name.format(number), data_of(number, kind))
        return [name.format(number) for number in self.numbers]

    def texts(self, name: str, made: Callable[[int], bytes | str] = sentence) -> None:
        for number in self.numbers:
            self.write(name.format(number), made(number))

    def rows(self, file: str, row: Callable[[int], str], head: str = "") -> None:
        self.write(file, head + "".join(row(number) + "\n" for number in self.numbers))


Truth = dict[str, Trained]
"""Item -> what it is trained with."""


def said(names: list[str], text: Callable[[int], str] = sentence, **kinds: bool) -> Truth:
    """One caption for each picture, and its mask and control where they are there."""
    return {
        name: alone(text(number), *(number if kinds.get(kind) else None for kind in ("mask", "control")))
        for number, name in enumerate(names)
    }


def with_word(number: int) -> str:
    return f"{WORD}, {sentence(number)}"


@dataclass(frozen=True)
class Case:
    """A layout. build: writes it and returns what it says. trigger: for `init`. refused: names in the refusal of
    `init`, whose first fix is then pasted. sources: folders below, each a source."""

    build: Callable[[Folder], Truth]
    trigger: str | None = None
    refused: tuple[str, ...] = ()
    sources: tuple[str, ...] = ("",)


def masks_and_controls(folder: Folder) -> Truth:
    names = folder.pictures("images/{}.png")
    folder.texts("images/{}.txt")
    folder.pictures("masks/{}.png", "mask")
    folder.pictures("canny/{}.png", "control")
    return said(names, with_word, mask=True, control=True)


def masks_named(picture: str, mask: str) -> Callable[[Folder], Truth]:
    """Masks of another name. picture, mask: names, with the number in braces."""

    def build(folder: Folder) -> Truth:
        names = folder.pictures(picture)
        folder.texts(picture.rpartition(".")[0] + ".txt")
        folder.pictures(mask, "mask")
        return said(names, with_word, mask=True)

    return build


def captions_at(picture: str, caption: str, made: Callable[[int], bytes | str] = sentence) -> Callable[[Folder], Truth]:
    """Captions in files. picture, caption: names, with the number in braces."""

    def build(folder: Folder) -> Truth:
        names = folder.pictures(picture)
        folder.texts(caption, made)
        return said(names, with_word)

    return build


def kohya(folder: Folder) -> Truth:
    truth = Truth()
    for number in folder.numbers:
        name = f"{10 if number % 2 else 2}_dog/{number}"
        folder.write(f"{name}.png", data_of(number))
        folder.write(f"{name}.caption", sentence(number))
        truth[f"{name}.png"] = alone(with_word(number))
    return truth


def regularisation(folder: Folder) -> Truth:
    truth = said(folder.pictures("img/{}.png"), with_word)
    folder.texts("img/{}.txt")
    for number in folder.numbers:
        folder.write(f"reg/r{number}.png", data_of(number + MANY))
        folder.write(f"reg/r{number}.txt", f"another dog {number}")
        truth[f"reg/r{number}.png"] = alone(f"another dog {number}")
    return truth


def several_captions(folder: Folder) -> Truth:
    names = folder.pictures("{}.png")
    folder.texts("{}.txt")
    folder.texts("{}.caption", lambda number: f"tags, of, {number}")
    return {name: Trained({sentence(number): 0.5, f"tags, of, {number}": 0.5}) for number, name in enumerate(names)}


def row_name(number: int) -> str:
    return f"train.parquet/{content_digest(data_of(number))}"


def lists_in_parquet(folder: Folder) -> Truth:
    pictures = [{"bytes": data_of(number), "path": f"{number}.png"} for number in folder.numbers]
    texts = [[sentence(number), f"it is number {number}."] for number in folder.numbers]
    folder.root.mkdir()
    pq.write_table(pa.table({"image": pictures, "captions": texts}), folder.root / "train.parquet")
    return {row_name(number): Trained(dict.fromkeys(texts[number], 0.5)) for number in folder.numbers}


def masks_in_parquet(folder: Folder) -> Truth:
    columns = {
        name: [{"bytes": data_of(number, kind), "path": None} for number in folder.numbers]
        for name, kind in (("image", "picture"), ("conditioning_image", "control"), ("mask", "mask"))
    }
    folder.root.mkdir()
    captions = [sentence(number) for number in folder.numbers]
    pq.write_table(pa.table({**columns, "text": captions}), folder.root / "train.parquet")
    return said([row_name(number) for number in folder.numbers])


def table(file: str, row: Callable[[int], str], head: str = "", picture: str = "{}.png") -> Callable[[Folder], Truth]:
    def build(folder: Folder) -> Truth:
        names = folder.pictures(picture)
        folder.rows(file, row, head)
        return said(names, with_word)

    return build


def json_row(column: str, text: str, name: str = "{}.png") -> Callable[[int], str]:
    return lambda number: json.dumps({column: name.format(number), text: sentence(number)})


def captions_json(place: str, picture: str) -> Callable[[Folder], Truth]:
    def build(folder: Folder) -> Truth:
        names = folder.pictures(picture)
        folder.write(place, json.dumps({f"{number}.png": sentence(number) for number in folder.numbers}))
        return said(names, with_word)

    return build


def tar(*members: tuple[str, str]) -> Callable[[Folder], Truth]:
    """A webdataset. members: name with the number in braces, and what: a kind of picture or `txt`."""

    def build(folder: Folder) -> Truth:
        folder.root.mkdir()
        with tarfile.open(folder.root / "0.tar", "w") as archive:
            for number in folder.numbers:
                for name, kind in members:
                    info = tarfile.TarInfo(name.format(number))
                    data = sentence(number).encode() if kind == "txt" else data_of(number, kind)
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
        kinds = {kind: True for _, kind in members}
        return said([f"0.tar/{members[0][0].format(number)}" for number in folder.numbers], with_word, **kinds)

    return build


def utf16(number: int) -> bytes:
    return sentence(number).encode("utf-16")


def windows(number: int) -> bytes:
    return b"\xef\xbb\xbf" + sentence(number).encode() + b"\r\n"


CASES: dict[str, Case] = {
    "masks and controls in folders": Case(masks_and_controls, WORD, ("masks", "canny")),
    "masks of a prefix": Case(masks_named("img_{}.png", "mask_{}.png"), WORD, ("mask_",)),
    "captions in a folder": Case(captions_at("images/{}.png", "captions/{}.txt"), WORD, ("captions/0.txt",)),
    "kohya's repeats": Case(kohya, WORD),
}
MORE: dict[str, Case] = {
    "plain": Case(captions_at("{}.png", "{}.txt"), WORD),
    "regularisation": Case(regularisation, WORD, sources=("img", "reg")),
    "several captions": Case(several_captions),
    "lists in parquet": Case(lists_in_parquet),
    "masks in parquet": Case(masks_in_parquet),
    "masks of a suffix": Case(masks_named("{}.png", "{}-masklabel.png"), WORD, ("-masklabel",)),
    "masks of a prefix before the name": Case(masks_named("img_{}.png", "mask_img_{}.png"), WORD, ("mask_",)),
    "masks of a prefix without a separator": Case(masks_named("{}.png", "mask{}.png"), WORD, ("mask",)),
    "masks of a prefix in a folder": Case(masks_named("images/i_{}.png", "masks/m_{}.png"), WORD, ("masks",)),
    "masks of a suffix in a folder": Case(masks_named("images/{}.png", "masks/{}_mask.png"), WORD, ("masks",)),
    "masks in upper case": Case(masks_named("{}.png", "{}_MASK.PNG"), WORD, ("_MASK",)),
    "masks of a split": Case(masks_named("train/images/{}.png", "train/masks/{}.png"), WORD, ("masks",)),
    "masks of a renamed folder": Case(masks_named("images/{}.png", "Train_Mattes/{}.png"), WORD, ("Train_Mattes",)),
    "captions of a split": Case(captions_at("train/images/{}.png", "train/texts/{}.txt"), WORD, ("texts/0.txt",)),
    "captions of a folder, split": Case(captions_at("images/a/{}.png", "txt/a/{}.txt"), WORD, ("txt/a/0.txt",)),
    "captions of a folder below": Case(captions_at("{}.png", "labels/{}.txt"), WORD, ("labels/0.txt",)),
    "captions of a folder above": Case(captions_at("images/{}.png", "{}.txt"), WORD, ("0.txt",)),
    "captions of a suffix": Case(captions_at("{}.png", "{}_caption.txt"), WORD, ("0_caption.txt",)),
    "captions of a prefix": Case(captions_at("img_{}.png", "caption_{}.txt"), WORD, ("caption_0.txt",)),
    "captions of another ending": Case(captions_at("{}.png", "{}.text"), WORD, (".text",)),
    "captions of Windows": Case(captions_at("{}.png", "{}.txt", windows), WORD),
    "captions in UTF-16": Case(captions_at("{}.png", "{}.txt", utf16), WORD),
    "captions in JSON": Case(captions_at("{}.png", "{}.json", lambda n: json.dumps({"prompt": sentence(n)})), WORD),
    "captions.json": Case(captions_json("captions.json", "{}.png"), WORD),
    "metadata.csv": Case(table("metadata.csv", lambda n: f"{n}.png,{sentence(n)}", "file_name,caption\r\n"), WORD),
    "metadata.jsonl": Case(table("metadata.jsonl", json_row("file_name", "text")), WORD),
    "metadata.jsonl in a folder": Case(
        table("images/metadata.jsonl", json_row("file_name", "text"), picture="images/{}.png"), WORD
    ),
    "a tar": Case(tar(("{}.png", "picture"), ("{}.txt", "txt")), WORD),
}
REFUSED: dict[str, tuple[Callable[[Folder], Truth], str]] = {
    "a text that is no UTF-8": (captions_at("{}.png", "{}.txt", lambda n: f"café {n}".encode("cp1252")), "UTF-8"),
    "JSON that is broken": (captions_at("{}.png", "{}.json", lambda n: f'{{"caption": "{n}'), "JSON"),
}
"""Layouts that have no other reading, and what the refusal names."""


def walk(data: list[Path], folder: Path, trigger: str | None, settings: list[str], tiny: Path) -> tuple[Truth, Any]:
    """What the snapshot trains on, and the report of `bucket`."""
    out, lines = folder / "sana-pipe.yaml", io.StringIO()
    options = init.Options(gpu="4090", out=out, trigger=trigger, overrides=tuple(settings), force=True)
    with mock.patch.object(init, "expected", return_value=[]), contextlib.redirect_stdout(lines):
        init.run(list(map(str, data)), options)
        models = [
            f"{model}.{name}" for model in ("vae", "text") for name in (f"id={tiny}", "revision=null", "dtype=fp32")
        ]
        small = [f"data.resolution={SIDE}", f"data.buckets=[[{SIDE},{SIDE}]]", "bucket.heldout=0"]
        others = [f"bucket.sources.{WARM}.weight=0"] if (folder / "cache").exists() else []
        config = load(out, [*models, *small, *others, f"cache={folder / 'cache'}"])
        for each in data:
            sana_pipe.stages.encode.run(config, str(each))
    with contextlib.redirect_stdout(report := io.StringIO()):
        sana_pipe.stages.bucket.run(config, as_json=True)
    return trained(Cache(config.cache)), json.loads(report.getvalue())


def trained(cache: Cache) -> Truth:
    """What a snapshot says of each item; of a mask and of a control picture the number of the picture that it shows."""
    snapshot = cache.open_snapshot()
    texts, truth, controls = snapshot.reader("text"), Truth(), dict[tuple[str, str], str]()
    for source in cache.sources():
        document = cache.last_scan(source)
        assert document is not None
        rows = cache.table(document["table"]).select(["item", "pictures"]).to_pylist()
        for row in rows:
            for picture in row["pictures"] or ():
                if picture["kind"] == "control" and picture["item"]:
                    controls[source, row["item"]] = picture["item"]
    for row in range(len(snapshot)):
        sample, (source, item) = snapshot.sample(row), snapshot.source_item(row)
        whole = sum(caption.weight for caption in sample.captions)
        shares = [caption.weight / whole for caption in sample.captions]
        captions = dict(zip(snapshot.captions(row, texts), shares, strict=True))
        mask = None
        if "mask" in sample.pictures:
            mask = round(float(from_bits(snapshot.picture(sample, "mask")).mean()) * CELLS) - 1
        control = re.search(r"\d+", controls.get((source, item), ""))
        truth[item if source == "data" else f"{source}/{item}"] = Trained(
            captions, mask, None if control is None else int(control[0])
        )
    return truth


def pasted(fix: str, place: Path) -> tuple[list[Path], list[str]]:
    """Run what the first command of a refusal does before `sana-pipe init`; what that is given."""
    first = re.split("; to train on all|; as |, and then the same command", fix)[0]
    shell, _, command = first.rpartition("sana-pipe init ") if "sana-pipe init " in first else (first, "", "")
    shell = re.sub(r"^as [a-z ]+: ", "", shell).strip().removesuffix("&&")
    if shell:
        subprocess.run(["bash", "-ec", shell], check=True)
    words = shlex.split(command)
    settings = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    return [Path(words[n + 1]) for n, word in enumerate(words) if word == "--data"] or [place], settings


@pytest.fixture(scope="module")
def warm(made_once: Callable[..., Path], tiny_repo: Path) -> Path:
    """A cache with the records of a short walk, so that later ones load no model."""

    def make(folder: Path) -> None:
        masks_and_controls(Folder(folder / WARM, FEW))
        settings = ["data.pictures.mask.folder=masks", "data.pictures.control.folder=canny"]
        walk([folder / WARM], folder, WORD, settings, tiny_repo)

    return made_once("stranger", make) / "cache"


def walked(case: Case, count: int, folder: Path, tiny: Path) -> None:
    data = folder / "data"
    truth = case.build(Folder(data, count))
    places, settings = [data / source if source else data for source in case.sources], list[str]()
    if case.refused:
        with pytest.raises(UserError, match=naming(*case.refused)) as refusal:
            walk(places, folder, case.trigger, settings, tiny)
        places, settings = pasted(str(refusal.value.fix), data)
    got, report = walk(places, folder, case.trigger, settings, tiny)
    assert got == {
        item: Trained(one.captions, None if one.mask is None else one.mask % (CELLS - 1), one.control)
        for item, one in truth.items()
    }
    repeats = Counter(visits[1] for item in truth if (visits := re.match("([0-9]+)_", item)))
    assert report["repeats"].get("data", {}) == repeats


@pytest.mark.parametrize("name", CASES)
def test_a_stranger_trains_on_what_the_data_say(name: str, warm: Path, tiny_repo: Path, tmp_path: Path) -> None:
    shutil.copytree(warm, tmp_path / "cache")
    walked(CASES[name], FEW, tmp_path, tiny_repo)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_layouts(name: str, warm: Path, tiny_repo: Path, tmp_path: Path) -> None:
    shutil.copytree(warm, tmp_path / "cache")
    walked(MORE[name], FEW, tmp_path, tiny_repo)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, "regularisation", "masks in parquet", "a tar"])
def test_forty_pictures_of_a_stranger(name: str, tiny_repo: Path, tmp_path: Path) -> None:
    walked({**CASES, **MORE}[name], MANY, tmp_path, tiny_repo)


@pytest.mark.parametrize("name", REFUSED)
def test_captions_that_cannot_be_read_are_not_replaced_by_the_trigger_word(
    name: str, tiny_repo: Path, tmp_path: Path
) -> None:
    build, named = REFUSED[name]
    build(Folder(tmp_path / "data", FEW))
    with pytest.raises(UserError, match=naming(named)):
        walk([tmp_path / "data"], tmp_path, WORD, [], tiny_repo)
