"""`sana-pipe sample`: pictures from a checkpoint, for captions of a snapshot or new prompts; or those of a training.

What: reads text rows and latents from the cache, draws latents with the transformer, decodes them in a separate
process, and writes PNGs, `samples.jsonl` and a contact sheet (photo, the VAE's reconstruction, the drawn picture).
Why a separate process for decoding: the transformer and the VAE never share memory, and this process imports no
encoder, like training.
Price: one more start of Python, and the latents go through a file.

Guidance uses the null record's valid rows, as `SanaPipeline` does, so that an exported model draws the same way.

New prompts (`--prompt`) are encoded by `sana-pipe encode --prompts`, in a process of its own, into a temporary cache.
`--watch` decodes what a training draws (see `pipeline.reporting.pictures`).
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from pipeline.cache.root import Cache
from pipeline.cache.snapshot import Snapshot
from pipeline.config import Config
from pipeline.errors import ConfigError, UserError
from pipeline.launch import resolve_device, set_tf32
from pipeline.models.sana_config import SanaConfig
from pipeline.reporting import decoder, drawing, pictures
from pipeline.reporting.drawing import Drawn
from pipeline.reporting.photos import Photos
from pipeline.training import checkpoint as checkpoints

SHEET = "contact_sheet.png"
TABLE = "samples.jsonl"
TITLES = ("photo", "reconstruction", "drawn")


@dataclass(frozen=True)
class Result:
    """nearest: number of drawn latents, out of `count`, whose nearest cached latent is that of the same sample."""

    sheet: Path
    count: int
    nearest: int


def run(
    config: Config, checkpoint: str, snapshot: str | None, out: Path, count: int | None = None, *, ema: bool = False
) -> Result:
    """Draw, decode, and put on a contact sheet.

    Args:
        checkpoint: `auto` (the newest of `train.output`) or a checkpoint folder.
        snapshot: a name or an id; None is the newest.
        out: folder of the pictures; files of an earlier call are replaced.
        count: number of captions, taken evenly from the snapshot (None: `sample.count`).
        ema: use the EMA instead of the last weights.

    Raises:
        UserError: no checkpoint, no snapshot, or a snapshot of other encoders.
    """
    out = Path(out)
    set_tf32(config.train.tf32)
    folder = checkpoints.find(config, checkpoint)
    config = config.at(folder)
    cache = Cache.of(config)
    opened = cache.open_snapshot(snapshot)
    architecture, weights = checkpoints.load_model_state(folder, ema=ema)
    _check_fit(architecture, opened, folder)
    wanted = min(count or config.sample.count, len(opened))
    if wanted < (count or config.sample.count):
        _say(f"the snapshot has {wanted} samples: drawing {wanted} pictures")
    _say(f"drawing {wanted} pictures from {folder} for captions of snapshot {opened.id[:12]}")
    drawn = drawing.draw_for(
        config, architecture, weights, opened, drawing.spread(len(opened), wanted), resolve_device(config.train.device)
    )
    del weights
    hits = drawing.nearest(drawn)
    _say(f"{sum(hits)} of {len(hits)} drawn latents are nearest to those of their own picture")

    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=out) as work:
            decode_in_subprocess(config, drawn, Path(work))
            sheet = _publish(config, cache, drawn, hits, Path(work), out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error}", fix="check the rights, or give another --out") from None
    _say(f"contact sheet: {sheet}")
    return Result(sheet, len(drawn), sum(hits))


def watch(config: Config, run: Path, *, once: bool = False) -> int:
    """Decode the latents that a training draws; see `pictures.Watcher.watch`."""
    set_tf32(False)
    pictures.Watcher(config.vae, run, resolve_device(config.encode.device), _say).watch(once=once)
    return 0


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
    set_tf32(False)
    decoder = LatentDecoder.load(config.vae, resolve_device(config.encode.device))
    out.mkdir(parents=True, exist_ok=True)
    for name, tensor in tensors.items():
        Image.fromarray(decoder.decode(tensor[None])[0]).save(out / f"{name}.png")
    return 0


def _check_fit(architecture: SanaConfig, snapshot: Snapshot, folder: Path) -> None:
    pairs = (
        ("in_channels", architecture.in_channels, "latents", snapshot.latent_recipe.channels),
        ("caption_channels", architecture.caption_channels, "text rows", snapshot.text_recipe.width),
    )
    for name, of_model, what, of_snapshot in pairs:
        if of_model != of_snapshot:
            raise ConfigError(
                f"{folder} and snapshot {snapshot.id[:12]} do not fit: the model's {name} is {of_model}, the {what} "
                f"have {of_snapshot}",
                fix="--snapshot with one that was made with this model's encoders",
            )


def decode_in_subprocess(config: Config, drawn: list[Drawn], work: Path) -> None:
    tensors = {}
    for i, sample in enumerate(drawn):
        tensors[f"{i:04d}"] = sample.latent
        tensors[f"{i:04d}-reconstruction"] = sample.cached
    decoder.decode(config, tensors, work)


def _publish(config: Config, cache: Cache, drawn: list[Drawn], hits: list[bool], work: Path, out: Path) -> Path:
    """Move the pictures into place; the sheet comes last."""
    from PIL import Image

    from pipeline.reporting.sheet import Card, contact_sheet

    cards, lines = [], []
    photos = Photos(config, cache)
    for i, (sample, hit) in enumerate(zip(drawn, hits, strict=True)):
        pictures: list[Image.Image | None] = [photos.cropped(sample.source, sample.item, sample.bucket)]
        for name in (f"{i:04d}-reconstruction.png", f"{i:04d}.png"):
            os.replace(work / "pictures" / name, out / name)
            with Image.open(out / name) as picture:
                pictures.append(picture.convert("RGB"))
        cards.append(Card(sample.caption, tuple(pictures)))
        lines.append(
            {
                "file": f"{i:04d}.png",
                "caption": sample.caption,
                "source": sample.source,
                "item": sample.item,
                "sample_id": sample.sample_id,
                "height": sample.bucket[0],
                "width": sample.bucket[1],
                "nearest_is_own": hit,
            }
        )
    table = work / TABLE
    table.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    os.replace(table, out / TABLE)
    contact_sheet(cards, TITLES, out / SHEET)
    return out / SHEET


def _say(line: str) -> None:
    print(line, flush=True)
