"""How captions are read from what people have: what was brought, and the captions that it must become."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sana_pipe.base.errors import UserError
from sana_pipe.config import load_given
from sana_pipe.data.cache.prompts import TRIGGER_PLACE, has_words
from sana_pipe.data.cache.scan_table import SCAN
from sana_pipe.data.encoding.scan import scan
from sana_pipe.data.sources import caption_signs
from sana_pipe.data.sources.caption_columns import CaptionRule
from sana_pipe.data.sources.config import DataConfig, TagsConfig
from sana_pipe.data.sources.detect import open_source
from sana_pipe.data.sources.reject_kinds import kind
from sana_pipe.data.sources.source import Item
from sana_pipe.data.sources.tag_sets import tags_of
from sana_pipe.data.sources.text_parts import parts_of
from sana_pipe.tools.planning import recommend
from tests.support.source_files import make_tar, opened

TAGS = ["1girl", "solo", "red_hair", "smile", "outdoors"]
JOINED = ", ".join(TAGS)
BARN, BOATS = "a red barn on a hill", "Two boats."

Brought = dict[str, Any]
"""File -> its text, or the JSON value in it; of a `.tar` the members, of a `.parquet` the columns."""


def bring(folder: Path, files: Brought) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".tar"):
            make_tar(path, list(content.items()))
        elif name.endswith(".parquet"):
            pq.write_table(pa.table(content), path)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def read(data: Path, **config: Any) -> dict[str, list[str]]:
    """The captions by picture; of a reject its reason."""
    entries = list(opened(data, **config).items())
    return {
        one.key: [text for text, _ in one.captions] if isinstance(one, Item) else [f"reject: {one.reason}"]
        for one in entries
    }


def row(name: str, **values: Any) -> str:
    return json.dumps({"file_name": name, **values}) + "\n"


LINES = f"{JOINED}\n\n{BARN}\r\n"
READINGS: dict[str, tuple[Brought, dict[str, Any], list[str]]] = {
    "gallery-dl's list of tags": ({"a.jpg": "", "a.jpg.json": {"tags": TAGS}}, {"caption_field": "tags"}, [JOINED]),
    "tags in a tar": ({"s.tar": {"a.jpg": "x", "a.json": {"tags": TAGS}}}, {"caption_field": "tags"}, [JOINED]),
    "tags in parquet": ({"t.parquet": {"jpg": [b"x"], "tags": [TAGS]}}, {"caption_field": "tags"}, [JOINED]),
    "tags in jsonl": ({"a.jpg": "", "metadata.jsonl": row("a.jpg", tags=TAGS)}, {"caption_field": "tags"}, [JOINED]),
    "two tags in a column of tags": (
        {"a.jpg": "", "a.json": {"tags": ["x", "y"]}},
        {"caption_field": "tags"},
        ["x, y"],
    ),
    "a list of sentences": ({"a.jpg": "", "a.json": {"text": [BARN, BOATS]}}, {}, [BARN, BOATS]),
    "sentences in parquet": ({"t.parquet": {"jpg": [b"x"], "text": [[BARN, BOATS]]}}, {}, [BARN, BOATS]),
    "a list of one": ({"a.jpg": "", "a.json": {"text": ["red barn"]}}, {}, ["red barn"]),
    "a list read as captions": (
        {"a.jpg": "", "a.json": {"text": TAGS}},
        {"caption_parts": "captions"},
        TAGS,
    ),
    "a list read as tags": ({"a.jpg": "", "a.json": {"text": ["x", "y"]}}, {"caption_parts": "tags"}, ["x, y"]),
    "lines as they are": ({"a.jpg": "", "a.txt": LINES}, {}, [LINES.strip()]),
    "a caption in each line": ({"a.jpg": "", "a.txt": LINES}, {"caption_parts": "captions"}, [JOINED, BARN]),
    "a caption in each line, in a tar": (
        {"s.tar": {"a.jpg": "x", "a.txt": LINES}},
        {"caption_parts": "captions"},
        [JOINED, BARN],
    ),
    "a caption in each line of a column": (
        {"t.parquet": {"jpg": [b"x"], "text": [LINES]}},
        {"caption_parts": "captions"},
        [JOINED, BARN],
    ),
    "a tag in each line": ({"a.jpg": "", "a.jpg.txt": "\n".join(TAGS)}, {"caption_parts": "tags"}, [JOINED]),
    "a list as JSON in csv": (
        {"a.jpg": "", "a.csv": f"""filename,raw\na.jpg,"[""{BARN}"", ""{BOATS}""]"\n"""},
        {"caption_field": "raw"},
        [BARN, BOATS],
    ),
    "a list as Python prints it": (
        {"a.jpg": "", "metadata.csv": f"""file_name,tags\na.jpg,"{TAGS}"\n"""},
        {"caption_field": "tags"},
        [JOINED],
    ),
    "a list as NumPy prints it": (
        {"t.parquet": {"jpg": [b"x"], "tags": ["['1girl' 'solo'\n 'red_hair']"]}},
        {"caption_field": "tags"},
        ["1girl, solo, red_hair"],
    ),
    "brackets that are no list": ({"a.jpg": "", "a.json": {"text": "[a sign] says [b]"}}, {}, ["[a sign] says [b]"]),
    "nested objects": ({"a.jpg": "", "a.json": {"json": {"prompt": BARN}}}, {"caption_field": "json.prompt"}, [BARN]),
    "nested in a tar": (
        {"s.tar": {"a.jpg": "x", "a.json": {"json": {"prompt": BARN}}}},
        {"caption_field": "json.prompt"},
        [BARN],
    ),
    "nested in jsonl": (
        {"a.jpg": "", "metadata.jsonl": row("a.jpg", json={"prompt": BARN})},
        {"caption_field": "json.prompt"},
        [BARN],
    ),
    "nested in parquet": (
        {"t.parquet": {"jpg": [b"x"], "json": [{"prompt": BARN}]}},
        {"caption_field": "json.prompt"},
        [BARN],
    ),
    "a name with backslashes in csv": (
        {"images/a.jpg": "", "metadata.csv": f"file_name,text\nimages\\a.jpg,{BARN}\n"},
        {},
        [BARN],
    ),
    "a name with backslashes in jsonl": ({"i/a.jpg": "", "a.jsonl": row("i\\a.jpg", text=BARN)}, {}, [BARN]),
    "a name with backslashes in parquet": (
        {"i/a.jpg": "", "t.parquet": {"file_name": ["i\\a.jpg"], "text": [BARN]}},
        {},
        [BARN],
    ),
    "a list with one picture": ({"t.parquet": {"images": [[b"\xff\xd8\xff"]], "text": [BARN]}}, {}, [BARN]),
    "a list with one name": ({"a.jpg": "", "a.jsonl": json.dumps({"images": ["a.jpg"], "text": BARN})}, {}, [BARN]),
    "a list of names in parquet": (
        {"a.jpg": "", "t.parquet": {"images": [["a.jpg"]], "text": [BARN]}},
        {},
        [BARN],
    ),
    "a list with several pictures": (
        {"t.parquet": {"images": [[b"\xff\xd8\xff"] * 2], "text": [BARN]}},
        {},
        ["reject: has 2 pictures: write a row for each"],
    ),
    "csv with spaces behind the separator": (
        {"a.jpg": "", "a.csv": f"image_name| number| comment\na.jpg| 0| {BARN}\n"},
        {"caption_field": "comment"},
        [BARN],
    ),
    "a field with a dot in a tar": (
        {"s.tar": {"a.jpg": "x", "a.prompt.txt": BARN, "a.other.txt": "x"}},
        {"caption_field": "prompt.txt"},
        [BARN],
    ),
    "columns of a field with a dot": (
        {"s.tar": {"a.jpg": "x", "a.Meta.json": {"prompt": BARN}}},
        {"caption_field": "meta.json.prompt"},
        [BARN],
    ),
    "the picture's ending in a tar": ({"s.tar": {"a.jpg": "x", "a.jpg.txt": BARN}}, {}, [BARN]),
    "kohya's meta_cap.json": (
        {"1.jpg": "", "meta_cap.json": {"1": {"caption": BARN, "tags": "a, b"}}},
        {},
        [BARN],
    ),
    "captions.json beside c.jpg": ({"c.jpg": "", "captions.json": {"c.jpg": BARN}}, {}, [BARN]),
    "captions.json with lists": ({"1.jpg": "", "captions.json": {"1.jpg": [BARN, BOATS]}}, {}, [BARN, BOATS]),
    "ControlNet's prompt.json": (
        {"t/1.png": "", "prompt.json": json.dumps({"target": "t/1.png", "prompt": BARN}) + "\n{}"},
        {"image_field": "target", "caption_field": "prompt", "at": "prompt.json"},
        [BARN],
    ),
    "Kaggle's captions.txt": (
        {"Images/1.jpg": "", "captions.txt": f'image,caption\n1.jpg,"{BARN}"\n1.jpg,{BOATS}\n'},
        {"image_root": "Images", "caption_field": "caption", "at": "captions.txt"},
        [BARN, BOATS],
    ),
    "captions.txt beside the pictures": (
        {"1.jpg": "", "captions.txt": f"image,text\n1.jpg,{BARN}\n"},
        {},
        [BARN],
    ),
    "a list of files beside captions": (
        {"1.jpg": "", "1.txt": BARN, "captions.json": {"1.jpg": BOATS}},
        {},
        [BARN],
    ),
    "a list of objects": (
        {"a.jpg": "", "a.json": {"sentences": [{"raw": BARN, "tokens": ["a"]}, {"id": 1, "raw": BOATS}]}},
        {"caption_field": "sentences.raw"},
        [BARN, BOATS],
    ),
    "a list of objects in parquet": (
        {"t.parquet": {"jpg": [b"x"], "tags": [[{"name": "1girl"}, {"name": "solo"}]]}},
        {"caption_field": "tags.name"},
        ["1girl, solo"],
    ),
    "a column with a dot in its name": ({"a.jpg": "", "a.json": {"x.y": BARN}}, {"caption_field": "x.y"}, [BARN]),
    "nested columns that are joined": (
        {"a.jpg": "", "a.json": {"t": {"who": "miku", "what": TAGS}}},
        {"caption_field": "t.who+t.what"},
        [f"miku, {JOINED}"],
    ),
}


@pytest.mark.parametrize("name", READINGS)
def test_captions_become_what_was_meant(name: str, tmp_path: Path) -> None:
    files, config, expected = READINGS[name]
    config, at = {**config}, config.get("at", "")
    config.pop("at", None)
    captions = list(read(bring(tmp_path, files) / at, **config).values())
    assert [one for one in captions if not one[0].startswith("reject: names no file")] == [expected]


LISTED: dict[str, tuple[Brought, str]] = {
    "fill50k": (
        {
            **dict.fromkeys(["target/1.png", "target/2.png", "source/1.png", "source/2.png"], ""),
            "prompt.json": "".join(
                json.dumps({"source": f"source/{n}.png", "target": f"target/{n}.png", "prompt": BARN}) + "\n"
                for n in (1, 2)
            ),
        },
        "prompt.json",
    ),
    "Kaggle": ({"Images/1.jpg": "", "captions.txt": f"image,caption\n1.jpg,{BARN}\n"}, "captions.txt"),
    "a subfolder": ({"x/1.jpg": "", "x/meta_cap.json": {"1": {"caption": BARN}}}, "x/meta_cap.json"),
    "another column": ({"1.jpg": "", "a.csv": f"picture,prompt\n1.jpg,{BARN}\n"}, "a.csv"),
}


@pytest.mark.parametrize("caption", [None, "none"])
@pytest.mark.parametrize("name", LISTED)
def test_a_file_that_lists_the_pictures_is_named_with_the_command_that_reads_it(
    tmp_path: Path, name: str, caption: str | None
) -> None:
    files, file = LISTED[name]
    bring(tmp_path / "data", files)
    with pytest.raises(UserError) as refused:
        read(tmp_path / "data", caption=caption)
    _, _, *words = shlex.split((refused.value.fix or "").partition(", or move")[0])
    assert words[:2] == ["--data", str(tmp_path / "data" / file)]
    config = load_given(None, words[3::2])[0].data
    captions = [
        [text for text, _ in one.captions] for one in open_source(words[1], config).items() if isinstance(one, Item)
    ]
    assert captions and all(texts == [BARN] for texts in captions)
    read(tmp_path / "data", caption="a photo")


def test_a_column_of_numbers_is_no_column_of_names_in_csv(tmp_path: Path) -> None:
    """`encode` reads names without an ending in .json files alone: a command that says so would fail."""
    rows = f"id,image,caption\n1,/upload/1.jpg,{BARN}\n"
    read(bring(tmp_path / "csv", {"1.jpg": "", "export.csv": rows}), caption="none")
    listed = [{"image": "1", "caption": BARN}]
    assert read(bring(tmp_path / "json", {"1.jpg": "", "export.json": listed})) == {"1.jpg": [BARN]}


def test_caption_columns_that_differ_between_files_are_read_by_the_advice(tmp_path: Path) -> None:
    bring(tmp_path, {"a.parquet": {"jpg": [b"x"], "text": [BARN]}, "b.parquet": {"jpg": [b"x"], "caption": [BOATS]}})
    for given in ({}, {"caption_field": "caption"}):
        with pytest.raises(UserError) as refused:
            read(tmp_path, **given)
        [_, option] = shlex.split(refused.value.fix or "")
        name, _, value = option.partition("=")
        assert name == "data.caption_weights"
        assert list(read(tmp_path, caption_weights=json.loads(value)).values()) == [[BARN], [BOATS]]


def test_empty_cells_of_csv_are_null(tmp_path: Path) -> None:
    bring(tmp_path, {"a.jpg": "", "metadata.csv": f"file_name,text,score\na.jpg,{BARN},\n"})
    [item] = opened(tmp_path).items()
    assert isinstance(item, Item) and item.meta == {"score": None}


@pytest.mark.parametrize("texts", [["red barn", "old barn"], ["cat", "dog", "bird"]])
def test_a_list_that_may_be_captions_or_tags_is_refused_with_both_settings(tmp_path: Path, texts: list[str]) -> None:
    bring(tmp_path, {"a.jpg": "", "a.json": {"text": texts}})
    [[reason]] = read(tmp_path).values()
    assert reason.startswith("reject")
    for way, expected in (("captions", texts), ("tags", [", ".join(texts)])):
        assert f"data.caption_parts={way}" in reason
        assert list(read(tmp_path, caption_parts=way).values()) == [expected]


UNREADABLE: dict[str, Any] = {
    "a list of objects": [{"raw": BARN}],
    "an object": {"en": BARN},
    "a number": 5,
    "a list that may be captions or tags": ["red barn", "old barn"],
}
PLACES: dict[str, Callable[[Any], Brought]] = {
    "beside": lambda value: {"a.jpg": "", "a.json": {"caption": value}},
    "metadata.jsonl": lambda value: {"a.jpg": "", "metadata.jsonl": row("a.jpg", caption=value)},
    "tar": lambda value: {"s.tar": {"a.jpg": "x", "a.json": {"caption": value}}},
    "parquet": lambda value: {"t.parquet": {"jpg": [b"x"], "caption": [value]}},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", UNREADABLE)
def test_a_default_caption_takes_no_place_of_a_column_that_cannot_be_read(
    value: str, place: str, tmp_path: Path
) -> None:
    """The reject names the setting that reads an object's text, and it works."""
    bring(tmp_path, PLACES[place](UNREADABLE[value]))
    [[reason]] = read(tmp_path, caption="sks dog", caption_field="caption").values()
    assert reason.startswith("reject") and "'caption'" in reason
    assert kind("a.jpg", reason).count("'caption'") == 1, "its kind names the column, too"
    if "object" in value:
        assert re.findall("[(]--set .*[)]", reason) == re.findall("[(]--set .*[)]", kind("a.jpg", reason)) != []
        [field] = re.findall(r"--set data\.caption_field=([\w.]+)", reason)
        assert list(read(tmp_path, caption="sks dog", caption_field=field).values()) == [[BARN]]


