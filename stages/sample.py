"""`sana-pipe sample`: pictures from a checkpoint, for captions of a snapshot or new prompts; or those of a training.

What: reads text rows and latents from the cache, draws latents with the transformer, decodes them in a separate
process, and writes PNGs, `samples.jsonl` and a contact sheet (photo, the VAE's reconstruction, the drawn picture).
Why a separate process for decoding: the transformer and the VAE never share memory, and this process imports no
encoder, like training.
Price: one more start of Python, and the latents go through a file.

Guidance uses the null record's valid rows, as `SanaPipeline` does, so that an exported model draws the same way.

New prompts (`--prompt`) are encoded by `sana-pipe encode --prompts`, in a separate process, into a temporary cache.
`--watch` decodes what a training draws (see `pipeline.reporting.run_pictures`).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pipeline.cache.layout import LatentRecipe, TextRecipe
from pipeline.cache.root import Cache
from pipeline.cache.snapshot import Head
from pipeline.config import Config
from pipeline.errors import CacheError, ConfigError, UserError, writing
from pipeline.launch import resolve_device, set_tf32
from pipeline.models.encoders import vae_shape
from pipeline.models.hub import resolve
from pipeline.reporting import draw_latents, encoder_process, run_pictures
from pipeline.reporting.draw_latents import DrawnLatent
from pipeline.reporting.source_pictures import Photos
from pipeline.training import checkpoint as checkpoints

SHEET = "contact_sheet.png"
TABLE = "samples.jsonl"
_FIX = "--snapshot or --config with this model's encoders"
TITLES = ("photo", "reconstruction", "drawn")


@dataclass(frozen=True)
class Result:
    """nearest: of `count` drawn latents, how many are nearest to the cached latent of their sample."""

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
        ema: use the EMA weights instead of the last weights.

    Raises:
        UserError: no checkpoint, no snapshot, or a snapshot of other encoders.
    """
    out = Path(out)
    set_tf32(config.train.tf32)
    folder = checkpoints.find(config, checkpoint)
    config = checkpoints.as_trained(config.at(folder), checkpoints.read_document(folder).config)
    cache = Cache.of(config)
    opened = cache.open_snapshot(snapshot)
    stored = checkpoints.ModelTensors(folder, ema=ema)
    architecture, weights = stored.architecture, dict(stored)
    channels, text_width = opened.latent_recipe.channels, opened.text_recipe.width
    architecture.check_widths(f"snapshot {opened.id[:12]}", _FIX, channels=channels, text_width=text_width)
    wanted = min(count or config.sample.count, len(opened))
    if wanted < (count or config.sample.count):
        _log(f"the snapshot has {wanted} samples: drawing {wanted} pictures")
    _make(out)
    _log(f"drawing {wanted} pictures with {stored} for captions of snapshot {opened.id[:12]}")
    drawn = draw_latents.draw_for(
        config,
        architecture,
        weights,
        opened,
        draw_latents.spread(len(opened), wanted),
        resolve_device(config.train.device),
    )
    del weights
    hits = draw_latents.nearest(drawn)
    _log(f"{sum(hits)} of {len(hits)} drawn latents are nearest to those of their own picture")

    with _writing(out), tempfile.TemporaryDirectory(prefix=".partial-", dir=out) as work:
        decode_in_subprocess(config, drawn, Path(work))
        sheet = _publish(config, cache, drawn, hits, stored, Path(work), out)
    _log(f"contact sheet: {sheet}")
    return Result(sheet, len(drawn), sum(hits))


def _make(out: Path) -> None:
    """Make the folder of the pictures, and see that it can be written, before anything is drawn."""
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=out):
            pass


def _writing(out: Path) -> AbstractContextManager[None]:
    return writing(out, "check the rights, or give another --out")


def run_prompts(
    config: Config,
    checkpoint: str,
    prompts: Sequence[str],
    out: Path,
    *,
    ema: bool = False,
    height: int | None = None,
    width: int | None = None,
) -> Path:
    """Encode new prompts, draw and decode them, each in a separate process; returns the contact sheet.

    Args:
        checkpoint, out, ema: as in `run`.
        prompts: equal ones (after the text recipe's normalisation) are drawn once.
        height, width: of the pictures in pixels (None: `data.resolution`).

    Raises:
        UserError: no checkpoint; encoders that do not fit it; sides that the model cannot draw.
    """
    out = Path(out)
    set_tf32(config.train.tf32)
    folder = checkpoints.find(config, checkpoint)
    config = config.at(folder)
    document = checkpoints.read_document(folder)
    config = checkpoints.as_trained(config, document.config)
    latent, text = recipes_of(config, document.state.snapshot)
    compression, channels = (
        (latent.compression, latent.channels) if latent else vae_shape(resolve(config.vae, ("config.json",)))
    )
    size = height or config.data.resolution, width or config.data.resolution
    document.architecture.check_sides(*size, compression, "--{name} {value}")
    _make(out)
    with _writing(out), tempfile.TemporaryDirectory(prefix=".partial-", dir=out) as work:
        encoded = encoder_process.encode_prompts(config, prompts, Path(work))
        if text is not None and not text.same_values(replace(encoded.recipe, storage=text.storage)):
            raise ConfigError(
                f"{folder} was trained with another text recipe (trained | configured)",
                found="; ".join(text.nameless().difference(replace(encoded.recipe, storage=text.storage))),
                fix="--config FILE, that of the training",
            )
        widths = {"channels": channels, "text_width": encoded.recipe.width}
        document.architecture.check_widths("the configured encoders", _FIX, **widths)
        stored = checkpoints.ModelTensors(folder, ema=ema)
        architecture, weights = stored.architecture, dict(stored)
        _log(f"drawing {len(encoded)} pictures of {size[0]}x{size[1]} with {stored}")
        shape = channels, size[0] // compression, size[1] // compression
        device = resolve_device(config.train.device)
        latents = draw_latents.draw_prompts(config, architecture, weights, encoded, shape, device)
        del weights
        tensors = {f"{number:04d}": each for number, each in enumerate(latents)}
        made = encoder_process.decode(config, tensors, Path(work))
        sheet = _publish_prompts(encoded.texts, size, made, stored, Path(work), out)
    _log(f"contact sheet: {sheet}")
    return sheet


