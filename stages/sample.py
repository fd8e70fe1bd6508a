"""`sana-pipe sample`: pictures from a checkpoint, for captions of a snapshot.

What: reads text rows and latents from the cache, draws latents with the transformer, then decodes them in a process
of its own, and writes PNGs, `samples.jsonl` and a contact sheet (photo, the VAE's reconstruction, the drawn picture).
Why another process for decoding: the transformer and the VAE never share memory, and what drawing needs is what
training needs, so this process imports no encoder either.
Price: one more start of Python, and the latents go through a file.

Guidance uses the null record's valid rows, as `SanaPipeline` does, so that an exported model draws the same way.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pipeline.cache.shard import Reader
from pipeline.cache.snapshot import Sample, Snapshot
from pipeline.cache.store import Cache
from pipeline.config import Config, dump
from pipeline.data import image
from pipeline.data.loader import bf16
from pipeline.data.source import Source, Unreadable
from pipeline.encoding.scan import reopen
from pipeline.errors import ConfigError, UserError
from pipeline.launch import resolve_device
from pipeline.models.sampler import draw_noise
from pipeline.models.sampler import sample as draw
from pipeline.models.sana import SanaConfig, SanaTransformer
from pipeline.processes import command
from pipeline.training import checkpoint as checkpoints
from pipeline.training import runs

SHEET = "contact_sheet.png"
TABLE = "samples.jsonl"
TITLES = ("photo", "reconstruction", "drawn")
SEED_STRIDE = 0x9E3779B97F4A7C15
"""Odd and large: seeds 0, 1, 2 lie far apart, so that they meet no other sample's noise."""


class DecodeError(UserError):
    """The process that decodes ended with an error, which it has told itself."""

    exit_code = 8


@dataclass(frozen=True)
class Drawn:
    """One caption and what was drawn for it.

    Attributes:
        row: of the sample in the snapshot.
        caption: as it was written.
        source, item: where the picture came from.
        bucket: (height, width) in pixels.
        cached: (C, h, w) float32, the latent of the sample's own picture.
        latent: (C, h, w) float32, the drawn one.
    """

    row: int
    sample_id: int
    caption: str
    source: str
    item: str
    bucket: tuple[int, int]
    cached: torch.Tensor
    latent: torch.Tensor


@dataclass(frozen=True)
class Result:
    """`nearest`: drawn latents whose nearest cached latent is their own picture's, out of `count`."""

    sheet: Path
    count: int
    nearest: int


def run(config: Config, checkpoint: str, snapshot: str | None, out: Path, count: int | None = None) -> Result:
    """Draw, decode, and put on a contact sheet.

    Args:
        checkpoint: `auto` (the newest of `train.output`) or a checkpoint folder.
        snapshot: a name or an id; None is the newest.
        out: folder of the pictures; files of an earlier call are replaced.
        count: how many captions, spread evenly over the snapshot (None: `sample.count`).

    Raises:
        UserError: no checkpoint, no snapshot, a snapshot of other encoders; see the messages.
    """
    out = Path(out)
    folder = runs.find(config, checkpoint)
    cache = Cache(config.cache)
    opened = cache.open_snapshot(snapshot)
    architecture, weights = checkpoints.load_model_state(folder)
    _check_fit(architecture, opened, folder)
    wanted = min(count or config.sample.count, len(opened))
    if wanted < (count or config.sample.count):
        _say(f"the snapshot has {wanted} samples: drawing {wanted} pictures")
    _say(f"drawing {wanted} pictures from {folder} for captions of snapshot {opened.id[:12]}")
    drawn = draw_for(config, architecture, weights, opened, spread(len(opened), wanted))
    del weights
    hits = nearest(drawn)
    _say(f"{sum(hits)} of {len(hits)} drawn latents are nearest to those of their own picture")

    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=out) as work:
            _decode_apart(config, drawn, Path(work))
            sheet = _publish(config, cache, drawn, hits, Path(work), out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error}", fix="check the rights, or give another --out") from None
    _say(f"contact sheet: {sheet}")
    return Result(sheet, len(drawn), sum(hits))