@pytest.mark.parametrize("place", ["beside", "metadata.jsonl", "tar"])
@pytest.mark.parametrize("text", ["", None])
def test_an_empty_caption_hides_no_caption_in_another_column(text: str | None, place: str, tmp_path: Path) -> None:
    value = {**PLACES[place](BARN)}
    name = next(file for file in value if not file.endswith("jpg"))
    if place == "tar":
        value[name] = {"a.jpg": "x", "a.json": {"text": text, "caption": BARN}}
    else:
        value[name] = row("a.jpg", text=text, caption=BARN)
    bring(tmp_path, value)
    [[reason]] = read(tmp_path, caption="sks dog").values()
    assert reason.startswith("reject") and "data.caption_field=caption" in reason
    assert list(read(tmp_path, caption="sks dog", caption_field="caption").values()) == [[BARN]]


@pytest.mark.parametrize(
    ("columns", "likely"),
    [
        (["negative_prompt", "style"], "style"),
        (["Negative Prompt", "prompt"], "prompt"),
        (["neg_prompt"], None),
        (["author.description", "content"], "content"),
        (["user.profile.title", "meta.prompt"], "meta.prompt"),
        (["negotiation_text"], "negotiation_text"),
    ],
)
def test_negative_prompts_and_texts_about_people_are_no_captions(columns: list[str], likely: str | None) -> None:
    assert CaptionRule().likely(columns) == likely
    assert CaptionRule(DataConfig(caption="x")).hides(set(columns) - {likely}) is None


