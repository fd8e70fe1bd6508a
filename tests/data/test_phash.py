"""The signal `phash`: hashes from the pixels that are decoded for latents, and in a cache that lacks them; stored,
verified, repaired, joined, packed and read like any record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.pack
import sana_pipe.stages.verify
from sana_pipe.base.errors import ConfigError
from sana_pipe.config import Config
from sana_pipe.data.cache import audit
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.shard import ShardReader
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.encoders.text import TextEncoder
from sana_pipe.data.encoding import estimate, unit_records
from sana_pipe.data.encoding.encoder_settings import EncoderSettings
from sana_pipe.data.encoding.plan import lead_made
from sana_pipe.data.encoding.unit_encoder import UnitEncoder
from sana_pipe.data.images import decoding
from sana_pipe.data.images.perceptual_hash import LENGTH, hashes
from sana_pipe.data.loader.loader import Loader
from sana_pipe.data.signals import Encoders
from sana_pipe.data.signals.phash import HashEncoding
from tests.support.constants import constants, unit_sizes
from tests.support.loading import loader_settings
from tests.support.trees import files

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module", autouse=True)
def small_units(small_cache: Path) -> Iterator[None]:
    """Small units. The cache that tests share is made before, with usual ones."""
    with constants(unit_sizes(4, 512)):
        yield


@pytest.fixture(scope="module")
def hashed(photos: Path, make_config: MakeConfig, made_once: Callable[..., Path]) -> Path:
    """A cache of the photographs with hashes and a snapshot."""

    def make(folder: Path) -> None:
        config = with_hashes(make_config, folder)
        sana_pipe.stages.encode.run(config, data=str(photos))
        sana_pipe.stages.bucket.run(config)

    return made_once("hashed", make) / "cache"


@pytest.fixture
def hashed_copy(hashed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(hashed, tmp_path / "cache"))


def with_hashes(make_config: MakeConfig, folder: Path, *options: str) -> Config:
    return make_config(folder, "encode.signals=[phash]", *options)


def shards(cache: Path, kind: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.glob(f"shards/{kind}-*/*/*.tar")}


def records(cache: Path) -> dict[bytes, bytes]:
    """Every hash of the last snapshot's index by its key."""
    opened = Cache(cache)
    [encoding] = opened.encodings("phash")
    reader, known = ShardReader(opened.files, encoding.name), opened.index(encoding.name)
    result = {}
    for row in range(len(known)):
        column = {name: values[row] for name, values in known.columns.items()}
        into, key = np.empty(LENGTH, np.uint16), bytes(known.keys[row]).ljust(16, b"\0")
        checksum = bytes(column["checksum"]).ljust(16, b"\0")
        reader.read(known.shards[int(column["shard"])], int(column["offset"]), key, checksum, into)
        result[key] = into.tobytes()
    return result


def test_hashes_are_those_of_the_pixels_of_the_latents(hashed: Path, photos: Path) -> None:
    snapshot = Cache(hashed).open_snapshot()
    encoding, reader = snapshot.encoding(HashEncoding), snapshot.reader("phash")
    for row in range(len(snapshot)):
        sample, into = snapshot.sample(row), np.empty(LENGTH, np.uint16)
        place, bucket = sample.pictures["phash"], snapshot.buckets[sample.bucket]
        reader.read(place.shard, place.offset, place.key, place.checksum, into)
        data = (photos / snapshot.source_item(row)[1]).read_bytes()
        pixels = decoding.load(data, (bucket.height, bucket.width), encoding.background, decoder=encoding.decoder)
        assert (into == hashes(pixels[None])[0]).all()


