"""Other programs read a cache: its shards as webdataset's clients, its tables as readers of Parquet and Arrow.

They are imported where they are called: each process that collects the tests would import them.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.pack
from sana_pipe.data.cache.cache import Cache
from tests.support import synthetic
from tests.support.layout_page import PAGE, examples

TWO = (("one", 1.0), ("two", 2.0))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """A cache with a snapshot and its pack. Every picture has two captions."""
    config = synthetic.config(tmp_path_factory.mktemp("clients") / "cache", "bucket.heldout=0.2")
    pictures = [synthetic.Picture(f"{number}.png", f"p{number}", captions=TWO) for number in range(6)]
    synthetic.add(config, "photos", pictures)
    sana_pipe.stages.bucket.run(config)
    sana_pipe.stages.pack.run(config, name="packed")
    return Cache(config.cache)


def by_webdataset(shards: list[str]) -> list[dict[str, Any]]:
    import webdataset

    return list(webdataset.WebDataset(shards, shardshuffle=False, empty_check=False))


def by_wids(shards: list[str]) -> list[dict[str, Any]]:
    from wids.wids import IndexedTarSamples

    opened = [IndexedTarSamples(path=shard) for shard in shards]
    samples = [samples[number] for samples in opened for number in range(len(samples))]
    return [
        {name.removeprefix("."): value.read() if name[0] == "." else value for name, value in sample.items()}
        for sample in samples
    ]


def by_datasets(shards: list[str]) -> list[dict[str, Any]]:
    import datasets

    return list(datasets.load_dataset("webdataset", data_files={"train": shards}, split="train", streaming=True))


CLIENTS: dict[str, Callable[[list[str]], list[dict[str, Any]]]] = {
    "webdataset": by_webdataset,
    "wids": by_wids,
    "datasets": by_datasets,
}


MEMBERS = {
    "latent": {"npy"},
    "text": {"npy", "txt"},
    "packed": {"latent.npy", "text.npy", "txt", "1.text.npy", "1.txt"},
}


def array(value: Any) -> np.ndarray:
    return np.load(io.BytesIO(value)) if isinstance(value, bytes) else np.asarray(value)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("kind", ["latent", "text", "packed"])
def test_a_client_of_webdataset_counts_the_samples_of_a_shard(cache: Cache, kind: str, client: str) -> None:
    snapshot = cache.open_snapshot("packed")
    shards = list(cache.root.glob(f"shards/{kind}-*/*/*.tar"))
    shards.sort(key=lambda shard: shard.stem == snapshot.null.shard)  # it has no sample: not the first
    samples = CLIENTS[client](list(map(str, shards)))
    expected = {"latent": 6, "text": 3, "packed": len(snapshot)}[kind]
    assert len(samples) == len({sample["__key__"] for sample in samples}) == expected
    for sample in samples:
        assert {name for name in sample if not name.startswith("__")} == MEMBERS[kind]
        assert all(array(value).dtype.kind in "ui" for name, value in sample.items() if name.endswith("npy"))


def test_joint_shards_of_different_numbers_of_captions_open_as_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = synthetic.config(tmp_path / "cache")
    captions = (*TWO, ("three", 1.0))
    pictures = [synthetic.Picture(f"{n}.png", f"p{n}", captions=captions[: 1 + n % 3]) for n in range(9)]
    synthetic.add(config, "photos", pictures)
    sana_pipe.stages.bucket.run(config)
    sana_pipe.stages.pack.run(config)
    shards = list(map(str, Path(config.cache).glob("shards/packed-*/*/*.tar")))
    for client in ("webdataset", "wids"):
        counts = Counter(sum(name.endswith("txt") for name in sample) for sample in CLIENTS[client](shards))
        assert counts == {1: 3, 2: 3, 3: 3}
    with pytest.raises(ValueError, match="same types"):  # the page says so
        by_datasets(sorted(shards, key=os.path.getsize, reverse=True))
    capsys.readouterr()
    exec(compile(examples()[4], str(PAGE), "exec"), {"joint_shards": shards, "most": 3})
    lines = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()]
    assert sorted(lines) == sorted(["one", "one two", "one two three"] * 3)


def by_duckdb(path: Path) -> int:
    import duckdb

    if path.suffix == ".parquet":
        return len(duckdb.sql(f"select * from '{path}'").fetchall())
    return len(duckdb.from_arrow(pa.ipc.open_file(path).read_all()).fetchall())


def by_pandas(path: Path) -> int:
    import pandas

    return len((pandas.read_parquet if path.suffix == ".parquet" else pandas.read_feather)(path))


def by_polars(path: Path) -> int:
    import polars

    return len((polars.read_parquet if path.suffix == ".parquet" else polars.read_ipc)(path))


READERS: dict[str, Callable[[Path], int]] = {"pandas": by_pandas, "polars": by_polars, "duckdb": by_duckdb}


@pytest.mark.parametrize("reader", READERS)
def test_every_table_opens(cache: Cache, reader: str) -> None:
    tables = [path for path in cache.root.glob("tables/*/*") if path.suffix in (".parquet", ".arrow")]
    assert len(tables) > 9
    assert all(READERS[reader](path) > 0 for path in tables)