def watch(config: Config, run: Path, *, once: bool = False) -> int:
    """Decode the latents that a training draws; see `run_pictures.Watcher.watch`."""
    set_tf32(False)
    run_pictures.Watcher(config.vae, run, resolve_device(config.encode.device), _log).watch(once=once)
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
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for name, tensor in tensors.items():
            Image.fromarray(decoder.decode(tensor[None])[0]).save(out / f"{name}.png")
    return 0


def recipes_of(config: Config, snapshot: str) -> tuple[LatentRecipe | None, TextRecipe | None]:
    """The recipes that a model was trained with; None if its snapshot is not in the cache."""
    try:
        cache = Cache.if_there(config)
        if cache is not None:
            head = Head.read(cache.files, snapshot)
            return head.latent, head.text
    except CacheError:
        pass
    _log(
        f"snapshot {snapshot[:12]} of the training is not in {config.cache}: its encoders are taken for the configured"
    )
    return None, None


def decode_in_subprocess(config: Config, drawn: list[DrawnLatent], work: Path) -> None:
    tensors = {}
    for i, sample in enumerate(drawn):
        tensors[f"{i:04d}"] = sample.latent
        tensors[f"{i:04d}-reconstruction"] = sample.cached
    encoder_process.decode(config, tensors, work)


def _publish(
    config: Config,
    cache: Cache,
    drawn: list[DrawnLatent],
    hits: list[bool],
    stored: checkpoints.ModelTensors,
    work: Path,
    out: Path,
) -> Path:
    """Move the pictures into place; the sheet comes last."""
    from PIL import Image

    from pipeline.reporting.contact_sheet import SheetRow, contact_sheet

    cards, lines = [], []
    photos = Photos(config, cache)
    for i, (sample, hit) in enumerate(zip(drawn, hits, strict=True)):
        pictures: list[Image.Image | None] = [photos.cropped(sample.source, sample.item, sample.bucket)]
        for name in (f"{i:04d}-reconstruction.png", f"{i:04d}.png"):
            os.replace(work / "pictures" / name, out / name)
            with Image.open(out / name) as picture:
                pictures.append(picture.convert("RGB"))
        cards.append(SheetRow(sample.caption, tuple(pictures)))
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
    _write_table(lines, stored, work, out)
    contact_sheet(cards, TITLES, out / SHEET)
    return out / SHEET


def _publish_prompts(
    texts: Sequence[str],
    size: tuple[int, int],
    made: Path,
    stored: checkpoints.ModelTensors,
    work: Path,
    out: Path,
) -> Path:
    """Move the pictures of prompts into place; the sheet comes last."""
    from PIL import Image

    from pipeline.reporting.contact_sheet import SheetRow, contact_sheet

    cards, lines = [], []
    for number, text in enumerate(texts):
        name = f"{number:04d}.png"
        os.replace(made / name, out / name)
        with Image.open(out / name) as picture:
            cards.append(SheetRow(text, (picture.convert("RGB"),)))
        lines.append({"file": name, "caption": text, "height": size[0], "width": size[1]})
    _write_table(lines, stored, work, out)
    contact_sheet(cards, TITLES[-1:], out / SHEET)
    return out / SHEET


def _write_table(lines: list[dict[str, Any]], stored: checkpoints.ModelTensors, work: Path, out: Path) -> None:
    table, origin = work / TABLE, {"checkpoint": stored.folder.name, "weights": stored.weights}
    table.write_text("".join(json.dumps(line | origin, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    with suppress(OSError, ValueError, AttributeError):
        earlier = json.loads((out / TABLE).read_text(encoding="utf-8").partition("\n")[0])
        if (weights := earlier.get("weights")) != stored.weights:
            _log(f"note: pictures of the {weights} ({earlier.get('checkpoint')}) in {out} were replaced")
    os.replace(table, out / TABLE)


def _log(line: str) -> None:
    print(line, flush=True)
