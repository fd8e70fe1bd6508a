"""`sana-pipe check`: whether the models of a configuration are available, of the right kind, and fit together.

Prints a line for the VAE, the text encoder, its tokenizer and the transformer (files, and bytes still to be fetched),
then compares their shapes, and `train.adapter` or `train.controlnet` with the transformer, and asks whether this
machine's GPU can be used and its kernels compiled. So a gated model, a missing file or a wrong kind shows before hours
of encoding. Only lists and JSON files are fetched; a damaged weight file is noticed by the stage that reads it. A local
tokenizer is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from sana_pipe.base import hub, launch
from sana_pipe.base.amounts import amount
from sana_pipe.base.config import Weights
from sana_pipe.base.errors import UserError
from sana_pipe.config import Config
from sana_pipe.data.encoders import vae as encoders
from sana_pipe.data.encoders.config import TextConfig
from sana_pipe.data.encoders.text import TOKENIZER_FILES, check_tokenizer, load_tokenizer
from sana_pipe.data.encoders.text_kind import TextKind, kind_at, kind_of
from sana_pipe.data.encoders.vae_kind import vae_at
from sana_pipe.data.images import buckets
from sana_pipe.train.models.adapters import adapter_class, adapter_of
from sana_pipe.train.models.spec import ModelSpec, spec_at, spec_from_arch, text_kind_of_weights


@dataclass
class _Part:
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


def run(config: Config, as_json: bool = False) -> int:
    """Check the models and print the result.

    Returns:
        0, or the exit code of an error in the configuration.
    """
    vae = _inspect(_Part("VAE", config.vae, "encode"), encoders.vae_shape)
    text = _inspect(_Part("text encoder", config.text, "encode"), partial(_text_kind, config.text))
    parts = [vae, text, _tokenizer(config)]
    if (decoder := config.vae.other_decoder) is not None:
        facts: Callable[[Path], Any] = encoders.decoder_shape
        if vae.facts is not None:
            facts = partial(encoders.check_decoder, hub.resolve(config.vae, ("config.json",)))
        parts.append(_inspect(_Part("decoder", decoder, "sample"), facts))
    shape: ModelSpec | None = None
    if (weights := config.model.weights) is not None:
        read = partial(spec_at, variant=weights.variant)
        model = _inspect(_Part("transformer", weights, "train"), read, widest=True)
        parts.append(model)
        shape = model.facts
    problems = [part.problem for part in parts if part.problem is not None]
    problems += _misfits(config, vae.facts, text.facts, shape)
    there = launch.gpus()
    problems += _problems_of(there, config)
    to_fetch = sum(part.to_fetch for part in parts)
    if as_json:
        gpu = {"count": there.count, "driver": launch.driver(), "oldest_driver": launch.oldest_driver()}
        click.echo(json.dumps({**_report(parts, problems, to_fetch), "gpu": gpu}))
    else:
        for part in parts:
            click.echo(_line(part))
        click.echo(f"{'GPU':12}  {launch.describe_gpus(there)}")
        adapter = adapter_class(config.train)
        if shape is not None and adapter is not None and (note := shape.adapter_note(adapter.formats)):
            click.echo(f"note: {note}")
        if shape is not None and shape.comfyui_warning:
            click.echo(f"note: {shape.comfyui_warning}")
        different = list({(problem.what, problem.fix): problem for problem in problems}.values())
        for problem in different:
            click.echo(f"{problem}", err=True)
        number = "1 problem" if len(different) == 1 else f"{len(different)} problems"
        click.echo(number if problems else f"all available; {amount(to_fetch)} to be fetched")
    return UserError.exit_code if problems else 0


def _problems_of(there: launch.Gpus, config: Config) -> list[UserError]:
    """Say why the stages that may take a GPU of this machine cannot use it."""
    options = {"encode.device": config.encode.device, "train.device": config.train.device}
    wanting = next((option for option, name in options.items() if name != "cpu"), None)
    if wanting is not None and there.problem is not None:
        return [launch.unusable(there, wanting)]
    if config.train.device == "cpu" or not there.count:
        return []
    try:
        launch.check_compiler(torch.device("cuda", 0), config.train.compile == "block")
    except UserError as error:
        return [error]
    return []


def _report(parts: list[_Part], problems: list[UserError], to_fetch: int) -> dict[str, Any]:
    return {
        "ok": not problems,
        "to_fetch": to_fetch,
        "parts": [
            {
                "part": part.name,
                "stage": part.stage,
                "id": part.weights.id,
                "files": list(part.files),
                "bytes": part.size,
                "to_fetch": part.to_fetch,
                "ok": part.problem is None,
            }
            for part in parts
        ],
        "problems": [str(problem) for problem in problems],
    }


def _line(part: _Part) -> str:
    state = f"{', '.join(part.files)}: {amount(part.size)}" if part.problem is None else "see below"
    later = f", {amount(part.to_fetch)} of them to be fetched by {part.stage}" if part.to_fetch else ""
    return f"{part.name:12}  {part.weights.id}: {state}{later}"


def _inspect(part: _Part, facts: Callable[[Path], Any], *, widest: bool = False) -> _Part:
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


def _tokenizer(config: Config) -> _Part:
    place = config.text.tokenizer
    part = _Part("tokenizer", place, "encode")
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
            load_tokenizer(folder, kind_of(config.text))
    except UserError as error:
        part.problem = error
    return part


def _check_sides(config: Config, transformer: ModelSpec | None, compression: int) -> None:
    """Refuse buckets that the VAE or the transformer's patches do not divide; None: the transformer is unknown."""
    for height, width in buckets.table(config.data, compression):
        if transformer is not None:
            transformer.check_sides(height, width, compression, "data.buckets with [{height}, {width}] in its place")