@pytest.mark.parametrize(
    ("caption", "tags"),
    [
        ("1girl\nsolo\nred hair", ["1girl", "solo", "red hair"]),
        ("1girl，solo、red hair", ["1girl", "solo", "red hair"]),
        ("1girl, solo,\nred hair", ["1girl", "solo", "red hair"]),
        ("miku, 1girl solo red_hair", ["miku", "1girl", "solo", "red_hair"]),
        ("1girl solo red_hair", ["1girl", "solo", "red_hair"]),
        ("1girl; solo;red hair;", ["1girl", "solo", "red hair"]),
        ("1girl;\nsolo; red hair", ["1girl", "solo", "red hair"]),
        ("1girl, ;), red hair", ["1girl", ";)", "red hair"]),
        ("1girl ;d red_hair", ["1girl", ";d", "red_hair"]),
        ("photo of sks_dog on grass", []),
        (f"1girl, solo\n{BARN}", []),
        (f"{BARN}\na boat", []),
        ("1girl, solo.", []),
        ("", []),
    ],
)
def test_tags_are_found_as_other_tools_separate_them(caption: str, tags: list[str]) -> None:
    assert tags_of(caption) == tags


@pytest.mark.parametrize(
    ("column", "texts", "expected"),
    [
        ("tags", ["a cat", "a dog"], "captions"),
        ("keywords", ["cat", "dog"], "tags"),
        ("text", ["red_hair", "solo"], "tags"),
        ("text", ["一只猫坐在红色的沙发上面看着窗外", "猫"], "captions"),
        ("text", ["猫", "狗"], None),
    ],
)
def test_a_list_is_read_by_its_entries_and_its_name(column: str, texts: list[str], expected: str | None) -> None:
    assert parts_of(column, texts) == expected


