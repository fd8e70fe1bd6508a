"""Columns with more text than Arrow holds in one piece, with the limit lowered: nothing is lost, and bytes stay."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sana_pipe.stages.bucket
from sana_pipe.base.errors import CacheError
from sana_pipe.data.cache import arrow, keys, layout, scratch, shard
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.scan_table import SCAN
from sana_pipe.data.encoding import plan as planning
from sana_pipe.data.encoding import scan as scanning
from sana_pipe.data.encoding import scan_rows
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.snapshots import assemble, frames, join
from sana_pipe.data.sources.detect import open_source
from tests.support.constants import set_constants, unit_sizes
from tests.support.synthetic import LATENT, TABLE, add, config, pictures

TEXT = TextEncoding(weights="w")


def scan_table(count: int = 100) -> pa.Table:
    """Rows of very different sizes, in chunks as a scan of several parts has them."""
    rows = [
        {
            "item": f"{n:05d}.png",
            "size": 1,
            "mtime_ns": 1,
            "digest": layout.digest(str(n)),
            "width": 24,
            "height": 24,
            "meta": "{}",
            "reject": "broken" if n % 10 == 3 else None,
            "captions": [{"text": f"{n} {m} " + "x" * (n * 7 % 50), "weight": 1.0} for m in range(n % 3 + 1)],
        }
        for n in range(count)
    ]
    return pa.concat_tables([pa.Table.from_pylist(rows[i : i + 17], schema=SCAN) for i in range(0, count, 17)])


def plain(table: pa.Table, rows: np.ndarray) -> pa.Table:
    return table.combine_chunks().take(pa.array(rows))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of at most 600 bytes in a piece."""
    monkeypatch.setattr(arrow, "LIMIT", 600)
    monkeypatch.setattr(arrow, "ROWS", 13)


def bounded(column: pa.ChunkedArray) -> bool:
    return column.num_chunks > 1 and all(chunk.nbytes <= arrow.LIMIT or len(chunk) == 1 for chunk in column.chunks)


def test_tables_are_joined_in_pieces(small: None) -> None:
    table = scan_table()
    joined = arrow.combined(table)
    assert joined.equals(table)
    assert bounded(joined.column("captions")) and bounded(joined.column("item"))
    assert [len(c) for c in joined.column("captions").chunks] == [len(c) for c in joined.column("item").chunks]


def test_a_column_without_a_limit_is_not_cut(small: None) -> None:
    names = pa.chunked_array([pa.array(["a"] * 300), pa.array(["b"] * 300)]).dictionary_encode()
    table = pa.table({"key": pa.chunked_array([pa.array(range(300)), pa.array(range(300))]), "shard": names})
    assert arrow.pieces(table) == [table]
    assert shard.from_ipc(shard.to_ipc(table), "here").equals(table.combine_chunks())


def test_rows_are_picked_in_pieces(small: None) -> None:
    table = scan_table().select(["item", "digest", "meta"])
    rows = np.random.default_rng(0).permutation(100)[:90]
    result = arrow.take_rows(table, rows)
    assert result.schema == table.schema
    assert result.equals(plain(table, rows))
    assert bounded(result.column("item"))
    one_long = pa.table({"item": ["x" * 5000, "y", "z" * 5000, "w"]})
    turned = arrow.take_rows(one_long, np.array([3, 2, 1, 0])).column("item")
    assert turned.to_pylist() == ["w", "z" * 5000, "y", "x" * 5000] and bounded(turned)
    assert arrow.text(table.column("item")).to_pylist() == table.column("item").to_pylist()
    assert len(arrow.text(pa.chunked_array([], pa.string()))) == 0


