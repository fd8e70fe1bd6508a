"""Public layouts of pictures and captions: what `init` makes of each, what `encode` refuses, and the page's table."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sana_pipe.stages.encode
from sana_pipe.base.errors import UserError
from sana_pipe.base.options import value_at
from sana_pipe.config import Config
from sana_pipe.data.cache import arrow
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.scan_table import SCAN
from sana_pipe.data.encoding import prompts as prompt_lists
from sana_pipe.data.encoding import understood
from sana_pipe.data.sources import name_patterns
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.detect import open_source
from sana_pipe.data.sources.name_patterns import CONTROL, MASK, REGULARISATION, REJECTED, UNKNOWN
from sana_pipe.data.sources.reject_kinds import Kinds
from tests.support.layouts import (
    BEGIN,
    COUNT,
    END,
    LAYOUTS,
    PAGE,
    SENTENCES,
    TRIGGER,
    Outcome,
    four_folders,
    hub_csv,
    hub_parquet,
    img2dataset,
    made,
    one_trainer,
    picture,
    pictures,
    table,
    text,
)
from tests.support.messages import naming

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def outcome_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """What `init` makes of the layout of a name: made once."""
    return cache(lambda name: made(LAYOUTS[name], tmp_path_factory.mktemp("layout")))


@pytest.mark.parametrize("name", LAYOUTS)
def test_init_takes_each_layout_as_it_was_meant(name: str, outcome_of: Callable[[str], Outcome]) -> None:
    """A layout with two readings is refused with both as commands; the first of them works when pasted."""
    layout, outcome = LAYOUTS[name], outcome_of(name)
    tree = outcome.config.model_dump()
    assert {option: value_at(tree, option) for option in layout.config} == layout.config
    assert (outcome.error is not None) == bool(layout.asks)
    fix = re.sub(r"[^\s'\"]+/layout\d+/data/", "", str(outcome.error.fix)) if outcome.error is not None else ""
    assert [each for each in layout.asks if each not in fix] == []
    assert layout.caption is None or layout.caption in outcome.prompts
    assert [each for each in layout.says if each not in outcome.said] == []


def test_the_page_has_the_table(outcome_of: Callable[[str], Outcome]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = page.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == table(outcome_of).strip(), "python -m tests.support.layouts"


NAMES: dict[str, tuple[list[str], list[str], list[tuple[str, str, str]]]] = {
    "a suffix": (["{}.jpg"], ["{}-masklabel.png"], [(MASK, "suffix", "-masklabel")]),
    "a suffix with a dot, no captions": ([], ["{}.jpg", "{}.control.png"], [(CONTROL, "suffix", ".control")]),
    "a folder below": ([], ["a/{}.jpg", "a/masks/{}.png"], [(MASK, "folder", "masks")]),
    "folders of a split": ([], ["train/images/{}.jpg", "train/masks/{}.png"], [(MASK, "folder", "masks")]),
    "source and target": ([], ["source/{}.png", "target/{}.png"], [(CONTROL, "folder", "source")]),
    "an unknown suffix": (["{}.jpg"], ["{}_m.png"], [(UNKNOWN, "suffix", "_m")]),
    "an unknown folder": (["a/{}.jpg"], ["b/{}.png"], [(UNKNOWN, "folder", "b")]),
    "pairs": (["{}_w.png"], ["{}_l.png"], [(REJECTED, "suffix", "_w/_l")]),
    "pairs in a folder, no captions": ([], ["a/{}_w.jpg", "a/{}_l.png"], [(REJECTED, "suffix", "_w/_l")]),
    "sizes": ([], ["{}_s.png", "{}_l.png"], []),
    "classes": ([], ["cats/{}.jpg", "dogs/{}.jpg"], []),
    "numbers": ([], ["{}.jpg", "{}1.jpg", "{}_1.jpg"], []),
    "a word in a name": ([], ["woman with mask {}.jpg"], []),
    "masks with captions": (["{}.jpg", "{}-masklabel.png"], [], []),
    "captions of all": (["images/{}.jpg", "masks/{}.jpg"], [], []),
    "a class of masks": ([], ["masks/{}.jpg", "hats/x{}.jpg"], []),
    "a prefix": (["img_{}.jpg"], ["mask_{}.png"], [(MASK, "name", "mask_*")]),
    "a prefix before the name, no captions": ([], ["img_{}.jpg", "depth_img_{}.png"], [(CONTROL, "name", "depth_*")]),
    "a prefix in a folder": (["images/i_{}.jpg"], ["masks/m_{}.png"], [(MASK, "name", "masks/m_*")]),
    "a suffix in a folder": (["train/{}.jpg"], ["train_masks/{}_mask.gif"], [(MASK, "name", "train_masks/*_mask")]),
    "suffixes of both": ([], ["{}_sat.jpg", "{}_mask.png"], [(MASK, "name", "*_mask")]),
    "prefixes of a split": (["a/images/i_{}.jpg"], ["a/masks/m_{}.png"], [(MASK, "name", "masks/m_*")]),
    "prefixes of classes": ([], ["cat_{}.jpg", "dog_{}.jpg"], []),
}
"""Names with a caption, names without, and what is seen in them."""


@pytest.mark.parametrize("case", NAMES)
def test_names_say_what_pictures_are_controls_and_masks(case: str) -> None:
    captioned, bare, expected = NAMES[case]
    rows = [
        (name.format(n), has) for has, names in ((True, captioned), (False, bare)) for name in names for n in "abcd"
    ]
    rows = sorted(rows) if case != "numbers" else [(name.format(n), False) for name in bare for n in range(4)]
    items, has = (pa.chunked_array([list(column)]) for column in zip(*rows, strict=True))
    found = name_patterns.controls_and_masks(items, has)
    assert [(each.kind, each.way, each.value) for each in found] == expected
    assert [each.count for each in found] == [4] * len(expected)


@pytest.mark.parametrize(
    ("file", "picture"),
    [
        ("captions/a.txt", "images/a.jpg"),
        ("labels/train/a.txt", "images/train/a.jpg"),
        ("a.txt", "images/a.jpg"),
        ("txt/a.txt", "a.jpg"),
        ("a_caption.txt", "a.jpg"),
        ("a_1.txt", "a.jpg"),
        ("a.text", "a.jpg"),
        ("captions/caption_a.txt", "images/img_a.jpg"),
        ("README.txt", None),
        ("other/b.txt", None),
    ],
)
def test_files_of_text_are_paired_with_pictures_without_a_caption(file: str, picture: str | None) -> None:
    names = [picture or "images/a.jpg", "images/z.jpg"]
    for captioned in (False, True):
        loose = Kinds()
        loose.count("some", 1, [file])
        items = pa.chunked_array([names])
        found = name_patterns.captions(loose, items, pa.chunked_array([[captioned, True]]))
        assert [each.of for each in found] == ([] if captioned or picture is None else [picture])


@pytest.mark.parametrize(
    ("names", "folders"),
    [
        (["img/10_sks dog/a.jpg", "reg/1_dog/b.jpg"], ["reg"]),
        (["a.jpg", "regularization_images/b.jpg"], ["regularization_images"]),
        (["x/img/a.jpg", "x/Reg/b.jpg"], ["x/Reg"]),
        (["a.jpg", "class_images/b.jpg"], ["class_images"]),
        (["a.jpg", "region/b.jpg", "classes/c.jpg", "reg.jpg"], []),
        (["reg/a.jpg"], []),
    ],
)
def test_folders_of_regularisation_pictures_are_seen(names: list[str], folders: list[str]) -> None:
    found = name_patterns.regularisation(pa.chunked_array([names]))
    assert [(each.kind, each.value) for each in found] == [(REGULARISATION, folder) for folder in folders]


def dry(make_config: MakeConfig, place: Path, *overrides: str) -> int:
    return sana_pipe.stages.encode.dry_run(make_config(place.parent, *overrides), str(place), probe=False)


def test_encode_refuses_a_default_caption_for_masks_until_it_is_said_what_they_are(
    tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    one_trainer(data := tmp_path / "data")
    mask = "data.pictures.mask.suffix=-masklabel"
    assert dry(make_config, data) == 0, "masks have no caption, so they are rejects"
    assert mask in capsys.readouterr().out
    with pytest.raises(UserError, match=naming(mask, "data.pictures={}")):
        dry(make_config, data, "data.caption=sks")
    capsys.readouterr()
    assert dry(make_config, data, "data.caption=sks", mask) == 0
    said = capsys.readouterr().out
    assert f"mask pictures: {COUNT} of {COUNT}" in said and "look like" not in said
    assert dry(make_config, data, "data.caption=sks", "data.pictures={}") == 0
    assert f"captions: {COUNT} of {2 * COUNT}" in capsys.readouterr().out


def test_what_an_encode_accepted_is_not_asked_again(tmp_path: Path, make_config: MakeConfig) -> None:
    for number in range(2):
        picture(tmp_path / f"data/{number}.png", (32, 32))
        picture(tmp_path / f"data/{number}_mask.png", (32, 32))
    config = make_config(tmp_path, "data.caption=sks", "data.pictures={}")
    assert sana_pipe.stages.encode.run(config, str(tmp_path / "data"))["items"] == 4
    config = make_config(tmp_path, "data.caption=sks")
    assert sana_pipe.stages.encode.run(config, str(tmp_path / "data"))["items"] == 4
    for number in range(2):
        picture(tmp_path / f"data/edges/{number}.png", (32, 32))
    with pytest.raises(UserError, match=naming("data.pictures.control.folder=edges")):
        sana_pipe.stages.encode.run(config, str(tmp_path / "data"))
    config = make_config(tmp_path, "data.caption=sks", "data.pictures.control={folder: edges, required: false}")
    sana_pipe.stages.encode.run(config, str(tmp_path / "data"))
    picture(tmp_path / "data/poses/0.png", (32, 32))
    with pytest.raises(UserError, match=naming("poses/0.png", "data.caption=")):
        sana_pipe.stages.encode.run(in_file(make_config(tmp_path), caption="sks"), str(tmp_path / "data"))


def test_masks_of_another_name_than_those_that_need_not_be_there_are_refused_with_the_command_that_renames_them(
    tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were blank ones in training. `data.caption` by `--set` says that they are pictures."""
    pictures(tmp_path / "data")
    for number, separator in enumerate("-_-_"):
        picture(tmp_path / f"data/{number}{separator}mask.png")
    mask = "data.pictures.mask={suffix: -mask, required: false}"
    with pytest.raises(UserError, match=naming("1_mask.png")) as error:
        dry(make_config, tmp_path / "data", mask)
    assert dry(make_config, tmp_path / "data", mask, "data.caption=a picture") == 0
    assert "mask pictures: 2 of 6" in capsys.readouterr().out
    subprocess.run(["bash", "-ec", str(error.value.fix).partition(": ")[2].partition(", and then")[0]], check=True)
    assert dry(make_config, tmp_path / "data", mask) == 0
    assert "mask pictures: 4 of 4" in capsys.readouterr().out


