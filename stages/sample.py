"""`sana-pipe sample`: pictures from a checkpoint, for captions of a snapshot or new prompts; or those of a training.

Text rows and latents come from the cache; new prompts (`--prompt`) are encoded into a temporary one. The transformer
draws latents, and a second process decodes them, so that transformer and VAE never share memory and this process
imports no encoder. The result is PNGs, `samples.jsonl` and a contact sheet: photo, the VAE's reconstruction, a picture
by the weights that the run began from, and by the trained ones. Guidance uses the null record's valid rows, as
`SanaPipeline` does. `--watch` decodes what a training draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sana_pipe.base.errors import CacheError, ConfigError, UserError, writing
from sana_pipe.base.hub import open_tensors, resolve
from sana_pipe.base.launch import check_compiler, resolve_device, set_tf32
from sana_pipe.base.metrics.trackers import PictureTrackers
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.prompts import spread
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import Head
from sana_pipe.data.encoders.vae import vae_shape
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.sources import caption_rules
from sana_pipe.tools import outputs
from sana_pipe.tools.locations import cache_location
from sana_pipe.tools.reporting import draw_latents, drawing_folder, encoder_process, pair_page, run_pictures
from sana_pipe.tools.reporting.draw_latents import DrawnLatent, draw_columns, likeness
from sana_pipe.tools.reporting.drawing_folder import (
    BASE,
    CONTROL,
    DRAWN,
    FOLDER,
    RECONSTRUCTION,
    Row,
    file_name,
    working,
)
from sana_pipe.tools.reporting.source_pictures import SourcePictures
from sana_pipe.train.models.adapters import Adapter, adapter_from
from sana_pipe.train.models.sampler import Sampling
from sana_pipe.train.models.spec import ModelSpec
from sana_pipe.train.training import checkpoint as checkpoints
from sana_pipe.train.training.base_weights import first_weights, whole_weights

CAPTIONS = 8
"""Captions of a snapshot that are drawn unless `--count` says otherwise."""
PAIR_CAPTIONS, PAIR_PICTURES = 100, 4
"""Captions that are drawn for pairs, and pictures of each unless `--count` says otherwise."""
_FIX = "--snapshot NAME of a snapshot, or --config FILE, with this model's encoders"


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
    opened = _opened(config, cache, snapshot, stored, controlled)
    architecture, columns = stored.architecture, _columns(config, stored, scale, base)
    wanted = min(count or CAPTIONS, len(opened))
    if wanted < (count or CAPTIONS):
        _log(f"the snapshot has only {wanted} samples: drawing {wanted} pictures")
    _log(f"drawing {wanted} pictures with {stored} for captions of snapshot {opened.id[:12]}")
    chosen, device = spread(len(opened), wanted), _device(config)

    def draw(title: str, weights: dict[str, Tensor]) -> list[DrawnLatent]:
        adapter = controlled if title == DRAWN and scale != 0 else None
        model = draw_latents.open_model(config.train, architecture, weights, device, adapter)
        return draw_latents.draw_for(
            model, _sampling(config, architecture), config.sample.seed, opened, chosen, controlled=adapter is not None
        )

    with working(out) as work:
        by_title = draw_columns(columns, draw)
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


def run_pairs(
    config: Config,
    checkpoint: str,
    snapshot: str | None,
    out: Path,
    count: int | None = None,
    *,
    ema: bool = False,
    scale: float | None = None,
) -> Path:
    """Draw several pictures for each of up to `PAIR_CAPTIONS` captions, the first with `sample.seed`, the next with the
    seed after it, and write a page to mark the better and the worse ones on; returns the page.

    Args:
        checkpoint, snapshot, ema, scale: as in `run`.
        out: a new or empty folder.
        count: pictures of each caption, at least 2 (None: `PAIR_PICTURES`).

    Raises:
        UserError: as in `run`; `out` holds something.
    """
    count = PAIR_PICTURES if count is None else count
    if count < 2:
        raise ConfigError("--count 1 gives no pairs", expected="2 or more pictures a caption", fix="--count 4")
    outputs.check(config, out, option="--for-pairs")
    pair_page.check_new(out)
    config, stored, controlled = _trained(config, checkpoint, ema)
    opened = _opened(config, cache_location(config).open(), snapshot, stored, controlled)
    chosen, seeds = spread(len(opened), min(PAIR_CAPTIONS, len(opened))), [config.sample.seed + n for n in range(count)]
    _log(f"drawing {count} pictures each with {stored} for {len(chosen)} captions of snapshot {opened.id[:12]}")
    adapter = controlled if scale != 0 else None
    weights = dict(_columns(config, stored, scale, base=False)[DRAWN]() or {})
    model = draw_latents.open_model(config.train, stored.architecture, weights, _device(config), adapter)
    sampling, controls = _sampling(config, stored.architecture), {"controlled": adapter is not None}
    with working(out) as work:
        drawn = [draw_latents.draw_for(model, sampling, seed, opened, chosen, **controls) for seed in seeds]
        del model
        groups = list(zip(*drawn, strict=True))
        latents = {pair_page.file_name(n, k): each.latent for n, of in enumerate(groups) for k, each in enumerate(of)}
        encoder_process.decode(config, latents, work)
        origin = {"checkpoint": stored.folder.name, "weights": stored.weights}
        rows = [
            {"caption": each.caption, "number": n, "picture": k, "seed": seed, "sample_id": each.sample_id, **origin}
            for n, of in enumerate(groups)
            for k, (each, seed) in enumerate(zip(of, seeds, strict=True))
        ]
        return pair_page.publish(rows, work / "pictures", out, _log)


def _opened(
    config: Config, cache: Cache, snapshot: str | None, stored: checkpoints.ModelTensors, controlled: Adapter | None
) -> Snapshot:
    """The snapshot whose captions are drawn.

    Raises:
        UserError: there is none, or it is of other encoders, or lacks control pictures.
    """
    opened, architecture = cache.open_snapshot(snapshot), stored.architecture
    if controlled is not None and CONTROL not in opened.pictures:
        raise ConfigError(
            f"{stored.folder} holds {controlled}, but snapshot {opened.id[:12]} has no control pictures",
            fix="--snapshot NAME of a snapshot that has them, or --prompt TEXT --control FILE",
        )
    channels, text_width = opened.encoding(LatentEncoding).channels, opened.encoding(TextEncoding).width
    architecture.check_widths(f"snapshot {opened.id[:12]}", _FIX, channels=channels, text_width=text_width)
    kind = opened.encoding(TextEncoding).encoder_kind
    architecture.check_text_kind(f"snapshot {opened.id[:12]}", _FIX, kind, stored.document.text_kind)
    if config.model.weights is not None:
        latent = opened.encoding(LatentEncoding)
        architecture.check_factors(f"snapshot {opened.id[:12]}", _FIX, latent.scaling_factor, latent.shift_factor)
    return opened


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
    return Sampling.of(
        config.sample,
        config.train.flow.shift,
        config.train.drawn_at_once,
        architecture.scheduler,
        architecture.sigmas,
    )


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
        kind = "a ControlNet, which draws with a control picture" if control is None else "no ControlNet"
        fix = "--control FILE" if control is None else "leave --control out"
        raise ConfigError(f"{stored.folder} holds {kind}", fix=fix)
    latent, text = encodings_of(config, stored.document.state.snapshot)
    compression, channels = (
        (latent.compression, latent.channels) if latent else vae_shape(resolve(config.vae, ("config.json",)))
    )
    size = height or config.data.resolution, width or config.data.resolution
    stored.architecture.check_sides(*size, compression, "--height {height} --width {width}")
    for prompt in prompts:
        caption_rules.check_prompt(prompt, "--prompt")
    with working(out) as work:
        encoded, drawn_from = encoder_process.encode_prompts(config, prompts, work, control, size)
        if text is not None and text != (configured := replace(encoded.encoding, storage=text.storage)):
            raise ConfigError(
                f"{stored.folder} was trained with another text encoding (trained | configured)",
                found="; ".join(text.difference(configured)),
                fix="--config FILE with the configuration of the training",
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

        latents = draw_columns(columns, draw)
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
    device = run_pictures.decoder_device(config.encode.device, run, _log)
    try:
        run_pictures.Watcher(config.vae, run, device, _log, trackers.log).watch(once=once)
    finally:
        trackers.close()
    return 0


def decode(config: Config, latents: Path, out: Path) -> int:
    """The decoding process: every tensor of a safetensors file to `out`/NAME.png.

    Args:
        latents: tensors (C, h, w), multiplied by the scaling factor.

    Raises:
        UserError: the file or the VAE cannot be read.
    """
    from PIL import Image

    from sana_pipe.data.encoders.vae import LatentDecoder

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
        f"snapshot {snapshot[:12]} of the training is not in {config.cache}: assuming that it was made with the "
        "configured encoders"
    )
    return None, None


def decode_in_subprocess(config: Config, latents: Mapping[str, Sequence[Tensor]], work: Path) -> None:
    """Decode the latents of each column of the sheet to `work`/pictures."""
    named = {file_name(number, title): each for title, column in latents.items() for number, each in enumerate(column)}
    encoder_process.decode(config, named, work)


def publish(
    config: Config,
    latents: Mapping[str, Sequence[Tensor]],
    rows: Sequence[Row],
    stored: checkpoints.ModelTensors,
    work: Path,
    out: Path | None,
    photos: SourcePictures | None = None,
) -> Path:
    """Decode, and move all into the folder of the pictures; see `drawing_folder.publish`.

    Args:
        latents: by title of their column.
    """
    decode_in_subprocess(config, latents, work)
    origin = {"checkpoint": stored.folder.name, "weights": stored.weights}
    return drawing_folder.publish(list(latents), [{**row, **origin} for row in rows], work, out, photos, _log)


def _device(config: Config) -> torch.device:
    """Return the device of the transformer."""
    device = resolve_device(config.train.device, log=_log)
    check_compiler(device)
    return device


def _log(line: str) -> None:
    print(line, flush=True)
