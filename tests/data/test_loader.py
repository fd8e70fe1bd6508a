"""The loader's laws: order, pairing, draws, integrity, errors at their batch."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
from sana_pipe.base.errors import ConfigError, IntegrityError
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.encoders.text import TextEncoder
from sana_pipe.data.loader.batch_prefetch import BatchPrefetch, OnRead
from sana_pipe.data.loader.loader import Batch, Loaded, Loader, LoaderSettings, LoaderState, bf16
from sana_pipe.data.sources import caption_rules
from tests.support.loading import loader_settings
from tests.support.waiting import until

MakeConfig = Callable[..., Config]


def load(cache: Path, steps: int = 6, **options: object) -> list[tuple[list[Batch], LoaderState]]:
    settings: dict = {
        "seed": 0,
        "phase": 0,
        "rank": 0,
        "world": 1,
        "microbatch": 12,
        "caption_drop": 0.1,
        "prefetch": 0,
        "threads": 2,
        "stop_step": steps,
    }
    return list(Loader(Cache(cache).open_snapshot(), LoaderSettings(**{**settings, **options})))


def joined(parts: list[list[Batch]]) -> list[torch.Tensor]:
    """All tensors of a step: microbatches of rank 0, then of rank 1, ..."""
    flat = [batch for part in parts for batch in part]
    names = [
        f.name for f in dataclasses.fields(Batch) if f.name not in ("sample_ids", "bucket", "cu_seqlens", "pictures")
    ]
    every = [[getattr(batch, name) for batch in flat] for name in names]
    return [torch.cat(tensors) for tensors in every if tensors[0] is not None]


# ---------------------------------------------------------------- order


def test_every_topology_gives_the_same_sequence(small_cache: Path) -> None:
    truth = [(joined([batches]), state) for batches, state in load(small_cache)]
    for world in (1, 2, 3, 4, 6, 12):
        for prefetch, threads, microbatch in ((0, 1, 12), (1, 2, 3), (5, 5, 5)):
            ranks = [
                load(
                    small_cache,
                    rank=rank,
                    world=world,
                    prefetch=prefetch,
                    threads=threads,
                    microbatch=microbatch,
                )
                for rank in range(world)
            ]
            for step, (expected, state) in enumerate(truth):
                result = joined([rank[step][0] for rank in ranks])
                assert all(torch.equal(a, b) for a, b in zip(expected, result, strict=True))
                assert all(rank[step][1] == state for rank in ranks)
                shapes = {tuple((b.latents.shape, b.captions.shape) for b in rank[step][0]) for rank in ranks}
                assert len(shapes) == 1, "ranks see different shapes"


def test_a_world_that_does_not_divide_the_batch_is_refused(small_cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[1, 2, 3, 4, 6, 12\]"):
        load(small_cache, world=5)


def test_resuming_at_any_step_continues_the_sequence(small_cache: Path) -> None:
    truth = load(small_cache, steps=9)
    for start in range(1, 9):
        for world in (1, 2, 4):
            state = LoaderState.from_dict(truth[start - 1][1].as_dict())
            ranks = [
                load(small_cache, steps=9, start_step=state.step, world=world, rank=rank, prefetch=2)
                for rank in range(world)
            ]
            for step in range(start, 9):
                expected = joined([truth[step][0]])
                result = joined([rank[step - start][0] for rank in ranks])
                assert all(torch.equal(a, b) for a, b in zip(expected, result, strict=True))


def test_resuming_late_reads_only_the_next_batch(small_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sana_pipe.data.cache.shard import ShardReader

    read: list[int] = []
    real = ShardReader.read_span
    monkeypatch.setattr(
        ShardReader, "read_span", lambda self, s, o, v: read.append(sum(map(len, v))) or real(self, s, o, v)
    )
    load(small_cache, steps=1)
    at_start = sum(read)
    read.clear()
    load(small_cache, start_step=10**6, steps=10**6 + 1)
    assert sum(read) < 3 * at_start


# ---------------------------------------------------------------- draws


def test_draws_belong_to_the_visit(small_cache: Path) -> None:
    by_visit: dict[tuple[int, bytes], int] = {}
    noises = set()
    for batches, _ in load(small_cache, steps=12):
        for batch in batches:
            for i, sample in enumerate(batch.sample_ids):
                noises.add((sample, batch.noise[i].numpy().tobytes()))
                by_visit[sample, batch.noise[i].numpy().tobytes()] = 1
    assert len(noises) == 12 * 12, "two visits drew the same noise"
    other = load(small_cache, steps=1, seed=1)[0][0][0]
    first = load(small_cache, steps=1)[0][0][0]
    assert not torch.equal(first.noise, other.noise)
    phase = load(small_cache, steps=1, phase=1)[0][0][0]
    assert not torch.equal(first.logit, phase.logit)
    many = torch.cat([b.noise.flatten() for batches, _ in load(small_cache, steps=20) for b in batches])
    assert abs(float(many.mean())) < 0.01
    assert abs(float(many.std()) - 1) < 0.01


def test_caption_drop_shows_the_null_record(small_cache: Path) -> None:
    snapshot = Cache(small_cache).open_snapshot()
    null = Loader(
        snapshot,
        loader_settings(),
    ).null
    retained = load(small_cache, caption_drop=0.0)
    for (with_captions, _), (dropped, _) in zip(retained, load(small_cache, caption_drop=1.0), strict=True):
        for a, b in zip(with_captions, dropped, strict=True):
            assert torch.equal(a.noise, b.noise)
            assert a.captions.shape == b.captions.shape, "a drop must not change the shape"
            assert torch.equal(a.mask, b.mask), "a drop keeps the mask of its caption"
            for i, n in enumerate(b.mask.sum(1).tolist()):
                assert torch.equal(b.captions[i, :n], bf16(null[:n].copy()))
                assert not b.captions[i, n:].any()
    share = [
        torch.equal(b.captions[i][b.mask[i]], bf16(null[: int(b.mask[i].sum())].copy()))
        for batches, _ in load(small_cache, steps=40, caption_drop=0.5)
        for b in batches
        for i in range(12)
    ]
    assert 0.4 < np.mean(share) < 0.6


# ---------------------------------------------------------------- pairing


@pytest.fixture(scope="module")
def numbered(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, dict[int, str]]:
    """Twenty-four pictures whose colours say their number, with a caption that says the same number."""
    folder = tmp_path_factory.mktemp("numbered")
    source = folder / "numbers"
    source.mkdir()
    rng = np.random.default_rng(0)
    sizes = [(64, 64), (80, 48), (48, 80)]
    for number in range(24):
        cells = rng.integers(0, 255, (4, 4, 3), np.uint8)
        Image.fromarray(cells).resize(sizes[number % 3], Image.Resampling.NEAREST).save(source / f"{number:02d}.png")
        (source / f"{number:02d}.txt").write_text(f"picture number {number} {'very ' * (number % 5)}good")
    config = make_config(folder)
    sana_pipe.stages.encode.run(config, data=str(source))
    sana_pipe.stages.bucket.run(config)
    from sana_pipe.data.cache.layout import sample_id

    return config, {sample_id("numbers", f"{n:02d}.png"): f"{n:02d}" for n in range(24)}


def mispaired(config: Config, ids: dict[int, str], batches: list[Batch]) -> int:
    """How many members' latent or caption is not nearest to those encoded straight from the files of their id."""
    from sana_pipe.data.images import decoding

    source = Path(config.cache).parent / "numbers"
    vae = encoders.LatentEncoder.load(config.vae, "cpu")
    text = TextEncoder.load(config.text, "cpu")
    pictures, words = {}, {}
    for sample_id, name in ids.items():
        with Image.open(source / f"{name}.png") as opened:
            size = opened.size[::-1]
        loaded = decoding.load((source / f"{name}.png").read_bytes(), size, decoder=decoding.choose("auto"))
        pictures[sample_id] = bf16(vae.encode(loaded[None])[0]).float()
        caption = caption_rules.normalise((source / f"{name}.txt").read_text(), config.text.prompting)
        words[sample_id] = bf16(text.encode([caption])[0]).float()
    wrong = 0
    for batch in batches:
        for i, sample_id in enumerate(batch.sample_ids):
            latent, rows = batch.latents[i].float(), batch.captions[i][batch.mask[i]].float()
            like = {k: float((v - latent).norm()) for k, v in pictures.items() if v.shape == latent.shape}
            said = {k: float((v - rows).norm()) for k, v in words.items() if v.shape == rows.shape}
            wrong += min(like, key=like.__getitem__) != sample_id or min(said, key=said.__getitem__) != sample_id
    return wrong


