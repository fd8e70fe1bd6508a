"""Documents of a cache that are lost or damaged: nothing is lost with them, and none looks as if it had never been."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.cache import audit, codec
from pipeline.cache.layout import Paths
from pipeline.cache.store import Cache
from tests import tiny_cache


def lose(root: Path, pattern: str) -> list[str]:
    found = [path.relative_to(root).as_posix() for path in sorted(root.glob(pattern)) if path.is_file()]
    assert found, pattern
    for name in found:
        (root / name).unlink()
    return found


@pytest.fixture
def tiny(tmp_path: Path) -> Cache:
    """Records of two kinds and a snapshot, as after `gc`: segments stand for the units."""
    cache = tiny_cache.build(tmp_path / "tiny")
    lose(cache.root, "units/**/*.json")
    return cache


@pytest.mark.parametrize(
    "pattern",
    ["segments/latent-*/00000000.json", "segments/text-*/00000000.json", "recipes/latent-*.json", "recipes/text-*.json",
     "plans/latent-*/00000000.json", "snapshots/*.json", "names/latest/*.json"],
)  # fmt: skip
def test_a_lost_document_contradicts_what_it_named(tiny: Cache, pattern: str) -> None:
    assert not list(audit.contradictions(tiny))
    lose(tiny.root, pattern)
    assert list(audit.contradictions(tiny))


def test_lost_scales_contradict_the_records_that_were_made_with_them(tmp_path: Path) -> None:
    files = Cache(tmp_path / "tiny", create=True).files
    for recipe, channels in zip(tiny_cache.recipes("int8"), (2, 3), strict=True):
        codec.publish_scale(files, recipe.name, np.ones(channels, np.float32), 1)
    cache = tiny_cache.build(tmp_path / "tiny", storage="int8")
    assert not list(audit.contradictions(cache))
    lose(cache.root, "scales/latent-*.json")
    [finding] = audit.contradictions(cache)
    assert finding.path.startswith("scales/latent-")


def test_what_a_crash_leaves_contradicts_nothing_once_the_work_is_finished(tiny: Cache) -> None:
    """A shard of a committed unit, and bytes that are no shard; a shard of a unit that is not committed does."""
    recipe = tiny.recipes("latent")[0].name
    [first, *_] = sorted(tiny.root.glob(f"shards/{recipe}/*/*.tar"))
    left = tiny.root / Paths.shard(recipe, "0" * 32)
    left.parent.mkdir(exist_ok=True)
    for data in (first.read_bytes(), b"never committed", b""):
        left.write_bytes(data)
        assert not list(audit.contradictions(tiny))
    unit = b'"unit":"' + b"0" * 31
    assert unit in first.read_bytes()
    left.write_bytes(first.read_bytes().replace(unit, b'"unit":"' + b"f" * 31))
    [finding] = audit.contradictions(tiny)
    assert finding.path == Paths.shard(recipe, "0" * 32)
