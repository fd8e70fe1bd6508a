"""Real encoding processes that are killed, stopped, run out of disk or lose their permission at any moment.

Each time the same command then finishes the same cache.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sana_pipe.config import Config, dump
from tests.support.constants import constants, set_constants, unit_sizes
from tests.support.forked import Forked
from tests.support.trees import files

MakeConfig = Callable[..., Config]
OPTIONS = (
    "encode.image_batch=2",
    "encode.signals=[phash]",
    "data.pictures={control: {made: canny}, mask: {made: alpha}}",
)


@pytest.fixture(scope="module", autouse=True)
def small_units(small_cache: Path) -> Iterator[None]:
    """Small units, which other workers take over soon. The cache that tests share is made before, with usual ones."""
    with constants({**unit_sizes(2, 3), "sana_pipe.data.work.claims.STALE_S": 3}):
        yield


def encode(
    config: Config, folder: Path, photos: Path, *, lowered: bool = False, log: Path | None = None, **options: Any
) -> Forked:
    path = folder / "config.yaml"
    path.write_text(dump(config))
    assert yaml.safe_load(path.read_text())["cache"] == config.cache
    words = ("encode", "--config", str(path), "--data", str(photos))
    return Forked(*words, worker="lowered" if lowered else None, log=log, **options)


@pytest.fixture(scope="module")
def undisturbed(
    photos: Path, make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, bytes], float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    Forked("--version").wait()  # imports the packages
    began = time.monotonic()
    process = encode(make_config(folder, *OPTIONS), folder, photos)
    assert process.wait() == 0
    return files(folder / "cache"), time.monotonic() - began


@pytest.mark.fault
@pytest.mark.timeout(600)
def test_killed_at_random_then_finished(
    fault_seed: int,
    undisturbed: tuple[dict[str, bytes], float],
    photos: Path,
    make_config: MakeConfig,
    tmp_path: Path,
) -> None:
    """Every third seed also with limits of memory so low that every array and table is in files."""
    truth, seconds = undisturbed
    for lowered in (False, True) if fault_seed % 3 == 0 else (False,):
        chance, folder = random.Random(fault_seed), tmp_path / str(lowered)
        folder.mkdir()
        config = make_config(folder, *OPTIONS)
        kills = 0
        for _ in range(2):
            process = encode(config, folder, photos, lowered=lowered)
            try:
                process.wait(timeout=chance.uniform(0.3, 2.0 if lowered else 1.0) * seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
        process = encode(config, folder, photos, lowered=lowered)
        assert process.wait() == 0, process.output()
        assert files(folder / "cache") == truth, f"after {kills} kills"


@pytest.mark.fault
@pytest.mark.timeout(600)
def test_a_stopped_process_that_wakes_late_changes_nothing(
    undisturbed: tuple[dict[str, bytes], float], photos: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    truth, seconds = undisturbed
    config = make_config(tmp_path, *OPTIONS)
    sleeper = encode(config, tmp_path, photos)
    time.sleep(0.7 * seconds)
    sleeper.send_signal(signal.SIGSTOP)
    other = encode(config, tmp_path, photos)
    assert other.wait() == 0
    assert files(tmp_path / "cache") == truth
    sleeper.send_signal(signal.SIGCONT)
    assert sleeper.wait() == 0
    assert files(tmp_path / "cache") == truth


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 208 KiB, of which nothing stays free."""
    set_constants(monkeypatch, {"sana_pipe.data.work.disk_space.RESERVE": 0})
    small = tmp_path / "small"
    small.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=208k", "tmpfs", str(small)], capture_output=True)
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {made.stderr.decode().strip()}")
    try:
        yield small
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)
        shutil.rmtree(small, ignore_errors=True)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def refused(process: Forked, code: int, said: str) -> None:
    """The process ended with an error for people."""
    output = process.output(timeout=300)
    assert process.wait() == code, output
    assert said in output
    assert "fix:" in output
    assert "Traceback" not in output


def nothing_half(cache: Path, truth: dict[str, bytes]) -> None:
    """Whatever is published is whole: the very file that an undisturbed run publishes."""
    result = {name: data for name, data in files(cache).items() if not name.startswith("claims/")}
    assert {name: data for name, data in truth.items() if name in result} == result


