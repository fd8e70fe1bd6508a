"""Estimate: what encoding a source would read, make, store and take, before anything is written.

What: `wanted` lists the work that is not in the cache yet, `sizes` the bytes it will take, `probe` the speed of the
real encoders on a few real batches.
Why: a run of days should not end on a full disk, nor begin on a source of which half is rejected.
Price: a picture that no earlier scan has read is known by its header alone. So equal pictures count as many times as
they are there, damaged pixels are not seen, and such a picture never counts as already encoded. Captions are exact.
Sizes of `bf16-zstd` storage are typical ones, and of many captions only a sample is tokenized; the report says which.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.amounts import amount
from pipeline.cache import codec, layout
from pipeline.cache.shard import BLOCK, RECORDS, npy_header
from pipeline.cache.store import Cache, Plan, Unit
from pipeline.config import Config
from pipeline.images import buckets, decoding
from pipeline.models import encoders
from pipeline.sources import caption_rules as captions
from pipeline.sources.reasons import Kinds
from pipeline.sources.source import Source
from pipeline.work.progress import span

Shape = tuple[int, int]

SAMPLE = 4096
"""Captions that are tokenized at most."""

PROBE_S = 60.0
"""Seconds that a probe may take, without loading the encoders. A batch that has begun is finished."""

_PROBED_BUCKETS = 3
_UNIT = 2500  # bytes of a unit's commit document, and of its place in the plan and in the segment
_SHARD = 4400  # bytes of a shard's head, of its table's frame and of its end


@dataclass
class Wanted:
    """The work of a source.

    Attributes:
        items, usable: of the scan; an `undecided` item is usable as far as its header tells, which is not far enough.
        rejects: by kind of reason.
        buckets: (height, width) -> samples and the sum of their crop losses.
        pictures: new pictures by target: the items to read.
        captions: new captions, normalised, and their length in bytes as written.
        kept_latents, kept_captions: records that the cache already holds (the null record included).
        null: the null record is to be made.
    """

    items: int = 0
    usable: int = 0
    undecided: int = 0
    unread: int = 0
    rejects: Kinds = field(default_factory=Kinds)
    buckets: dict[Shape, list[float]] = field(default_factory=dict)
    pictures: dict[Shape, list[str]] = field(default_factory=lambda: defaultdict(list))
    captions: list[tuple[str, int]] = field(default_factory=list)
    kept_latents: int = 0
    kept_captions: int = 0
    null: bool = True

    @property
    def images(self) -> int:
        """New pictures, those included whose size is not known."""
        return sum(map(len, self.pictures.values())) + self.undecided

    @property
    def texts(self) -> int:
        return len(self.captions) + self.null


def wanted(
    scan: pa.Table, cache: Cache | None, latent: layout.LatentRecipe, text: layout.TextRecipe, table: list[Shape]
) -> Wanted:
    """Compare a scan, of whole pictures or of headers, with what a cache holds."""
    found = Wanted(items=scan.num_rows)
    has, failed = _held(cache, latent)
    has_text, failed_text = _held(cache, text)
    seen: set[bytes] = set()
    rejects: list[tuple[str, str]] = []
    columns = ("item", "digest", "width", "height", "captions", "reject")
    for item, digest, width, height, listed, reject in zip(*(scan.column(c).to_pylist() for c in columns), strict=True):
        if reject is not None:
            rejects.append((item, reject))
            continue
        found.usable += 1
        for caption in listed:
            normalised = captions.normalise(caption["text"], text.normalisation)
            key = layout.text_key(text.id, normalised)
            if key in seen:
                continue
            seen.add(key)
            if has_text(key):
                found.kept_captions += 1
            elif key in failed_text:
                rejects.append((caption["text"], failed_text[key]))
            else:
                found.captions.append((normalised, len(caption["text"].encode())))
        found.unread += digest is None
        if width is None:
            found.undecided += 1
            continue
        target = buckets.nearest(table, height, width)
        bucket = found.buckets.setdefault(target, [0, 0.0])
        bucket[0] += 1
        bucket[1] += buckets.crop_loss(height, width, target)
        if digest is not None:
            key = layout.latent_key(latent.id, digest, *target)
            if key in seen:
                continue
            seen.add(key)
            if has(key):
                found.kept_latents += 1
                continue
            if key in failed:
                rejects.append((item, failed[key]))
                continue
        found.pictures[target].append(item)
    found.rejects = Kinds.of(rejects)
    found.null = not has_text(layout.null_key(text.id))
    found.kept_captions += not found.null
    return found


def _held(cache: Cache | None, recipe: layout.Recipe) -> tuple[Callable[[bytes], bool], dict[bytes, str]]:
    """Whether a record is there, and the reasons of records that could not be made and will not be tried again."""
    if cache is None:
        return lambda key: False, {}
    index = cache.index(recipe.name)
    failed = {bytes.fromhex(r.key): r.reason for r in index.rejects if not r.retry}
    return index.has, failed


# ---------------------------------------------------------------- bytes


def unit_bytes(cache: Cache, plan: Plan, unit: Unit) -> int:
    """Bytes that a unit's shard will take, about: of captions only the lengths are known."""
    recipe = cache.recipe(plan.recipe)
    rows = cache.table(plan.table).slice(unit.start, unit.count)
    if isinstance(recipe, layout.LatentRecipe):
        shapes = zip(rows.column("height").to_pylist(), rows.column("width").to_pylist(), strict=True)
        return sum(latent_bytes(recipe, height, width) for height, width in shapes)
    assert isinstance(recipe, layout.TextRecipe)
    lengths = [None if text is None else len(text.encode()) for text in rows.column("caption").to_pylist()]
    return sum(
        text_bytes(recipe, recipe.max_length if length is None else likely_rows(recipe, length), length or 0)
        for length in lengths
    )


