"""Documents of a cache that are lost or damaged: nothing is lost with them, and none looks as if it had never been."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stages.bucket
import stages.encode
import stages.gc
import stages.status
import stages.verify
from pipeline.cache import audit, codec, index, layout
from pipeline.cache.layout import Paths
from pipeline.cache.store import Cache, Plan, Unit
from pipeline.config import Config
from pipeline.encoding import worker
from pipeline.errors import IntegrityError
from tests import tiny_cache


def documents(root: Path) -> list[str]:
    """All of a cache, without their copies."""
    names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.json"))]
    return [name for name in names if layout.is_document(name)]


def content(root: Path) -> dict[str, bytes]:
    """What lies in a cache but reports and unfinished files."""
    names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.is_file()]
    return {name: (root / name).read_bytes() for name in names if not name.startswith(("reports/", "tmp/"))}


def lose(root: Path, pattern: str) -> None:
    """Documents and their copies."""
    found = sorted(path.relative_to(root).as_posix() for path in root.glob(pattern) if path.is_file())
    assert found, pattern
    for name in found:
        (root / name).unlink()
        (root / Paths.copy(name)).unlink()


def flip(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]


HARM: dict[str, Callable[[Path], object]] = {
    "lost": Path.unlink,
    "flipped": lambda path: path.write_bytes(flip(path.read_bytes())),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.fixture
def tiny(tmp_path: Path) -> Cache:
    """Records of two kinds and a snapshot, as after `gc`: segments stand for the units."""
    cache = tiny_cache.build(tmp_path / "tiny")
    lose(cache.root, "units/**/*.json")
    return cache


@pytest.fixture
def config(small_cache_copy: Path, make_config: Callable[..., Config], tmp_path: Path) -> Config:
    """Of a copy of the small cache, as after `gc`."""
    lose(small_cache_copy, "units/**/*.json")
    return make_config(tmp_path)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Units that are encoded from now on."""
    units: list[str] = []
    real = worker.encode

    def encode(cache: Cache, recipe: layout.Recipe, plan: Plan, unit: Unit, *rest: Any) -> index.Commit:
        units.append(unit.unit)
        return real(cache, recipe, plan, unit, *rest)

    monkeypatch.setattr(worker, "encode", encode)
    return units


# ---------------------------------------------------------------- one of the two


@pytest.mark.parametrize("how", HARM)
def test_harm_to_one_of_the_two_changes_nothing_is_named_and_put_right(config: Config, how: str) -> None:
    root = Path(config.cache)
    whole, answer = content(root), audit.status(Cache.of(config))
    names = documents(root)
    assert {name.partition("/")[0] for name in names} == {*layout.DOCUMENTS, Paths.FORMAT} - {"scales", "units"}
    for name in names:
        HARM[how](root / name)
        damaged = stages.status.run(config)
        found = audit.status(Cache.of(config))
        assert damaged == (4 if found["damaged"] else 0) and {**found, "damaged": {}, "complete": True} == {
            **answer, "free_bytes": found["free_bytes"]}  # fmt: skip
        assert not list(audit.contradictions(Cache.of(config))), "a copy is as good"
        assert stages.gc.run(config, older_than_hours=0) == 0
        assert [finding.path for finding in audit.verify_documents(Cache.of(config))] == [name]
        assert stages.verify.run(config, mend=True) == 0
        assert content(root) == whole
        HARM[how](root / Paths.copy(name))
        told = [finding.path for finding in audit.verify_documents(Cache.of(config))]
        assert told == ([] if how == "lost" else [Paths.copy(name)]), "earlier versions made no copies"
        assert stages.verify.run(config, mend=True) == 0
        assert content(root) == whole


@pytest.mark.parametrize("how", HARM)
def test_encode_and_bucket_put_right_what_they_meet(config: Config, photos: Path, how: str, encoded: list[str]) -> None:
    """Every document at once, or its copy, in turn."""
    root = Path(config.cache)
    whole = content(root)
    for number, name in enumerate(documents(root)):
        HARM[how](root / (name if number % 2 else Paths.copy(name)))
    stages.encode.run(config, data=str(photos))
    snapshot = stages.bucket.run(config)
    assert not encoded
    assert Paths.snapshot(snapshot) in whole
    assert stages.verify.run(config, mend=True) == 0, "what they had no need to read"
    assert content(root) == whole


def test_a_cache_of_an_earlier_version_is_whole_and_gets_its_copies(config: Config, photos: Path) -> None:
    root = Path(config.cache)
    whole = content(root)
    shutil.rmtree(root / "copies")
    assert stages.verify.run(config) == 0 and stages.status.run(config) == 0
    assert not (root / "copies").exists()
    stages.encode.run(config, data=str(photos))
    assert content(root) == whole


def test_a_document_in_the_place_of_another_is_damage(config: Config) -> None:
    cache = Cache.of(config)
    one, two = (
        Paths.numbered(Paths.plans(recipe.name), 0) for kind in ("latent", "text") for recipe in cache.recipes(kind)
    )
    first, second = (cache.files.read(name) for name in (one, two))
    cache.files.replace(one, second)
    assert cache.files.document(one) == layout.unseal(first, one)
    assert [finding.path for finding in audit.verify_documents(cache)] == [one]
    cache.files.replace(Paths.copy(one), second)
    with pytest.raises(IntegrityError):
        cache.files.document(one)


# ---------------------------------------------------------------- both


@pytest.mark.parametrize("how", ["lost", "flipped"])
def test_what_is_lost_with_its_copy_is_made_again(
    config: Config, photos: Path, how: str, encoded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Commits, plans, recipes and snapshots are; nothing is encoded again. A scan is read again, a name is given."""
    root = Path(config.cache)
    whole = content(root)
    [snapshot] = [name for name in whole if name.startswith("snapshots/")]
    for name in documents(root):
        for place in (name, Paths.copy(name)):
            HARM[how](root / place)
        if name != Paths.FORMAT:
            assert stages.status.run(config) in (0, 1, 4)
            assert stages.verify.run(config) == 4 or (how == "lost" and name.startswith("sources/"))
            stages.verify.run(config, mend=True)
        stages.encode.run(config, data=str(photos))
        stages.bucket.run(config)
        assert stages.verify.run(config) == 0, name
        assert stages.status.run(config) == 0, name
        assert not encoded, name
        assert Cache.of(config).snapshot_of("latest") == Path(snapshot).stem, name
        aside = [path for path in root.glob("damaged/**/*") if path.is_file()]
        assert len(aside) == (2 if how == "flipped" and name != Paths.FORMAT else 0), "nothing damaged is thrown away"
        shutil.rmtree(root)
        for other, data in whole.items():
            (root / other).parent.mkdir(parents=True, exist_ok=True)
            (root / other).write_bytes(data)


# ---------------------------------------------------------------- contradictions


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