def test_a_picture_is_read_and_decoded_once_and_latents_stay(
    photos: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_config(tmp_path / "plain")
    sana_pipe.stages.encode.run(plain, data=str(photos))
    decoded: list[int] = []
    real = decoding.load
    monkeypatch.setattr(decoding, "load", lambda *args: decoded.append(1) or real(*args))
    config = with_hashes(make_config, tmp_path / "hashed")
    done = sana_pipe.stages.encode.run(config, data=str(photos))
    assert done["images"] == done["hashes"] == done["new"]["hashes"] == len(decoded) > 0
    for kind in ("latent", "text"):
        assert shards(Path(config.cache), kind) == shards(Path(plain.cache), kind) != {}
    assert not list(audit.verify(Cache(config.cache)))
    again = sana_pipe.stages.encode.run(config, data=str(photos))
    assert again["hashes"] == again["new"]["hashes"] == 0 and again["reused"]["hashes"] == done["hashes"]


def test_a_cache_without_hashes_gets_them_without_latents(
    small_cache_copy: Path, hashed: Path, photos: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: Any
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a model was loaded")

    for model in (encoders.LatentEncoder, TextEncoder):
        monkeypatch.setattr(model, "load", refuse)
    before = {kind: shards(small_cache_copy, kind) for kind in ("latent", "text")}
    config = with_hashes(make_config, tmp_path)
    assert sana_pipe.stages.encode.dry_run(config, str(photos), probe=False) == 0
    done = sana_pipe.stages.encode.run(config, data=str(photos))
    assert done["images"] == done["captions"] == 0 < done["hashes"]
    assert {kind: shards(small_cache_copy, kind) for kind in before} == before
    assert records(small_cache_copy) == records(hashed)
    sana_pipe.stages.bucket.run(config)
    assert list(Cache(config.cache).open_snapshot().pictures) == ["latent", "phash"]


def test_hashes_that_were_not_committed_with_their_latents_are_made_alone(
    hashed: Path, photos: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*args: object) -> None:
        raise Killed

    config = with_hashes(make_config, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(unit_records.FollowingUnit, "commit", killed)
        for _ in range(2):
            with pytest.raises(Killed):
                sana_pipe.stages.encode.run(config, data=str(photos))
    made = len(shards(tmp_path / "cache", "latent"))
    assert made == 2 and not shards(tmp_path / "cache", "phash")
    done = sana_pipe.stages.encode.run(config, data=str(photos))
    assert done["images"] < done["hashes"] == done["new"]["images"] + done["reused"]["images"] - done["rejects"]
    for kind in ("latent", "phash", "text"):
        assert shards(tmp_path / "cache", kind) == shards(hashed, kind)


def test_another_worker_leaves_hashes_whose_latents_are_being_made(
    photos: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_hashes(make_config, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(encoders.LatentEncoder, "encode", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sana_pipe.stages.encode.run(config, data=str(photos))
    cache = Cache(config.cache)
    [plan] = cache.plans(cache.encodings("phash")[0].name)
    lead = cache.encodings("latent")[0].name
    assert plan.lead == (lead, 0)
    assert not any(map(lead_made(cache, plan, lead), plan.units))
    settings = EncoderSettings(Encoders(config.vae, config.text), config.encode, config.data.max_pixels)
    first, space = cache.plan(lead, 0), UnitEncoder(settings, cache, {}, cache.encodings("phash")).disk_space()
    for unit, follower in zip(first.units, plan.units, strict=True):
        need = [estimate.unit_bytes(cache, *one) for one in ((first, unit), (plan, follower))]
        assert space.unit_bytes(first, unit) == sum(need) and space.unit_bytes(plan, follower) == need[1] > 0
    sana_pipe.stages.encode.run(config, data=str(photos))
    assert all(map(lead_made(cache, plan, lead), plan.units))


def test_hashes_do_not_wait_for_latents_that_nobody_makes(
    photos: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed run planned them with latents of a VAE that is not configured any more."""
    with monkeypatch.context() as patch:
        patch.setattr(encoders.LatentEncoder, "encode", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sana_pipe.stages.encode.run(with_hashes(make_config, tmp_path), data=str(photos))
    config = with_hashes(make_config, tmp_path, "vae.dtype=tf32")
    done = sana_pipe.stages.encode.run(config, data=str(photos))
    assert done["images"] == done["hashes"] == done["new"]["hashes"] > 0 == done["left"]


def test_what_loads_a_model_is_made_in_a_pass_of_its_own(
    hashed: Path, photos: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process holds one model at a time."""
    monkeypatch.setattr(HashEncoding, "shares_pixels", False)
    config = with_hashes(make_config, tmp_path)
    done = sana_pipe.stages.encode.run(config, data=str(photos))
    assert done["images"] == done["hashes"] > 0
    cache = Cache(config.cache)
    assert [plan.lead for plan in cache.plans(cache.encodings("phash")[0].name)] == [None]
    assert records(tmp_path / "cache") == records(hashed)


def test_hashes_are_those_of_their_pictures_after_the_plan_of_the_latents_was_lost(
    photos: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that takes its number has other pictures in its units."""
    config = with_hashes(make_config, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(encoders.LatentEncoder, "encode", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sana_pipe.stages.encode.run(config, data=str(photos))
    for plan in Path(config.cache).rglob("plans/latent-*/*.json"):
        plan.unlink()
    source = Path(shutil.copytree(photos, tmp_path / "source" / photos.name))
    first = min(source.glob("*.jpg"))
    first.rename(source / "zzz.jpg")
    first.with_suffix(".txt").rename(source / "zzz.txt")
    assert sana_pipe.stages.verify.run(config, repair=True) == 0
    assert sana_pipe.stages.encode.run(config, data=str(source))["left"] == 0
    alone = with_hashes(make_config, tmp_path / "alone")
    sana_pipe.stages.encode.run(alone, data=str(source))
    assert records(Path(config.cache)) == records(Path(alone.cache))


def test_a_damaged_hash_is_repaired_to_the_byte(hashed_copy: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    before = files(hashed_copy)
    path = next(hashed_copy.glob("shards/phash-*/*/*.tar"))
    snapshot = Cache(hashed_copy).open_snapshot()
    place = next(
        place for row in range(len(snapshot)) if (place := snapshot.sample(row).pictures["phash"]).shard == path.stem
    )
    data = bytearray(path.read_bytes())
    data[place.offset] ^= 1
    path.write_bytes(data)
    [finding] = audit.verify(Cache(hashed_copy))
    assert finding.records == (place.key.hex(),)
    assert sana_pipe.stages.verify.run(with_hashes(make_config, tmp_path), repair=True) == 0
    assert files(hashed_copy) == before


def test_a_picture_that_cannot_be_decoded_is_one_reject(
    photos: Path, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(photos, tmp_path / "source"))
    listed = sana_pipe.stages.encode.planning.plan_images
    broken = next(source.glob("*.jpg"))

    def plan(*args: Any) -> Any:
        data = bytearray(broken.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        broken.write_bytes(data)  # after the scan
        return listed(*args)

    monkeypatch.setattr(sana_pipe.stages.encode.planning, "plan_images", plan)
    done = sana_pipe.stages.encode.run(with_hashes(make_config, tmp_path), data=str(source))
    assert done["rejects"] == 1 and done["images"] == done["hashes"]


def test_the_dry_run_counts_hashes(
    photos: Path, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_hashes(make_config, tmp_path)
    sana_pipe.stages.encode.dry_run(config, str(photos), probe=False, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["new"]["hashes"] == report["new"]["images"] > 0 == report["reused"]["hashes"]
    sana_pipe.stages.encode.run(config, data=str(photos))
    stored = sum(path.stat().st_size for path in (tmp_path / "cache").glob("shards/phash-*/*/*.tar"))
    assert stored == pytest.approx(report["bytes"]["hashes"], rel=0.25)
    sana_pipe.stages.encode.dry_run(config, str(photos), probe=False, as_json=True)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["new"]["hashes"] == 0 < report["reused"]["hashes"]


def test_the_dry_run_counts_the_time_of_hashes_alone(
    small_cache_copy: Path, photos: Path, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sana_pipe.stages.encode.dry_run(with_hashes(make_config, tmp_path), str(photos), as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["new"]["images"] == 0 < report["new"]["hashes"]
    assert report["time"]["image_encode_s"] > 0 and report["time"]["image_decode_s"] > 0


@pytest.mark.parametrize("packed", [False, True])
def test_the_loader_reads_what_is_asked_for(
    hashed_copy: Path, make_config: MakeConfig, tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_hashes(make_config, tmp_path)
    name = str(sana_pipe.stages.pack.run(config, None, "packed")) if packed else "latest"
    cache = Cache(hashed_copy)
    assert not list(audit.verify(cache))
    snapshot = cache.open_snapshot(name)
    assert snapshot.packed == packed and list(snapshot.pictures) == ["latent", "phash"]
    read: list[str] = []
    real = ShardReader.read_batch

    def read_batch(self: ShardReader, *args: Any, **options: Any) -> Any:
        read.append(self.encoding)
        return real(self, *args, **options)

    monkeypatch.setattr(ShardReader, "read_batch", read_batch)
    plain = [batch for step, _ in Loader(snapshot, loader_settings(stop_step=4)) for batch in step]
    assert not any(encoding.startswith("phash") for encoding in read) and not plain[0].pictures
    asking = Loader(snapshot, loader_settings(stop_step=4, pictures=("phash",)))
    batches = [batch for step, _ in asking for batch in step]
    assert any(encoding.startswith("phash") for encoding in read)
    reader = snapshot.reader("phash")
    places = {s.sample_id: s.pictures["phash"] for s in map(snapshot.sample, range(len(snapshot)))}
    for batch, other in zip(batches, plain, strict=True):
        assert batch.sample_ids == other.sample_ids and batch.latents.equal(other.latents)
        for sample_id, values in zip(batch.sample_ids, batch.pictures["phash"].numpy(), strict=True):
            place, into = places[sample_id], np.empty(LENGTH, np.uint16)
            reader.read(place.shard, place.offset, place.key, place.checksum, into, place.length)
            assert (into == values).all()


def test_a_run_that_asks_for_what_a_snapshot_lacks_is_refused(small_cache: Path) -> None:
    with pytest.raises(ConfigError, match="no records of the kind phash"):
        Loader(Cache(small_cache).open_snapshot(), loader_settings(pictures=("phash",)))


def test_snapshots_with_and_without_hashes_have_the_same_samples(
    hashed_copy: Path, photos: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    with_them = Cache(hashed_copy).open_snapshot()
    config = make_config(tmp_path, "encode.signals=[]")
    sana_pipe.stages.encode.run(config, data=str(photos))
    sana_pipe.stages.bucket.run(config)
    without = Cache(hashed_copy).open_snapshot()
    assert list(without.pictures) == ["latent"] != list(with_them.pictures)
    rows = range(len(with_them))
    assert [with_them.sample(row).pictures["latent"] for row in rows] == [
        without.sample(row).pictures["latent"] for row in rows
    ]
