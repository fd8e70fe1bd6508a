"""Metrics of `encode` and `train` in one form: rows, textfiles; and `status`, which shows them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.status
import sana_pipe.stages.train
from sana_pipe import __version__
from sana_pipe.base import counters, disk, processes, retrying
from sana_pipe.base.errors import AwayError, CacheError
from sana_pipe.base.metrics import rows, textfile
from sana_pipe.base.metrics.textfile import Textfile
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.mirror import Mirror
from sana_pipe.data.encoding.unit_encoder import UnitEncoder
from sana_pipe.data.work import claims, progress_rows
from sana_pipe.data.work.progress import Meter, Progress
from sana_pipe.data.work.progress_rows import ProgressRows
from sana_pipe.train.training import metrics
from tests.support import prometheus
from tests.support.constants import constants, set_constants, unit_sizes
from tests.support.failing_reads import disconnect
from tests.support.forked import Forked
from tests.support.prometheus import total
from tests.support.waiting import until

MakeConfig = Callable[..., Config]
ROOT = Path(__file__).parent.parent
CPU = ("encode.device=cpu",)


@pytest.fixture(scope="module", autouse=True)
def small_units(small_cache: Path) -> Iterator[None]:
    """Small units. The cache that tests share is made before, with usual ones."""
    with constants(unit_sizes(2, 2)):
        yield


def written(cache: str | Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of each process that encoded, by noun in the order of writing."""
    return {path.name: list(rows.read(path)) for path in sorted(Path(cache).glob("reports/*.jsonl"))}


