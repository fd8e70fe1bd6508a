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
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from pipeline.training.base_weights import whole_weights

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

SHEET = "contact_sheet.png"
TABLE = "samples.jsonl"
_FIX = "--snapshot or --config with this model's encoders"
BASE, DRAWN = "base", "drawn"
TITLES = ("photo", "reconstruction")


@dataclass(frozen=True)
class Result:
    """nearest: of `count` drawn latents, how many are nearest to the cached latent of their sample."""

    sheet: Path
    count: int
    nearest: int


def run(
    config: Config,
    checkpoint: str,
    snapshot: str | None,
    out: Path,
    count: int | None = None,
    *,
    ema: bool = False,
    scale: float | None = None,
) -> Result:
    """Draw, decode, and put on a contact sheet; of a checkpoint of an adapter with the base beside it.

    Args:
        checkpoint: `auto` (the newest of `train.output`) or a checkpoint folder.
        snapshot: a name or an id; None is the newest.
        out: folder of the pictures; files of an earlier call are replaced.
        count: number of captions, taken evenly from the snapshot (None: `sample.count`).
        ema: use the EMA weights instead of the last weights.
        scale: of an adapter's change (None: 1).

    Raises:
        UserError: no checkpoint, no snapshot, or a snapshot of other encoders; a scale for a whole model.
    """
    out = Path(out)
    set_tf32(config.train.tf32)
    folder = checkpoints.find(config, checkpoint)
    config = checkpoints.as_trained(config.at(folder), checkpoints.read_document(folder).config)
    cache = Cache.of(config)
    opened = cache.open_snapshot(snapshot)
    stored = checkpoints.ModelTensors(folder, ema=ema)
    architecture, columns = stored.architecture, _columns(stored, scale)
    channels, text_width = opened.latent_recipe.channels, opened.text_recipe.width
    architecture.check_widths(f"snapshot {opened.id[:12]}", _FIX, channels=channels, text_width=text_width)
    wanted = min(count or config.sample.count, len(opened))
    if wanted < (count or config.sample.count):
        _log(f"the snapshot has {wanted} samples: drawing {wanted} pictures")
    _make(out)
    _log(f"drawing {wanted} pictures with {stored} for captions of snapshot {opened.id[:12]}")
    rows, device = draw_latents.spread(len(opened), wanted), resolve_device(config.train.device)
    by_column = {}
    for title, by in columns.items():
        weights = dict(whole_weights(config, stored, by))
        by_column[title] = draw_latents.draw_for(config, architecture, weights, opened, rows, device)
        del weights
    drawn = by_column[DRAWN]
    hits = draw_latents.nearest(drawn)
    _log(f"{sum(hits)} of {len(hits)} drawn latents are nearest to those of their own picture")

    with _writing(out), tempfile.TemporaryDirectory(prefix=".partial-", dir=out) as work:
        decode_in_subprocess(config, by_column, Path(work))
        sheet = _publish(config, cache, by_column, hits, stored, Path(work), out)
    _log(f"contact sheet: {sheet}")
    return Result(sheet, len(drawn), sum(hits))


def _columns(stored: checkpoints.ModelTensors, scale: float | None) -> dict[str, float]:
    """Title in the contact sheet -> scale of the adapter's change."""
    if stored.document.adapter is None and scale is not None:
        raise ConfigError(f"{stored.folder} holds a whole model, not an adapter", fix="leave --adapter-scale out")
    base = {} if stored.document.adapter is None else {BASE: 0.0}
    return {**base, DRAWN: 1.0 if scale is None else scale}


def _file(number: int, title: str) -> str:
    """Of a picture, without its ending."""
    return f"{number:04d}" + ("" if title == DRAWN else f"-{title}")


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
    scale: float | None = None,
    height: int | None = None,
    width: int | None = None,
) -> Path:
    """Encode new prompts, draw and decode them, each in a separate process; returns the contact sheet.

    Args:
        checkpoint, out, ema, scale: as in `run`.
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
        columns = _columns(stored, scale)
        _log(f"drawing {len(encoded)} pictures of {size[0]}x{size[1]} with {stored}")
        shape = channels, size[0] // compression, size[1] // compression
        device = resolve_device(config.train.device)
        tensors: dict[str, Tensor] = {}
        for title, by in columns.items():
            weights = dict(whole_weights(config, stored, by))
            latents = draw_latents.draw_prompts(config, stored.architecture, weights, encoded, shape, device)
            tensors |= {_file(number, title): each for number, each in enumerate(latents)}
            del weights
        encoder_process.decode(config, tensors, Path(work))
        sheet = _publish_prompts(encoded.texts, size, [*columns], stored, Path(work), out)
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


def decode_in_subprocess(config: Config, by_column: Mapping[str, list[DrawnLatent]], work: Path) -> None:
    """Decode the drawn latents of each column of the sheet, and those of the photographs."""
    tensors = {_file(i, title): each.latent for title, drawn in by_column.items() for i, each in enumerate(drawn)}
    tensors |= {_file(i, "reconstruction"): each.cached for i, each in enumerate(by_column[DRAWN])}
    encoder_process.decode(config, tensors, work)


def _moved(work: Path, out: Path, name: str) -> Image.Image:
    """A decoded picture, moved into place."""
    from PIL import Image

    os.replace(work / "pictures" / f"{name}.png", out / f"{name}.png")
    with Image.open(out / f"{name}.png") as picture:
        return picture.convert("RGB")


def _publish(
    config: Config,
    cache: Cache,
    by_column: Mapping[str, list[DrawnLatent]],
    hits: list[bool],
    stored: checkpoints.ModelTensors,
    work: Path,
    out: Path,
) -> Path:
    """Move the pictures into place; the sheet comes last."""
    from pipeline.reporting.contact_sheet import SheetRow, contact_sheet

    cards, lines = [], []
    photos = Photos(config, cache)
    for i, (sample, hit) in enumerate(zip(by_column[DRAWN], hits, strict=True)):
        shown = [_moved(work, out, _file(i, title)) for title in ("reconstruction", *by_column)]
        cards.append(SheetRow(sample.caption, (photos.cropped(sample.source, sample.item, sample.bucket), *shown)))
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
    contact_sheet(cards, (*TITLES, *by_column), out / SHEET)
    return out / SHEET


def _publish_prompts(
    texts: Sequence[str],
    size: tuple[int, int],
    titles: Sequence[str],
    stored: checkpoints.ModelTensors,
    work: Path,
    out: Path,
) -> Path:
    """Move the pictures of prompts into place; the sheet comes last."""
    from pipeline.reporting.contact_sheet import SheetRow, contact_sheet

    cards, lines = [], []
    for number, text in enumerate(texts):
        cards.append(SheetRow(text, tuple(_moved(work, out, _file(number, title)) for title in titles)))
        lines.append({"file": f"{_file(number, DRAWN)}.png", "caption": text, "height": size[0], "width": size[1]})
    _write_table(lines, stored, work, out)
    contact_sheet(cards, tuple(titles), out / SHEET)
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
