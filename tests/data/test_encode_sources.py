"""The same pictures and captions from a folder, tars, parquet and a listing make the same records; scans are reused."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
from sana_pipe.base.errors import RejectRateError, UserError
from sana_pipe.config import Config
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.shard import ShardReader
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.encoders.text import TextEncoder
from sana_pipe.data.encoding import plan as planning
from sana_pipe.data.encoding import scan as scanning
from sana_pipe.data.encoding import unit_records
from sana_pipe.data.encoding.fragments import Fragments
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.sources.source import Place
from sana_pipe.data.sources.tars import TarSource
from tests.support.http_server import serve
from tests.support.lowered import lower_limits
from tests.support.messages import naming
from tests.support.parameters import first_quick
from tests.support.trees import files

MakeConfig = Callable[..., Config]
COUNT = 8


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """folder/, tars/, set.parquet, list.jsonl."""
    root = tmp_path_factory.mktemp("pictures")
    (root / "folder").mkdir()
    (root / "tars").mkdir()
    rows = []
    for n in range(COUNT):
        pixels = np.random.default_rng(n).integers(0, 255, (8, 8, 3), np.uint8)
        path = root / "folder" / f"{n}.{'png' if n % 2 else 'webp'}"
        Image.fromarray(pixels).resize((90, 70) if n % 3 else (60, 80), Image.Resampling.BICUBIC).save(path)
        path.with_suffix(".txt").write_text(f"Random picture number {n}")
        rows.append({"file_name": f"folder/{path.name}", "text": f"Random picture number {n}"})
    for shard in range(2):
        with tarfile.open(root / "tars" / f"{shard}.tar", "w") as tar:
            for n in range(shard * COUNT // 2, (shard + 1) * COUNT // 2):
                for path in sorted((root / "folder").glob(f"{n}.*")):
                    tar.add(path, path.name)
    (root / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    images = [{"bytes": (root / row["file_name"]).read_bytes(), "path": row["file_name"]} for row in rows]
    table = pa.table({"image": images, "text": [row["text"] for row in rows]})
    pq.write_table(table, root / "set.parquet", row_group_size=3)
    return root


def members(cache: Path) -> dict[str, bytes]:
    """Every record and caption, by its name in a shard."""
    result: dict[str, bytes] = {}
    for path in sorted((cache / "shards").rglob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if not member.name.startswith("__"):
                    file = tar.extractfile(member)
                    assert file is not None
                    assert member.name not in result
                    result[member.name] = file.read()
    return result


@contextmanager
def planned_by_another(config: Config, data: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Before this process plans, another process of its launch begins, plans, encodes nothing and waits. Yields the
    result of the other process."""
    real, results = Fragments.once, list[dict[str, Any]]()

    @contextmanager
    def idle(run: Any) -> Iterator[sana_pipe.stages.encode.Make]:
        yield lambda todo, noun: sana_pipe.stages.encode.Made(0, len(todo), {})

    def once(self: Fragments, *args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Fragments, "once", real)
            patch.setattr(Fragments, "finish", lambda self: None)
            patch.setitem(sana_pipe.stages.encode.ENGINES, "local", idle)
            results.append(sana_pipe.stages.encode.run(config, data=data, task_index=0, task_count=2))
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Fragments, "once", once)
        yield results


