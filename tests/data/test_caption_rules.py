"""What a picture says: captions of NVlabs' folders, of pictures without any, text around all, and columns mistyped."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sana_pipe.base.errors import UserError
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.layout import content_digest
from sana_pipe.data.encoding import scan as scanning
from sana_pipe.data.encoding import scan_rows
from sana_pipe.data.encoding.fragments import Fragments
from sana_pipe.data.sources.caption_columns import CaptionCandidate, CaptionRule
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.detect import open_source
from sana_pipe.data.sources.source import Item, Place, Reject, Source
from sana_pipe.data.work.claims import Claims
from sana_pipe.data.work.engine import Worker
from sana_pipe.data.work.stop import Stop
from tests.support.source_files import make_tar

Captions = dict[str, dict[str, float]]


def png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (40, 40)).save(out, "png")
    return out.getvalue()


def put(root: Path, **files: str | dict[str, Any]) -> Path:
    """`a_b=...`: the file a.b; a double underscore is a folder."""
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png() if path.suffix == ".png" else _text(content).encode())
    return root


def _text(content: str | dict[str, Any]) -> str:
    return content if isinstance(content, str) else json.dumps(content)


def said(path: Path, raw: bool = False, **config: Any) -> tuple[Captions, dict[str, str]]:
    """Captions with their weights, and rejects."""
    source = open_source(str(path), DataConfig(**config), raw=raw)
    result = list(source.items())
    return (
        {one.key: dict(one.captions) for one in result if isinstance(one, Item)},
        {one.key: one.reason for one in result if isinstance(one, Reject)},
    )


# ---------------------------------------------------------------- pictures without captions


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("none", ["", ""]),
        ("filename", ["red cat", "b"]),
        ("folder", ["sks dog", "pics"]),
        ("a photo of sks dog", ["a photo of sks dog"] * 2),
    ],
)
def test_a_folder_of_pictures_alone_says_what_is_configured(tmp_path: Path, caption: str, expected: list[str]) -> None:
    root = tmp_path / "pics"
    for name in ("sks_dog/red_cat.png", "b.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png())
    assert set(said(root)[1]) == {"sks_dog/red_cat.png", "b.png"}
    actual, rejects = said(root, caption=caption)
    assert [list(actual[key]) for key in ("sks_dog/red_cat.png", "b.png")] == [[text] for text in expected]
    assert not rejects
    (root / "b.txt").write_text("what is written goes first")
    assert list(said(root, caption=caption)[0]["b.png"]) == ["what is written goes first"]


def test_tars_and_tables_without_captions(tmp_path: Path) -> None:
    make_tar(tmp_path / "x.tar", [("0.png", "p"), ("0.json", {"width": 3}), ("1.png", "p")])
    assert said(tmp_path / "x.tar", caption="folder") == ({"x.tar/0.png": {"x": 1.0}, "x.tar/1.png": {"x": 1.0}}, {})
    pq.write_table(pa.table({"image": [png()], "score": [1.0]}), tmp_path / "t.parquet")
    name = f"t.parquet/{content_digest(png())}"
    assert said(tmp_path / "t.parquet", caption="all the same") == ({name: {"all the same": 1.0}}, {})
    put(tmp_path, a_png="")
    (tmp_path / "l.jsonl").write_text('{"file_name": "a.png", "score": 1}\n')
    assert said(tmp_path / "l.jsonl", caption="filename") == ({"a.png": {"a": 1.0}}, {})


def test_fields_of_danbooru_are_joined(tmp_path: Path) -> None:
    tags = {"tag_string_character": "hatsune_miku", "tag_string_general": "1girl solo", "tags_meta": ["a", "", "b"]}
    here = put(tmp_path / "d", a_png="", a_json={**tags, "score": 7, "rating": None})
    put(here, b_png="", b_json={"tag_string_general": "sky"})
    field = "tag_string_character + tag_string_general+tags_meta+rating"
    expected = {"a.png": {"hatsune_miku, 1girl solo, a, b": 1.0}, "b.png": {"sky": 1.0}}
    assert said(here, caption_field=field) == (expected, {})
    assert said(here, caption_weights={field: 2.0})[0]["b.png"] == {"sky": 2.0}
    source = open_source(str(here), DataConfig(caption_field=field))
    assert [set(item.meta) for item in source.items() if isinstance(item, Item)] == [{"score"}, set()]
    pq.write_table(pa.Table.from_pylist([{"image": png(), **tags}]), tmp_path / "t.parquet")
    assert list(said(tmp_path / "t.parquet", caption_field=field)[0].values()) == [expected["a.png"]]
    put(tmp_path / "c", a_png="", a_json={"x": "left", "x+y": "the column itself"})
    assert said(tmp_path / "c", caption_field="x+y") == ({"a.png": {"the column itself": 1.0}}, {})
    mistyped = open_source(str(here), DataConfig(caption_field="tag_string_general+tag_string_artists"))
    assert list(mistyped.items())
    with pytest.raises(UserError, match="tag_string_artists"):
        mistyped.rule.check_seen()


def test_the_number_of_a_folder_of_kohyas_is_no_caption(tmp_path: Path) -> None:
    names = {"10_sks dog": "sks dog", "1_dog": "dog", "2023_summer": "2023 summer", "3d": "3d", "100_a_b": "a b"}
    for name in names:
        put(tmp_path / name, a_png="")
    said_of = {f"{name}/a.png": {caption: 1.0} for name, caption in names.items()}
    assert said(tmp_path, caption="folder") == (said_of, {})


def test_text_is_put_before_every_caption(tmp_path: Path) -> None:
    put(tmp_path, a_png="", a_txt="one", a_json={"text": "two"}, b_png="")
    result, _ = said(tmp_path, caption="none", caption_prefix="sks, ")
    assert result == {"a.png": {"sks, one": 1.0, "sks, two": 1.0}, "b.png": {"sks, ": 1.0}}


def test_each_rule_has_an_identity() -> None:
    """It is in the stamps of scanned tars and tables, which are read again under another rule."""
    ways: list[dict[str, Any]] = [{"caption": "none"}, {"caption_prefix": "x"}, {"caption_parts": "tags"}]
    rules = [CaptionRule(DataConfig(**way)) for way in [{}, *ways]] + [CaptionRule(DataConfig(), raw=True)]
    assert len({rule.identity() for rule in rules}) == 5


# ---------------------------------------------------------------- NVlabs


def test_nvlabs_folders_have_captions_and_scores_in_files_of_their_suffixes(tmp_path: Path) -> None:
    """As their SanaImgDataset reads them: {name: {column: text}}, {name: {column: score}}; `prompt` is the .txt."""
    put(
        tmp_path,
        a_png="",
        a_txt="plain",
        ab_png="",
        ab_txt="other",
        a_json={"a": {"vila": "by VILA"}},
    )
    (tmp_path / "a_InternVL2-26B.json").write_text(json.dumps({"a": {"intern": "by InternVL"}}))
    (tmp_path / "a_clip_score.json").write_text(json.dumps({"a": {"prompt": 26, "vila": 13, "intern": 52.0}}))
    (tmp_path / "ab_InternVL2-26B.json").write_text(json.dumps({"ab": {"intern": "of ab"}}))
    (tmp_path / "a_notes.json").write_text(json.dumps({"what": "something else"}))
    (tmp_path / "meta_data.json").write_text(json.dumps({"img_names": ["a", "ab"]}))
    weights = {"txt": 1, "vila": 1, "intern": 1}
    result, rejects = said(tmp_path, caption_weights=weights)
    assert result == {"a.png": {"plain": 0.5**10, "by InternVL": 1.0}, "ab.png": {"other": 1.0, "of ab": 1.0}}
    assert not rejects
    source = open_source(str(tmp_path), DataConfig(caption_weights=weights))
    list(source.items())
    assert source.ignored.total == 3  # the notes, the list of names, and the caption that its score rules out
    before = scan(tmp_path, weights)
    (tmp_path / "a_InternVL2-26B.json").write_text(json.dumps({"a": {"intern": "changed!"}}))
    assert scan(tmp_path, weights) != before


def scan(path: Path, weights: dict[str, float]) -> list[Any]:
    source = open_source(str(path), DataConfig(caption_weights=weights))
    table = scanning.scan(
        source, "s", None, max_pixels=10**6, workers=1, rehash=False, progress=lambda done, whole: None
    )
    return table.column("captions").to_pylist()


def test_captions_of_columns_are_raw_under_the_prompting_of_nvlabs(tmp_path: Path) -> None:
    make_tar(
        tmp_path / "x.tar",
        [
            ("0.png", "p"),
            ("0.json", {"text": " A \n"}),
            ("1.png", "p"),
            ("1.json", {"text": None}),
            ("2.png", "p"),
            ("2.json", {"other": 1}),
        ],
    )
    result, rejects = said(tmp_path / "x.tar", raw=True)
    assert result == {"x.tar/0.png": {" A \n": 1.0}, "x.tar/1.png": {"": 1.0}}
    assert set(rejects) == {"x.tar/2.png"}
    result, rejects = said(tmp_path / "x.tar")
    assert result == {"x.tar/0.png": {"A": 1.0}}
    assert set(rejects) == {"x.tar/1.png", "x.tar/2.png"}


# ---------------------------------------------------------------- columns that are not there


def test_a_column_that_no_item_has_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    put(tmp_path / "f", a_png="", a_json={"short": "s", "long": "l"}, b_png="", b_json={"short": "s", "rare": "r"})
    make_tar(tmp_path / "x.tar", [("0.png", png()), ("0.json", {"short": "s", "long": "l"})])
    table = pa.table({"image": [png()], "short": ["s"], "long": ["l"]})
    pq.write_table(table, tmp_path / "t.parquet")
    for path in (tmp_path / "f", tmp_path / "x.tar", tmp_path / "t.parquet"):
        with pytest.raises(UserError, match="'lnog'") as refused:
            scan(path, {"short": 1, "lnog": 3})
        assert "'long'" in str(refused.value.fix)
        assert len(scan(path, {"short": 1, "long": 3})[0]) == 2
    assert len(scan(tmp_path / "f", {"short": 1, "rare": 3})) == 2
    with pytest.raises(UserError, match="'txt'"):
        scan(tmp_path / "f", {"short": 1, "txt": 3})


def test_columns_that_another_process_has_seen_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "f", a_png="", a_json={"short": "s"}, b_png="", b_json={"rare": "r"})
    cache = Cache(tmp_path / "cache", create=True)
    monkeypatch.setattr(scan_rows, "RUN", 1)
    looked: list[str] = []

    def look(source: Source, place: Place, *limits: int) -> dict[str, Any]:
        looked.append(place.item)
        return scan_rows.from_bytes(source, place, *limits)

    for _ in range(2):  # the second finds what the first, which was killed before it published the scan, has read
        source = open_source(str(tmp_path / "f"), DataConfig(caption_weights={"short": 1, "rare": 1}))
        fragments = Fragments(cache, "f", Worker(Claims(cache.files, 60), Stop(0)))
        table = scanning.scan(
            source,
            "f",
            cache,
            max_pixels=10**6,
            workers=1,
            rehash=False,
            progress=lambda done, whole: None,
            fragments=fragments,
            look=look,
        )
        assert (len(table), looked) == (2, ["a.png", "b.png"])


@pytest.mark.parametrize(
    ("scores", "weights"),
    [
        ([30.0, 25.0, 24.9, None], [2.0, 2 * (25 / 30) ** 10, 0.0, 0.0]),
        ([25.0, 20.0], [2.0, 0.0]),
        ([24.0, 24.5, 24.5], [0.0, 2.0, 0.0]),
        ([0.0, 0.0, None], [2.0, 0.0, 0.0]),
        ([50.0, 25.0], [2.0, 2 * 0.5**10]),
        ([None, None], [2.0, 2.0]),
    ],
)
def test_scores_decide_the_weights(scores: list[float | None], weights: list[float]) -> None:
    rule = CaptionRule()
    given = [CaptionCandidate(str(i), 2.0, score) for i, score in enumerate(scores)]
    captions, never = rule.weigh(given, "a.png", "s")
    assert dict(captions) == pytest.approx({str(i): weight for i, weight in enumerate(weights) if weight})
    assert never == weights.count(0.0)