def test_control_pictures_next_to_those_that_are_used_do_not_get_the_trigger_word(tmp_path: Path) -> None:
    from sana_pipe.stages import init

    four_folders(tmp_path / "data")
    chosen = ("data.pictures.control.folder=edges", "data.pictures.mask.folder=masks")
    options = init.Options(gpu="4090", out=tmp_path / "a.yaml", overrides=chosen, **TRIGGER)
    with pytest.raises(UserError, match=naming("poses/0.png", "data.caption=a picture")):
        init.run([str(tmp_path / "data")], options)


def in_file(config: Config, **data: str) -> Config:
    """The configuration as if its file said so."""
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


def test_regularisation_pictures_get_the_prefix_only_by_set(
    tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the file says later; what `--set` gave is remembered."""
    for name in ("reg", "class_images"):
        picture(tmp_path / name / "0.png", (32, 32))
        text(tmp_path / name / "0.txt", "a wheel")
    config = make_config(tmp_path)

    def captions(name: str, config: Config) -> list[str]:
        sana_pipe.stages.encode.run(config, str(tmp_path / name))
        cache = Cache(config.cache)
        scan = cache.last_scan(name)
        assert scan is not None
        [[caption]] = cache.table(scan["table"]).column("captions").to_pylist()
        return [caption["text"], capsys.readouterr().out]

    caption, said = captions("reg", in_file(config, caption_prefix="sks dog, "))
    assert caption == "a wheel" and "data.caption_prefix" in said
    assert captions("reg", in_file(config, caption_prefix="zwx dog, "))[0] == "a wheel"
    given = make_config(tmp_path, "data.caption_prefix='sks dog, '")
    assert captions("class_images", given)[0] == "sks dog, a wheel"
    assert captions("class_images", make_config(tmp_path))[0] == "sks dog, a wheel"


def test_regularisation_pictures_without_captions_do_not_get_the_subjects(
    tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(tmp_path / "reg", caption=None)
    file = in_file(make_config(tmp_path), caption="sks dog")
    with pytest.raises(UserError, match=naming("reg", "sks dog", "data.caption=dog")):
        sana_pipe.stages.encode.dry_run(file, str(tmp_path / "reg"), probe=False)
    capsys.readouterr()
    assert dry(make_config, tmp_path / "reg", "data.caption=dog") == 0
    assert "sks" not in capsys.readouterr().out


def test_prompts_without_the_trigger_word_do_not_take_the_place_of_those_with_it() -> None:
    lines = [(1, "a cat on a beach"), (5, "masks, asks")]
    more, notes = prompt_lists.with_trigger(lines, "sks, ")
    assert more[:2] == lines and len(notes) == 1
    assert [number for number, _ in more] == [1, 5, 6, 7, 8, 9]
    assert all("sks" in line for _, line in more[2:])
    assert prompt_lists.with_trigger([*lines, (6, "an SKS")], "sks, ") == ([*lines, (6, "an SKS")], [])
    assert prompt_lists.with_trigger(lines, " ") == (lines, [])


def test_a_default_caption_does_not_hide_a_column_of_captions(tmp_path: Path, make_config: MakeConfig) -> None:
    hub_csv(tmp_path / "table")
    pictures(tmp_path / "json", caption="{}.json", more='{{"prompt": "{}"}}')
    for name, column in (("table", "caption"), ("json", "prompt")):
        with pytest.raises(UserError, match=naming(f"data.caption_field={column}", "data.caption_weights")):
            dry(make_config, tmp_path / name, "data.caption=sks")
        assert dry(make_config, tmp_path / name, "data.caption=sks", f"data.caption_field={column}") == 0
        assert dry(make_config, tmp_path / name, "data.caption=sks", "data.caption_weights={txt: 1}") == 0


def test_a_listing_in_another_folder_is_named_with_the_command_that_moves_it(
    tmp_path: Path, make_config: MakeConfig
) -> None:
    pictures(tmp_path / "data", "images/{}.png", None)
    text(tmp_path / "data/ann/captions.json", {f"{n}.png": sentence for n, sentence in enumerate(SENTENCES)})
    with pytest.raises(UserError, match=naming("ann/captions.json", "images/0.png")) as error:
        dry(make_config, tmp_path / "data")
    subprocess.run(["bash", "-ec", str(error.value.fix).partition(", and")[0]], check=True)
    with pytest.raises(UserError, match=naming("images/captions.json")):
        dry(make_config, tmp_path / "data")


def listed(file: str, made: Callable[[list[str]], str]) -> Callable[[Path], None]:
    """Pictures of which a file names two. made: of their names."""

    def build(folder: Path) -> None:
        pictures(folder, caption=None)
        text(folder / file, made(["0.png", "1.png"]))

    return build


def listed_in_parquet(folder: Path) -> None:
    pictures(folder, caption=None)
    pq.write_table(pa.table({"image": ["0.png", "1.png", "0.png"], "text": SENTENCES[:3]}), folder / "a.parquet")


PARTS: dict[str, Callable[[Path], None]] = {
    "captions.json": listed("captions.json", lambda names: json.dumps(dict.fromkeys(names, "a barn"))),
    "meta_cap.json": listed("meta_cap.json", lambda names: json.dumps({n[0]: {"caption": "a barn"} for n in names})),
    "captions.txt": listed("captions.txt", lambda names: "image,text\n" + "".join(f"{n},a barn\n" for n in names)),
    "rows.jsonl": listed(
        "rows.jsonl", lambda names: "".join(json.dumps({"image": name, "text": "a barn"}) + "\n" for name in names)
    ),
    "a.parquet": listed_in_parquet,
}
"""Tables that name some of the pictures next to them."""


@pytest.mark.parametrize("file", PARTS)
def test_pictures_that_a_table_next_to_them_does_not_name_are_said_to_be_left_out(
    file: str, tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not where it names all, nor where the user names the table."""
    PARTS[file](tmp_path / "data")
    assert dry(make_config, tmp_path / "data") == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if file in line and "2.png, 3.png" in line]
    assert line.startswith("2 pictures")
    assert dry(make_config, tmp_path / "data" / file) == 0
    assert "2.png" not in capsys.readouterr().out
    for name in ("2.png", "3.png"):
        (tmp_path / "data" / name).unlink()
    picture(tmp_path / "data/masks/0.png")
    assert dry(make_config, tmp_path / "data") == 0
    assert "data.pictures.mask.column" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "data/masks")
    assert dry(make_config, tmp_path / "data") == 0
    assert "pictures of the folder" not in capsys.readouterr().out


