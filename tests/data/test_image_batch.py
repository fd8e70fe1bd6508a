"""How many pictures go through the VAE at a time: chosen by memory, kept by the plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sana_pipe.stages.encode
from sana_pipe.base import launch
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.encoding import image_batch, plan, unit_records
from sana_pipe.data.encoding.config import EncodeConfig
from tests.support.constants import set_constants, unit_sizes
from tests.support.parameters import first_quick

MakeConfig = Callable[..., Config]
CUDA = torch.device("cuda", 0)


class Written(TorchDispatchMode):
    """Values of the largest tensor that a computation makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [
            leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        ]
        self.largest = max(self.largest, *sizes, 0)
        return result


def pictures(count: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (count, height, width, 3), np.uint8)


def peak_between_operations(profiler: torch.profiler.profile) -> int:
    """The most bytes that are allocated when an operation ends: what a CPU's kernel needs inside is not counted."""
    events = profiler.profiler.kineto_results.events()
    ends, last = [], 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name().startswith("aten::") and event.start_ns() >= last:
            last = event.end_ns()
            ends.append(last)
    level = most = 0
    changes = iter(sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"))
    change = next(changes, None)
    for end in ends:
        while change is not None and change[0] <= end:
            level += change[1]
            change = next(changes, None)
        most = max(most, level)
    return most


@pytest.mark.parametrize("dtype", first_quick("fp32", "bf16"))
def test_a_footprint_is_what_the_encoder_uses_for_each_picture(
    make_config: MakeConfig, tmp_path: Path, dtype: str
) -> None:
    vae = make_config(tmp_path, f"vae.dtype={dtype}").vae
    encoder = encoders.LatentEncoder.load(vae, "cpu")
    each = encoders.footprint(vae, 96, 64)
    assert each.weights == sum(p.nbytes for p in encoder.model.parameters())
    for count in (1, 3):
        images = pictures(count, 96, 64)
        with Written() as written, torch.profiler.profile(profile_memory=True) as profiler:
            encoder.encode(images)
        assert written.largest == count * each.largest
        most = peak_between_operations(profiler)
        assert most == pytest.approx(count * each.picture, rel=0.05)
    larger = encoders.footprint(vae, 192, 128)
    assert larger.largest == 4 * each.largest and 3.9 < larger.picture / each.picture < 4.1


def test_as_many_pictures_as_fit_and_as_can_be_indexed(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = make_config(tmp_path).vae
    each = encoders.footprint(vae, 96, 64)

    def with_memory(size: int) -> int:
        monkeypatch.setattr(image_batch, "available", lambda device: size)
        return image_batch.fitting(partial(encoders.footprint, vae), lambda: CUDA)(96, 64)

    assert with_memory(each.weights + 5 * each.picture) == 5
    assert with_memory(each.weights + 5 * each.picture - 1) == 4
    assert with_memory(each.weights) == with_memory(1) == 1, "more is not known to fit; fewer is nothing"
    assert with_memory(1 << 60) == image_batch.INDEXED // each.largest
    monkeypatch.setattr(image_batch, "INDEXED", 7 * each.largest)
    assert with_memory(1 << 60) == 7


def test_a_tenth_of_what_is_free_stays_free_and_processes_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for processes, size in ((1, 720), (2, 720), (3, 360), (4, 360), (5, 240)):
        monkeypatch.setattr(launch, "detect", lambda processes=processes: SimpleNamespace(local_world=processes))
        assert image_batch.available(CUDA) == size
    assert image_batch.available(torch.device("cpu")) == 0


def units(config: Config) -> dict[tuple[int, int], set[int]]:
    """The planned batches, by target size."""
    cache = Cache(config.cache)
    result: dict[tuple[int, int], set[int]] = {}
    for encoding in cache.encodings("latent"):
        for each in cache.plans(encoding.name):
            for unit in each.units:
                row = cache.unit_rows(each, unit).slice(0, 1).to_pylist()[0]
                result.setdefault((row["height"], row["width"]), set()).add(unit.batch)
    return result


def test_on_a_cpu_and_with_ray_the_batch_is_fixed_and_a_number_is_taken_as_it_is(
    make_config: MakeConfig, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert EncodeConfig().image_batch == "auto" and plan.FIXED == 8
    assert plan.images_of_batch(EncodeConfig(), (96, 64), None) == 8, "Ray"
    assert plan.images_of_batch(EncodeConfig(image_batch=3), (96, 64), lambda height, width: pytest.fail("asked")) == 3
    monkeypatch.setattr(encoders, "footprint", lambda *args: pytest.fail("asked"))
    for size, value in ((8, "auto"), (2, 2)):
        config = make_config(tmp_path / str(value), f"encode.image_batch={value}", "encode.device=cpu")
        sana_pipe.stages.encode.run(config, data=str(photos))
        planned = units(config)
        assert planned and all(batches == {size} for batches in planned.values())


def shards(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.rglob("*.tar")}


def test_a_killed_run_and_a_process_with_other_memory_make_the_planned_bytes(
    make_config: MakeConfig, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch belongs to the plan: whoever goes on has another memory, and makes the same files."""
    set_constants(monkeypatch, unit_sizes(3, 512))
    options = "encode.image_batch=auto", "encode.device=cpu"
    sizes: list[tuple[tuple[int, ...], int]] = []
    encode = encoders.LatentEncoder.encode

    def counted(self: encoders.LatentEncoder, images: np.ndarray) -> np.ndarray:
        sizes.append((np.shape(images)[1:3], len(images)))
        return encode(self, images)

    def with_room_for(count: int) -> None:
        vae = make_config(tmp_path).vae
        each = encoders.footprint(vae, 64, 64)
        monkeypatch.setattr(image_batch, "available", lambda device: each.weights + count * each.picture)

    monkeypatch.setattr(encoders.LatentEncoder, "encode", counted)
    with_room_for(2)
    whole = make_config(tmp_path / "whole", *options)
    sana_pipe.stages.encode.run(whole, data=str(photos))
    assert max(max(batches) for batches in units(whole).values()) == 2 == max(count for _, count in sizes)

    killed = make_config(tmp_path / "killed", *options)
    write, written = unit_records.write_unit, list[Any]()

    def until_the_third(cache: Cache, encoding: Any, *args: Any, **kwargs: Any) -> Any:
        if encoding.kind == "latent" and len(written) == 2:
            raise KeyboardInterrupt
        commit = write(cache, encoding, *args, **kwargs)
        if encoding.kind == "latent":
            written.append(commit)
        return commit

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(unit_records, "write_unit", until_the_third)
        sana_pipe.stages.encode.run(killed, data=str(photos))
    assert len(written) == 2 and shards(tmp_path / "killed") != shards(tmp_path / "whole")
    with_room_for(100)
    sana_pipe.stages.encode.run(killed, data=str(photos))
    assert units(killed) == units(whole)
    assert max(count for _, count in sizes) == 2
    assert shards(tmp_path / "killed") == shards(tmp_path / "whole")


def test_a_batch_that_did_not_fit_is_not_tried_again_at_its_size() -> None:
    tried: list[tuple[int, int]] = []

    def encode(pictures: list[np.ndarray]) -> list[np.ndarray]:
        tried.append((len(pictures[0]), len(pictures)))
        if tried[-1] in ((8, 4), (8, 3)):
            raise MemoryError
        return pictures

    limits = unit_records.Limits()
    for side, count in ((8, 4), (8, 4), (4, 4), (8, 3)):
        unit_records.encode_finite([np.zeros((side, side))] * count, encode, limits)
    assert tried == [(8, 4), (8, 2), (8, 2), (8, 2), (8, 2), (4, 4), (8, 3), (8, 2), (8, 1)]
    assert limits.halved == 3