def test_pairing_law(numbered: tuple[Config, dict[int, str]]) -> None:
    config, ids = numbered
    for world in (1, 2, 3, 4):
        parts = [load(Path(config.cache), world=world, rank=r, caption_drop=0.0, steps=4) for r in range(world)]
        batches = [batch for part in parts for step, _ in part for batch in step]
        assert sum(len(batch.sample_ids) for batch in batches) == 48
        assert mispaired(config, ids, batches) == 0


def test_the_pairing_check_can_fail(numbered: tuple[Config, dict[int, str]]) -> None:
    """Sabotage: with captions handed to the next sample, the check sees it."""
    config, ids = numbered
    [(batches, _)] = load(Path(config.cache), steps=1, caption_drop=0.0)
    rolled = [dataclasses.replace(b, captions=b.captions.roll(1, 0), mask=b.mask.roll(1, 0)) for b in batches]
    assert mispaired(config, ids, rolled) > 6


# ---------------------------------------------------------------- integrity


def damage(cache: Path, kind: str) -> list[Path]:
    paths = sorted(cache.glob(f"shards/{kind}-*/*/*.tar"))
    for path in paths:
        data = bytearray(path.read_bytes())
        for start in range(0, len(data), 512):
            data[start + 300] ^= 4
        path.write_bytes(data)
    return paths


