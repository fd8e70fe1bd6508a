"""One sample of a snapshot: how it is named, where its bytes lie, what its latent and captions are, its pictures.

`find` resolves what a user has at hand: a sample id (`samples.jsonl`, messages of `train`), an item's name, the key of
the latent (the member's name in its shard), or the beginning of one of them.
Price: `find` reads the tables of the whole snapshot, in columns.
"""

from __future__ import annotations

import difflib
import math
import re
import string
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image, ImageDraw

from pipeline.base.errors import IntegrityError, UserError
from pipeline.data.cache.cache import Cache
from pipeline.data.cache.snapshot import Snapshot
from pipeline.data.cache.snapshot_samples import picture_keys
from pipeline.data.images import buckets
from pipeline.data.images.resize import cover_box
from pipeline.data.signals import PictureSignal
from pipeline.data.signals.latent import LatentEncoding
from pipeline.data.signals.text import TextEncoding
from pipeline.tools.reporting.source_pictures import SIDE, Embedded, SourcePictures, embedded

SCANNED = ["size", "digest", "width", "height", "meta", "reject"]
"""Columns of the scan that are shown."""
HEX_DIGITS = 6
"""The shortest beginning of a key or an id that is looked for."""
SHOWN = 5
ALIKE = 3
"""Characters that a name shares with a name that does not exist, to be compared with it first."""
CANDIDATES = 5000
"""Limit on names that are compared letter by letter with a name that does not exist."""
LARGE = 480
"""Longer side of pictures in pixels."""


def find(cache: Cache, snapshot: Snapshot, text: str) -> int:
    """The row of a sample.

    Args:
        text: an id, a name (`item` or `source: item`), a file name in any folder, the key of a latent (hex), or the
            beginning of a name, id or key.

    Raises:
        UserError: no sample has it, or several; the message names the nearest.
    """
    matches = (
        _rows(snapshot, text, pc.equal) or _rows(snapshot, text, _in_a_folder) or _rows(snapshot, text, pc.starts_with)
    )
    if len(matches) == 1:
        return matches[0]
    if matches:
        shown = [f"{snapshot.sample_id(row)} ({': '.join(snapshot.source_item(row))})" for row in matches[:SHOWN]]
        raise UserError(
            f"{text!r} names several samples of snapshot {snapshot.id[:12]}",
            found="; ".join(shown) + ("; ..." if len(matches) > SHOWN else ""),
            fix="give the sample id, the first number of the sample that you mean",
        )
    raise UserError(
        f"no sample of snapshot {snapshot.id[:12]} is called {text!r}{_rejected(cache, snapshot, text)}",
        expected=f"a sample id, an item, or {HEX_DIGITS} or more digits of a key; near: "
        + ", ".join(_nearest(snapshot, text)),
        fix="sana-pipe snapshots lists other snapshots (--snapshot NAME)",
    )


def _in_a_folder(items: Any, name: str) -> Any:
    return pc.ends_with(items, f"/{name}")


def _rows(snapshot: Snapshot, text: str, compare: Callable[[Any, str], Any]) -> list[int]:
    """The first rows that a text names. compare: `pc.equal`, `_in_a_folder` or `pc.starts_with`."""
    source, colon, item = text.partition(": ")
    is_long = len(text) >= HEX_DIGITS
    digits = text.lower() if is_long and set(text) <= set(string.hexdigits) else ""
    rows: list[int] = []
    first = 0
    for samples, names in zip(snapshot.tables(), snapshot.name_tables(), strict=True) if text else ():
        items = names.column("item")
        chosen = compare(items, text)
        if colon:
            chosen = pc.or_(chosen, pc.and_(compare(items, item), pc.equal(names.column("source"), source)))
        if text.isdecimal() and (is_long or compare is pc.equal):
            chosen = pc.or_(chosen, compare(pc.cast(samples.column("sample_id"), pa.string()), text))
        mask = chosen.to_numpy()
        if digits and compare is not pc.equal:
            for kind in snapshot.pictures:
                keys = np.frombuffer(picture_keys(samples, kind).tobytes().hex().encode(), "S32")
                mask = mask | np.char.startswith(keys, digits.encode())
        rows += (first + np.flatnonzero(mask)).tolist()
        first += samples.num_rows
        if len(rows) > SHOWN:
            break
    return rows


