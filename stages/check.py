"""`sana-pipe check`: whether the models of a configuration are available, of the right kind, and fit together.

Prints a line for the VAE, the text encoder, its tokenizer and the transformer (files, and bytes still to be fetched),
then compares their shapes, and `train.adapter` or `train.controlnet` with the transformer, and asks whether this
machine's GPU can be used and its kernels compiled. So a gated model, a missing file or a wrong kind shows before hours
of encoding. Only lists and JSON files are fetched; a damaged weight file is noticed by the stage that reads it. A local
tokenizer is loaded.
"""

from __future__ import annotations

import json
from typing import Any

import click

from sana_pipe.base import launch
from sana_pipe.base.amounts import amount
from sana_pipe.base.errors import UserError
from sana_pipe.config import Config
from sana_pipe.tools import model_check
from sana_pipe.tools.model_check import Part
from sana_pipe.train.models.adapters import adapter_class


def run(config: Config, as_json: bool = False) -> int:
    """Check the models and print the result.

    Returns:
        0, or the exit code of an error in the configuration.
    """
    models = model_check.inspected(config.vae, config.text, config.model)
    parts = models.parts
    problems = [part.problem for part in parts if part.problem is not None]
    problems += model_check.misfits(models, config.vae, config.text, config.model, config.data, config.train)
    there = launch.gpus()
    problems += model_check.gpu_problems(there, config.encode.device, config.train)
    to_fetch = sum(part.to_fetch for part in parts)
    if as_json:
        gpu = {"count": there.count, "driver": launch.driver(), "oldest_driver": launch.oldest_driver()}
        click.echo(json.dumps({**_report(parts, problems, to_fetch), "gpu": gpu}))
    else:
        for part in parts:
            click.echo(_line(part))
        click.echo(f"{'GPU':12}  {launch.describe_gpus(there)}")
        adapter, shape = adapter_class(config.train), models.transformer
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


def _report(parts: list[Part], problems: list[UserError], to_fetch: int) -> dict[str, Any]:
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


def _line(part: Part) -> str:
    state = f"{', '.join(part.files)}: {amount(part.size)}" if part.problem is None else "see below"
    later = f", {amount(part.to_fetch)} of them to be fetched by {part.stage}" if part.to_fetch else ""
    return f"{part.name:12}  {part.weights.id}: {state}{later}"
