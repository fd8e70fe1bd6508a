"""What pyproject.toml declares, and that a snapshot's id does not depend on the installed pyarrow."""

from __future__ import annotations

import io
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packaging.requirements import Requirement

from sana_pipe.data.cache.arrow import WRITER, fix_writer, parquet_batches, write_parquet
from sana_pipe.data.cache.cache import Cache

DATA = Path(__file__).parents[1] / "files"


def table() -> pa.Table:
    captions = pa.list_(pa.struct([("text", pa.string()), ("weight", pa.float32())]))
    columns = {
        "key": [f"a{i}" for i in range(50)],
        "size": list(range(50)),
        "hash": pa.array([bytes([i]) * 16 for i in range(50)], pa.binary(16)),
        "captions": pa.array([[{"text": "ein Bild", "weight": 1.0}]] * 50, captions),
    }
    return pa.table(columns)


def test_a_table_has_the_same_bytes_whichever_pyarrow_wrote_it(tmp_path: Path) -> None:
    """The file in `data` is pyarrow 22's, of the same table."""
    old = (DATA / "table-pyarrow-22.parquet").read_bytes()
    assert b"parquet-cpp-arrow version 22" in old
    fixed = io.BytesIO(old)
    fix_writer(fixed)
    written = io.BytesIO()
    write_parquet(table(), written)
    assert written.getvalue() == fixed.getvalue()
    cache = Cache(tmp_path, create=True)
    digest = cache.put_table(table())
    assert digest == "3e369475d1636ddffaefcc9e98cad163", "it is in the ids of snapshots"
    assert cache.table(digest).to_pylist() == table().to_pylist()


def test_the_name_of_the_writer_in_the_data_stays(tmp_path: Path) -> None:
    sink = io.BytesIO()
    versions = pa.table({"a": [f"parquet-cpp-arrow version {n}" for n in range(30)], "b": [pa.__version__] * 30})
    pq.write_table(versions, sink)
    fix_writer(sink)
    assert pa.concat_tables(parquet_batches(sink.getvalue())[1]).equals(versions)
    assert pq.ParquetFile(sink).metadata.created_by == WRITER.decode()


def test_a_name_of_another_length_is_refused() -> None:
    sink = io.BytesIO()
    write_parquet(table(), sink)
    sink = io.BytesIO(sink.getvalue().replace(b"\x20" + WRITER, b"\x27" + WRITER + b"-SNAPSH"))
    with pytest.raises(RuntimeError, match=pa.__version__):
        fix_writer(sink)


def test_every_dependency_has_a_lower_bound() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = [Requirement(line) for line in lines]
    bounds = {each.name: str(each.specifier) for each in declared}
    assert all(bound.startswith(">=") and "," not in bound for bound in bounds.values())
    assert {"torch", "pyarrow", "s3fs", "moto"} <= bounds.keys()
    assert bounds["fsspec"] == bounds["s3fs"] == bounds["gcsfs"], "each of them needs the same version of fsspec"