def latent_bytes(recipe: layout.LatentRecipe, height: int, width: int) -> int:
    """Bytes of a latent in a shard, its share of the shard's own table included. height, width: in pixels."""
    shape = (recipe.channels, height // recipe.compression, width // recipe.compression)
    return _record(recipe, shape)


def text_bytes(recipe: layout.TextRecipe, rows: int, caption: int) -> int:
    """Bytes of a text record of so many rows in a shard; caption: bytes of the caption as written."""
    return _record(recipe, (rows, recipe.width)) + BLOCK + _padded(caption)


def _record(recipe: layout.Recipe, shape: tuple[int, ...]) -> int:
    size = codec.payload_bytes(str(recipe.values()["storage"]), recipe.kind, shape)
    return BLOCK + _padded(len(npy_header(shape)) + size) + _row(recipe.kind)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _row(kind: str) -> int:
    return sum(column.type.bit_width // 8 for column in RECORDS[kind])


def likely_rows(recipe: layout.TextRecipe, caption: int) -> int:
    """Rows of a caption of so many bytes, without a tokenizer: three bytes a token, which few captions reach."""
    return min(recipe.max_length, 2 + -(-caption // 3))


@dataclass(frozen=True)
class Sizes:
    """Bytes that the work will take: shards by kind, and all tables and documents (`index`).

    tokens: rows of all new captions, without <bos> and without the null record; sampled: captions that were tokenized.
    """

    latents: int
    text: int
    index: int
    tokens: int
    sampled: int

    @property
    def total(self) -> int:
        return self.latents + self.text + self.index


def sizes(
    work: Wanted,
    config: Config,
    latent: layout.LatentRecipe,
    text: layout.TextRecipe,
    count_rows: Callable[[Sequence[str]], list[int]],
) -> Sizes:
    """Bytes by kind.

    Args:
        count_rows: normalised captions -> their rows (a tokenizer); at most `SAMPLE` captions are counted.
    """
    known = {shape: latent_bytes(latent, *shape) for shape in work.pictures}
    latents = sum(known[shape] * len(items) for shape, items in work.pictures.items())
    if work.undecided:
        counted = work.images - work.undecided
        mean = latents / counted if counted else latent_bytes(latent, config.data.resolution, config.data.resolution)
        latents += round(mean * work.undecided)
    picked = work.captions[:: max(1, math.ceil(len(work.captions) / SAMPLE))]
    rows = count_rows([caption for caption, _ in picked]) if picked else []
    scale = len(work.captions) / len(picked) if picked else 0.0
    body = sum(text_bytes(text, n, size) for n, (_, size) in zip(rows, picked, strict=True))
    null = text_bytes(text, text.max_length, 0) if work.null else 0
    image_units = sum(-(-len(items) // _unit_images(config, known[shape])) for shape, items in work.pictures.items())
    text_units = -(-len(work.captions) // config.encode.unit_captions) + work.null
    # Twice a row: the unit's own table and the plan's; the scan and the plan hold keys, digests and the text itself.
    index = work.images * (2 * _row("latent") + 64) + work.texts * (2 * _row("text") + 24)
    index += (image_units + text_units) * _UNIT + sum(size for _, size in work.captions) // 2 + work.items * 48
    return Sizes(
        latents + image_units * _SHARD,
        round(body * scale) + null + text_units * _SHARD,
        index if work.images + work.texts else 0,
        round((sum(rows) - len(rows)) * scale),
        len(picked),
    )


def _unit_images(config: Config, record: int) -> int:
    return max(1, min(config.encode.unit_images, (config.encode.unit_mib << 20) // record))


# ---------------------------------------------------------------- time


@dataclass(frozen=True)
class Speed:
    """What a probe measured. Seconds an item; None where nothing could be measured.

    image_s: encoder seconds a picture, by target. decode_s: reading and decoding one picture in one thread.
    token_s: encoder seconds a caption token. load_s: loading both encoders. images, captions: how many were encoded.
    """

    image_s: dict[Shape, float]
    decode_s: float | None
    token_s: float | None
    load_s: float
    images: int
    captions: int
    device: str


def probe(
    work: Wanted, config: Config, source: Source, latent: layout.LatentRecipe, device: Any, budget_s: float = PROBE_S
) -> Speed:
    """Encode a few real batches of the most frequent buckets and of captions; nothing is kept.

    Each encoder runs once before the clock starts. A batch that would take too long is measured by a single picture.

    Raises:
        UserError: the encoders cannot be loaded, or give what they must not.
    """
    image_s: dict[Shape, float] = {}
    decoded: list[float] = []
    load_s, images, texts = 0.0, 0, 0
    token_s = None
    if work.captions:
        began = time.monotonic()
        text = encoders.TextEncoder.load(config.text, captions.instruction(config.text), device)
        load_s += time.monotonic() - began
        token_s, texts = _probe_text(text, work, config, began + load_s + budget_s / 3)
        del text
    if work.pictures:
        began = time.monotonic()
        vae = encoders.LatentEncoder.load(config.vae, device)
        spent = time.monotonic() - began
        load_s += spent
        often = sorted(work.pictures, key=lambda shape: -len(work.pictures[shape]))[:_PROBED_BUCKETS]
        for number, shape in enumerate(often):
            end = began + spent + budget_s * 2 / 3 * (number + 1) / len(often)
            seconds, count = _probe_images(vae, source, work.pictures[shape], shape, config, latent, end, decoded)
            if seconds is not None:
                image_s[shape] = seconds
                images += count
    decode_s = sum(decoded) / len(decoded) if decoded else None
    return Speed(image_s, decode_s, token_s, load_s, images, texts, str(device))


def _probe_text(encoder: encoders.TextEncoder, work: Wanted, config: Config, end: float) -> tuple[float | None, int]:
    by_length = sorted(caption for caption, _ in work.captions)
    by_length.sort(key=len)
    take = min(len(by_length), config.encode.text_batch)
    batch = [by_length[i * len(by_length) // take] for i in range(take)]
    began = time.monotonic()
    encoder.encode(batch[take // 2 : take // 2 + 1])  # loads kernels, runs the instruction, compares with the reference
    if (time.monotonic() - began) * take > end - time.monotonic():
        batch = batch[take // 2 : take // 2 + 1]
    else:
        encoder.encode(batch)  # the longest caption is compared, too
    before, began = encoder.tokens, time.monotonic()
    encoder.encode(batch)
    tokens = encoder.tokens - before
    return ((time.monotonic() - began) / tokens if tokens else None), len(batch)


def _probe_images(
    encoder: encoders.LatentEncoder,
    source: Source,
    items: list[str],
    shape: Shape,
    config: Config,
    recipe: layout.LatentRecipe,
    end: float,
    decoded: list[float],
) -> tuple[float | None, int]:
    """Seconds a picture, and how many were encoded at once. `decoded` gets the seconds of each that was read."""
    pictures: list[np.ndarray] = []
    began = time.monotonic()
    for item in items[: config.encode.image_batch]:
        start = time.monotonic()
        if pictures and start - began > (end - began) / 4:
            break
        try:
            data = source.read(item)
            limits = {"max_pixels": config.data.max_pixels, "max_bytes": config.data.max_bytes}
            pictures.append(decoding.load(data, shape, recipe.background, decoder=recipe.decoder, **limits))
        except (OSError, decoding.ImageReject):
            continue
        decoded.append(time.monotonic() - start)
    if not pictures:
        return None, 0
    encoder.encode(np.stack(pictures[:1]))
    began = time.monotonic()
    encoder.encode(np.stack(pictures[:1]))
    one = time.monotonic() - began
    if 2 * one * len(pictures) > end - time.monotonic():
        return one, 1
    encoder.encode(np.stack(pictures))
    began, rounds = time.monotonic(), 0
    while rounds < 3 and (not rounds or time.monotonic() + one * len(pictures) < end):
        encoder.encode(np.stack(pictures))
        rounds += 1
    return (time.monotonic() - began) / rounds / len(pictures), len(pictures)


def times(work: Wanted, found: Sizes, speed: Speed, config: Config, tasks: int) -> dict[str, Any]:
    """Device-hours of the work, and the hours that each of `tasks` equal workers takes (JSON values).

    Pictures of targets that were not probed count by their pixels. Decoding runs beside the encoder, in
    `encode.workers` threads, so the slower of the two decides. `null`: nothing could be measured.
    """
    encode_s: float | None = 0.0
    if work.images:
        encode_s = None
        if speed.image_s:
            pixel_s = sum(speed.image_s.values()) / sum(h * w for h, w in speed.image_s)
            by_shape = {s: speed.image_s.get(s, pixel_s * s[0] * s[1]) for s in work.pictures}
            encode_s = sum(by_shape[s] * len(items) for s, items in work.pictures.items())
            encode_s *= work.images / (work.images - work.undecided)
    text_s = found.tokens * speed.token_s if speed.token_s is not None else (0.0 if not work.captions else None)
    decode_s = work.images * (speed.decode_s or 0.0) / max(1, config.encode.workers)
    known = encode_s is not None and text_s is not None
    seconds = max(encode_s or 0.0, decode_s) + (text_s or 0.0)
    return {
        "device": speed.device,
        "probed_images": speed.images,
        "probed_captions": speed.captions,
        "load_s": speed.load_s,
        "image_encode_s": encode_s,
        "image_decode_s": decode_s,
        "text_encode_s": text_s,
        "decode_bound": encode_s is not None and decode_s > encode_s,
        "device_hours": seconds / 3600 if known else None,
        "tasks": tasks,
        "hours_per_task": (seconds / tasks + speed.load_s) / 3600 if known else None,
    }


# ---------------------------------------------------------------- the report


def report(
    name: str, work: Wanted, found: Sizes, free: int | None, reserve: int, time_told: dict[str, Any] | None
) -> dict[str, Any]:
    """The whole estimate as JSON values. reserve: bytes that must stay free (`encode.min_free_gib`);
    free: None where the store does not tell."""
    return {
        "source": name,
        "items": work.items,
        "usable": work.usable,
        "rejects": sum(work.rejects.counts.values()),
        "undecided": work.undecided,
        "unread": work.unread,
        "reasons": work.rejects.counts,
        "examples": work.rejects.examples,
        "buckets": [
            {"height": shape[0], "width": shape[1], "samples": int(count), "crop_loss": loss / count}
            for shape, (count, loss) in sorted(work.buckets.items())
        ],
        "reused": {"latents": work.kept_latents, "captions": work.kept_captions},
        "new": {"latents": work.images, "captions": work.texts},
        "tokens": {"total": found.tokens, "captions_tokenized": found.sampled, "captions": len(work.captions)},
        "bytes": {"latents": found.latents, "text": found.text, "index": found.index, "total": found.total},
        "free_bytes": free,
        "reserve_bytes": reserve,
        "enough_space": free is None or found.total + reserve <= free,
        "time": time_told,
    }


def lines(told: dict[str, Any], cache: str) -> list[str]:
    """The report for people."""
    out = [
        f"source {told['source']!r}: {told['items']} items, {told['usable']} usable, {told['rejects']} rejects expected"
    ]
    out += Kinds(told["reasons"], told["examples"]).lines()
    if told["undecided"]:
        out.append(f"  {told['undecided']} of the usable ones have no header in their first MiB: their size is unknown")
    if told["unread"]:
        out.append(
            f"  {told['unread']} pictures were judged by their headers alone: damaged pixels and equal pictures show "
            "only when they are read"
        )
    out += [
        f"  {one['height']:5d} x {one['width']:<5d} {one['samples']:8d} samples, mean crop loss {one['crop_loss']:.1%}"
        for one in told["buckets"]
    ]
    kept, new, size = told["reused"], told["new"], told["bytes"]
    out.append(f"already in the cache: {kept['latents']} latents, {kept['captions']} captions")
    out.append(f"to be encoded: {new['latents']} latents, {new['captions']} captions")
    tokens = told["tokens"]
    if tokens["captions_tokenized"] < tokens["captions"]:
        out.append(f"  tokens counted in a sample of {tokens['captions_tokenized']} of {tokens['captions']} captions")
    out.append(
        f"bytes: latents {amount(size['latents'])}, text {amount(size['text'])}, index {amount(size['index'])}; "
        f"in all {amount(size['total'])}"
    )
    state = "enough" if told["enough_space"] else "NOT ENOUGH"
    free = "not told" if told["free_bytes"] is None else f"{amount(told['free_bytes'])} free"
    out.append(
        f"space at {cache}: {free}, {amount(size['total'])} needed and "
        f"{amount(told['reserve_bytes'])} in reserve: {state}"
    )
    took = told["time"]
    if took is None:
        out.append("time: not probed")
    elif took["device_hours"] is None:
        out.append("time: unknown, nothing of the work could be encoded in the probe")
    else:
        share = (
            f", {span(took['hours_per_task'] * 3600)} for each of {took['tasks']} tasks" if took["tasks"] > 1 else ""
        )
        out.append(
            f"time: {span(took['device_hours'] * 3600)} on one device ({took['device_hours']:.3g} device-hours, "
            f"{took['device']}){share}; probed with {took['probed_images']} pictures and "
            f"{took['probed_captions']} captions"
        )
        if took["decode_bound"]:
            out.append("  decoding takes longer than encoding: more encode.workers would help")
    return out