def table(captions: list[list[str]], rejected: int = 0) -> pa.Table:
    rows = [{"item": f"{n}.jpg", "captions": [{"text": t, "weight": 1.0} for t in c]} for n, c in enumerate(captions)]
    rows += [{"item": "r.jpg", "captions": [{"text": "[trigger]", "weight": 1.0}], "reject": "x"}] * rejected
    return pa.Table.from_pylist([{**dict.fromkeys(SCAN.names), **each} for each in rows], schema=SCAN)


def test_what_other_trainers_read_in_captions_is_counted_by_picture() -> None:
    captions = [["plain"], ["[trigger] x", "[Trigger] y"], ["a ||| b", "{x|y} in <trigger>"], ["one\ntwo [name]"]]
    found = {sign.pattern: (sign.count, sign.item, sign.match) for sign in caption_signs.signs(table(captions, 3))}
    assert found == {
        TRIGGER_PLACE: (2, "1.jpg", "[trigger]"),
        caption_signs.PLACEHOLDER: (1, "3.jpg", "[name]"),
        caption_signs.SEPARATOR: (1, "2.jpg", "|||"),
        caption_signs.CHOICE: (1, "2.jpg", "{x|y}"),
        caption_signs.LINES: (1, "3.jpg", "\n"),
    }
    generated = f"{BARN}\nNegative prompt: ugly, x\nSteps: 20, Sampler: Euler a, Seed: 1"
    found = {
        sign.pattern: (sign.count, sign.match)
        for sign in caption_signs.signs(table([[generated], [f"sks, {BARN}\nSteps: 9, Sampler: x"]]))
    }
    assert found == {caption_signs.PARAMETERS: (2, "Negative prompt:")}, "and not of several lines"
    assert not caption_signs.signs(table([["[x] {y} <z> | a trigger"]])), "brackets alone are none"


