"""SIGKILL to real encoding processes at random moments; then the same command finishes the same cache."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pipeline.config import Config, dump
from pipeline.processes import command

MakeConfig = Callable[..., Config]
UNITS = (
    "encode.unit_images=2", "encode.unit_captions=3", "encode.image_batch=2", "encode.text_batch=2",
    "encode.claim_timeout_s=3",
)  # fmt: skip


def files(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.relative_to(root).parts[0] not in ("tmp", "reports")
    }


def encode(config: Config, folder: Path, photos: Path) -> subprocess.Popen[bytes]:
    path = folder / "config.yaml"
    path.write_text(dump(config))
    assert yaml.safe_load(path.read_text())["cache"] == config.cache
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command("encode", "--config", str(path), "--data", str(photos)), env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(
    photos: Path, make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, bytes], float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    began = time.monotonic()
    process = encode(make_config(folder, *UNITS), folder, photos)
    assert process.wait() == 0
    return files(folder / "cache"), time.monotonic() - began


@pytest.mark.fault
@pytest.mark.timeout(600)
def test_killed_at_random_then_finished(
    fault_seed: int, undisturbed: tuple[dict[str, bytes], float], photos: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    truth, seconds = undisturbed
    chance = random.Random(fault_seed)
    config = make_config(tmp_path, *UNITS)
    kills = 0
    for _ in range(2):
        process = encode(config, tmp_path, photos)
        try:
            process.wait(timeout=chance.uniform(0.3, 1.0) * seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    process = encode(config, tmp_path, photos)
    _, error = process.communicate()
    assert process.returncode == 0, error.decode()
    assert files(tmp_path / "cache") == truth, f"after {kills} kills"


@pytest.mark.fault
@pytest.mark.timeout(600)
def test_a_stopped_process_that_wakes_late_changes_nothing(
    undisturbed: tuple[dict[str, bytes], float], photos: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    truth, seconds = undisturbed
    config = make_config(tmp_path, *UNITS)
    sleeper = encode(config, tmp_path, photos)
    time.sleep(0.7 * seconds)
    sleeper.send_signal(signal.SIGSTOP)
    other = encode(config, tmp_path, photos)
    assert other.wait() == 0
    assert files(tmp_path / "cache") == truth
    sleeper.send_signal(signal.SIGCONT)
    assert sleeper.wait() == 0
    assert files(tmp_path / "cache") == truth


@pytest.mark.fault
def test_a_full_disk_is_an_error_for_people_and_continues(
    photos: Path, make_config: MakeConfig, tmp_path: Path, undisturbed: tuple[dict[str, bytes], float]
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", str(small)], capture_output=True)
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {made.stderr.decode().strip()}")
    try:
        config = make_config(tmp_path, *UNITS, f"cache={small / 'cache'}")
        process = encode(config, tmp_path, photos)
        _, error = process.communicate()
        assert process.returncode == 3, error.decode()
        assert "cannot be written" in error.decode()
        assert "Traceback" not in error.decode()
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
        process = encode(config, tmp_path, photos)
        _, error = process.communicate()
        assert process.returncode == 0, error.decode()
        assert files(small / "cache") == undisturbed[0]
    finally:
        subprocess.run(["umount", str(small)], check=False)
        shutil.rmtree(small, ignore_errors=True)
