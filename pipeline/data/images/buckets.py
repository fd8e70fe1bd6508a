"""Aspect-ratio buckets: the (height, width) to which a picture is resized and cropped.

Why Sana's table: a batch needs one shape, and a picture loses least if that shape is close to its own. Sana trains on
40 shapes of nearly equal area, and a model continues best on the shapes it has seen. So the table, the rounding of its
keys and the rule of choice are Sana's, not better ones.
Price: choosing by the absolute difference of ratios (not of their logarithms) crops wide pictures a little more than
necessary: over ratios 0.25 to 4 (log-uniform) the mean loss is 2.3 % of the picture, the maximum 8.0 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sana_pipe.base.errors import ConfigError
from sana_pipe.data.snapshots.config import BucketConfig
from sana_pipe.data.sources.config import DataConfig

Shape = tuple[int, int]

_PICTURES = 1 << 16  # compared with all buckets at a time

SANA_UNITS: tuple[Shape, ...] = (
    (8, 32),
    (8, 31),
    (8, 30),
    (8, 29),
    (9, 28),
    (9, 27),
    (9, 26),
    (10, 25),
    (10, 24),
    (11, 23),
    (11, 22),
    (11, 21),
    (12, 21),
    (12, 20),
    (13, 19),
    (13, 18),
    (14, 18),
    (14, 17),
    (15, 17),
    (15, 16),
    (16, 16),
    (16, 15),
    (17, 15),
    (17, 14),
    (18, 14),
    (18, 13),
    (19, 13),
    (20, 12),
    (21, 12),
    (22, 11),
    (23, 11),
    (24, 10),
    (25, 10),
    (26, 9),
    (27, 9),
    (28, 9),
    (29, 8),
    (30, 8),
    (31, 8),
    (32, 8),
)
"""(height, width) in sixteenths of the resolution: NVlabs/Sana's ASPECT_RATIO_{256,512,1024,2048,4096}, which are one
table at five scales. (Their 2880 table is rounded to multiples of 64 and so is not a multiple of this table.)"""

UNITS_PER_SIDE = 16


def ratio_key(bucket: Shape) -> float:
    """The ratio height/width of a bucket, rounded to two digits like the keys of Sana's tables."""
    return round(bucket[0] / bucket[1], 2)