def two_columns(taken: str, other: str, place: str) -> Callable[[Path], None]:
    """Captions in two columns of a table. place: of it."""

    def build(folder: Path) -> None:
        if place == "parquet":
            hub_parquet(folder, **{taken: SENTENCES, other: [f"{n} as tags" for n in range(COUNT)]})
            return
        pictures(folder, caption=None)
        rows = [{"file_name": f"{n}.png", taken: each, other: f"{n} as tags"} for n, each in enumerate(SENTENCES)]
        if place == "csv":
            lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
            text(folder / "metadata.csv", "\n".join(lines))
        elif place == "beside":
            for n, row in enumerate(rows):
                text(folder / f"{n}.txt", row[taken])
                text(folder / f"{n}.json", {other: row[other]})
        else:
            text(folder / place, {row["file_name"]: {taken: row[taken], other: row[other]} for row in rows})

    return build


@pytest.mark.parametrize("place", ["parquet", "csv", "beside", "meta_cap.json"])
def test_a_column_of_captions_that_is_not_taken_is_named_with_the_settings_that_take_it(
    place: str, tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone, or as well; both work. A column with the same texts is no other reading."""
    taken, other = ("caption", "tags") if place.endswith("json") else ("text", "caption")
    two_columns(taken, other, place)(tmp_path / "data")
    hub_parquet(tmp_path / "same", text=SENTENCES, caption=SENTENCES, negative_prompt=["a bad one"] * COUNT)
    hub_parquet(tmp_path / "many", text=SENTENCES, **{f"prompt_{n}": ["another text"] * COUNT for n in range(5)})
    assert dry(make_config, tmp_path / "data") == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("the column")]
    assert f"'{other}'" in line and "'0 as tags'" in line
    for settings, captions in zip(re.findall(r"--set ('.*?'|\S+)", line), (4, 8), strict=True):
        assert dry(make_config, tmp_path / "data", *shlex.split(settings)) == 0
        assert f"{captions + 1} captions" in capsys.readouterr().out, "the empty one included"
    assert dry(make_config, tmp_path / "same") == 0
    assert "holds text" not in capsys.readouterr().out
    assert dry(make_config, tmp_path / "many") == 0
    said = capsys.readouterr().out
    assert said.count("holds text") == 3 and "prompt_3, prompt_4" in said


def tarred(*members: str) -> Callable[[Path], None]:
    """A tar of pictures and texts. members: names with the number in braces."""

    def build(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(folder / "0.tar", "w") as tar:
            for number, sentence in enumerate(SENTENCES):
                for name in members:
                    is_picture = name.rpartition(".")[2] in ("png", "jpg")
                    data = picture() + name.format(number).encode() if is_picture else sentence.encode()
                    if not is_picture and "{}" not in name:
                        data = json.dumps({f"{n}.png": each for n, each in enumerate(SENTENCES)}).encode()
                    if "{}" in name or not number:
                        member = tarfile.TarInfo(name.format(number))
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))

    return build


def beside_a_tar(folder: Path) -> None:
    tarred("{}.png")(folder)
    text(folder / "captions.json", {f"{n}.png": each for n, each in enumerate(SENTENCES)})


IN_TARS: dict[str, Callable[[Path], None]] = {
    "captions/0.txt": tarred("images/{}.png", "captions/{}.txt"),
    "0_caption.txt": tarred("{}.png", "{}_caption.txt"),
    "0.text": tarred("{}.png", "{}.text"),
    "0.tar/captions.json": tarred("{}.png", "captions.json"),
    "captions.json": beside_a_tar,
}
"""Captions of a tar that are not read: a name in the refusal, and what makes the tar."""


@pytest.mark.parametrize("name", IN_TARS)
def test_captions_in_another_place_of_a_tar_are_not_replaced_by_the_trigger_word(
    name: str, tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of the refusal works when pasted."""
    IN_TARS[name](tmp_path / "data")
    config = in_file(make_config(tmp_path), caption="sks dog")
    with pytest.raises(UserError, match=naming(name)) as error:
        sana_pipe.stages.encode.dry_run(config, str(tmp_path / "data"), probe=False)
    fix = str(error.value.fix)
    subprocess.run(["bash", "-ec", fix.partition(", and then")[0]], check=True)
    [place] = re.findall("with --data ([^ ;]+)", fix)
    capsys.readouterr()
    assert dry(make_config, Path(place)) == 0
    assert f"captions: {COUNT} of {COUNT}" in capsys.readouterr().out


def test_several_pictures_of_a_sample_of_a_tar_are_named(
    tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that share its caption, and those that are control pictures and masks by their names."""
    tarred("{}.jpg", "{}.png", "{}.txt", "{}.control.jpg", "{}.mask.png")(tmp_path / "data")
    assert dry(make_config, tmp_path / "data") == 0
    said = capsys.readouterr().out
    assert "4 times two pictures" in said and "0.tar/0.jpg and 0.tar/0.png" in said
    ways = ["data.pictures.control.suffix=.control", "data.pictures.mask.suffix=.mask"]
    assert [way for way in ways if way not in said] == []
    assert dry(make_config, tmp_path / "data", *ways) == 0
    assert "look like" not in capsys.readouterr().out


def test_a_caption_file_of_two_pictures_is_named(
    tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(tmp_path / "data")
    pictures(tmp_path / "data", "{}.jpg", None)
    assert dry(make_config, tmp_path / "data") == 0
    assert "0.txt of 0.jpg and 0.png" in capsys.readouterr().out


def test_names_in_another_case_find_their_captions_and_masks_and_exact_names_come_first(
    tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("A.png", "a.png", "B.PNG", "A-Mask.png", "a-MASK.png", "b-mask.png"):
        picture(tmp_path / "data" / name)
    for name in ("A", "a", "b"):
        text(tmp_path / f"data/{name}.txt", f"a picture of {name}")
    assert dry(make_config, tmp_path / "data", "data.pictures.mask.suffix=-mask") == 0
    said = capsys.readouterr().out
    assert "captions: 3 of 3" in said and "mask pictures: 3 of 3" in said and "of several pictures" not in said


def test_init_counts_the_latents_of_the_configured_vae(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 channels at 8 pixels 8 times the values of Sana's 32 at 32."""
    from sana_pipe.stages import init

    sizes: list[int] = []
    monkeypatch.setattr(init, "run_lines", lambda *arguments: [])
    monkeypatch.setattr(init, "disk_lines", lambda train, shape, data, cache, free: sizes.append(cache) or [])
    pictures(tmp_path / "dog")
    flux = {"_class_name": "AutoencoderKL", "latent_channels": 16, "block_out_channels": [8] * 4, "scaling_factor": 0.4}
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae/config.json").write_text(json.dumps(flux))
    for name, overrides in (("sana", ()), ("flux", (f"vae.id={tmp_path / 'vae'}", "vae.revision=null"))):
        options = init.Options(gpu="4090", out=tmp_path / f"{name}.yaml", overrides=overrides, **TRIGGER)
        assert init.run([str(tmp_path / "dog")], options) == 0
    assert sizes[1] - sizes[0] == (16 * 128**2 - 32 * 32**2) * 2, "in bf16, of the one picture that all files hold"


def test_init_takes_regularisation_pictures_for_none_of_the_subject(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix is the subject's alone; the command for the others comes before `run`."""
    from sana_pipe.config import load
    from sana_pipe.stages import init

    monkeypatch.setattr(init, "expected", lambda *arguments: [])
    pictures(tmp_path / "dog")
    pictures(tmp_path / "reg", caption=None)
    sources, out = [str(tmp_path / "dog"), str(tmp_path / "reg")], tmp_path / "a.yaml"
    assert init.run(sources, init.Options(gpu="4090", out=out, **TRIGGER)) == 0
    data = load(out).data
    assert (data.caption_prefix, data.caption) == ("sks dog, ", None)
    lines = capsys.readouterr().out.splitlines()
    first = next(line for line in lines if "sana-pipe encode" in line and str(tmp_path / "reg") in line)
    assert "data.caption=dog" in first
    assert lines[-1].startswith("next: sana-pipe run ")


def test_a_folder_of_links_and_a_mistyped_name_are_answered_with_the_place(
    tmp_path: Path, make_config: MakeConfig
) -> None:
    pictures(tmp_path / "pictures")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/there").symlink_to(tmp_path / "pictures")
    with pytest.raises(UserError, match=naming("there")) as error:
        dry(make_config, tmp_path / "linked")
    assert error.value.fix == f"--data {tmp_path / 'linked/there'}"
    assert dry(make_config, tmp_path / "linked/there") == 0
    with pytest.raises(UserError, match=naming("picturs")) as error:
        dry(make_config, tmp_path / "picturs")
    assert f"--data {tmp_path / 'pictures'}," in str(error.value.fix)


def test_run_without_a_configuration_says_that_it_trains_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sana_pipe.stages.run
    from sana_pipe.config import load_given, shipped

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sana_pipe.stages.run, "chain", lambda *arguments: iter(()))
    assert sana_pipe.stages.run.run(*load_given(None), None, (), ("pictures",), None) == 0
    said = capsys.readouterr().out
    assert "whole model" in said and "sana-pipe init --data pictures" in said
    shutil.copy(shipped()[0], "sana-pipe.yaml")
    assert sana_pipe.stages.run.run(*load_given(None), None, (), ("pictures",), None) == 0
    assert "whole model" not in capsys.readouterr().out


def test_a_folder_below_a_split_has_the_masks_of_the_folder_next_to_it(
    tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not those of pictures of the same name in another folder; a kind in another folder finds only its pictures."""
    for place in ("train/images", "images", "val/images"):
        pictures(tmp_path / "data", f"{place}/{{}}.png", f"{place}/{{}}.txt")
    pictures(tmp_path / "data", "train/masks/{}.png", None)
    mask = "data.pictures.mask={folder: train/masks, required: false}"
    assert dry(make_config, tmp_path / "data", mask) == 0
    said = capsys.readouterr().out
    assert "mask pictures: 4 of 12" in said and "mask picture of no picture" not in said
    shutil.rmtree(tmp_path / "data/images")
    pictures(tmp_path / "data", "edges/{}.png", None)
    assert dry(make_config, tmp_path / "data", mask, "data.pictures.control={folder: edges, required: false}") == 0
    said = capsys.readouterr().out
    assert "mask pictures: 4 of 8" in said and "control pictures: 0 of 8" in said


def test_the_tables_of_links_next_to_tars_are_no_second_kind_and_the_fix_for_two_kinds_works(tmp_path: Path) -> None:
    """Tables with pictures are, whatever their names: each kind is a pattern then, which any command takes."""
    img2dataset(tmp_path / "tars")
    links = pa.table({"url": ["http://x/y.jpg"] * COUNT, "caption": SENTENCES})
    pq.write_table(links, tmp_path / "tars/00000.parquet")
    assert open_source(str(tmp_path / "tars"), DataConfig()).format == "webdataset"
    hub_parquet(tmp_path / "tars", text=SENTENCES)
    for name in ("train-0.parquet", "00000.parquet"):
        (tmp_path / "tars/train-0.parquet").rename(tmp_path / "tars" / name)
        with pytest.raises(UserError, match=naming("*.tar", "*.parquet")) as error:
            open_source(str(tmp_path / "tars"), DataConfig())
        (tmp_path / "tars" / name).rename(tmp_path / "tars/train-0.parquet")
    assert [
        open_source(shlex.split(way)[1], DataConfig()).format
        for way in str(error.value.fix).partition(": ")[2].split(" or ")
    ] == [
        "parquet",
        "webdataset",
    ]


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("settings", [{}, {"caption": "sks"}, {"pictures": {"mask": {"suffix": "-mask"}}}])
def test_a_large_scan_is_not_copied_to_see_what_it_was_taken_for(
    settings: dict[str, Any], bare: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows some are read at a time; what remains of all is a bit a row or two."""
    rows = 50_000
    text = {"text": "a wheel " * 16, "weight": 1.0}
    place = {"kind": "mask", "item": "m" * 100, "part": None, "where": None, "digest": b"d" * 16}
    columns = {
        "item": [f"reg/{number:0100}.jpg" for number in range(rows - 1)] + ["a/9.jpg"],
        "captions": [[text], None if bare else [text]] * (rows // 2),
        "meta": ['{"a": "' + "b" * 100 + '"}'] * rows,
        "pictures": [[place]] * rows,
        "reject": [None, "no caption"] * (rows // 2),
    }
    empty = {name: [None] * rows for name in SCAN.names if name not in columns}
    scan = pa.table({**columns, **empty}, SCAN)
    picture(tmp_path / "data/0.png")
    source = open_source(str(tmp_path / "data"), config := DataConfig.model_validate(settings))
    monkeypatch.setattr(arrow, "ROWS", 500)
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool := pa.proxy_memory_pool(before))
    try:
        taken = understood.of(source, scan, config)
    finally:
        pa.set_memory_pool(before)
    assert (taken.usable, taken.captioned) == (rows // 2, rows // 2)
    assert len(taken.captions) == understood.SHOWN and taken.captions[-1][0] == columns["item"][rows - 2]
    assert list(taken.controls_and_masks.values()) in ([], [rows // 2])
    assert pool.max_memory() < 1 << 20 < scan.nbytes / 20


def test_captions_that_have_the_trigger_word_already_are_counted(
    tmp_path: Path, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["a photo of sks dog", "a dog", "[trigger] runs", "sks dogs"]
    for number, caption in enumerate(words):
        picture(tmp_path / f"data/{number}.png")
        text(tmp_path / f"data/{number}.txt", caption)
    assert dry(make_config, tmp_path / "data", "data.caption_prefix=sks dog, ") == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "get it twice" in line]
    assert "captions: 1 of 3 " in line and repr(words[0]) in line and "data.caption_prefix=" in line
    assert dry(make_config, tmp_path / "data") == 0
    assert "get it twice" not in capsys.readouterr().out


def test_a_table_in_another_encoding_is_refused_with_it(tmp_path: Path, make_config: MakeConfig) -> None:
    """Not with its column, which its header has."""
    picture(tmp_path / "data/0.png")
    (tmp_path / "data/metadata.csv").write_bytes("file_name,caption\n0.png,a café\n".encode("cp1252"))
    with pytest.raises(UserError, match="iconv -f CP1252 -t UTF-8") as error:
        sana_pipe.stages.encode.run(make_config(tmp_path, "data.caption_field=caption"), str(tmp_path / "data"))
    assert "which no item has" not in str(error.value)
