"""`sana-pipe sample`: pictures from a checkpoint, for captions of a snapshot or new prompts; or those of a training.

Text rows and latents come from the cache; new prompts (`--prompt`) are encoded into a temporary one. The transformer
draws latents, and a second process decodes them, so that transformer and VAE never share memory and this process
imports no encoder. The result is PNGs, `samples.jsonl` and a contact sheet: photo, the VAE's reconstruction, a picture
by the weights that the run began from, and by the trained ones. Guidance uses the null record's valid rows, as
`SanaPipeline` does. `--watch` decodes what a training draws.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipeline.base.errors import CacheError, ConfigError, UserError, writing
from pipeline.base.hub import listed, open_tensors, resolve
from pipeline.base.launch import check_compiler, gpus, resolve_device, set_tf32
from pipeline.base.metrics.trackers import PictureTrackers
from pipeline.config import Config
from pipeline.data.cache.prompts import spread
from pipeline.data.cache.snapshot_head import Head
from pipeline.data.encoders.vae import vae_shape
from pipeline.data.signals.latent import LatentEncoding
from pipeline.data.signals.text import TextEncoding
from pipeline.data.sources import caption_rules
from pipeline.tools import outputs
from pipeline.tools.locations import cache_location
from pipeline.tools.reporting import draw_latents, encoder_process, run_pictures
from pipeline.tools.reporting.draw_latents import DrawnLatent
from pipeline.tools.reporting.source_pictures import SourcePictures
from pipeline.train.models.adapters import Adapter, adapter_from
from pipeline.train.models.sampler import Sampling
from pipeline.train.models.spec import ModelSpec
from pipeline.train.training import checkpoint as checkpoints
from pipeline.train.training import lock
from pipeline.train.training.base_weights import first_weights, whole_weights

FOLDER = Path("samples")
"""The folder of the pictures, unless another is given."""
SHEET = "contact_sheet.png"
TABLE = "samples.jsonl"
CAPTIONS = 8
"""Captions of a snapshot that are drawn unless `--count` says otherwise."""
_FIX = "--snapshot or --config with this model's encoders"
CONTROL, RECONSTRUCTION, BASE, DRAWN = "control", "reconstruction", "base", "drawn"
T = TypeVar("T")


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
    out: Path | None = None,
    count: int | None = None,
    *,
    ema: bool = False,
    scale: float | None = None,
    base: bool = True,
) -> Result:
    """Draw, decode, and put on a contact sheet, with what the weights drew that the run began from.

    Args:
        checkpoint: `auto` (the newest of `train.output`) or a checkpoint folder.
        snapshot: a name or an id; None is the newest.
        out: folder of the pictures; an earlier drawing in it is replaced. None: `samples`, or if that holds another
            drawing `samples-2`, and so on.
        count: number of captions, taken evenly from the snapshot (None: `CAPTIONS`).
        ema: use the EMA weights instead of the last weights.
        scale: of an adapter's change (None: 1).
        base: also draw with the weights before the training, one model after the other.

    Raises:
        UserError: no checkpoint, no snapshot, or a snapshot of other encoders; a scale for a whole model.
    """
    outputs.check(config, FOLDER if out is None else out)
    config, stored, controlled = _trained(config, checkpoint, ema)
    cache = cache_location(config).open()
    opened = cache.open_snapshot(snapshot)
    if controlled is not None and CONTROL not in opened.pictures:
        raise ConfigError(
            f"{stored.folder} holds {controlled}, and snapshot {opened.id[:12]} has no control pictures",
            fix="--snapshot NAME of one with them, or --prompt TEXT --control FILE",
        )
    architecture, columns = stored.architecture, _columns(config, stored, scale, base)
    channels, text_width = opened.encoding(LatentEncoding).channels, opened.encoding(TextEncoding).width
    architecture.check_widths(f"snapshot {opened.id[:12]}", _FIX, channels=channels, text_width=text_width)
    wanted = min(count or CAPTIONS, len(opened))
    if wanted < (count or CAPTIONS):
        _log(f"the snapshot has {wanted} samples: drawing {wanted} pictures")
    _log(f"drawing {wanted} pictures with {stored} for captions of snapshot {opened.id[:12]}")
    chosen, device = spread(len(opened), wanted), _device(config)

    def draw(title: str, weights: dict[str, Tensor]) -> list[DrawnLatent]:
        adapter = controlled if title == DRAWN and scale != 0 else None
        model = draw_latents.open_model(config.train, architecture, weights, device, adapter)
        return draw_latents.draw_for(
            model, _sampling(config, architecture), config.sample.seed, opened, chosen, controlled=adapter is not None
        )

    with _working(out) as work:
        by_title = _drawn(columns, draw)
        drawn = by_title[DRAWN]
        controls = [each.control for each in drawn if each.control is not None]
        latents = {**({CONTROL: controls} if controls else {}), RECONSTRUCTION: [each.cached for each in drawn]}
        latents |= {title: [each.latent for each in column] for title, column in by_title.items()}
        hits = draw_latents.nearest(drawn)
        for line in likeness(drawn, hits, by_title.get(BASE)):
            _log(line)
        rows = [
            {
                **{name: getattr(each, name) for name in ("caption", "source", "item", "sample_id")},
                "height": each.bucket[0],
                "width": each.bucket[1],
                "nearest_is_own": hit,
                "seed": config.sample.seed,
            }
            for each, hit in zip(drawn, hits, strict=True)
        ]
        sheet = publish(config, latents, rows, stored, work, out, SourcePictures(config.data, cache))
    return Result(sheet, len(drawn), sum(hits))


def _trained(config: Config, checkpoint: str, ema: bool) -> tuple[Config, checkpoints.ModelTensors, Adapter | None]:
    """The configuration as of the training, the weights, and the ControlNet among them (None: it has none)."""
    set_tf32(config.train.tf32)
    stored = checkpoints.ModelTensors(checkpoints.find(config.train.output, checkpoint), ema=ema)
    adapter = adapter_from(stored.document.adapter)
    controlled = adapter if adapter is not None and adapter.stays else None
    trained = checkpoints.as_trained(config.train, stored.document.config)
    for line in checkpoints.other_drawing(config.train, trained):
        _log(f"note: drawn as {stored.folder} was trained: {line}")
    return config.model_copy(update={"train": trained}), stored, controlled


def _sampling(config: Config, architecture: ModelSpec) -> Sampling:
    return Sampling.of(config.sample, config.train.flow.shift, config.train.drawn_at_once, architecture.scheduler)


def _columns(
    config: Config, stored: checkpoints.ModelTensors, scale: float | None, base: bool
) -> dict[str, Callable[[], Mapping[str, Tensor] | None]]:
    """Title in the contact sheet -> reads the weights (None: there are none); `DRAWN` is the last."""
    is_adapter = stored.document.adapter is not None
    if not is_adapter and scale is not None:
        raise ConfigError(f"{stored.folder} holds a whole model, not an adapter", fix="leave --adapter-scale out")
    whole = partial(whole_weights, config.model.weights, config.train.seed, stored)
    first = partial(whole, 0.0) if is_adapter else partial(_first_weights, stored)
    last = partial(whole, 1.0 if scale is None else scale)
    return {**({BASE: first} if base else {}), DRAWN: last}


def _first_weights(stored: checkpoints.ModelTensors) -> Mapping[str, Tensor] | None:
    try:
        return first_weights(stored)
    except UserError as error:
        _log(f"note: the weights that the run began from are not drawn for comparison: {error.line}")
        return None


def _drawn(
    columns: Mapping[str, Callable[[], Mapping[str, Tensor] | None]], draw: Callable[[str, dict[str, Tensor]], list[T]]
) -> dict[str, list[T]]:
    """Draw the columns that have weights; one model is in memory at a time. draw: (title, weights)."""
    drawn = {}
    for title, read in columns.items():
        if (weights := read()) is not None:
            drawn[title] = draw(title, dict(weights))
        del weights
        gc.collect()
    return drawn


def likeness(drawn: Sequence[DrawnLatent], hits: Sequence[bool], base: list[DrawnLatent] | None) -> Iterator[str]:
    """Say what `draw_latents.nearest` returned, for people."""
    count, right = len(hits), sum(hits)
    before = f"; before the training {sum(draw_latents.nearest(base))}" if base is not None else ""
    if count > 1:
        yield (
            f"likeness: {right} of {count} pictures are closer to the photo of their own caption than to the "
            f"{count - 1} other photos{before}; chance alone gives about 1"
        )
    others = [f"{_file(number, DRAWN)}.png ({each.item})" for number, each in enumerate(drawn) if not hits[number]]
    if others and right:
        yield f"  closer to another photo: {listed(others)}"
    if count > 1 and right < count:
        yield "  photos of the same subject resemble each other: among them a low number is no failure"


def _file(number: int, title: str) -> str:
    """Return the file name of a picture, without its ending."""
    return f"{number:04d}" + ("" if title == DRAWN else f"-{title}")


def _drawn_there(out: Path) -> set[Path]:
    """The pictures of the drawing in a folder, if there is one."""
    try:
        lines = (out / TABLE).read_text(encoding="utf-8").splitlines()
        stems = {Path(json.loads(line)["file"]).stem for line in lines}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {path for path in out.glob("*.png") if path.stem.partition("-")[0] in stems}


def _free(work: Path) -> Path:
    """`FOLDER`, or with a number the first next to it that is new, empty or holds the drawing in `work`; made."""
    pictures = {path.name: path.read_bytes() for path in (work / "pictures").iterdir()}
    for number in itertools.count(1):
        out = FOLDER if number == 1 else FOLDER.with_name(f"{FOLDER.name}-{number}")
        there = _drawn_there(out)
        if not out.exists() or not any(out.iterdir()):
            break
        if (out / TABLE).exists() and {path.name for path in there} == set(pictures):
            same_rows = (out / TABLE).read_bytes() == (work / TABLE).read_bytes()
            if same_rows and all(path.read_bytes() == pictures[path.name] for path in there):
                break
    if out != FOLDER:
        _log(f"{FOLDER} holds another drawing or other files: this one goes to {out}")
    out.mkdir(parents=True, exist_ok=True)
    return out


@contextmanager
def _working(out: Path | None) -> Iterator[Path]:
    """A temporary folder in that of the pictures, made before anything is drawn.

    Args:
        out: None: `FOLDER`, or one next to it.

    Raises:
        UserError: it cannot be made; pictures of somebody else would be replaced.
    """
    if out is None:
        with writing(FOLDER, "check the permissions, or give --out"):
            with tempfile.TemporaryDirectory(prefix=f".{FOLDER.name}-partial-", dir=FOLDER.parent) as beside:
                yield Path(beside)
        return
    if not (out / TABLE).exists() and (there := sorted(out.glob("[0-9][0-9][0-9][0-9]*.png"))):
        raise UserError(
            f"{out} holds pictures that `sample` did not draw",
            expected=f"a folder with {TABLE}, or without pictures of such names",
            found=there[0].name,
            fix="another --out",
        )
    with writing(out, "check the permissions, or give another --out"):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=out) as work:
            yield Path(work)


def run_prompts(
    config: Config,
    checkpoint: str,
    prompts: Sequence[str],
    out: Path | None = None,
    *,
    ema: bool = False,
    scale: float | None = None,
    base: bool = True,
    height: int | None = None,
    width: int | None = None,
    control: Path | None = None,
) -> Path:
    """Encode new prompts, draw and decode them, each in a separate process; returns the contact sheet.

    Args:
        checkpoint, out, ema, scale, base: as in `run`.
        prompts: equal ones (after the text encoding's normalisation) are drawn once.
        height, width: of the pictures in pixels (None: `data.resolution`).
        control: the control picture of a ControlNet, a file; it is cropped as those of a data set.

    Raises:
        UserError: no checkpoint; encoders that do not fit it; sides that the model cannot draw.
    """
    outputs.check(config, FOLDER if out is None else out)
    config, stored, controlled = _trained(config, checkpoint, ema)
    if (controlled is None) != (control is None):
        held = "a ControlNet, which draws with a control picture" if control is None else "no ControlNet"
        fix = "--control FILE" if control is None else "leave --control out"
        raise ConfigError(f"{stored.folder} holds {held}", fix=fix)
    latent, text = encodings_of(config, stored.document.state.snapshot)
    compression, channels = (
        (latent.compression, latent.channels) if latent else vae_shape(resolve(config.vae, ("config.json",)))
    )
    size = height or config.data.resolution, width or config.data.resolution
    stored.architecture.check_sides(*size, compression, "--height {height} --width {width}")
    for prompt in prompts:
        caption_rules.check_prompt(prompt, "--prompt")
    with _working(out) as work:
        encoded, drawn_from = encoder_process.encode_prompts(config, prompts, work, control, size)
        if text is not None and text != (configured := replace(encoded.encoding, storage=text.storage)):
            raise ConfigError(
                f"{stored.folder} was trained with another text encoding (trained | configured)",
                found="; ".join(text.difference(configured)),
                fix="--config FILE, that of the training",
            )
        widths = {"channels": channels, "text_width": encoded.encoding.width}
        stored.architecture.check_widths("the configured encoders", _FIX, **widths)
        columns = _columns(config, stored, scale, base)
        _log(f"drawing {len(encoded)} pictures of {size[0]}x{size[1]} with {stored}")
        shape = channels, size[0] // compression, size[1] // compression
        device = _device(config)

        def draw(title: str, weights: dict[str, Tensor]) -> list[Tensor]:
            adapter, control = (controlled, drawn_from) if title == DRAWN and scale != 0 else (None, None)
            model = draw_latents.open_model(config.train, stored.architecture, weights, device, adapter)
            sampling = _sampling(config, stored.architecture)
            return draw_latents.draw_prompts(model, sampling, config.sample.seed, encoded, shape, control)

        latents = _drawn(columns, draw)
        if drawn_from is not None:
            latents = {CONTROL: [drawn_from.clone() for _ in range(len(encoded))], **latents}
        shared = {"height": size[0], "width": size[1], "seed": config.sample.seed}
        rows = [{"caption": text, **shared} for text in encoded.texts]
        return publish(config, latents, rows, stored, work, out)


def watch(config: Config, run: Path, *, once: bool = False) -> int:
    """Decode the latents that a training draws, and give the pictures to `train.trackers`; see
    `run_pictures.Watcher.watch`."""
    set_tf32(config.train.tf32)
    trackers = PictureTrackers(config.train.trackers, _log)
    device = beside_training(config.encode.device, run)
    try:
        run_pictures.Watcher(config.vae, run, device, _log, trackers.log).watch(once=once)
    finally:
        trackers.close()
    return 0


def beside_training(name: str, run: Path) -> Callable[[], torch.device]:
    """Gives the decoder's device. `auto` takes the CPU from the moment that a training of this host is alive: a decoder
    on the training's GPU takes 3 GiB that the training may need. Until a picture is decoded no GPU is opened."""
    resolved = functools.cache(partial(resolve_device, option="encode.device", log=_log))
    avoids = False
    if name != "auto":
        resolved(name)  # a wrong one is refused at the start

    def device() -> torch.device:
        nonlocal avoids
        if name == "auto" and not avoids and gpus().count and (owner := lock.owner_here(run)) is not None:
            avoids = True
            _log(
                f"decoding on the CPU, since {owner} trains in {run} and may need the GPU's memory; another GPU: "
                "--set encode.device=cuda:1"
            )
        return resolved("cpu" if avoids else name)

    return device


def decode(config: Config, latents: Path, out: Path) -> int:
    """The decoding process: every tensor of a safetensors file to `out`/NAME.png.

    Args:
        latents: tensors (C, h, w), multiplied by the scaling factor.

    Raises:
        UserError: the file or the VAE cannot be read.
    """
    from PIL import Image

    from pipeline.data.encoders.vae import LatentDecoder

    with open_tensors(latents) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    set_tf32(config.train.tf32)
    decoder = LatentDecoder.load(config.vae, resolve_device(config.encode.device, option="encode.device"))
    with writing(out, "check the permissions, or give another --out"):
        out.mkdir(parents=True, exist_ok=True)
        for name, tensor in tensors.items():
            Image.fromarray(decoder.decode(tensor[None])[0]).save(out / f"{name}.png")
    return 0


def encodings_of(config: Config, snapshot: str) -> tuple[LatentEncoding | None, TextEncoding | None]:
    """The encodings that a model was trained with; None if its snapshot is not in the cache."""
    try:
        cache = cache_location(config).open_if_there()
        if cache is not None:
            head = Head.read(cache.files, snapshot)
            return head.encoding(LatentEncoding), head.encoding(TextEncoding)
    except CacheError:
        pass
    _log(
        f"snapshot {snapshot[:12]} of the training is not in {config.cache}: the configured encoders are taken for "
        "those of the training"
    )
    return None, None


def decode_in_subprocess(config: Config, latents: Mapping[str, Sequence[Tensor]], work: Path) -> None:
    """Decode the latents of each column of the sheet to `work`/pictures."""
    tensors = {_file(number, title): each for title, column in latents.items() for number, each in enumerate(column)}
    encoder_process.decode(config, tensors, work)


def publish(
    config: Config,
    latents: Mapping[str, Sequence[Tensor]],
    rows: Sequence[dict[str, Any]],
    stored: checkpoints.ModelTensors,
    work: Path,
    out: Path | None,
    photos: SourcePictures | None = None,
) -> Path:
    """Decode, and move the table, its pictures and the contact sheet into place, in this order: by the table a folder
    is known as ours. Of an earlier drawing nothing stays in the folder.

    Args:
        out: None: `FOLDER`, or a folder next to it if that holds another drawing (`_free`).
        latents: by title of their column.
        rows: of the table, a picture each.
        photos: of the first column, for rows with a `source`.
    """
    from PIL import Image

    from pipeline.tools.reporting.contact_sheet import SheetRow, contact_sheet

    decode_in_subprocess(config, latents, work)
    origin = {"checkpoint": stored.folder.name, "weights": stored.weights}
    lines = [{"file": f"{_file(number, DRAWN)}.png", **row, **origin} for number, row in enumerate(rows)]
    table = work / TABLE
    table.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    out = _free(work) if out is None else out
    earlier = _drawn_there(out)
    os.replace(table, out / TABLE)
    for path in earlier - {out / path.name for path in (work / "pictures").iterdir()}:
        path.unlink(missing_ok=True)
    cards = []
    for number, row in enumerate(rows):
        size = row["height"], row["width"]
        shown = [] if photos is None else [photos.cropped(row["source"], row["item"], size)]
        for title in latents:
            name = f"{_file(number, title)}.png"
            os.replace(work / "pictures" / name, out / name)
            with Image.open(out / name) as picture:
                shown.append(picture.convert("RGB"))
        cards.append(SheetRow(f"{number:04d}: {row['caption']}", tuple(shown)))
    contact_sheet(cards, (*([] if photos is None else ["photo"]), *latents), out / SHEET)
    last = f" to {_file(len(rows) - 1, DRAWN)}.png" if len(rows) > 1 else ""
    seed = rows[0]["seed"]
    _log(
        f"pictures: {out / _file(0, DRAWN)}.png{last}, seed {seed} (--set sample.seed={seed + 1} draws others); "
        f"captions: {out / TABLE}"
    )
    _log(f"contact sheet: {out / SHEET}")
    return out / SHEET


def _device(config: Config) -> torch.device:
    """Return the device of the transformer."""
    device = resolve_device(config.train.device, log=_log)
    check_compiler(device)
    return device


def _log(line: str) -> None:
    print(line, flush=True)