@pytest.mark.parametrize("data", first_quick("folder", "tars", "set.parquet", "list.jsonl"))
def test_a_process_encodes_what_another_one_planned(
    data: str, pictures: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = str(pictures / data)
    config, alone = make_config(tmp_path / "shared"), make_config(tmp_path / "alone")
    truth = sana_pipe.stages.encode.run(alone, data=where)
    planned: list[object] = []
    real = planning.plan_images

    def plan(*args: Any) -> Any:
        planned.append(args)
        return real(*args)

    monkeypatch.setattr(planning, "plan_images", plan)
    lower_limits(monkeypatch)
    with planned_by_another(config, where, monkeypatch) as other:
        done = sana_pipe.stages.encode.run(config, data=where, task_index=1, task_count=2)
    assert len(planned) == 1, "by the other process"
    for name in truth.keys() - {"speed"}:
        assert done[name] == truth[name], name
    assert other[0]["new"] == truth["new"] and other[0]["images"] == 0
    assert files(Path(config.cache)) == files(Path(alone.cache))


def test_a_process_with_other_settings_plans_itself(
    pictures: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, config = str(pictures / "folder"), make_config(tmp_path)
    sana_pipe.stages.encode.run(config, data=where)
    planned, real = list[object](), planning.plan_images

    def plan(*args: Any) -> Any:
        planned.append(args)
        return real(*args)

    for setting in ("encode.max_reject_rate=0.9", "encode.image_batch=3", "data.max_pixels=1000000"):
        planned.clear()
        with monkeypatch.context() as patch:
            patch.setattr(planning, "plan_images", plan)
            with planned_by_another(make_config(tmp_path, setting), where, monkeypatch):
                sana_pipe.stages.encode.run(config, data=where, task_index=1, task_count=2)
        assert len(planned) == 2, setting


def test_whatever_decides_a_plan_is_in_its_name(
    pictures: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    asked: list[str] = []

    def once(self: Fragments, identity: str, *args: Any) -> None:
        asked.append(identity)
        raise Asked

    monkeypatch.setattr(Fragments, "once", once)
    plain = ["encode.workers=2", "encode.device=cpu"]
    others = [
        "encode.image_batch=3",
        "encode.device=auto",
        "encode.max_shrink=0.3",
        "encode.max_reject_rate=0.3",
        "data.min_side=9",
    ]
    for setting in plain + others:
        with pytest.raises(Asked):
            sana_pipe.stages.encode.run(
                make_config(tmp_path, setting), data=str(pictures / "folder"), task_index=0, task_count=2
            )
    assert asked[0] == asked[1] and len(set(asked[1:])) == 1 + len(others)


def test_what_another_process_found_unused_is_said(
    pictures: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tars = Path(shutil.copytree(pictures / "tars", tmp_path / "tars"))
    with tarfile.open(tars / "1.tar", "a") as tar:
        tar.addfile(tarfile.TarInfo("notes.md"))
    with planned_by_another(make_config(tmp_path), str(tars), monkeypatch):
        sana_pipe.stages.encode.run(make_config(tmp_path), data=str(tars), task_index=1, task_count=2)
    assert capsys.readouterr().out.count(" members or captions of the source are not used") == 2


def test_rejects_of_another_process_are_reported_alike(
    pictures: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the scan, and those of units: a picture vanishes after the planning."""
    folder = Path(shutil.copytree(pictures / "folder", tmp_path / "folder"))
    (folder / "broken.png").write_bytes(b"no picture")
    (folder / "broken.txt").write_text("a caption")
    config = make_config(tmp_path, "encode.max_reject_rate=0.5")
    with planned_by_another(config, str(folder), monkeypatch) as other:
        once = Fragments.once

        def vanish(self: Fragments, *args: Any) -> Any:
            result = once(self, *args)
            (folder / "1.png").unlink()
            return result

        with monkeypatch.context() as patch:
            patch.setattr(Fragments, "once", vanish)
            done = sana_pipe.stages.encode.run(config, data=str(folder), task_index=1, task_count=2)
    assert (other[0]["rejects"], done["rejects"], done["images"]) == (1, 2, COUNT - 1)
    rows = (Path(config.cache) / "reports/rejects-folder.csv").read_text().splitlines()[1:]
    assert [row.partition(",")[0] for row in rows] == ["1.png", "broken.png"]


def test_every_kind_of_source_makes_the_same_records(pictures: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    truth: dict[str, bytes] = {}
    for data in ("folder", "tars/{0..1}.tar", "set.parquet", "list.jsonl"):
        config = make_config(tmp_path / data.partition("/")[0])
        done = sana_pipe.stages.encode.run(config, data=str(pictures / data))
        assert (done["images"], done["captions"], done["rejects"]) == (COUNT, COUNT + 1, 0)
        result = members(Path(config.cache))
        assert len(result) == COUNT + 2 * (COUNT + 1)
        truth = truth or result
        assert result == truth, data
        sana_pipe.stages.bucket.run(config)
        assert len(Cache(config.cache).open_snapshot()) == COUNT
        again = sana_pipe.stages.encode.run(config, data=str(pictures / data))
        assert (again["images"], again["captions"]) == (0, 0)
        assert len(Cache(config.cache).files.numbers("sources/" + Cache(config.cache).sources()[0])) == 1


def documents(cache: Path) -> dict[str, bytes]:
    """Scans, plans, snapshots and tables by name, without the place of the source."""
    folders = ("sources", "plans", "names", "snapshots", "tables")
    return {
        path.relative_to(cache).as_posix(): b"" if folder == "sources" else path.read_bytes()
        for folder in folders
        for path in sorted((cache / folder).rglob("*.*"))
    }


@pytest.mark.parametrize(
    "data",
    ["tars/{0..1}.tar", *(pytest.param(d, marks=pytest.mark.slow) for d in ("folder", "set.parquet", "list.jsonl"))],
)
def test_no_limit_of_memory_changes_a_byte(
    pictures: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    truth: dict[str, bytes] = {}
    for name in ("whole", "lowered"):
        config = make_config(tmp_path / name)
        if name == "lowered":
            lower_limits(monkeypatch)
        for _ in range(2):
            sana_pipe.stages.encode.run(config, data=str(pictures / data), source_name="pictures")
            sana_pipe.stages.bucket.run(config)
        result = documents(Path(config.cache))
        assert not list((Path(config.cache) / "tmp").iterdir())
        truth = truth or result
    assert list(result) == list(truth)
    assert result == truth


def test_the_same_pictures_elsewhere_are_not_encoded_again(
    pictures: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    sana_pipe.stages.encode.run(config, data=str(pictures / "folder"))

    def refuse(*args: object) -> None:
        raise AssertionError("a model was loaded although there is nothing to encode")

    monkeypatch.setattr(encoders.LatentEncoder, "load", refuse)
    monkeypatch.setattr(TextEncoder, "load", refuse)
    for data in ("tars", "set.parquet", "list.jsonl"):
        assert sana_pipe.stages.encode.run(config, data=str(pictures / data), source_name=data[:4])["images"] == 0
    sana_pipe.stages.bucket.run(config)
    assert len(Cache(config.cache).open_snapshot()) == 4 * COUNT


def test_an_unchanged_tar_is_not_listed_again_and_its_bytes_are_found(
    pictures: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    tars = Path(shutil.copytree(pictures / "tars", tmp_path / "tars"))
    config = make_config(tmp_path)
    sana_pipe.stages.encode.run(config, data=str(tars))
    shutil.rmtree(Path(config.cache) / "shards")  # the records are lost, the scan is not: another encoding, in effect
    for folder in ("plans", "units", "segments"):
        shutil.rmtree(Path(config.cache) / folder)
    listed: list[str] = []
    real = TarSource.part
    monkeypatch.setattr(TarSource, "part", lambda self, name: listed.append(name) or real(self, name))
    assert sana_pipe.stages.encode.run(config, data=str(tars))["images"] == COUNT
    assert not listed
    # one tar changes: that one alone is listed, and only what is new in it is encoded
    with tarfile.open(tars / "1.tar", "a") as tar:
        Image.new("RGB", (70, 70), "red").save(tmp_path / "new.png")
        tar.add(tmp_path / "new.png", "new.png")
        (tmp_path / "new.txt").write_text("all red")
        tar.add(tmp_path / "new.txt", "new.txt")
    done = sana_pipe.stages.encode.run(config, data=str(tars))
    assert (done["images"], done["captions"], listed) == (1, 1, ["1.tar"])
    # another rule for captions lists all of them again, and reads no picture
    monkeypatch.setattr(TarSource, "read", lambda self, key: 1 / 0)
    other = config.model_copy(update={"data": config.data.model_copy(update={"caption_prefix": "x"})})
    listed.clear()
    assert sana_pipe.stages.encode.run(other, data=str(tars))["images"] == 0
    assert listed == ["0.tar", "1.tar"]


def test_a_member_that_changed_since_the_scan_is_reported_and_mended(
    pictures: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    tars = Path(shutil.copytree(pictures / "tars", tmp_path / "tars"))
    config = make_config(tmp_path)
    real = sana_pipe.stages.encode.planning.plan_images

    def swap(*args: object) -> object:
        plans = real(*args)  # type: ignore[arg-type]
        first = (tars / "0.tar").read_bytes()
        (tars / "0.tar").write_bytes((tars / "1.tar").read_bytes())
        (tars / "1.tar").write_bytes(first)
        return plans

    monkeypatch.setattr(sana_pipe.stages.encode.planning, "plan_images", swap)
    with pytest.raises(RejectRateError, match=f"{COUNT} of {COUNT}"):
        sana_pipe.stages.encode.run(config, data=str(tars))
    assert Cache(config.cache).sources() == ["tars"], "the scan was good"
    monkeypatch.undo()
    assert sana_pipe.stages.encode.run(config, data=str(tars))["images"] == COUNT


@pytest.mark.slow
def test_a_source_is_opened_again_for_reading_without_listing(
    pictures: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    for data in ("folder", "tars", "set.parquet", "list.jsonl"):
        config = make_config(tmp_path / data)
        sana_pipe.stages.encode.run(config, data=str(pictures / data), source_name="own")
        cache = Cache(config.cache)
        source = scanning.reopen(cache, "own", config.data)
        body = cache.last_scan("own")
        assert body is not None
        rows = cache.table(body["table"]).to_pylist()
        assert len(rows) == COUNT
        elsewhere = Cache(tmp_path / f"{data}-adopted", create=True)
        adopted = scanning.reopen(elsewhere, "own", config.data, str(pictures / data))
        for row in rows:
            place = Place(row["item"], row["part"], row["where"])
            assert layout.digest(source.read(place)) == layout.digest(adopted.read(place)) == row["digest"]
    with pytest.raises(UserError, match=naming(tmp_path / "gone")):
        scanning.reopen(cache, "own", config.data, str(tmp_path / "gone"))
    with pytest.raises(UserError, match=naming("'other'")):
        scanning.reopen(cache, "other", config.data)


def test_a_unit_of_remote_tars_is_read_by_one_request_a_tar(
    pictures: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    class Flat:
        def encode(self, images: np.ndarray) -> np.ndarray:
            return np.zeros((len(images), 4, 2, 2), np.uint16)

    server = serve(pictures, True)
    here = next(server)
    config = make_config(tmp_path)
    assert sana_pipe.stages.encode.run(config, data=f"{here.url}/tars/{{0..1}}.tar")["images"] == COUNT
    cache = Cache(config.cache)
    body = cache.last_scan("tars")
    assert body is not None
    encoding = cache.encoding(body["encodings"]["latent"])
    assert isinstance(encoding, LatentEncoding)
    (plan,) = cache.plans(encoding.name)
    read = 0
    for unit in plan.units:
        source = scanning.reopen(cache, "tars", config.data)
        here.ranges.clear()
        rows = cache.unit_rows(plan, unit)
        for records, rejects in unit_records.image_records(
            encoding, unit, rows, {"tars": source}, Flat(), max_pixels=10**7, workers=2
        ):
            assert not rejects
            read += len(records)
        assert 1 <= len(here.ranges) <= 2
        assert None not in here.ranges
    assert read == COUNT
    assert max(unit.count for unit in plan.units) > 2
    server.close()


def named(config: Config) -> dict[str, tuple[str, int]]:
    """Caption of each sample of the newest snapshot -> its item and sample id."""
    made = Cache(config.cache).open_snapshot()
    reader, result = ShardReader(made.files, made.encoding(TextEncoding).name), {}
    for row in range(len(made)):
        [caption] = made.captions(row, reader)
        result[caption] = made.source_item(row)[1], made.sample(row).sample_id
    return result


@pytest.mark.parametrize("options", [(), ("data.key_field=id",)], ids=["content", "key_field"])
def test_a_row_that_is_deleted_moved_or_added_renames_no_other(
    options: tuple[str, ...], pictures: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Nothing is encoded again, and the samples that stay keep their ids and their order."""
    rows = pq.read_table(pictures / "set.parquet").to_pylist()
    rows = [{**row, "id": f"id {number}"} for number, row in enumerate(rows)]
    data, config = tmp_path / "data", make_config(tmp_path, *options)
    data.mkdir()

    def put(*files: list[dict[str, Any]]) -> dict[str, Any]:
        for number, content in enumerate(files):
            pq.write_table(pa.Table.from_pylist(content), data / f"{number}.parquet", row_group_size=2)
        done = sana_pipe.stages.encode.run(config, str(data))
        sana_pipe.stages.bucket.run(config)
        return done

    assert put(rows[:5], rows[5:7])["images"] == 7
    first = named(config)
    assert put([*rows[:2], *rows[3:5]], rows[5:7])["images"] == 0
    second = named(config)
    assert second == {text: name for text, name in first.items() if text != rows[2]["text"]}
    assert put([*reversed([*rows[:2], *rows[3:5]]), rows[7]], rows[5:7])["images"] == 1
    third = named(config)
    assert {text: name for text, name in third.items() if text in second} == second and len(third) == 7
    assert [text for text in third if text in second] == list(second), "the order of training"
    if options:
        assert third[rows[0]["text"]][0] == "id 0"
        shutil.move(data / "1.parquet", data / "part-of-another-name.parquet")
        assert sana_pipe.stages.encode.run(config, str(data))["images"] == 0
        sana_pipe.stages.bucket.run(config)
        assert named(config) == third, "names do not depend on the file"


def test_names_of_rows_are_there_and_each_once(pictures: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    rows = pq.read_table(pictures / "set.parquet").to_pylist()
    keys = ["a", "b", "", None, "c", "d", "e", "f"]
    rows = [{**row, "id": key, "share": 0.5} for row, key in zip(rows, keys, strict=True)]
    data = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist(rows), data, row_group_size=3)

    def run(*options: str) -> dict[str, Any]:
        config = make_config(tmp_path, "encode.max_reject_rate=0.9", "data.key_field=id", *options)
        return sana_pipe.stages.encode.run(config, str(data))

    assert run()["images"] == COUNT - 2
    with pytest.raises(UserError, match=naming("data.parquet", "'name'", "the columns", "'id'", "data.key_field")):
        run("data.key_field=name")
    with pytest.raises(RejectRateError, match=naming("'share'", "not text or a whole number")):
        run("data.key_field=share", "encode.max_shrink=1", "encode.max_reject_rate=0.5")
    rows[7]["id"] = "d"
    pq.write_table(pa.Table.from_pylist(rows), data, row_group_size=3)
    with pytest.raises(
        UserError, match=naming("two items", "'d'", "data.parquet (1:2", "data.parquet (2:1", "key_field")
    ):
        run()
    with pytest.raises(UserError, match=naming("data.key_field", "folder")):
        sana_pipe.stages.encode.run(make_config(tmp_path / "of", "data.key_field=id"), str(pictures / "folder"))