def _scan(cache: Cache, snapshot: Snapshot, source: str) -> pa.Table | None:
    """The scan of a source that the snapshot was made from; None if it is gone."""
    try:
        return cache.table(snapshot.head.sources[source], ["item", *SCANNED])
    except (IntegrityError, KeyError):
        return None


def _scanned(cache: Cache, snapshot: Snapshot, source: str, item: str) -> dict[str, Any] | None:
    """An item's row in the scan."""
    table = _scan(cache, snapshot, source)
    at = -1 if table is None else pc.index(table.column("item"), item).as_py()
    return None if table is None or at < 0 else table.slice(at, 1).to_pylist()[0]


def _rejected(cache: Cache, snapshot: Snapshot, item: str) -> str:
    """Say why an item of the sources is not in the snapshot, as a part of a sentence."""
    for source in snapshot.head.sources:
        row = _scanned(cache, snapshot, source, item)
        if row is not None:
            reason = row["reject"] or "left out by `bucket`; sana-pipe inspect lists the reasons"
            return f"; source {source!r} has it: {reason}"
    return ""


def _nearest(snapshot: Snapshot, text: str) -> list[str]:
    """Names of a few items that resemble a text: of those that begin like it, else of all."""
    text = re.sub(r"^[\w.-]+: ?", "", text)  # a source
    candidates: list[str] = []
    for beginning in (text[:ALIKE], ""):
        for names in snapshot.name_tables():
            items = names.column("item")
            alike = items.filter(pc.starts_with(items, beginning))
            candidates += alike.slice(0, CANDIDATES - len(candidates)).to_pylist()
    return difflib.get_close_matches(text, candidates, SHOWN, 0.3) or candidates[:SHOWN]


# ---------------------------------------------------------------- numbers


