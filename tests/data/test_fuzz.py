"""Damaged foreign bytes end in an error for people or a reject, in bounded time and memory, for every parser.

`make fault` tries some thousand inputs, `make fault-long` 10^5; the examples that they found stand here as plain tests.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sana_pipe.base.errors import ConfigError, IntegrityError, UserError
from sana_pipe.config import load
from sana_pipe.data.cache import codec, layout, shard
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.files import Files
from sana_pipe.data.sources import filesystem
from sana_pipe.data.sources.folder import FolderSource
from sana_pipe.data.work import claims
from sana_pipe.train.models.sana_shape import read_config
from sana_pipe.train.training.checkpoint import CheckpointError, read_document
from tests.support.source_files import listed, make_tar, opened

WORKER = Path(__file__).parents[1] / "support" / "workers" / "fuzzing.py"
INPUTS = 1_050


@pytest.mark.fault
def test_damaged_files_are_errors_for_people(fault_seed: int, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(WORKER), str(fault_seed), str(INPUTS), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    last = (tmp_path / "input").read_bytes().hex() if (tmp_path / "input").exists() else ""
    assert run.returncode == 0, f"the process died of {last[:2000]}: {run.stderr[-2000:]}"
    assert lines[-1] == {"inputs": INPUTS}
    assert lines[:-1] == []


# ---------------------------------------------------------------- what was found


def content(root: Path, suffix: str, data: bytes) -> tuple[Files, str]:
    files, digest = Files(root), layout.content_digest(data)
    files.put(layout.Paths.table(digest, suffix), data)
    return files, digest


def test_columns_that_disagree_about_their_rows(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes((Path(__file__).parents[1] / "files" / "rows-disagree.parquet").read_bytes())
    kinds = [type(one).__name__ for one in opened(tmp_path).items()]
    assert "Reject" in kinds


def test_a_chunk_whose_own_name_is_not_utf8(tmp_path: Path) -> None:
    pq.write_table(pa.table({"file_name": ["a.png"], "text": ["one"]}), tmp_path / "a.parquet", store_schema=False)
    whole = (tmp_path / "a.parquet").read_bytes()
    at = whole.rindex(b"file_name")  # the schema has it before
    (tmp_path / "a.parquet").write_bytes(whole[:at] + b"file\x80name" + whole[at + 9 :])
    items, rejects = listed(opened(tmp_path))
    assert list(items) == ["a.parquet/a.png"] and not rejects


NAME_NOT_UTF8 = (Path(__file__).parents[1] / "files" / "name-not-utf8.parquet").read_bytes()


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1 no PAR1", b"\x00" * 100, NAME_NOT_UTF8])
def test_a_table_that_is_none(tmp_path: Path, data: bytes) -> None:
    cache = Cache(tmp_path, create=True)
    _, digest = content(tmp_path, "parquet", data)
    with pytest.raises(IntegrityError, match="not a Parquet table"):
        cache.table(digest)


def test_a_frame_that_says_it_is_huge(tmp_path: Path) -> None:
    coder = codec.Codec(True, codec.LOSSLESS)
    bits, back = np.arange(18, dtype=np.uint16).reshape(3, 6), np.empty((3, 6), np.uint16)
    payload = coder.encode(bits)
    coder.decode(payload, back, "here")
    assert np.array_equal(back, bits)
    frame = payload.index(b"\x28\xb5\x2f\xfd")
    assert payload[frame + 4] == 0x20 and payload[frame + 5] == 18, "one byte says how much it is"
    huge = payload[: frame + 4] + b"\xe0" + struct.pack("<Q", 1 << 62) + payload[frame + 6 :]
    for other in (huge, payload[: frame + 5] + b"\x11" + payload[frame + 6 :]):
        with pytest.raises(IntegrityError, match="wrong number of exponents"):
            coder.decode(other, back, "here")


def test_offsets_and_text_of_arrow_files_are_checked() -> None:
    good = shard.to_ipc(pa.table({"x": ["said"] * 5}))
    offsets = struct.pack("<6i", *range(0, 24, 4))
    assert good.count(offsets) == 1
    for bad in (struct.pack("<6i", 0, 4, 8, 12, 16, 1 << 29), struct.pack("<6i", 0, 4, 3, 12, 16, 20)):
        with pytest.raises(IntegrityError, match="not an Arrow file"):
            shard.from_ipc(good.replace(offsets, bad), "here")
    with pytest.raises(IntegrityError, match="not an Arrow file"):
        shard.from_ipc(good.replace(b"saidsaid", b"sai\xffsaid"), "here")


def test_a_shard_whose_head_is_no_json(tmp_path: Path) -> None:
    table = shard.to_ipc(pa.table({"x": [1]}))
    for head in (b'{"unit"  1}', b"[" * 5000):
        path = make_tar(tmp_path / "a.tar", [(f"{layout.META}/head", head), (f"{layout.META}/records", table)])
        with pytest.raises(IntegrityError, match="not a shard"):
            shard.read_head(Files(tmp_path), path.name)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_a_shard_whose_record_table_is_no_file(tmp_path: Path, kind: bytes) -> None:
    member = tarfile.TarInfo(f"{layout.META}/records")
    member.type, member.linkname = kind, "records"  # itself
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(member)
    with pytest.raises(IntegrityError, match="has no __sana_pipe__/records"):
        shard.read_table(Files(tmp_path), "a.tar")


def test_a_header_that_is_not_utf8_costs_its_file(tmp_path: Path) -> None:
    (tmp_path / "metadata.csv").write_bytes(b"file_name,text,sc\xf2re\na.png,one,1\n")
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "a.txt").write_text("beside it")
    result = list(FolderSource(tmp_path, "text").items())
    assert [one.key for one in result] == ["metadata.csv:1", "a.png"]
    assert getattr(result[0], "reason", "") == "the header is not UTF-8"


def test_reading_allocates_no_more_than_the_file_has(tmp_path: Path) -> None:
    """Sizes in headers are anybody's: an extended header of a tar may say that it has 8 GiB."""
    (tmp_path / "a").write_bytes(b"few")
    with filesystem.LocalFilesystem(tmp_path).open("a") as stream:
        assert isinstance(stream, filesystem.BoundedReader)
        assert stream.read(1 << 62) == b"few", "would be a MemoryError"
        assert stream.read(1 << 62) == b""
    assert filesystem.LocalFilesystem(tmp_path).read("a", 1 << 62) == b"few"
    path = make_tar(
        tmp_path / "t" / "a.tar", [("0.png", b"picture"), ("0.txt", b"said"), ("n" * 200, b"x")], tarfile.PAX_FORMAT
    )
    data = bytearray(path.read_bytes())
    at = next(i for i in range(0, len(data), 512) if data[i + 156 : i + 157] == b"x")
    info = tarfile.TarInfo.frombuf(bytes(data[at : at + 512]), "utf-8", "strict")
    info.size = 1 << 40
    data[at : at + 512] = info.tobuf(tarfile.GNU_FORMAT)
    path.write_bytes(data)
    items, rejects = listed(opened(path))
    assert list(items) == ["a.tar/0.png"] and rejects


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 1000, "[" * 1000 + "]" * 1000])
def test_a_value_that_yaml_cannot_hold(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError):
        load("tiny", [f"cache={value}"])
    (tmp_path / "c.yaml").write_text(f"cache: {value}\n")
    with pytest.raises(ConfigError):
        load(tmp_path / "c.yaml")


def test_documents_that_are_nested_too_deeply(tmp_path: Path) -> None:
    deep = b'{"a":' * 3000
    with pytest.raises(IntegrityError, match="not a document"):
        layout.unseal(deep, "here")
    assert claims.parse_claim(deep) == {}
    (tmp_path / "checkpoint.json").write_bytes(deep)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_document(tmp_path)
    (tmp_path / "config.json").write_bytes(deep)
    with pytest.raises(UserError, match="cannot be read"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["[", "data.[[x", "list[int]", "train.steps[0]"])
def test_an_unknown_key_with_a_bracket(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        load("tiny", [f"{name}=1"])