def wait_for(condition: Callable[[], bool], process: Forked) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.output()
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.fault
def test_a_full_disk_is_an_error_for_people_and_continues(
    photos: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    undisturbed: tuple[dict[str, bytes], float],
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = small_disk / "cache"
    config = make_config(tmp_path, *OPTIONS, f"cache={cache}")
    set_constants(monkeypatch, {"sana_pipe.data.work.disk_space.WAIT_S": 0.0})
    refused(encode(config, tmp_path, photos), 6, "continues")
    nothing_half(cache, undisturbed[0])
    remount(small_disk, "size=64m")
    process = encode(config, tmp_path, photos)
    assert process.wait() == 0, process.output()
    assert files(cache) == undisturbed[0]


@pytest.mark.fault
def test_a_full_disk_pauses_it_and_more_room_lets_it_go_on(
    photos: Path, make_config: MakeConfig, tmp_path: Path, undisturbed: tuple[dict[str, bytes], float], small_disk: Path
) -> None:
    """One process from beginning to end; while it waits it holds no claim and a signal ends it cleanly."""
    cache = small_disk / "cache"
    config = make_config(tmp_path, *OPTIONS, f"cache={cache}")
    log = tmp_path / "log"

    def start() -> Forked:
        process = encode(config, tmp_path, photos, log=log)
        wait_for(lambda: "paused:" in log.read_text(), process)
        return process

    def claimed() -> list[Path]:
        return [path for path in (cache / "claims").rglob("*") if path.is_file()]

    process = start()
    assert claimed() == []
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()
    nothing_half(cache, undisturbed[0])
    process = start()
    assert claimed() == []
    remount(small_disk, "size=64m")
    assert process.wait(200) == 0, log.read_text()
    assert log.read_text().count("paused:") == 1
    assert "continues" in log.read_text()
    assert files(cache) == undisturbed[0]


@pytest.mark.fault
def test_a_read_only_file_system_is_an_error_for_people_and_continues(
    photos: Path, make_config: MakeConfig, tmp_path: Path, undisturbed: tuple[dict[str, bytes], float], small_disk: Path
) -> None:
    cache = small_disk / "cache"
    remount(small_disk, "size=64m")
    config = make_config(tmp_path, *OPTIONS, f"cache={cache}")
    remount(small_disk, "ro")
    refused(encode(config, tmp_path, photos), 3, "Read-only file system")
    remount(small_disk, "rw")
    process = encode(config, tmp_path, photos)
    wait_for(lambda: any(cache.glob("units/*/*/*/*.json")), process)
    process.send_signal(signal.SIGKILL)  # so that the file system is not in use
    process.wait()
    before = files(cache)
    remount(small_disk, "ro")
    refused(encode(config, tmp_path, photos), 3, "Read-only file system")
    assert files(cache) == before
    remount(small_disk, "rw")
    process = encode(config, tmp_path, photos)
    assert process.wait() == 0, process.output()
    assert files(cache) == undisturbed[0]


# ---------------------------------------------------------------- permissions


def allow(cache: Path, mode: int) -> None:
    for folder, _, _ in os.walk(cache):
        os.chmod(folder, mode)


@pytest.mark.fault
def test_a_cache_without_permission_is_an_error_for_people_and_continues(
    photos: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    undisturbed: tuple[dict[str, bytes], float],
    bound_by_permissions: Callable[[], None],
) -> None:
    (tmp_path / "cache").mkdir()
    config = make_config(tmp_path, *OPTIONS)
    allow(tmp_path / "cache", 0o555)
    refused(encode(config, tmp_path, photos, before=bound_by_permissions), 3, "Permission denied")
    assert list((tmp_path / "cache").iterdir()) == []
    allow(tmp_path / "cache", 0o755)
    process = encode(config, tmp_path, photos, before=bound_by_permissions)
    assert process.wait() == 0, process.output()
    assert files(tmp_path / "cache") == undisturbed[0]


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["text", "latent"])
def test_permission_lost_in_mid_run_is_an_error_for_people_and_continues(
    kind: str,
    photos: Path,
    make_config: MakeConfig,
    tmp_path: Path,
    undisturbed: tuple[dict[str, bytes], float],
    bound_by_permissions: Callable[[], None],
) -> None:
    cache = tmp_path / "cache"
    config = make_config(tmp_path, *OPTIONS)
    process = encode(config, tmp_path, photos, before=bound_by_permissions)
    wait_for(lambda: any(cache.glob(f"units/{kind}-*/*/*/*.json")), process)
    process.send_signal(signal.SIGSTOP)
    allow(cache, 0o555)
    try:
        process.send_signal(signal.SIGCONT)
        refused(process, 3, f"g+ws {cache}")
    finally:
        allow(cache, 0o755)
    result = files(cache)
    assert result.keys() < undisturbed[0].keys() | {name for name in result if name.startswith("claims/")}
    nothing_half(cache, undisturbed[0])
    process = encode(config, tmp_path, photos, before=bound_by_permissions)
    assert process.wait() == 0, process.output()
    assert files(cache) == undisturbed[0]
