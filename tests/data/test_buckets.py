"""Bucket tables and the choice among them, against diffusers' own tables and the figures they are known by."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sana_pipe.base.errors import ConfigError
from sana_pipe.data.images import buckets
from sana_pipe.data.snapshots.config import BucketConfig
from sana_pipe.data.sources.config import DataConfig
from tests.support.messages import naming

TABLE = buckets.table(DataConfig(), 32)


def diffusers_tables() -> dict[int, dict[str, list[float]]]:
    alpha = importlib.import_module("diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha")
    sigma = importlib.import_module("diffusers.pipelines.pixart_alpha.pipeline_pixart_sigma")
    sana = importlib.import_module("diffusers.pipelines.sana.pipeline_sana")
    return {
        256: alpha.ASPECT_RATIO_256_BIN,
        512: alpha.ASPECT_RATIO_512_BIN,
        1024: alpha.ASPECT_RATIO_1024_BIN,
        2048: sigma.ASPECT_RATIO_2048_BIN,
        4096: sana.ASPECT_RATIO_4096_BIN,
    }


def test_tables_agree_with_diffusers() -> None:
    for resolution, theirs in diffusers_tables().items():
        ours = {b: buckets.ratio_key(b) for b in buckets.table(DataConfig(resolution=resolution), resolution // 16)}
        assert len(ours) == 40
        assert len(theirs) == (40 if resolution >= 2048 else 33)
        for key, (height, width) in theirs.items():
            assert ours[int(height), int(width)] == float(key)


def test_shape_of_the_table() -> None:
    assert len(TABLE) == len(set(TABLE)) == 40
    assert TABLE[0] == (512, 2048)
    assert (1024, 1024) in TABLE
    assert TABLE[-1] == (2048, 512)
    assert all(h % 64 == 0 and w % 64 == 0 and 924 <= h * w // 1024 <= 1024 for h, w in TABLE)
    keys = [buckets.ratio_key(b) for b in TABLE]
    assert keys == sorted(set(keys))


def test_crop_loss_figures() -> None:
    losses = []
    for ratio in np.exp(np.linspace(math.log(0.25), math.log(4), 4001)):
        height, width = round(10_000 * math.sqrt(ratio)), round(10_000 / math.sqrt(ratio))
        losses.append(buckets.crop_loss(height, width, buckets.nearest(TABLE, height, width)))
    assert np.mean(losses) == pytest.approx(0.023, abs=0.0006)
    assert np.max(losses) == pytest.approx(0.080, abs=0.001)


def test_the_difference_of_ratios_decides_not_that_of_logarithms() -> None:
    # 0.2997 lies between the keys 0.28 and 0.32; their arithmetic mean is 0.3, their geometric mean 0.2993.
    height, width = 2997, 10_000
    assert buckets.nearest(TABLE, height, width) == (512, 1856)
    by_log = min(TABLE, key=lambda b: abs(math.log(buckets.ratio_key(b) / (height / width))))
    assert by_log == (576, 1792)


def test_first_wins_a_tie() -> None:
    table = buckets.table(DataConfig(buckets=[(64, 64), (96, 64)]), 32)  # keys 1.0 and 1.5
    assert buckets.nearest(table, 125, 100) == (64, 64)
    assert buckets.nearest(table[::-1], 125, 100) == (96, 64)


@pytest.mark.parametrize(("resolution", "compression"), [(512, 32), (1024, 32), (128, 8), (4096, 32)])
def test_resolutions_that_work(resolution: int, compression: int) -> None:
    table = buckets.table(DataConfig(resolution=resolution), compression)
    assert all(h % compression == 0 and w % compression == 0 for h, w in table)


@pytest.mark.parametrize(("resolution", "compression"), [(256, 32), (600, 32), (64, 8), (1000, 32), (100, 8)])
def test_undivided_tables_are_refused_with_a_way_out(resolution: int, compression: int) -> None:
    with pytest.raises(ConfigError) as caught:
        buckets.table(DataConfig(resolution=resolution), compression)
    assert str(resolution) in caught.value.what
    works = [int(number) for number in str(caught.value.expected).split("e.g. ")[1].split(", ")]
    assert works
    for other in works:
        buckets.table(DataConfig(resolution=other), compression)
    assert caught.value.fix is not None
    fixed = int(caught.value.fix.split("data.resolution=")[1].split(",")[0])
    buckets.table(DataConfig(resolution=fixed), compression)


def test_the_256_table_names_its_entries() -> None:
    with pytest.raises(ConfigError) as caught:
        buckets.table(DataConfig(resolution=256), 32)
    odd = [(h * 16, w * 16) for h, w in buckets.SANA_UNITS if h % 2 or w % 2]
    assert str(caught.value.found) == "buckets " + ", ".join(f"{h}x{w}" for h, w in odd)
    theirs = diffusers_tables()[256].values()
    assert sum(any(side % 32 for side in shape) for shape in theirs) == 24


def test_lists_of_the_configuration() -> None:
    assert buckets.table(DataConfig(buckets=[(256, 256), (192, 320)]), 32) == [(256, 256), (192, 320)]
    with pytest.raises(ConfigError, match="200x256"):
        buckets.table(DataConfig(buckets=[(256, 256), (200, 256)]), 32)
    with pytest.raises(ConfigError, match=naming("data.buckets", "512x512", "256x256")):
        buckets.table(DataConfig(buckets=[(256, 256), (512, 512)]), 32)
    with pytest.raises(ConfigError, match=naming("data.buckets", "[height, width]")):
        buckets.table(DataConfig(buckets=[]), 32)


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_loss_and_scale_bounds(height: int, width: int) -> None:
    bucket = buckets.nearest(TABLE, height, width)
    assert bucket in TABLE
    scale = buckets.upscale(height, width, bucket)
    assert height * scale >= bucket[0] * (1 - 1e-12)
    assert width * scale >= bucket[1] * (1 - 1e-12)
    assert 0 <= buckets.crop_loss(height, width, bucket) < 1


def test_exact_fits_lose_nothing() -> None:
    for height, width in TABLE:
        assert buckets.nearest(TABLE, height, width) == (height, width)
        assert buckets.crop_loss(height, width, (height, width)) == 0
        assert buckets.upscale(height // 2, width // 2, (height, width)) == 2
    assert buckets.crop_loss(1024, 2048, (1024, 1024)) == 0.5


@pytest.mark.parametrize(
    ("setting", "passes", "refused"),
    [
        ({"min_side": 512}, (512, 700), (511, 700)),
        ({"max_upscale": 1.0}, (1024, 1024), (1023, 1024)),
        ({"max_upscale": 2.0}, (512, 512), (511, 511)),
        ({"max_crop_loss": 0.0}, (2048, 512), (2048, 500)),
        ({"max_crop_loss": 0.5}, (8192, 1024), (8200, 1024)),
    ],
)
def test_policies(setting: dict[str, float], passes: tuple[int, int], refused: tuple[int, int]) -> None:
    (name,) = setting
    data = DataConfig(**setting)  # type: ignore[arg-type]
    for shapes in (passes, passes[::-1]):
        assert buckets.refusal(*shapes, buckets.nearest(TABLE, *shapes), data) is None
    for shapes in (refused, refused[::-1]):
        reason = buckets.refusal(*shapes, buckets.nearest(TABLE, *shapes), data)
        assert reason is not None
        assert f"data.{name} = {setting[name]:g}" in reason


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_no_policy_refuses_nothing(height: int, width: int) -> None:
    assert buckets.refusal(height, width, buckets.nearest(TABLE, height, width), DataConfig()) is None


def test_many_at_once_are_judged_as_one_by_one() -> None:
    rng = np.random.default_rng(0)
    heights, widths = rng.integers(1, 5000, (2, (1 << 17) + 3))
    indexes = buckets.nearest_all(TABLE, heights, widths)
    fit = heights, widths, np.array(TABLE)[indexes].T
    scales, losses = buckets.upscale(*fit), buckets.crop_loss(*fit)
    for n in (*range(50), *range((1 << 16) - 3, (1 << 16) + 3), *range((1 << 17) - 3, (1 << 17) + 3)):
        height, width = int(heights[n]), int(widths[n])
        bucket = buckets.nearest(TABLE, height, width)
        assert TABLE[indexes[n]] == bucket
        assert scales[n] == pytest.approx(buckets.upscale(height, width, bucket), rel=1e-12)
        assert losses[n] == pytest.approx(buckets.crop_loss(height, width, bucket), abs=1e-12)
    seven, bucket = np.array([7]), np.array([[21], [21]])
    assert buckets.upscale(seven, seven, bucket) == 3 and buckets.crop_loss(seven, seven, bucket) == 0


SHAPES = [(256, 256), (128, 512), (256, 512)]  # 64, 64 and 128 latent tokens


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"batch": 6, "batch_multiple": 3}, [6, 6, 6]),
        ({"tokens": 1000}, [15, 15, 7]),
        ({"tokens": 1000, "batch_multiple": 4}, [12, 12, 4]),
        ({"tokens": 512, "batch_multiple": 4}, [8, 8, 4]),
        ({"tokens": 511, "batch_multiple": 4}, "at least 512: 128"),
        ({"batch": 6, "batch_multiple": 4}, "bucket.batch = 6"),
    ],
)
def test_the_batch_of_each_bucket(setting: dict[str, Any], expected: list[int] | str) -> None:
    config = BucketConfig(**setting)
    if isinstance(expected, list):
        assert buckets.batches(config, SHAPES, 32) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        buckets.batches(config, SHAPES, 32)


def test_a_table_for_each_resolution() -> None:
    data = DataConfig(resolution=1024)
    own = buckets.table(data, 32)
    half = buckets.table(DataConfig(resolution=512), 32)
    assert buckets.resolutions(BucketConfig(), data, 32) == [("", own)]
    assert buckets.resolutions(BucketConfig(resolutions=[512, 1024]), data, 32) == [("512", half), ("", own)]
    with pytest.raises(ConfigError, match=naming("bucket.resolutions", "512 and 512")):
        buckets.resolutions(BucketConfig(resolutions=[512, 512]), data, 32)
    with pytest.raises(ConfigError, match=naming("bucket.resolutions", "data.buckets")):
        buckets.resolutions(BucketConfig(resolutions=[512]), DataConfig(buckets=[(256, 256)]), 32)
