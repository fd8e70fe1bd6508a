"""A source remembers how it was read; another way is taken only when it is given on purpose."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.cache.scan_table import SCAN
from pipeline.config import DataConfig, load
from pipeline.encoding.reading import as_read, settled
from pipeline.encoding.survey import fit_notes
from tests.support.messages import naming

PREFIX = "sks style, "
SET = f"data.caption_prefix={PREFIX!r}"


def read(scan: dict[str, Any] | None, path: Path | str | None, *overrides: str, format: str | None = None) -> Any:
    """(reading, scan document of it) of an `encode` with this configuration."""
    reading = settled(load(path, list(overrides)), format, "pictures", scan)
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
        assert again.config.data.caption_prefix == PREFIX
        assert len(again.notes) == 1
        assert re.search(naming("pictures", "data.caption_prefix", PREFIX, "--set"), again.notes[0])
        assert after["read"]["used"] == scan["read"]["used"]
    changed, scan = read(scan, plain, "data.caption_prefix=''")
    assert changed.config.data.caption_prefix == ""
    assert len(changed.notes) == 1 and scan == {}
    unchanged, _ = read(scan, plain)
    assert unchanged.config.data.caption_prefix == "" and not unchanged.notes


def test_a_file_gives_what_it_says_anew(tmp_path: Path) -> None:
    path = file(tmp_path, "own.yaml", "{caption_prefix: 'one, '}")
    _, scan = read(None, path)
    for other in (file(tmp_path, "without.yaml", "{}"), None, "sana_1600m_1024"):  # says nothing of it
        kept, _ = read(scan, other)
        assert kept.config.data.caption_prefix == "one, " and len(kept.notes) == 1
    edited, scan = read(scan, file(tmp_path, "own.yaml", "{caption_prefix: 'two, '}"))
    assert edited.config.data.caption_prefix == "two, " and len(edited.notes) == 1
    again, _ = read(scan, path)
    assert again.config.data.caption_prefix == "two, " and not again.notes


def test_every_way_of_reading_is_remembered(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "caption_weights": {"short": 1.0, "long": 3.0},
        "caption_scores": {"long": "clip"},
        "score_threshold": 20.0,
        "score_power": 5.0,
        "caption": "filename",
        "caption_prefix": "a",
        "caption_suffix": "b",
        "tags": {"shuffle": 2, "drop": 0.5, "keep": 1},
        "image_field": "target",
        "image_root": "pictures",
        "buckets": [[512, 512], [256, 1024]],
    }
    plain = file(tmp_path, "plain.yaml", "{}")
    _, scan = read(None, plain, *(f"data.{name}={value}" for name, value in options.items()), format="parquet")
    again, after = read(scan, plain)
    assert {name: again.config.data.model_dump(mode="json")[name] for name in options} == options
    assert again.format == "parquet" and after["read"]["used"] == scan["read"]["used"]
    assert len(again.notes) == len(options) + 1
    assert as_read(load("sana_1600m_1024").data, scan) == again.config.data
    # options of which one replaces the other are given together
    field, _ = read(scan, plain, "data.caption_field=short", "data.resolution=512", format="folder")
    assert (field.config.data.caption_weights, field.config.data.buckets) == ({}, "sana")
    assert field.format == "folder" and field.config.data.caption_suffix == "b"


@pytest.mark.parametrize("first", ["sana_600m_512", "sana_1600m_1024"])
def test_a_configuration_that_is_asked_for_decides_and_the_shipped_default_does_not(first: str) -> None:
    """That the shipped default has another resolution does not encode everything again."""
    _, scan = read(None, first)
    resolution = load(first).data.resolution
    assert read(scan, None)[0].config.data.resolution == resolution
    for second in ("sana_600m_512", "sana_1600m_1024"):
        assert read(scan, second)[0].config.data.resolution == load(second).data.resolution


def test_a_note_names_what_is_given_of_further_pictures(tmp_path: Path) -> None:
    plain = file(tmp_path, "plain.yaml", "{}")
    _, scan = read(None, plain, "data.pictures.mask.made=alpha")
    changed, _ = read(scan, plain, "data.pictures={control: {folder: edges}}")
    [note] = changed.notes
    assert '"control": {"folder": "edges"' in note and '"made": "alpha"' in note and "null" not in note
    (given,) = re.findall(r"so far: (.*)\)", note)
    name, value = shlex.split(given)
    assert name == "--set" and load(plain, [value]).data.pictures == read(scan, plain)[0].config.data.pictures


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