def textfiles(folder: Path) -> dict[str, dict[prometheus.Series, float]]:
    assert all(path.suffix == ".prom" for path in folder.iterdir()), "node exporter would read unfinished files"
    return {path.name: prometheus.read(path) for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def done(photos: Path, make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Photographs that were encoded, and three steps of training on them."""
    folder = tmp_path_factory.mktemp("metrics")
    train = (
        "train.steps=3",
        "train.save_every=1",
        "train.log_every=1",
        "train.device=cpu",
        "train.trackers=[]",
        "train.compile=none",
    )
    config = make_config(folder, *CPU, *train, f"metrics.textfile={folder / 'prom/node'}")
    sana_pipe.stages.encode.run(config, data=str(photos))
    sana_pipe.stages.bucket.run(config)
    sana_pipe.stages.train.run(config)
    return config


# -------------------------------------------------------------------------------------------------------- both stages


def test_encode_and_train_write_the_same_metrics(done: Config) -> None:
    [(name, encoded)] = written(done.cache).items()
    trained = metrics.read(Path(done.train.output) / "metrics.jsonl")
    assert name == f"encode-photos-{os.uname().nodename}-0.jsonl"
    captions, images = ([row for row in encoded if row["noun"] == noun] for noun in ("captions", "images"))
    assert captions[-1]["samples"] == 13 and images[-1]["samples"] == 12, "the null record is a caption"
    both = images[-1].keys() & trained[-1].keys()
    assert both == {
        *("samples", "images_per_s", "tokens_per_s", "left", "left_s", "bytes", "data_wait", "data_wait_s"),
        *("requests", "request_s", "retries", "store_wait_s", "evictions", "seconds", "time", "free_bytes"),
    }
    saved = max(path.stat().st_mtime for path in Path(done.train.output).glob("checkpoints/*/checkpoint.json"))
    assert trained[0]["checkpoint_at"] is None and 0 <= saved - trained[-1]["checkpoint_at"] < 60
    for row in (*encoded, *trained):
        assert row["free_bytes"] == pytest.approx(disk.free_at(Path(done.cache)), rel=0.5)
        assert 0 <= row["data_wait"] <= 1 and row["bytes"] > 0 and row["time"].endswith("+00:00")
    shards = [path.stat().st_size for path in Path(done.cache).glob("shards/latent-*/**/*.tar")]
    assert images[-1]["bytes"] == sum(shards) and images[-1]["left"] == 0 == images[-1]["left_s"]
    assert [row["left"] for row in trained] == [2, 1, 0] and trained[-1]["left_s"] == 0
    assert [row["samples"] for row in trained] == sorted({row["samples"] for row in trained})


def test_textfiles_have_the_values_of_the_last_rows(done: Config) -> None:
    assert done.metrics.textfile is not None
    found = textfiles(Path(done.metrics.textfile))
    run = "/".join(Path(done.train.output).parts[-2:])
    stems = [name.rpartition("_")[0] for name in found]
    assert stems == ["sana_pipe_encode_photos_0", f"sana_pipe_train_{run.replace('/', '-')}_0"]
    for values, folder in zip(found.values(), (done.cache, done.train.output), strict=True):
        assert {dict(labels)["folder"] for _, labels in values} == {os.path.realpath(folder)}
    encode, train = found.values()
    names = {family.name for key, family in textfile.FAMILIES.items() if not family.live}
    shared = {name for name, _ in encode} & {name for name, _ in train}
    assert {f"sana_pipe_{name}" for name in names - {"step", "rejects_total", "checkpoint_timestamp_seconds"}} <= shared
    [encoded] = written(done.cache).values()
    trained = metrics.read(Path(done.train.output) / "metrics.jsonl")
    last = {(row["stage"], row["noun"]): row for row in encoded} | {("train", "images"): trained[-1]}
    for (stage, noun), row in last.items():
        values = encode if stage == "encode" else train
        labels = {"stage": stage, "noun": noun, "node": os.uname().nodename, "task": "0"}
        for key in ("samples", "bytes", "data_wait_s"):
            assert total(values, f"sana_pipe_{textfile.FAMILIES[key].name}", **labels) == row[key], key
    assert total(train, "sana_pipe_left", noun="steps") == 0 and total(train, "sana_pipe_step", run=run) == 3
    saved = max(path.stat().st_mtime for path in Path(done.train.output).glob("checkpoints/*/checkpoint.json"))
    last_saved = total(train, "sana_pipe_checkpoint_timestamp_seconds")
    assert trained[-1]["checkpoint_at"] < saved <= last_saved < saved + 60, "that of the last checkpoint"
    for values in found.values():
        assert total(values, "sana_pipe_running") == 0 and total(values, "sana_pipe_info", version=__version__) == 1
        assert not any("_per_second" in name for name, _ in values), "a process that has ended has no rate"


def test_a_second_encode_that_has_nothing_to_do_writes_nothing(done: Config, photos: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path(done.cache).glob("reports/*")}
    sana_pipe.stages.encode.run(done, data=str(photos))
    after = {path: path.stat().st_mtime_ns for path in Path(done.cache).glob("reports/*")}
    jsonl = {path for path in before if path.suffix == ".jsonl"}
    assert jsonl and {path: before[path] for path in jsonl} == {p: t for p, t in after.items() if p.suffix == ".jsonl"}


def test_retries_of_a_source_are_counted(
    photos: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    shutil.copytree(photos, data)
    config = make_config(tmp_path, *CPU, f"metrics.textfile={tmp_path / 'prom'}", "encode.workers=0")
    monkeypatch.setattr(retrying, "PAUSE_S", 0.01)
    before = counters.totals()["retries"]
    disconnect(monkeypatch, str(data), every=2)
    assert sana_pipe.stages.encode.run(config, data=str(data))["rejects"] == 0
    [encoded] = written(config.cache).values()
    [values] = textfiles(tmp_path / "prom").values()
    assert encoded[-1]["retries"] == total(values, "sana_pipe_store_retries_total") > before + 12


def test_rejects_are_counted_by_reason(
    photos: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    shutil.copytree(photos, data)
    picture = sorted(data.glob("*.jpg"))[0]
    config = make_config(tmp_path, *CPU, f"metrics.textfile={tmp_path / 'prom'}")
    whole, real = picture.read_bytes(), UnitEncoder.make

    def late(self: UnitEncoder, *given: Any) -> Any:
        picture.write_bytes(whole[: len(whole) // 3])
        return real(self, *given)

    monkeypatch.setattr(UnitEncoder, "make", late)
    assert sana_pipe.stages.encode.run(config, data=str(data))["rejects"] == 1
    [encoded] = written(config.cache).values()
    [values] = textfiles(tmp_path / "prom").values()
    [(reason, count)] = encoded[-1]["rejects"].items()
    assert count == 1 == total(values, "sana_pipe_rejects_total", reason=reason, noun="images")
    assert picture.name not in reason, "a reason with names would be a series of its own for each picture"


# ---------------------------------------------------------------------------------------------------------- processes


def often(go: Path) -> None:
    """In the child: rows in quick succession, no unit before `go` exists."""
    progress_rows.ROW_S = textfile.RENEW_S = 0.01
    real = UnitEncoder.make

    def held(self: UnitEncoder, *given: Any) -> Any:
        until(go.exists, 120)
        return real(self, *given)

    UnitEncoder.make = held  # type: ignore[method-assign]


@pytest.mark.dist
def test_two_tasks_write_two_files_and_a_killed_one_leaves_its_file_whole(
    photos: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, prom = make_config(tmp_path, *CPU), tmp_path / "prom"
    models = [f"--set=vae.id={config.vae.id}", f"--set=text.id={config.text.id}"]
    sets = [f"--set={text}" for text in (*CPU, f"cache={config.cache}", f"metrics.textfile={prom}")]
    command = ["encode", "--config", "tiny", "--data", str(photos), "--task-count", "2", *models, *sets]
    set_constants(monkeypatch, {"sana_pipe.data.work.claims.STALE_S": 2})
    held = partial(often, tmp_path / "go")
    tasks = [Forked(*command, "--task-index", str(task), before=held) for task in (0, 1)]
    until(lambda: prom.is_dir() and len(list(prom.glob("*.prom"))) == 2, 120)
    names = sorted(path.name for path in prom.glob("*.prom"))
    assert [name.rpartition("_")[0] for name in names] == [f"sana_pipe_encode_photos_{task}" for task in (0, 1)]
    assert total(prometheus.read(prom / names[0]), "sana_pipe_running") == 1
    tasks[1].kill()
    tasks[1].wait(30)
    (tmp_path / "go").touch()
    seen = 0.0
    while tasks[0].poll() is None:  # a reader never sees a part, and counts never fall
        values = prometheus.read(prom / names[0])
        assert seen <= (seen := total(values, "sana_pipe_samples_total", task="0"))
        time.sleep(0.005)
    assert tasks[0].wait() == 0, tasks[0].output()
    killed = prometheus.read(prom / names[1])
    assert total(killed, "sana_pipe_running", task="1") == 1, "it could not say that it ended"
    assert total(prometheus.read(prom / names[0]), "sana_pipe_running") == 0
    encoded = written(config.cache)
    assert [name.rpartition("-")[2] for name in encoded] == ["0.jsonl", "1.jsonl"]
    made = {row["noun"]: row["samples"] for row in encoded[next(iter(encoded))]}
    assert made == {
        noun: total(prometheus.read(prom / names[0]), "sana_pipe_samples_total", noun=noun) for noun in made
    }
    again = Forked(*command, "--task-index", "1")
    assert again.wait(60) == 0, again.output()


@pytest.mark.dist
def test_each_process_of_a_training_writes_its_textfile(small_cache_copy: Path, tmp_path: Path) -> None:
    from tests.support.forked import ranks, succeed

    sets = [f"cache={small_cache_copy}", f"train.output={tmp_path / 'run'}", f"metrics.textfile={tmp_path / 'prom'}"]
    sets += ["train.steps=2", "train.log_every=1", "train.precision=fp32", "train.device=cpu"]
    options = [word for text in sets for word in ("--set", text)]
    succeed(ranks(2, "train", "--config", "tiny", *options), timeout=200)
    first, second = textfiles(tmp_path / "prom").values()
    row = metrics.read(tmp_path / "run/metrics.jsonl")[-1]
    for key in ("bytes", "data_wait_s"):
        name = f"sana_pipe_{textfile.FAMILIES[key].name}"
        assert total(first, name) + total(second, name) == pytest.approx(row[key]) and total(second, name) > 0
    assert total(first, "sana_pipe_samples_total") == row["samples"]
    assert not any(name == "sana_pipe_samples_total" for name, _ in second), "a sum over nodes counts them once"


# ----------------------------------------------------------------------------------------------------------- textfile


def test_a_textfile_that_cannot_be_written_is_named_once_and_tried_again(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "prom").write_text("a file where the folder should be")
    file = Textfile(str(tmp_path / "prom"), {"stage": "encode", "run": "a/b", "task": 3}, said.append)
    file.update(images={"samples": 1, "images_per_s": 2.0, "left_s": None})
    file.renew()
    assert len(said) == 1 and str(tmp_path / "prom") in said[0]
    (tmp_path / "prom").unlink()
    (tmp_path / "prom").mkdir()
    file.renew()
    [path] = (tmp_path / "prom").iterdir()
    left = path.with_name(f".{path.name}.99.partial")
    left.write_text("of a process that was killed")
    file.update(images={"samples": 2, "images_per_s": 2.0, "rejects": {'a "b" \\ \n': 4}})
    values = prometheus.read(path)
    assert total(values, "sana_pipe_samples_per_second", noun="images", run="a/b") == 2
    assert total(values, "sana_pipe_rejects_total", reason='a "b" \\ \n') == 4
    assert path.stat().st_mode & 0o044, "another user reads it"
    Textfile(str(tmp_path / "prom"), {"stage": "encode", "run": "a/b", "task": 3}, said.append)
    assert not left.exists()
    for value, text in ((float("nan"), "NaN"), (float("inf"), "+Inf"), (float("-inf"), "-Inf")):
        file.update(steps={"loss": value})
        [line] = [line for line in next((tmp_path / "prom").iterdir()).read_text().splitlines() if "loss{" in line]
        assert line.endswith(f" {text}")
    Textfile(None, {"stage": "train"}, said.append).update(images={"samples": 1})
    assert len(said) == 1


def test_no_two_processes_write_one_textfile(tmp_path: Path) -> None:
    """Also those of equal names in two folders, or of names that differ in signs that a file name does not have."""
    labels = {"stage": "train", "run": "runs/dog", "task": 0, "folder": tmp_path / "runs/dog"}
    others = [{"folder": tmp_path / "other/runs/dog"}, {"task": 1}, {"stage": "encode"}]
    others += [{"run": name} for name in ("runs_dog", "runs-dog", "n" * 300 + "/a", "n" * 300 + "/b")]
    every = [labels | other for other in ({}, *others, {})]
    for number, each in enumerate(every):
        Textfile(str(tmp_path / "prom"), each, print).update(images={"samples": number})
    found = textfiles(tmp_path / "prom").values()
    assert len(found) == len(every) - 1, "a process that begins again replaces its file"
    assert sorted(total(values, "sana_pipe_samples_total") for values in found) == list(range(1, len(every)))
    assert {dict(each)["folder"] for values in found for _, each in values} == {str(each["folder"]) for each in every}


def test_a_run_whose_folder_is_no_utf8_has_a_textfile(tmp_path: Path) -> None:
    Textfile(str(tmp_path), {"stage": "train", "run": "a/\udcff", "task": 0}, print).update(images={"samples": 1})
    [values] = textfiles(tmp_path).values()
    assert total(values, "sana_pipe_samples_total", run="a/?") == 1


def test_a_file_that_is_written_in_part_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = Textfile(str(tmp_path), {"stage": "encode", "run": "a", "task": 0}, print), Path.write_text
    file.update(images={"samples": 1})

    def torn(self: Path, text: str, **given: Any) -> int:
        real(self, text[: len(text) // 2], **given)
        raise OSError(28, "the disk is full")

    monkeypatch.setattr(Path, "write_text", torn)
    file.update(images={"samples": 2})
    [values] = textfiles(tmp_path).values()
    assert total(values, "sana_pipe_samples_total") == 1


def test_it_is_renewed_while_no_row_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that waits for a store shows that it waits."""
    monkeypatch.setattr(textfile, "RENEW_S", 0.01)
    file = Textfile(str(tmp_path), {"stage": "train", "run": "a", "task": 0}, print)
    file.renew()
    [path] = tmp_path.iterdir()
    with file.renewed():
        counters.add(retries=7)
        expected = counters.totals()["retries"]
        until(lambda: total(prometheus.read(path), "sana_pipe_store_retries_total") == expected, 10)
        assert total(prometheus.read(path), "sana_pipe_running") == 1
    assert total(prometheus.read(path), "sana_pipe_running") == 0


def test_the_page_names_every_metric() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    table = page.partition("## Names")[2].partition("## Prometheus")[0]
    cells = ["".join(line.split("|")[1:3]) for line in table.splitlines() if "|" in line]
    names = set(re.findall(r"`([a-z_]+)`", "".join(cells)))
    assert {family.name for family in (*textfile.FAMILIES.values(), textfile.RUNNING, textfile.INFO)} <= names
    assert textfile.FAMILIES.keys() - {"per_s"} <= names


def test_the_reader_of_the_tests_is_strict() -> None:
    head = "# HELP a_total A.\n# TYPE a_total counter\n"
    assert prometheus.parse(head + 'a_total{x="1"} 2\n') == {("a_total", frozenset({("x", "1")})): 2}
    for bad in (
        head + 'a_total{x="1"} 2',
        head + 'a_total{x="1"} 2\na_total{x="1"} 3\n',
        head + 'a_total{x="1"} 2 1700000000\n',
        head + 'a_total{x="1} 2\n',
        head + 'a_total{x="a"b"} 2\n',
        head + 'b_total{x="1"} 2\n',
        head.replace("counter", "gauge") + 'a_total{x="1"} 2\n',
        'a_total{x="1"} 2\n',
        head + head,
    ):
        with pytest.raises((AssertionError, ValueError)):
            prometheus.parse(bad)


# ------------------------------------------------------------------------------------------------- encode's own rows


@pytest.fixture
def bar(monkeypatch: pytest.MonkeyPatch) -> Progress:
    return Progress("images", 100, Meter())


def encoder_rows(config: Config, folder: Path, said: list[str]) -> ProgressRows:
    return ProgressRows(config.metrics.textfile, folder, "cache", "photos", 2, 8, said.append)


def after_a_row(folder: Path) -> None:
    """Wait until two rows were begun: the second with what is counted now."""
    lines = sum(map(len, written(folder).values()))
    until(lambda: sum(map(len, written(folder).values())) >= lines + 2)


def test_counts_only_grow_when_a_unit_is_made_again(
    make_config: MakeConfig, tmp_path: Path, bar: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_rows, "ROW_S", 0.01)
    with closing(encoder_rows(make_config(tmp_path), tmp_path / "reports", [])) as metrics_of:
        for made in (30, 5):
            with metrics_of.of(bar):
                bar.add(made)
                after_a_row(tmp_path)
                bar.forget(10, 0)
                after_a_row(tmp_path)
    [found] = written(tmp_path).values()
    samples = [row["samples"] for row in found]
    assert samples == sorted(samples) and 30 in samples
    assert {row["task"] for row in found} == {2} and {row["tasks"] for row in found} == {8}


def test_rejects_of_a_new_kind_may_come_while_a_row_is_made(
    make_config: MakeConfig, tmp_path: Path, bar: Progress
) -> None:
    class Growing(Counter[str]):
        def items(self) -> Any:
            for item in super().items():
                self[f"reason {len(self)}"] += 1
                yield item

    bar.meter.rejects = Growing({"not a picture": 2})
    bar.add(1)
    with closing(encoder_rows(make_config(tmp_path), tmp_path / "reports", [])) as metrics_of, metrics_of.of(bar):
        pass
    [[row]] = written(tmp_path).values()
    assert row["rejects"] == {"not a picture": 2}


def test_pictures_that_are_planned_later_are_added(make_config: MakeConfig, tmp_path: Path) -> None:
    with closing(encoder_rows(make_config(tmp_path), tmp_path / "reports", [])) as metrics_of:
        for made in (30, 5):
            later = Progress("images", made, Meter(bytes=made))
            with metrics_of.of(later):
                later.add(made)
    [found] = written(tmp_path).values()
    assert [(row["samples"], row["bytes"], row["left"]) for row in found] == [(30, 30, 0), (35, 35, 0)]


def test_what_cannot_be_written_ends_no_encoding(
    make_config: MakeConfig, tmp_path: Path, bar: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    (tmp_path / "reports").write_text("a file where the folder should be")
    metrics_of = encoder_rows(make_config(tmp_path), tmp_path / "reports", said)
    with metrics_of.of(bar):
        bar.add(3)
    with metrics_of.of(bar):
        bar.add(3)
    metrics_of.close()
    assert len(said) == 1 and "reports" in said[0]


# ----------------------------------------------------------------------------------------------------------- counters


@pytest.fixture
def counted() -> Callable[[], dict[str, float]]:
    began = counters.totals()
    return lambda: counters.since(began)


def test_a_silent_store_and_a_slow_one_are_counted(
    monkeypatch: pytest.MonkeyPatch, counted: Callable[[], dict[str, float]]
) -> None:
    monkeypatch.setattr(retrying, "NOTICE_S", 0.1)
    monkeypatch.setattr(retrying, "PAUSE_S", 0.01)
    assert retrying.retry(lambda: 1, "quick") == 1
    assert counted()["store_wait_s"] == 0 and counted()["requests"] == 1
    answers = iter([ConnectionError("reset"), ConnectionError("reset"), None])

    def ask() -> None:
        time.sleep(0.3)
        if (answer := next(answers)) is not None:
            raise answer

    began = time.monotonic()
    retrying.retry(ask, "slow", 60)
    seconds = time.monotonic() - began
    assert counted()["retries"] == 2 and 0.3 <= counted()["request_s"] < seconds
    assert 0.5 * seconds < counted()["store_wait_s"] <= seconds, "once, though it is looked at often"


def test_evictions_of_the_mirror_are_counted(tmp_path: Path, counted: Callable[[], dict[str, float]]) -> None:
    from sana_pipe.data.cache import layout
    from sana_pipe.data.cache.folder_store import FolderStore

    mirror = Mirror(tmp_path / "mirror", 1000, FolderStore(tmp_path / "origin", 60))
    for number in range(6):
        data = bytes([number]) * 300
        name = f"shards/x/{layout.content_digest(data)}.tar"
        mirror.origin.replace(name, data)
        mirror.open(name)
        copies = len(mirror.list_copies())
        assert counted()["evictions"] == number + 1 - copies
    mirror.drop(name)
    assert counted()["evictions"] == 6 - copies > 0, "what is damaged is not evicted"


# ------------------------------------------------------------------------------------------------------------- status


@pytest.fixture
def working(done: Config, tmp_path: Path) -> tuple[Config, Any]:
    """A copy of the cache in which a process holds a claim."""
    shutil.copytree(done.cache, tmp_path / "cache")
    config = done.model_copy(update={"cache": str(tmp_path / "cache")})
    cache = Cache(config.cache)
    worker = claims.Claims(cache.files, 60)
    worker.progress = lambda: {"node": "gpu03", "task": 1, "tasks": 8, **bar.brief(), **textfile.store_counts()}
    bar = Progress("images", 200, Meter())
    bar.done, bar.rejected = 50, 3
    name = next(iter(Cache(config.cache).encodings("latent"))).name
    assert worker.take(name, 0, "ab" * 16) == "ours"
    return config, SimpleNamespace(files=cache.files, worker=worker, work=(name, 0, "ab" * 16))


def test_status_shows_processes_that_encode(working: tuple[Config, Any], capsys: Any) -> None:
    config, held = working
    sana_pipe.stages.status.run(config)
    assert "gpu03, task 2 of 8: 50 images at " in capsys.readouterr().out
    path = held.files.path(f"claims/{held.work[0]}/00000000/{held.work[2]}.json")
    os.utime(path, (time.time() - 100,) * 2)
    sana_pipe.stages.status.run(config)
    assert "147 left" in (out := capsys.readouterr().out) and "silent for 1m40s" in out
    held.worker.release(*held.work)
    sana_pipe.stages.status.run(config, as_json=True)
    assert json.loads(capsys.readouterr().out)["tasks"] == []


def test_status_shows_what_stores_cost_a_process_that_encodes(
    photos: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    config, real, retries = make_config(tmp_path, *CPU), UnitEncoder.make, list[float]()

    def make(self: UnitEncoder, *given: Any) -> Any:
        if retries:
            sana_pipe.stages.status.run(config)
            lines = capsys.readouterr().out.splitlines()
            [line] = [line for line in lines if line.startswith(f"{os.uname().nodename}, task 1 of 1: ")]
            assert f", {retries[-1]:.0f} retries" in line and " of waiting for stores" in line
        counters.add(retries=7, store_wait_s=90)
        retries.append(counters.totals()["retries"])
        return real(self, *given)

    monkeypatch.setattr(UnitEncoder, "make", make)
    sana_pipe.stages.encode.run(config, data=str(photos))
    assert len(retries) > 6


def test_status_shows_a_training_that_holds_its_run(done: Config, capsys: Any) -> None:
    lock = Path(done.train.output) / "lock.json"
    sana_pipe.stages.status.run(done)
    assert "training" not in capsys.readouterr().out, "it has ended"
    lock.touch()
    try:
        sana_pipe.stages.status.run(done)
        assert f"training {done.train.output}: step 3, 0 left" in capsys.readouterr().out
        below = Path(done.train.output) / "second"
        below.mkdir()
        (below / "lock.json").touch()
        sana_pipe.stages.status.run(done)
        assert f"training {below}: no step yet" in capsys.readouterr().out
        shutil.rmtree(below)
        os.utime(lock, (time.time() - 100,) * 2)
        sana_pipe.stages.status.run(done)
        assert "training" not in capsys.readouterr().out, "it was killed"
    finally:
        lock.unlink()


def test_status_is_watched_until_ctrl_c(
    working: tuple[Config, Any], capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = working
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(sana_pipe.stages.status, "time", SimpleNamespace(sleep=sleep, time=time.time))
    assert sana_pipe.stages.status.watch(config, 7) == 0 and pauses == [7, 7, 7]
    out = capfd.readouterr().out
    assert out.count("gpu03, task 2 of 8") == 3 and "\x1b" not in out, "a pipe gets one below the other"
    pauses.clear()
    assert sana_pipe.stages.status.watch(config, 7, as_json=True) == 0
    assert [json.loads(line)["tasks"][0]["left"] for line in capfd.readouterr().out.splitlines()] == [147] * 3
    monkeypatch.setattr(sana_pipe.stages.status.sys.stdout, "isatty", lambda: True, raising=False)
    pauses.clear()
    sana_pipe.stages.status.watch(config, 7)
    assert capfd.readouterr().out.count("\x1b[2J") == 3


def test_watching_ends_with_the_pipe_that_is_read(done: Config, tmp_path: Path) -> None:
    command = f"{sys.executable} -m sana_pipe.cli status --watch --every 0.1 --set cache={done.cache} | head -1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == processes.OUTPUT_LOST and "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    "error", [AwayError("s3://b: no answer", fix="wait"), CacheError("there is no cache"), OSError()]
)
def test_watching_outlasts_errors_of_the_store(
    error: Exception, done: Config, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = sana_pipe.stages.status.status, list[int]()

    def failing(cache: Cache) -> Any:
        calls.append(1)
        if len(calls) < 3:
            raise error
        return real(cache)

    def sleep(seconds: float) -> None:
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(sana_pipe.stages.status, "status", failing)
    monkeypatch.setattr(sana_pipe.stages.status, "time", SimpleNamespace(sleep=sleep, time=time.time))
    assert sana_pipe.stages.status.watch(done, 0.1) == 0
    out = capfd.readouterr().out
    assert out.count("waiting for it") == 2 and "complete" in out and "Traceback" not in out
