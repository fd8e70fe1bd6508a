"""`sana-pipe check`: whether the models of a configuration are there, are the right ones and fit one another.

What: one line for the VAE, the text encoder, its tokenizer and the transformer: which files, and how much of them is
still to be fetched; then whether their shapes agree.
Why: a gated model, a missing file or a wrong kind shows here, not after hours of encoding.
Price: the hub is asked for lists and JSON files, so a damaged weight file is found only by the stage that reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipeline.amounts import amount
from pipeline.config import Config, Weights
from pipeline.errors import ConfigError, UserError
from pipeline.images import buckets
from pipeline.models import encoders, hub
from pipeline.models.sana_config import SanaConfig
from pipeline.models.sana_files import architecture_at


@dataclass
class _Part:
    """One model. `facts` is what its configuration says; None if that is not known."""

    name: str
    weights: Weights
    stage: str
    files: tuple[str, ...] = ()
    size: int = 0
    to_fetch: int = 0
    facts: Any = None
    problem: UserError | None = None


def run(config: Config, as_json: bool = False) -> int:
    """Check, and say what was found.

    Returns:
        0, or the exit code of a mistake in the configuration.
    """
    vae = _seen(_Part("VAE", config.vae, "encode"), encoders.vae_shape)
    text = _seen(_Part("text encoder", config.text, "encode"), encoders.text_width)
    parts = [vae, text, _tokenizer(config)]
    shape: SanaConfig | None = None
    if config.model.weights is not None:
        model = _seen(_Part("transformer", config.model.weights, "train"), architecture_at, widest=True)
        parts.append(model)
        shape = model.facts
    problems = [part.problem for part in parts if part.problem is not None]
    problems += _misfits(config, vae.facts, text.facts, shape)
    to_fetch = sum(part.to_fetch for part in parts)
    if as_json:
        listed = [
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
        ]
        told = {"ok": not problems, "to_fetch": to_fetch, "parts": listed, "problems": [str(one) for one in problems]}
        click.echo(json.dumps(told))
    else:
        for part in parts:
            place = f"{part.weights.id}{f'/{part.weights.subfolder}' if part.weights.subfolder else ''}"
            state = f"{', '.join(part.files)}: {amount(part.size)}" if part.problem is None else "see below"
            later = f", {amount(part.to_fetch)} of them to be fetched by {part.stage}" if part.to_fetch else ""
            click.echo(f"{part.name:12}  {place}: {state}{later}")
        for problem in problems:
            click.echo(f"{problem}", err=True)
        click.echo(f"{len(problems)} problems" if problems else f"all is there; {amount(to_fetch)} to be fetched")
    return UserError.exit_code if problems else 0


def _seen(part: _Part, facts: Callable[[Path], Any], *, widest: bool = False) -> _Part:
    """Look at a model: first of which kind it is, then its weights. A file of NVlabs says its kind only once it is
    here."""
    try:
        if not hub.is_file(part.weights):
            part.facts = facts(hub.resolve(part.weights, ("config.json",)))
        seen = hub.look(part.weights, widest=widest)
        part.files, part.size, part.to_fetch = seen.files, seen.size, seen.to_fetch
        if hub.is_file(part.weights) and seen.place.is_file():
            part.facts = facts(seen.place)
    except UserError as error:
        part.problem = error
    return part


def _tokenizer(config: Config) -> _Part:
    place = config.text.model_copy(update={"subfolder": config.text.tokenizer_subfolder})
    part = _Part("tokenizer", place, "encode")
    try:
        listing = None if hub.is_local(place) else hub.sizes(place)
        # a gated repository shows its list to everybody, its files to none
        folder = hub.resolve(place, encoders.TOKENIZER_FILES if listing is None else ("tokenizer_config.json",))
        here = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        there = here if listing is None else listing
        found = {name: size for name, size in there.items() if name in encoders.TOKENIZER_FILES}
        if not {"tokenizer.json", "tokenizer.model"} & set(found):
            raise hub.ModelError(
                f"{place.id}/{place.subfolder or ''} holds no tokenizer",
                expected="tokenizer.json or tokenizer.model",
                found=", ".join(sorted(there)) or "no files",
                fix="set text.tokenizer_subfolder (null if the files lie directly in the model's folder)",
            )
        part.files, part.size = tuple(found), sum(found.values())
        part.to_fetch = sum(size for name, size in found.items() if here.get(name) != size)
    except UserError as error:
        part.problem = error
    return part


def _misfits(
    config: Config, vae: tuple[int, int] | None, width: int | None, shape: SanaConfig | None
) -> list[UserError]:
    """What the parts say of one another. None: a part that is not known."""
    arch = config.model.arch
    channels = shape.in_channels if shape is not None else arch.in_channels if arch is not None else None
    captions = shape.caption_channels if shape is not None else arch.caption_channels if arch is not None else None
    found: list[UserError] = []
    for what, ours, theirs in (
        ("the VAE gives channels", vae[1] if vae else None, channels),
        ("the text encoder gives rows of width", width, captions),
    ):
        if None not in (ours, theirs) and ours != theirs:
            found.append(
                ConfigError(
                    f"{what} {ours}, the transformer takes {theirs}", fix="take all three from one released repository"
                )
            )
    if vae is not None:
        try:
            buckets.table(config.data, vae[0])
        except UserError as error:
            found.append(error)
    return found