def table(data: DataConfig, compression: int) -> list[Shape]:
    """The bucket table of a configuration.

    Args:
        data: `buckets: sana` scales Sana's table to `resolution`; a list is used unchanged.
        compression: pixels of a side per latent side of the VAE (32 for Sana's DC-AE).

    Returns:
        (height, width) in pixels; of equally near buckets the first is chosen (Sana's order: widest to tallest).

    Raises:
        ConfigError: a side that the compression does not divide, a bucket that no picture can reach, or no bucket.
    """
    if data.buckets == "sana":
        scaled = [(h * data.resolution, w * data.resolution) for h, w in SANA_UNITS]
        bad = [s for s in scaled if any(side % (UNITS_PER_SIDE * compression) for side in s)]
        if bad:
            step = UNITS_PER_SIDE * compression
            below = data.resolution // step * step
            near = [r for r in (below, below + step, below + 2 * step) if r > 0]
            raise ConfigError(
                f"data.resolution {data.resolution}: {len(bad)} of the {len(scaled)} buckets of Sana's table have a "
                f"side that the VAE's compression {compression} does not divide",
                expected=f"a resolution that is a multiple of {step}, e.g. " + ", ".join(map(str, near)),
                found="buckets " + ", ".join(_pixels(s) for s in bad),
                fix=f"--set data.resolution={near[-2]}, or list your own data.buckets with sides divisible "
                f"by {compression}",
            )
        return [(h // UNITS_PER_SIDE, w // UNITS_PER_SIDE) for h, w in scaled]

    buckets = [(h, w) for h, w in data.buckets]
    if not buckets:
        raise ConfigError("data.buckets is an empty list", expected="'sana' or at least one [height, width]")
    undivided = [b for b in buckets if any(side % compression for side in b)]
    if undivided:
        raise ConfigError(
            f"data.buckets: the VAE's compression {compression} does not divide every side",
            expected=f"heights and widths that are multiples of {compression}",
            found=", ".join(f"{h}x{w}" for h, w in undivided),
            fix="for instance "
            + ", ".join(f"[{_near(h, compression)}, {_near(w, compression)}]" for h, w in undivided),
        )
    bucket_of: dict[float, Shape] = {}
    for bucket in buckets:
        first = bucket_of.setdefault(ratio_key(bucket), bucket)
        if first is not bucket:
            raise ConfigError(
                f"data.buckets: {bucket[0]}x{bucket[1]} can never be chosen: {first[0]}x{first[1]} comes first and has "
                f"the same ratio {ratio_key(bucket)} (height/width, two digits)",
                fix="leave one of the two out; a second resolution needs a configuration of its own",
            )
    return buckets


def _near(side: int, compression: int) -> int:
    return max(compression, round(side / compression) * compression)


def _pixels(scaled: Shape) -> str:
    return "x".join(f"{side / UNITS_PER_SIDE:g}" for side in scaled)


def nearest(buckets: Sequence[Shape], height: int, width: int) -> Shape:
    """The bucket with the ratio nearest to height/width; the first of equals. Sana's rule (NVlabs `get_closest_ratio`).

    Args:
        buckets: (height, width) in pixels, from `table`.
        height, width: of the picture after EXIF orientation, in pixels.
    """
    ratio = height / width
    return min(buckets, key=lambda bucket: abs(ratio_key(bucket) - ratio))


def nearest_all(buckets: Sequence[Shape], heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """`nearest` of many pictures: (n,) int64 indexes into `buckets`. A picture of a bucket's size gets that bucket."""
    keys = np.array([ratio_key(bucket) for bucket in buckets])
    indexes = _of_equal_size(buckets, heights, widths)
    others = np.flatnonzero(indexes < 0)
    for start in range(0, len(others), _PICTURES):
        part = others[start : start + _PICTURES]
        ratio = heights[part].astype(np.float64) / widths[part]
        indexes[part] = np.abs(keys[None, :] - ratio[:, None]).argmin(axis=1)
    return indexes


def _of_equal_size(buckets: Sequence[Shape], heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """The bucket with the very sides of each picture, (n,) int64; -1: there is none."""
    codes = np.array([height << 32 | width for height, width in buckets], np.int64)
    order = np.argsort(codes, kind="stable")
    wanted = heights.astype(np.int64) << 32 | widths.astype(np.int64)
    at = np.minimum(np.searchsorted(codes[order], wanted), len(codes) - 1)
    return np.where(codes[order][at] == wanted, order[at], -1)


def resolutions(bucket: BucketConfig, data: DataConfig, compression: int) -> list[tuple[str, list[Shape]]]:
    """The bucket tables of a snapshot: (name of the resolution, table). The name is "" for `data.resolution`.

    Raises:
        ConfigError: as `table`; two tables share a shape; `data.buckets` is a list, which cannot be scaled.
    """
    if not bucket.resolutions:
        return [("", table(data, compression))]
    if data.buckets != "sana":
        raise ConfigError(
            "bucket.resolutions scales Sana's table, but data.buckets is a list",
            fix="set data.buckets=sana, or leave bucket.resolutions out",
        )
    tables: dict[int, list[Shape]] = {}
    for resolution in bucket.resolutions:
        shapes = table(data.model_copy(update={"resolution": resolution}), compression)
        for other, other_shapes in tables.items():
            if shared := set(shapes) & set(other_shapes):
                raise ConfigError(
                    f"bucket.resolutions: {other} and {resolution} both have the bucket "
                    + ", ".join(f"{h}x{w}" for h, w in sorted(shared)),
                    fix="choose resolutions that lie further apart, each once",
                )
        tables[resolution] = shapes
    return [("" if r == data.resolution else str(r), shapes) for r, shapes in tables.items()]


def batches(bucket: BucketConfig, shapes: Sequence[Shape], compression: int) -> list[int]:
    """The global batch of each bucket: from `bucket.tokens`, else `bucket.batch`.

    Raises:
        ConfigError: `bucket.batch_multiple` does not divide `bucket.batch`, or `bucket.tokens` is too small for
            `batch_multiple` samples of a bucket.
    """
    multiple = bucket.batch_multiple
    if bucket.tokens is None:
        if bucket.batch % multiple:
            raise ConfigError(
                f"bucket.batch = {bucket.batch} is not a multiple of bucket.batch_multiple = {multiple}",
                fix=f"{bucket.batch // multiple * multiple or multiple} is a multiple",
            )
        return [bucket.batch] * len(shapes)
    result = []
    for height, width in shapes:
        tokens = (height // compression) * (width // compression)
        batch = bucket.tokens // tokens // multiple * multiple
        if batch == 0:
            raise ConfigError(
                f"bucket.tokens = {bucket.tokens} does not hold {multiple} samples of {height}x{width}",
                expected=f"at least {multiple * tokens}: {tokens} latent tokens each",
                fix="raise bucket.tokens, or lower bucket.batch_multiple",
            )
        result.append(batch)
    return result


def upscale(height: Any, width: Any, bucket: Any) -> Any:
    """The factor by which a picture is scaled to cover the bucket; above 1 it is visibly enlarged. Of one picture, or
    of many: arrays (n,), and a pair of them."""
    return np.maximum(bucket[0] / height, bucket[1] / width)


def crop_loss(height: Any, width: Any, bucket: Any) -> Any:
    """The share of the picture's area, 0 to 1, that the centre crop after the covering resize removes. Arguments as of
    `upscale`."""
    scale = upscale(height, width, bucket)
    return np.maximum(0.0, 1.0 - (bucket[0] * bucket[1]) / (height * scale * width * scale))


def refusals(height: Any, width: Any, bucket: Any, data: DataConfig) -> Iterator[tuple[str, Any]]:
    """Reasons of `data.min_side`, `data.max_upscale` and `data.max_crop_loss`, and whether each excludes a picture.
    Arguments as of `upscale`.

    A reason names the setting and not the value of the picture (which is in the scan's table), so that equal reasons
    can be counted. Values equal to the limit pass, also if rounding puts them above it.
    """
    if data.min_side is not None:
        yield f"the shorter side is below data.min_side = {data.min_side}", np.minimum(height, width) < data.min_side
    if data.max_upscale is not None:
        enlarged = upscale(height, width, bucket) > data.max_upscale * (1 + 1e-9)
        yield f"it would be enlarged by more than data.max_upscale = {data.max_upscale:g}", enlarged
    if data.max_crop_loss is not None:
        cropped = crop_loss(height, width, bucket) > data.max_crop_loss + 1e-9
        yield f"the crop would cut away more than data.max_crop_loss = {data.max_crop_loss:g}", cropped


def refusal(height: int, width: int, bucket: Shape, data: DataConfig) -> str | None:
    """The first reason that excludes a picture, or None."""
    return next((reason for reason, excludes in refusals(height, width, bucket, data) if excludes), None)