def test_files_have_no_piece_that_is_too_large(tmp_path: Path, small: None) -> None:
    cache, table = Cache(tmp_path / "cache", create=True), scan_table()
    digest = cache.put_table(table)
    metadata = pq.ParquetFile(next((tmp_path / "cache" / "tables").rglob("*.parquet"))).metadata
    groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    assert len(groups) > 10 and sum(groups) == 100
    assert cache.table(digest).equals(table)
    assert bounded(cache.table(digest).column("captions")), "read group by group"
    again = shard.from_ipc(shard.to_ipc(table), "here")
    assert again.equals(table) and bounded(again.column("captions"))


def test_the_bytes_of_small_tables_are_those_of_earlier_versions(tmp_path: Path) -> None:
    cache, table = Cache(tmp_path / "cache", create=True), scan_table().combine_chunks()
    pq.write_table(table, tmp_path / "plain", compression="zstd", write_page_checksum=True)
    with open(tmp_path / "plain", "r+b") as plain:
        arrow.fix_writer(plain)
    assert cache.put_table(table) == layout.content_digest((tmp_path / "plain").read_bytes())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert shard.to_ipc(scan_table()) == sink.getvalue().to_pybytes()


def test_row_groups_are_those_of_earlier_versions_however_a_table_is_cut(tmp_path: Path) -> None:
    count = arrow.GROUP_ROWS + 5000
    whole = pa.table({"a": np.arange(count) % 1000, "b": pa.array(np.arange(count) % 77).cast(pa.string())})
    pq.write_table(whole, tmp_path / "plain", compression="zstd", write_page_checksum=True)
    with open(tmp_path / "cut", "x+b") as cut:
        arrow.write_parquet(pa.concat_tables(whole.slice(at, 70_001) for at in range(0, count, 70_001)), cut)
    with open(tmp_path / "plain", "r+b") as plain:
        arrow.fix_writer(plain)
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "plain").read_bytes()


@pytest.mark.parametrize("lowered", [False, True])
def test_every_caption_and_picture_is_planned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowered: bool
) -> None:
    table = scan_table()
    if lowered:
        monkeypatch.setattr(arrow, "LIMIT", 600)
        monkeypatch.setattr(arrow, "ROWS", 13)
        monkeypatch.setattr(scratch, "LIMIT", 200)
        monkeypatch.setattr(scratch, "RUN", 7)
    cache = Cache(tmp_path / "cache", create=True)
    written: list[pa.Table] = []
    put = cache.put_table
    monkeypatch.setattr(cache, "put_table", lambda table: written.append(table) or put(table))
    usable = [row for row in table.to_pylist() if row["reject"] is None]
    set_constants(monkeypatch, unit_sizes(1024, 11, WINDOW=20))
    options = EncodeConfig()
    captions = planning.caption_work(table, TEXT)
    images = planning.image_work(table, "photos", LATENT, TABLE)
    assert set(images.column("source").to_pylist()) == {"photos"}
    for plans, encoding, column, wanted in (
        (
            planning.plan_captions(cache, TEXT, captions, options),
            TEXT,
            "caption",
            [None, *(caption["text"] for row in usable for caption in row["captions"])],
        ),
        (planning.plan_images(cache, LATENT, images, options), LATENT, "item", [row["item"] for row in usable]),
    ):
        assert bounded(next(table for table in written if column in table.column_names).column(column)) == lowered
        assert len(plans) == 1 and sum(unit.count for unit in plans[0].units) == len(wanted)
        planned = cache.table(plans[0].table)
        assert sorted(planned.column(column).to_pylist(), key=str) == sorted(wanted, key=str)
        for row in planned.to_pylist():
            expected = (
                LATENT.key(row["digest"], row["height"], row["width"])
                if encoding is LATENT
                else TEXT.null_key
                if row["caption"] is None
                else TEXT.key(row["caption"].lower().strip())
            )
            assert row["key"] == expected


