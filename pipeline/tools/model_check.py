"""The models of a configuration: available, of the right kind, fitting together; and whether a GPU can be used.

`inspected` looks at each model, `misfits` compares their shapes, `gpu_problems` asks this machine. Only lists and JSON
files are fetched; a damaged weight file is noticed by the stage that reads it. A local tokenizer is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sana_pipe.base import hub, launch
from sana_pipe.base.config import Weights
from sana_pipe.base.errors import UserError
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.encoders.config import TextConfig, VaeConfig
from sana_pipe.data.encoders.text import TOKENIZER_FILES, check_tokenizer, load_tokenizer
from sana_pipe.data.encoders.text_kind import TextKind, kind_at, kind_of
from sana_pipe.data.encoders.vae_kind import vae_at
from sana_pipe.data.images import buckets
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import adapter_of
from sana_pipe.train.models.config import ModelConfig
from sana_pipe.train.models.spec import ModelSpec, spec_at, spec_from_arch, text_kind_of_weights


@dataclass
class Part:
    """One model.

    Attributes:
        stage: the stage that fetches it.
        files, size, to_fetch: names of its files, bytes of all, bytes of those that are not local.
        facts: the shapes in its configuration; None if unknown.
        problem: why it cannot be used.
    """

    name: str
    weights: Weights
    stage: str
    files: tuple[str, ...] = ()
    size: int = 0
    to_fetch: int = 0
    facts: Any = None
    problem: UserError | None = None


@dataclass
class Models:
    """The models of a configuration.

    Attributes:
        parts: VAE, text encoder, tokenizer, then the decoder and the transformer, if they have weights.
        vae: compression and channels; None: unknown.
        text: the kind of the text encoder; None: unknown.
        transformer: None: unknown.
    """

    parts: list[Part]
    vae: tuple[int, int] | None
    text: TextKind | None
    transformer: ModelSpec | None = None


def inspected(vae: VaeConfig, text: TextConfig, model: ModelConfig) -> Models:
    """Look at each model; its part says what is wrong with it."""
    vae_part = _inspect(Part("VAE", vae, "encode"), encoders.vae_shape)
    text_part = _inspect(Part("text encoder", text, "encode"), partial(_text_kind, text))
    models = Models([vae_part, text_part, _tokenizer(text)], vae_part.facts, text_part.facts)
    if (decoder := vae.other_decoder) is not None:
        facts: Callable[[Path], Any] = encoders.decoder_shape
        if vae_part.facts is not None:
            facts = partial(encoders.check_decoder, hub.resolve(vae, ("config.json",)))
        models.parts.append(_inspect(Part("decoder", decoder, "sample"), facts))
    if (weights := model.weights) is not None:
        read = partial(spec_at, variant=weights.variant)
        transformer = _inspect(Part("transformer", weights, "train"), read, widest=True)
        models.parts.append(transformer)
        models.transformer = transformer.facts
    return models


def gpu_problems(there: launch.Gpus, encode_device: str, train: TrainConfig) -> list[UserError]:
    """Say why the stages that may take a GPU of this machine cannot use it."""
    options = {"encode.device": encode_device, "train.device": train.device}
    wanting = next((option for option, name in options.items() if name != "cpu"), None)
    if wanting is not None and there.problem is not None:
        return [launch.unusable(there, wanting)]
    if train.device == "cpu" or not there.count:
        return []
    try:
        launch.check_compiler(torch.device("cuda", 0), train.compile == "block")
    except UserError as error:
        return [error]
    return []


def misfits(
    models: Models,
    vae_config: VaeConfig,
    text_config: TextConfig,
    model: ModelConfig,
    data: DataConfig,
    train: TrainConfig,
) -> list[UserError]:
    """Shapes that do not agree, and an adapter that does not fit the transformer. What is unknown is not compared."""
    vae, text, shape = models.vae, models.text, models.transformer
    transformer, problems = shape, list[UserError]()
    if transformer is None and model.arch is not None:
        transformer = spec_from_arch(model.arch, 1)
    widths: tuple[dict[str, int], ...] = (
        *([{"channels": vae[1]}] if vae else []),
        *([{"text_width": text.width}] if text is not None else []),
    )
    checks: list[Callable[[], Any]] = []
    if transformer is not None:
        of_widths = partial(transformer.check_widths, "the encoders", "take all three from one released repository")
        checks = [*(partial(of_widths, **each) for each in widths), partial(adapter_of, train, transformer)]
    if shape is not None and text is not None:
        fix = "set text.id to the encoder of the model that is trained, or to the pipeline that has it"
        assert model.weights is not None
        trained = text_kind_of_weights(model.weights, shape)
        checks.append(partial(shape.check_text_kind, f"text.id ({text_config.id})", fix, text.name, trained))
    if transformer is not None and text is not None:
        checks.append(partial(transformer.check_rows, "text.max_length", text.rows(text_config)))
    if shape is not None and (factors := _factors(vae_config)) is not None:
        fix = "set vae.id to the VAE of the model that is trained, or to the pipeline that has it"
        checks.append(partial(shape.check_factors, f"vae.id ({vae_config.id})", fix, *factors))
    if vae is not None:
        checks.append(partial(_check_sides, data, transformer, vae[0]))
    for check in checks:
        try:
            check()
        except UserError as error:
            problems.append(error)
    return problems


def _inspect(part: Part, facts: Callable[[Path], Any], *, widest: bool = False) -> Part:
    """Fill in a part: first its kind, then its weights. The kind of a file of NVlabs is known only once it is local."""
    try:
        if not hub.is_file(part.weights):
            part.facts = facts(hub.resolve(part.weights, ("config.json",)))
        listing = hub.look(part.weights, widest=widest)
        part.files, part.size, part.to_fetch = listing.files, listing.size, listing.to_fetch
        if hub.is_file(part.weights) and listing.place.is_file():
            part.facts = facts(listing.place)
    except UserError as error:
        part.problem = error
    return part


def _text_kind(text: TextConfig, folder: Path) -> TextKind:
    kind = kind_at(folder)
    kind.check(text)
    return kind


def _tokenizer(text: TextConfig) -> Part:
    place = text.tokenizer
    part = Part("tokenizer", place, "encode")
    try:
        listing = None if hub.is_local(place) else hub.sizes(place)
        # a gated repository lists its files to everyone but delivers none, so one is fetched
        folder = hub.resolve(place, TOKENIZER_FILES if listing is None else ("tokenizer_config.json",))
        settings = folder / "tokenizer_config.json"
        if listing is not None and settings.is_file() and "auto_map" in hub.read_json(settings):
            # it may name code: it is loaded below
            folder = hub.resolve(place, TOKENIZER_FILES)
        local = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        available = local if listing is None else listing
        files = {name: size for name, size in available.items() if name in TOKENIZER_FILES}
        check_tokenizer(place.id, available)
        part.files, part.size = tuple(files), sum(files.values())
        part.to_fetch = sum(size for name, size in files.items() if local.get(name) != size)
        if not part.to_fetch:
            load_tokenizer(folder, kind_of(text))
    except UserError as error:
        part.problem = error
    return part


def _check_sides(data: DataConfig, transformer: ModelSpec | None, compression: int) -> None:
    """Refuse buckets that the VAE or the transformer's patches do not divide; None: the transformer is unknown."""
    for height, width in buckets.table(data, compression):
        if transformer is not None:
            transformer.check_sides(height, width, compression, "data.buckets with [{height}, {width}] in its place")


def _factors(vae: VaeConfig) -> tuple[float, float] | None:
    """Scale and shift of the VAE; None: unknown, which the part VAE says."""
    try:
        kind = vae_at(hub.resolve(vae, ("config.json",)))
        return kind.scaling_factor, kind.shift_factor
    except UserError:
        return None