def spread(samples: int, count: int) -> list[int]:
    """`count` different rows, evenly over all of them (rows are ordered by bucket, so every shape has its share)."""
    return [(2 * i + 1) * samples // (2 * count) for i in range(count)]


def draw_for(
    config: Config,
    architecture: SanaConfig,
    weights: dict[str, torch.Tensor],
    snapshot: Snapshot,
    rows: list[int],
) -> list[Drawn]:
    """Draw a latent for the first of the most probable captions of each row.

    The noise of a picture depends on `sample.seed` and the sample alone: not on what else is drawn.

    Args:
        weights: of `architecture`, in our layout; taken over by the model.
    """
    device = resolve_device(config.train.device)
    model = SanaTransformer.on_meta(architecture)
    model.load_state_dict(weights, assign=True)
    model.reset_buffers()
    model.to(device, torch.bfloat16 if config.train.precision == "bf16" else torch.float32).eval()
    records = _Records(snapshot)
    settings = config.sample
    pieces = []
    for row in rows:
        sample = snapshot.sample(row)
        bucket = snapshot.buckets[sample.bucket]
        latent = records.latent(sample)
        at = max(range(len(sample.captions)), key=lambda i: sample.captions[i].weight)
        text = records.text(sample, at)
        channels, height, width = latent.shape
        noise = draw_noise(1, (channels, height, width), (settings.seed * SEED_STRIDE + sample.sample_id) % 2**40)
        caption = snapshot.captions(row, records.texts)[at]
        pieces.append((row, sample, caption, (bucket.height, bucket.width), latent, text, noise))

    null, null_mask = records.null()
    drawn: dict[int, torch.Tensor] = {}
    for shape in sorted({piece[3] for piece in pieces}):
        group = [piece for piece in pieces if piece[3] == shape]
        longest = max(len(text) for *_, text, _ in group)
        captions = torch.zeros(len(group), longest, null.shape[-1])
        mask = torch.zeros(len(group), longest, dtype=torch.bool)
        for i, (*_, text, _) in enumerate(group):
            captions[i, : len(text)], mask[i, : len(text)] = text, True
        latents = draw(
            model,
            captions,
            mask,
            null,
            null_mask,
            noise=torch.cat([noise for *_, noise in group]),
            steps=settings.steps,
            guidance=settings.guidance,
            flow_shift=config.train.flow.shift,
            batch=config.train.microbatch,
        ).cpu()
        drawn.update({piece[0]: latent for piece, latent in zip(group, latents, strict=True)})
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the decoding process needs the room
    return [
        Drawn(row, sample.sample_id, caption, *snapshot.origin(row), shape, latent, drawn[row])
        for row, sample, caption, shape, latent, *_ in pieces
    ]


def nearest(drawn: list[Drawn]) -> list[bool]:
    """Whether each drawn latent is nearer to its own picture's latent than to any other's (Euclidean, averaged over
    4 x 4 regions so that different shapes compare)."""
    ours, theirs = (
        torch.stack([torch.nn.functional.adaptive_avg_pool2d(t, 4).flatten() for t in latents])
        for latents in ([d.latent for d in drawn], [d.cached for d in drawn])
    )
    return (torch.cdist(ours, theirs).argmin(dim=1) == torch.arange(len(drawn))).tolist()


def decode(config: Config, latents: Path, out: Path) -> int:
    """The decoding process: every tensor of a safetensors file to `out`/NAME.png.

    Args:
        latents: tensors (C, h, w), multiplied by the scaling factor.

    Raises:
        UserError: the file or the VAE cannot be read.
    """
    from PIL import Image

    from pipeline.models.encoders import LatentDecoder

    try:
        with safe_open(latents, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{latents}: cannot be read as safetensors: {error}") from None
    decoder = LatentDecoder.load(config.vae, resolve_device(config.encode.device))
    out.mkdir(parents=True, exist_ok=True)
    for name, tensor in tensors.items():
        Image.fromarray(decoder.decode(tensor[None])[0]).save(out / f"{name}.png")
    return 0


class _Records:
    """Verified tensors of a snapshot, as float32."""

    def __init__(self, snapshot: Snapshot):
        snapshot.check_shards()
        self.snapshot = snapshot
        self.latents = Reader(snapshot.files, snapshot.latent_recipe.name)
        self.texts = Reader(snapshot.files, snapshot.text_recipe.name)

    def latent(self, sample: Sample) -> torch.Tensor:
        recipe, bucket = self.snapshot.latent_recipe, self.snapshot.buckets[sample.bucket]
        side = recipe.compression
        into = np.empty((recipe.channels, bucket.height // side, bucket.width // side), np.uint16)
        self.latents.read(sample.shard, sample.offset, sample.key, sample.checksum, into)
        return bf16(into).float()

    def text(self, sample: Sample, at: int) -> torch.Tensor:
        caption = sample.captions[at]
        into = np.empty((caption.rows, self.snapshot.text_recipe.width), np.uint16)
        self.texts.read(caption.shard, caption.offset, caption.key, caption.checksum, into)
        return bf16(into).float()

    def null(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The valid rows of the null record and their mask."""
        null: dict[str, Any] = self.snapshot.null
        into = np.empty((null["rows"], self.snapshot.text_recipe.width), np.uint16)
        self.texts.read(
            null["shard"], null["offset"], bytes.fromhex(null["key"]), bytes.fromhex(null["checksum"]), into
        )
        rows = bf16(into).float()[: int(null["valid"])]
        return rows, torch.ones(len(rows), dtype=torch.bool)


def _check_fit(architecture: SanaConfig, snapshot: Snapshot, folder: Path) -> None:
    pairs = (
        ("in_channels", architecture.in_channels, "latents", snapshot.latent_recipe.channels),
        ("caption_channels", architecture.caption_channels, "text rows", snapshot.text_recipe.width),
    )
    for name, ours, what, theirs in pairs:
        if ours != theirs:
            raise ConfigError(
                f"{folder} and snapshot {snapshot.id[:12]} do not fit: the model's {name} is {ours}, the {what} have "
                f"{theirs}",
                fix="--snapshot with one that was made with this model's encoders",
            )


def _decode_apart(config: Config, drawn: list[Drawn], work: Path) -> None:
    tensors = {}
    for i, one in enumerate(drawn):
        tensors[f"{i:04d}"] = one.latent.contiguous()
        tensors[f"{i:04d}-reconstruction"] = one.cached.contiguous()
    save_file(tensors, work / "latents.safetensors")
    (work / "config.yaml").write_text(dump(config), encoding="utf-8")
    arguments = ["--config", str(work / "config.yaml"), "--latents", str(work / "latents.safetensors")]
    done = subprocess.run(command("decode", *arguments, "--out", str(work / "pictures")), check=False)
    if done.returncode:
        raise DecodeError(
            "the process that decodes the latents ended with an error",
            found=f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}",
            fix="see its message above",
        )


def _publish(config: Config, cache: Cache, drawn: list[Drawn], hits: list[bool], work: Path, out: Path) -> Path:
    """Move the pictures into place; the sheet comes last."""
    from PIL import Image

    from pipeline.reporting.sheet import Card, contact_sheet

    cards, lines = [], []
    photos = _Photos(config, cache)
    for i, (one, hit) in enumerate(zip(drawn, hits, strict=True)):
        pictures: list[Image.Image | None] = [photos.of(one)]
        for name in (f"{i:04d}-reconstruction.png", f"{i:04d}.png"):
            os.replace(work / "pictures" / name, out / name)
            with Image.open(out / name) as picture:
                pictures.append(picture.convert("RGB"))
        cards.append(Card(one.caption, tuple(pictures)))
        lines.append(
            {
                "file": f"{i:04d}.png",
                "caption": one.caption,
                "source": one.source,
                "item": one.item,
                "sample_id": one.sample_id,
                "height": one.bucket[0],
                "width": one.bucket[1],
                "nearest_is_own": hit,
            }
        )
    table = work / TABLE
    table.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    os.replace(table, out / TABLE)
    contact_sheet(cards, TITLES, out / SHEET)
    return out / SHEET


class _Photos:
    """The pictures that samples were made of, where their sources are still there."""

    def __init__(self, config: Config, cache: Cache):
        self.config, self.cache = config, cache
        self.sources: dict[str, Source | None] = {}

    def of(self, one: Drawn) -> Any:
        from PIL import Image

        if one.source not in self.sources:
            self.sources[one.source] = self._open(one.source)
        source = self.sources[one.source]
        if source is None:
            return None
        try:
            pixels = image.load(
                source.read(one.item), one.bucket, self.config.data.background, self.config.data.max_pixels
            )
        except (Unreadable, image.ImageReject):  # moved or changed since; the sheet says so
            return None
        return Image.fromarray(pixels)

    def _open(self, name: str) -> Source | None:
        try:
            return reopen(self.cache, name, self.config.data)
        except UserError:  # not there any more, or out of reach
            return None


def _say(line: str) -> None:
    print(line, flush=True)