def test_snapshots_are_the_same_however_their_tables_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = config(tmp_path / "cache", "bucket.filter=\"starts_with(item, '0') AND captions < 3 AND tag != 'none'\"")
    many = [
        dataclasses.replace(p, captions=tuple((f"{p.content} {m}", 1.0) for m in range(i % 4)))
        for i, p in enumerate(pictures(60))
    ]
    add(of, "one", many)
    whole = sana_pipe.stages.bucket.run(of)
    assert len(Cache(of.cache).open_snapshot(whole)) == 45
    monkeypatch.setattr(arrow, "ROWS", 7)
    monkeypatch.setattr(frames, "ROWS", 7)
    monkeypatch.setattr(keys, "BATCH", 3)
    monkeypatch.setattr(scratch, "LIMIT", 100)
    monkeypatch.setattr(scratch, "RUN", 5)
    files: list[int] = []
    unnamed = scratch.unnamed_file
    monkeypatch.setattr(scratch, "unnamed_file", lambda *args, **options: files.append(1) or unnamed(*args, **options))
    assert sana_pipe.stages.bucket.run(of) == whole
    assert len(files) > 10

    monkeypatch.setattr(assemble, "CHUNK_ROWS", 7)
    parts, all_rows = (
        Cache(of.cache).open_snapshot(sana_pipe.stages.bucket.run(of)),
        Cache(of.cache).open_snapshot(whole),
    )
    assert [chunk.rows for chunk in parts.head.chunks] == [7] * 6 + [3]
    found, expected = (pa.concat_tables(snapshot.tables()).column("sample_id") for snapshot in (parts, all_rows))
    assert found.to_pylist() == expected.to_pylist()


def test_names_of_items_are_joined_as_large_strings() -> None:
    joined = join.Joined()
    assert joined.frame().item.type == pa.large_string()
    index = type("Index", (), {"rejects": (), "find": lambda self, keys: np.zeros(len(keys), np.int64)})()
    records = join.EncodedRecords([LATENT, TEXT], {"latent": index, "text": index})
    join.join(joined, "one", scan_table(), records, join.Resolution(TABLE))
    join.join(joined, "two", scan_table(), records, join.Resolution(TABLE))
    join.join(joined, "one", scan_table(), records, join.Resolution(TABLE, len(TABLE), "small"))
    assert joined.sources == ["one", "two"]
    assert [set(frame.source.tolist()) for frame in joined.frames[-3:]] == [{0}, {1}, {0}]
    joined.frames = joined.frames[-3:-1]
    frame = joined.frame()
    assert frame.item.type == pa.large_string() and len(frame) == 180
    assert frame.take(np.array([91]), joined.scratch).item.to_pylist() == ["00001.png"]


def test_a_cache_without_its_null_record_makes_no_snapshot() -> None:
    index = type("Index", (), {"rejects": (), "find": lambda self, keys: np.full(len(keys), -1)})()
    with pytest.raises(CacheError, match="null record"):
        assemble.row_of_null(join.EncodedRecords([LATENT, TEXT], {"latent": index, "text": index}))


def test_a_part_is_made_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(10):
        (tmp_path / f"{n}.png").write_bytes(b"no picture")
        (tmp_path / f"{n}.txt").write_text(f"caption {n}")
    sizes: list[int] = []
    table = pa.table
    monkeypatch.setattr(scan_rows, "ROWS", 4)
    monkeypatch.setattr(arrow, "LIMIT", 100)
    monkeypatch.setattr(
        scan_rows.pa,
        "table",
        lambda columns, names=None, schema=None: (
            (sizes.append(len(columns["item"])) if schema is SCAN else None)
            or table(columns, names=names, schema=schema)
        ),
    )
    source = open_source(str(tmp_path), config(tmp_path).data)
    result = scanning.scan(
        source, "x", None, max_pixels=10**6, workers=1, rehash=False, progress=lambda done, total: None
    )
    assert sizes == [4, 4, 2]
    assert bounded(result.column("captions"))
    assert [row["captions"][0]["text"] for row in result.to_pylist()] == [f"caption {n}" for n in range(10)]


def test_arrow_gives_memory_back() -> None:
    assert pa.default_memory_pool().backend_name == "system"