def _factors(config: Config) -> tuple[float, float] | None:
    """Scale and shift of the VAE; None: unknown, which the part VAE says."""
    try:
        kind = vae_at(hub.resolve(config.vae, ("config.json",)))
        return kind.scaling_factor, kind.shift_factor
    except UserError:
        return None


def _misfits(
    config: Config, vae: tuple[int, int] | None, text: TextKind | None, shape: ModelSpec | None
) -> list[UserError]:
    """Shapes that do not agree, and an adapter that does not fit the transformer; None: the shape is unknown."""
    transformer, problems = shape, list[UserError]()
    if transformer is None and config.model.arch is not None:
        transformer = spec_from_arch(config.model.arch, 1)
    widths: tuple[dict[str, int], ...] = (
        *([{"channels": vae[1]}] if vae else []),
        *([{"text_width": text.width}] if text is not None else []),
    )
    checks: list[Callable[[], Any]] = []
    if transformer is not None:
        of_widths = partial(transformer.check_widths, "the encoders", "take all three from one released repository")
        checks = [*(partial(of_widths, **each) for each in widths), partial(adapter_of, config.train, transformer)]
    if shape is not None and text is not None:
        fix = "set text.id to the encoder of the model that is trained, or to the pipeline that has it"
        assert config.model.weights is not None
        trained = text_kind_of_weights(config.model.weights, shape)
        checks.append(partial(shape.check_text_kind, f"text.id ({config.text.id})", fix, text.name, trained))
    if transformer is not None and text is not None:
        checks.append(partial(transformer.check_rows, "text.max_length", text.rows(config.text)))
    if shape is not None and (factors := _factors(config)) is not None:
        fix = "set vae.id to the VAE of the model that is trained, or to the pipeline that has it"
        checks.append(partial(shape.check_factors, f"vae.id ({config.vae.id})", fix, *factors))
    if vae is not None:
        checks.append(partial(_check_sides, config, transformer, vae[0]))
    for check in checks:
        try:
            check()
        except UserError as error:
            problems.append(error)
    return problems