def describe(cache: Cache, snapshot: Snapshot, row: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Everything about a sample as JSON values, and its records that are pictures by kind, the latent first: (C, h, w)
    float32. `picture` is null where the scan is gone.

    Raises:
        IntegrityError: a record is damaged.
    """
    sample, files = snapshot.sample(row), snapshot.files
    bucket = snapshot.buckets[sample.bucket]
    source, item = snapshot.source_item(row)
    records = dict[str, np.ndarray]()
    for kind, encoding in snapshot.pictures.items():
        if encoding.axes == LatentEncoding.axes:
            records[kind] = (snapshot.picture(sample, kind).astype(np.uint32) << 16).view(np.float32)
    texts = snapshot.captions(row, snapshot.reader("text"))
    longest, width = snapshot.encoding(TextEncoding).max_length, snapshot.encoding(TextEncoding).width

    def place(kind: str, record: Any, plain: int) -> dict[str, Any]:
        return {
            "key": record.key.hex(),
            "shard": files.where(snapshot.shard_path(kind, record.shard)),
            "offset": record.offset,
            "bytes": plain if record.length is None else record.length,
            "storage": snapshot.head.encodings_by_kind[kind].storage,
        }

    values = {
        "sample_id": sample.sample_id,
        "snapshot": snapshot.id,
        "row": row,
        "source": source,
        "item": item,
        "bucket": {"height": bucket.height, "width": bucket.width, "batch": bucket.batch, "samples": bucket.samples},
        "picture": _picture(_scanned(cache, snapshot, source, item), (bucket.height, bucket.width)),
        **{
            kind: place(kind, record, 2 * math.prod(snapshot.shape(kind, sample.bucket)))
            | (_statistics(records[kind]) if kind in records else {})
            for kind, record in sample.pictures.items()
        },
        "captions": [
            {
                "text": text,
                "tokens": caption.rows,
                "max_length": longest,
                "at_max_length": caption.rows >= longest,
                "weight": caption.weight,
                **place("text", caption, caption.rows * width * 2),
            }
            for text, caption in zip(texts, sample.captions, strict=True)
        ],
    }
    return values, records


def _statistics(record: np.ndarray) -> dict[str, Any]:
    return {
        "shape": list(record.shape),
        **{name: float(getattr(record, name)(dtype=np.float64)) for name in ("mean", "std")},
        **{name: float(getattr(record, name)()) for name in ("min", "max")},
        "channel_std": record.reshape(len(record), -1).std(1, dtype=np.float64).tolist(),
    }


def _picture(row: dict[str, Any] | None, size: tuple[int, int]) -> dict[str, Any] | None:
    """The file of a sample as scanned, and its crop to the bucket's (height, width)."""
    if row is None or row["width"] is None:
        return None
    width, height = row["width"], row["height"]
    return {
        "width": width,
        "height": height,
        "bytes": row["size"],
        "digest": row["digest"].hex(),
        "crop": [round(side, 1) for side in cover_box(width, height, size)],
        "crop_loss": buckets.crop_loss(height, width, size),
        "upscale": buckets.upscale(height, width, size),
        "meta": row["meta"],
    }


# ---------------------------------------------------------------- pictures


def pictures(
    photos: SourcePictures,
    values: dict[str, Any],
    records: dict[str, np.ndarray],
    further: Mapping[str, PictureSignal],
) -> list[Embedded]:
    """The original with its crop, the crop as the VAE gets it, the control pictures and masks as their encoders get
    them, and the records. values, records: of `describe`. further: encodings of the control pictures and masks by
    kind."""
    bucket, picture = values["bucket"], values["picture"]
    original = photos.thumbnail(values["source"], values["item"], LARGE)
    if original is not None and picture is not None:
        scale = original.width / picture["width"], original.height / picture["height"]
        left, top, right, bottom = (side * scale[i % 2] for i, side in enumerate(picture["crop"]))
        box = (left, top, max(left, right - 1), max(top, bottom - 1))
        ImageDraw.Draw(original).rectangle(box, outline=(255, 64, 0), width=3)
    size = bucket["height"], bucket["width"]
    cropped = photos.cropped(values["source"], values["item"], size)
    beside = {
        kind: photos.further(values["source"], values["item"], encoding, size) for kind, encoding in further.items()
    }
    return [
        embedded(original, "original, with the crop as a frame", LARGE),
        embedded(cropped, f"crop at {bucket['height']}x{bucket['width']}", LARGE),
        *(embedded(picture, f"{kind} at {size[0]}x{size[1]}", LARGE) for kind, picture in beside.items()),
        *(embedded(projected(record), _title(kind, record), SIDE) for kind, record in records.items()),
    ]


def _title(kind: str, record: np.ndarray) -> str:
    return f"{kind}, its three main components as red, green, blue" if len(record) > 1 else f"{kind}, from 0 to 1"


def projected(latent: np.ndarray) -> Image.Image:
    """A latent (C, h, w) as a picture: its first three principal components over the positions, scaled to 0..255; of
    one channel the values themselves, from 0 to 1."""
    channels, height, width = latent.shape
    scale = max(1, SIDE // max(height, width))
    if channels == 1:
        gray = Image.fromarray(np.round(np.clip(latent[0], 0, 1) * 255).astype(np.uint8)).convert("RGB")
        return gray.resize((width * scale, height * scale), Image.Resampling.NEAREST)
    flat = latent.reshape(channels, -1).astype(np.float64)
    flat = flat - flat.mean(1, keepdims=True)
    directions, _, _ = np.linalg.svd(flat, full_matrices=False)
    parts = np.zeros((3, height * width))
    chosen = directions[:, :3].T @ flat
    parts[: len(chosen)] = chosen
    low, high = parts.min(1, keepdims=True), parts.max(1, keepdims=True)
    levels = np.divide(parts - low, high - low, out=np.zeros_like(parts), where=high > low)
    picture = Image.fromarray(np.round(levels * 255).astype(np.uint8).T.reshape(height, width, 3))
    return picture.resize((width * scale, height * scale), Image.Resampling.NEAREST)