def test_captions_that_a_cleaning_empties_are_counted_and_the_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sana_pipe.data.cache.arrow.ROWS", 2)
    empty = "https://www.example.com/x", "\u732b\u5ea7"
    found = table([["A cat"], [""], ["a dog", empty[0], empty[1]], [empty[1]], ["caf\u00e9"], [empty[0]]], 3)
    [line] = caption_signs.emptied(found, "prx")
    assert line.startswith("captions: 3 pictures") and "2.jpg" in line and empty[0] in line
    assert caption_signs.emptied(table([["A cat"], [""], [" "], ["caf\u00e9"]]), "prx") == []
    assert caption_signs.emptied(found, "diffusers") == caption_signs.emptied(found, "unchanged") == []


def test_captions_are_searched_in_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sana_pipe.data.cache.arrow.ROWS", 2)
    [sign] = caption_signs.signs(table([["x"]] * 5 + [["{a|b}"]] * 3))
    assert (sign.count, sign.item) == (3, "5.jpg")


def test_tags_that_make_no_variant_are_said(tmp_path: Path) -> None:
    config = DataConfig(tags=TagsConfig(shuffle=2), caption_prefix="sks, ")

    def said(files: Brought) -> list[str]:
        source = opened(bring(tmp_path, files), **config.model_dump(exclude={"tags"}), tags={"shuffle": 2})
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        made = scan(
            source,
            "s",
            None,
            max_pixels=9,
            workers=1,
            rehash=False,
            progress=nothing,
            look=lambda *_: {"digest": b"x" * 16},
        )
        return caption_signs.without_variants(made, config)

    [line] = said({"a.jpg": "", "a.txt": BARN})
    assert "data.tags" in line and "a.jpg" in line
    [line] = said({"b.jpg": "", "b.txt": JOINED})
    assert "1 of 2" in line
    assert not said({"a.txt": JOINED})


