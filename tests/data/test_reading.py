"""A source remembers how it was read; another way is taken only when it is given on purpose."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import sana_pipe.stages.encode
from sana_pipe.base.errors import ConfigError
from sana_pipe.config import load
from sana_pipe.data.cache.scan_table import SCAN
from sana_pipe.data.encoding.reading import as_read, settled
from sana_pipe.data.encoding.survey import fit_notes
from sana_pipe.data.sources.config import DataConfig, TagsConfig
from tests.support.messages import naming

PREFIX = "sks style, "
SET = f"data.caption_prefix={PREFIX!r}"


def read(scan: dict[str, Any] | None, path: Path | str | None, *overrides: str, format: str | None = None) -> Any:
    """(reading, scan document of it) of an `encode` with this configuration."""
    reading = settled(sana_pipe.stages.encode.reading_of(load(path, list(overrides)), format), "pictures", scan)
    return reading, reading.document()


def file(folder: Path, name: str, data: str) -> Path:
    shipped = load("tiny").model_dump(mode="json")
    path = folder / name
    path.write_text(f"vae: {{id: {shipped['vae']['id']}}}\ntext: {{id: x}}\nmodel: {{arch: {{}}}}\ndata: {data}\n")
    return path


def test_what_set_gave_stays_until_set_gives_another(tmp_path: Path) -> None:
    plain = file(tmp_path, "plain.yaml", "{}")
    dumped = file(tmp_path, "dumped.yaml", "{caption_prefix: '', caption_field: text}")
    _, scan = read(None, plain, SET)
    for path in (plain, dumped, None):  # a file that says what it said before gives nothing on purpose
        again, after = read(scan, path)
        assert again.data.caption_prefix == PREFIX
        assert len(again.notes) == 1
        assert re.search(naming("pictures", "data.caption_prefix", PREFIX, "--set"), again.notes[0])
        assert after["read"]["used"] == scan["read"]["used"]
    changed, scan = read(scan, plain, "data.caption_prefix=''")
    assert changed.data.caption_prefix == ""
    assert len(changed.notes) == 1 and scan == {}
    unchanged, _ = read(scan, plain)
    assert unchanged.data.caption_prefix == "" and not unchanged.notes


def test_a_file_gives_what_it_says_anew(tmp_path: Path) -> None:
    path = file(tmp_path, "own.yaml", "{caption_prefix: 'one, '}")
    _, scan = read(None, path)
    for other in (file(tmp_path, "without.yaml", "{}"), None, "sana_1600m_1024"):  # says nothing of it
        kept, _ = read(scan, other)
        assert kept.data.caption_prefix == "one, " and len(kept.notes) == 1
    edited, scan = read(scan, file(tmp_path, "own.yaml", "{caption_prefix: 'two, '}"))
    assert edited.data.caption_prefix == "two, " and len(edited.notes) == 1
    again, _ = read(scan, path)
    assert again.data.caption_prefix == "two, " and not again.notes


def test_every_way_of_reading_is_remembered(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "caption_weights": {"short": 1.0, "long": 3.0},
        "caption_scores": {"long": "clip"},
        "caption": "filename",
        "caption_prefix": "a",
        "tags": {"shuffle": 2, "drop": 0.5, "keep": 1},
        "image_field": "target",
        "image_root": "pictures",
        "buckets": [[512, 512], [256, 1024]],
    }
    plain = file(tmp_path, "plain.yaml", "{}")
    _, scan = read(None, plain, *(f"data.{name}={value}" for name, value in options.items()), format="parquet")
    again, after = read(scan, plain)
    assert {name: again.data.model_dump(mode="json")[name] for name in options} == options
    assert again.format == "parquet" and after["read"]["used"] == scan["read"]["used"]
    assert len(again.notes) == len(options) + 1
    assert as_read(load("sana_1600m_1024").data, scan) == again.data
    # options of which one replaces the other are given together
    field, _ = read(scan, plain, "data.caption_field=short", "data.resolution=512", format="folder")
    assert (field.data.caption_weights, field.data.buckets) == ({}, "sana")
    assert field.format == "folder" and field.data.caption_prefix == "a"


@pytest.mark.parametrize("first", ["sana_600m_512", "sana_1600m_1024"])
def test_a_configuration_that_is_asked_for_decides_and_the_shipped_default_does_not(first: str) -> None:
    """That the shipped default has another resolution does not encode everything again."""
    _, scan = read(None, first)
    resolution = load(first).data.resolution
    assert read(scan, None)[0].data.resolution == resolution
    for second in ("sana_600m_512", "sana_1600m_1024"):
        assert read(scan, second)[0].data.resolution == load(second).data.resolution


def test_a_note_names_what_is_given_of_controls_and_masks(tmp_path: Path) -> None:
    plain = file(tmp_path, "plain.yaml", "{}")
    _, scan = read(None, plain, "data.pictures.mask.made=alpha")
    changed, _ = read(scan, plain, "data.pictures.mask={folder: masks}")
    [note] = changed.notes
    assert '"folder": "masks"' in note and '"made": "alpha"' in note and "null" not in note
    (given,) = re.findall(r"so far: (.*)\)", note)
    name, value = shlex.split(given)
    assert name == "--set" and load(plain, [value]).data.pictures == read(scan, plain)[0].data.pictures


MASK, CONTROL = {"suffix": "-masklabel", "required": False}, {"folder": "poses"}
REMEMBERED = {
    "data.pictures.mask": MASK,
    "data.pictures.control": CONTROL,
    "data.tags": {"shuffle": 2, "keep": 1},
    "data.caption_weights": {"short": 1.0, "long": 3.0},
    "encode.signals": ["phash"],
}
STAYS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "nothing": ([], {}),
    "another folder of masks": (
        ["data.pictures.mask={folder: masks}"],
        {"data.pictures.mask": {"folder": "masks", "required": False}},
    ),
    "another folder of masks, by its name": (
        ["data.pictures.mask.folder=masks"],
        {"data.pictures.mask": {"folder": "masks", "required": False}},
    ),
    "a mask that is made is always there": (
        ["data.pictures.mask.made=alpha"],
        {"data.pictures.mask": {"made": "alpha"}},
    ),
    "whether masks are required": (
        ["data.pictures.mask.required=true"],
        {"data.pictures.mask": {"suffix": "-masklabel"}},
    ),
    "all control pictures and masks": (
        ["data.pictures={control: {column: edges}}"],
        {"data.pictures.control": {"column": "edges"}},
    ),
    "no masks": (["data.pictures.mask=null"], {"data.pictures.mask": None}),
    "no control pictures and masks": (
        ["data.pictures={}"],
        {"data.pictures.mask": None, "data.pictures.control": None},
    ),
    "a new mask": (
        ["data.pictures.mask=null", "data.pictures.mask.folder=masks"],
        {"data.pictures.mask": {"folder": "masks"}},
    ),
    "fewer tags": (["data.tags.drop=0.5"], {"data.tags": {"shuffle": 2, "keep": 1, "drop": 0.5}}),
    "fewer tags, as a mapping": (["data.tags={drop: 0.5}"], {"data.tags": {"shuffle": 2, "keep": 1, "drop": 0.5}}),
    "no tags": (["data.tags=null"], {"data.tags": None}),
    "one weight": (
        ["data.caption_weights.alt=2"],
        {"data.caption_weights": {"short": 1.0, "long": 3.0, "alt": 2.0}},
    ),
    "other weights": (["data.caption_weights={alt: 2}"], {"data.caption_weights": {"alt": 2.0}}),
    "no hashes": (["encode.signals=[]"], {"encode.signals": []}),
}


@pytest.mark.parametrize("case", STAYS)
def test_what_a_source_has_stays_until_it_is_changed_option_by_option(case: str, tmp_path: Path) -> None:
    plain = file(tmp_path, "plain.yaml", "{pictures: {control: {made: canny}}}")
    _, scan = read(None, plain, *(f"{option}={json.dumps(value)}" for option, value in REMEMBERED.items()))
    overrides, changed = STAYS[case]
    reading, after = read(scan, plain, *overrides)
    wanted = load(plain, [f"{option}={json.dumps(value)}" for option, value in {**REMEMBERED, **changed}.items()])
    assert (reading.data, reading.encode) == (wanted.data, wanted.encode)
    for option in REMEMBERED:
        [said] = [note for note in reading.notes if re.search(naming(option, "--set"), note)]
        assert ("so far: " in said) == (option in changed)
    assert read(after, plain)[0].data == wanted.data, "and it is remembered in turn"


def test_a_file_that_says_something_else_changes_what_it_names(tmp_path: Path) -> None:
    before = file(tmp_path, "a.yaml", "{tags: {drop: 0.1, keep: 1}, pictures: {mask: {suffix: -m}}}")
    _, scan = read(None, before, "data.tags.shuffle=2", "data.pictures.control.folder=edges")
    drop, _ = read(scan, file(tmp_path, "b.yaml", "{tags: {drop: 0.2, keep: 1}, pictures: {mask: {suffix: -m}}}"))
    assert drop.data.tags == TagsConfig(drop=0.2, keep=1, shuffle=2)
    assert drop.data.pictures == load(before, ["data.pictures.control.folder=edges"]).data.pictures
    without, _ = read(scan, file(tmp_path, "c.yaml", "{tags: null, pictures: {control: {folder: poses}}}"))
    assert without.data.tags is None and without.data.pictures.mask is None
    assert without.data.pictures.control == load("tiny", ["data.pictures.control.folder=poses"]).data.pictures.control


def test_a_control_picture_without_a_place_names_the_options(tmp_path: Path) -> None:
    plain = file(tmp_path, "plain.yaml", "{}")
    for scan in (None, read(None, plain, SET)[1]):
        with pytest.raises(ConfigError, match=naming("data.pictures.mask.suffix", "--set", "pictures")):
            read(scan, plain, "data.pictures.mask.required=false")


def test_pictures_that_fit_their_bucket_badly_are_counted_unless_a_limit_decides() -> None:
    sizes = [("small.png", 400, 400), ("tiny.png", 1, 1), ("panorama.png", 10_000, 1_000), ("good.png", 1024, 1024)]
    rows = [{"item": item, "width": width, "height": height} for item, width, height in sizes]
    rows += [{"item": "out.png", "width": 1, "height": 1, "reject": "left out"}, {"item": "unread.png"}]
    table = pa.Table.from_pylist([dict.fromkeys(SCAN.names) | row for row in rows], SCAN)
    shapes = [(1024, 1024), (512, 2048)]
    enlarged, cropped = fit_notes(table, shapes, DataConfig())
    assert enlarged.startswith("2 ") and "tiny.png" in enlarged and "data.max_upscale" in enlarged
    assert cropped.startswith("1 ") and "panorama.png" in cropped and "data.max_crop_loss" in cropped
    assert fit_notes(table, shapes, DataConfig(max_upscale=1.0, max_crop_loss=0.1)) == []
