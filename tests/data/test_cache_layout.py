"""`cache_layout.md` is true: its examples run on a real cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import sana_pipe.stages.pack
from sana_pipe.config import Config
from tests.support.layout_page import PAGE, examples


def test_the_examples_run(small_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = examples()
    assert len(result) == 5
    shards = sorted(small_cache.glob("shards/text-*/*/*.tar"))
    for text_shard in shards:
        exec(compile(result[0], str(PAGE), "exec"), {"text_shard": str(text_shard)})
    assert "an astronaut in an orange space suit" in capsys.readouterr().out
    exec(compile(result[2], str(PAGE), "exec"), {"cache_folder": str(small_cache)})
    assert "(16, " in capsys.readouterr().out


def test_the_example_of_a_packed_snapshot_runs(
    small_cache_copy: Path, make_config: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    sana_pipe.stages.pack.run(make_config(small_cache_copy.parent))
    shards = sorted(str(path) for path in small_cache_copy.glob("shards/packed-*/*/*.tar"))
    capsys.readouterr()
    exec(compile(examples()[3], str(PAGE), "exec"), {"joint_shards": shards})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and any("an astronaut in an orange space suit" in line for line in lines)
    test_every_file_of_a_cache_is_described(small_cache_copy)


def test_the_example_notices_damage(small_cache_copy: Path) -> None:
    """Sabotage: with one flipped byte the example's own check fails."""
    for shard in small_cache_copy.glob("shards/latent-*/*/*.tar"):
        data = bytearray(shard.read_bytes())
        for start in range(0, len(data), 512):
            data[start + 200] ^= 1
        shard.write_bytes(data)
    with pytest.raises(AssertionError, match="not the bytes"):
        exec(compile(examples()[2], str(PAGE), "exec"), {"cache_folder": str(small_cache_copy)})


def test_every_file_of_a_cache_is_described(small_cache: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for path in small_cache.rglob("*"):
        if path.is_file():
            assert f"{path.relative_to(small_cache).parts[0]}" in page