@pytest.mark.parametrize(
    ("text", "words", "has"),
    [("a mask", "ask", False), ("SKS  dog, x", "sks dog", True), ("skss", "sks", False), ("(sks)", "sks", True)],
)
def test_a_trigger_is_found_as_whole_words(text: str, words: str, has: bool) -> None:
    assert has_words(text, words) == has


@pytest.mark.parametrize(
    ("captions", "keep", "drop"),
    [
        (["sks, a b, c, d"] * 3, 1, 0.1),
        (["1girl, sks, c, d"] * 3, 2, 0.1),
        (["sks, b, c, d", "b, sks, c, d"], 0, 0.0),
        (["b, c, d, e, sks"] * 2, 0, 0.0),
        (["[trigger], b, c, d"] * 3, 1, 0.1),
        (["masks, c, d, e"] * 2, 0, 0.1),
    ],
)
def test_the_trigger_word_among_tags_stays_in_its_place(captions: list[str], keep: int, drop: float) -> None:
    sides = np.full(9, 1024)
    facts = recommend.Facts(sides, sides, 9, 9, tuple(captions), 1, None, 1)
    choices = {each.option: each.value for each in recommend.recommend(facts, "lora", "sks").choices}
    assert choices["data.tags"] == {"shuffle": 4, "drop": drop, "keep": keep}
    assert ("data.caption_prefix" in choices) == (captions[0][0] in "m[")


NESTED: dict[str, Brought] = {
    "a field of a tar": {"s.tar": {"a.jpg": "x", "a.caption.txt": BARN}},
    "an object in a tar": {"s.tar": {"a.jpg": "x", "a.json": {"meta": {"prompt": BARN}}}},
    "a structure in parquet": {"t.parquet": {"jpg": [b"x"], "meta": [{"prompt": BARN}]}},
    "an object in jsonl": {"a.jpg": "", "metadata.jsonl": row("a.jpg", meta={"prompt": BARN})},
}


@pytest.mark.parametrize("name", NESTED)
def test_the_advice_for_a_caption_within_something_is_accepted(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError) as refused:
        read(bring(tmp_path, NESTED[name]))
    [_, option] = shlex.split((refused.value.fix or "").partition(", or")[0])
    config = load_given(None, [option])[0].data
    [item] = open_source(str(tmp_path), config).items()
    assert isinstance(item, Item) and item.captions == ((BARN, 1.0),)


def test_the_reject_for_a_caption_within_an_object_names_its_column(tmp_path: Path) -> None:
    [[reason]] = read(bring(tmp_path, {"a.jpg": "", "a.json": {"meta": {"prompt": BARN}}})).values()
    assert "data.caption_field=meta.prompt" in reason


def test_the_words_of_the_prefix_take_the_place_of_the_trigger(tmp_path: Path) -> None:
    """In other captions they stand in front; without a prefix the place stays, and is counted."""
    files = {f"{n}.jpg": "" for n in "abc"}
    texts = {"a.txt": "a [trigger] and <Trigger_Word>", "b.txt": "a dog", "c.txt": "a [name]"}
    data = bring(tmp_path, {**files, **texts})
    for prefix, expected in (
        ("sks dog, ", ["a sks dog and sks dog", "sks dog, a dog", "sks dog, a [name]"]),
        ("", ["a [trigger] and <Trigger_Word>", "a dog", "a [name]"]),
    ):
        source = opened(data, caption_prefix=prefix)
        assert [item.captions[0][0] for item in source.items() if isinstance(item, Item)] == expected