@pytest.mark.parametrize("kind", ["latent", "text"])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_wrong_bytes_stop_at_their_batch_and_name_the_record(small_cache_copy: Path, kind: str, prefetch: int) -> None:
    names = {path.stem for path in damage(small_cache_copy, kind)}
    with pytest.raises(IntegrityError, match="wrong checksum") as error:
        load(small_cache_copy, prefetch=prefetch)
    assert any(name in str(error.value) for name in names)
    assert "record" in str(error.value)


def test_an_error_in_a_thread_arrives_after_the_good_batches(
    small_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Loader.load

    def fail_at_four(self: Loader, step: int, report: object = None) -> Loaded:
        if step == 4:
            raise OSError("the disk is gone")
        return real(self, step)

    monkeypatch.setattr(Loader, "load", fail_at_four)
    loader = iter(
        Loader(
            Cache(small_cache).open_snapshot(),
            loader_settings(prefetch=3, threads=2, stop_step=10),
        )
    )
    assert [next(loader)[1].step for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(OSError, match="the disk is gone"):
        next(loader)


def test_a_taken_step_makes_room_at_once() -> None:
    begun = list[int]()

    def work(step: int, on_read: OnRead) -> int:
        begun.append(step)
        return step

    prefetch = BatchPrefetch(work, 0, None, threads=1, steps=1, limit=1 << 20, size=lambda step: 1, timeout_s=60.0)
    until(lambda: begun == [0, 1] and prefetch.bytes == 2)
    for step in range(3):
        assert prefetch.get() == step
        until(partial(lambda last: begun[-1] == last, step + 2))  # before the next call
    prefetch.close()


def test_missing_short_and_swapped_shards_are_named(small_cache: Path, tmp_path: Path) -> None:
    def fresh(name: str) -> tuple[Path, list[Path]]:
        copy = Path(shutil.copytree(small_cache, tmp_path / name))
        return copy, sorted(copy.glob("shards/latent-*/*/*.tar"))

    copy, shards = fresh("gone")
    shards[0].unlink()
    with pytest.raises(IntegrityError, match="missing") as error:
        load(copy)
    assert shards[0].stem in str(error.value)

    copy, shards = fresh("short")
    shards[0].write_bytes(shards[0].read_bytes()[:-512])
    with pytest.raises(IntegrityError, match="size"):
        load(copy)

    copy, shards = fresh("swapped")
    one, two = (p.read_bytes() for p in shards[:2])
    shards[0].write_bytes(two)
    shards[1].write_bytes(one)
    with pytest.raises(IntegrityError):
        load(copy)

    copy, _ = fresh("head")
    for place in ("snapshots", "copies/snapshots"):
        head = next((copy / place).iterdir())
        head.write_bytes(head.read_bytes().replace(b'"batch": 12', b'"batch": 13', 1))
    with pytest.raises(IntegrityError, match="digest"):
        load(copy)

    copy, _ = fresh("chunk")
    snapshot = Cache(copy).open_snapshot()
    chunk = Files(copy).path(Paths.table(snapshot.head.chunks[0].samples, "arrow"))
    data = bytearray(chunk.read_bytes())
    for position in range(0, len(data), max(1, len(data) // 200)):
        bad = bytearray(data)
        bad[position] ^= 0x10
        chunk.write_bytes(bad)
        with pytest.raises(IntegrityError, match="do not match its name"):
            load(copy, steps=1)
    chunk.write_bytes(data)
    load(copy, steps=1)
