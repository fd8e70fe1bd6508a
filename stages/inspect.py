"""`sana-pipe inspect`: the numbers of the report for scripts, and in short for people. Writes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pipeline.amounts import amount
from pipeline.config import Config
from pipeline.reporting.data_figures import bucket_name
from pipeline.reporting.figures import collect

SHOWN = 10
"""Rejects by kind that are printed without `--json`."""


def run(config: Config, run: Path | None = None, snapshot: str | None = None, as_json: bool = False) -> int:
    """Print the numbers. Arguments and errors: see `pipeline.reporting.figures.collect`.

    Returns:
        0.
    """
    figures, _, _ = collect(config, run=run, snapshot=snapshot)
    if as_json:
        click.echo(json.dumps(figures))
        return 0
    for line in _lines(figures):
        click.echo(line)
    return 0


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    if (data := figures["snapshot"]) is not None:
        yield from _snapshot_lines(data)
    for part in (figures["run"] or {"parts": []})["parts"]:
        yield from _part_lines(part)
    for section, entry in figures["missing"].items():
        yield f"no {section}: {entry['what']}; {entry['command']}"


def _snapshot_lines(data: dict[str, Any]) -> Iterator[str]:
    captions, storage, crop = data["captions"], data["storage"], data["crop"]
    names = f" ({', '.join(data['names'])})" if data["names"] else ""
    yield f"snapshot {data['id'][:12]}{names}: {data['samples']} samples, {data['steps_per_epoch']:.2f} steps per epoch"
    for bucket in data["buckets"]:
        loss = "" if bucket["crop"] is None else f", crop loss {bucket['crop']:.1%}"
        yield f"bucket {bucket_name(bucket)}: {bucket['samples']} samples, batch {bucket['batch']}{loss}"
    if crop is not None:
        yield f"crop loss: mean {crop['mean']:.1%}, largest {crop['largest']:.1%}; {crop['enlarged']} enlarged"
    for source, count in data["sources"].items():
        yield f"source {source!r}: {count} samples"
    yield (
        f"captions: {captions['captions']}, {captions['mean_tokens']:.1f} tokens on average, "
        f"{captions['share_at_max_length']:.1%} with {captions['max_length']} (cut there)"
    )
    for kind, entry in data["duplicates"].items():
        yield f"repeated {kind}: {entry['repeated']} of {entry['entries']}"
    for entry in data["left_out"][:SHOWN]:
        yield f"left out: {entry['samples']} {entry['reason']}"
    for kind in ("latent", "text"):
        yield f"{kind}: {storage[kind]['shards']} shards, {amount(storage[kind]['bytes'])}"
    if (new := data["new"]) is not None:
        yield f"against {new['earlier'][:12]}: {new['new']} new, {new['old']} old, {new['removed']} removed"


def _part_lines(part: dict[str, Any]) -> Iterator[str]:
    if not part["rows"]:
        yield f"run {part['name']}: no steps yet"
        return
    last, mean = part["last"], part["mean"]
    speed = f", {mean['images_per_s']:.1f} images/s" if "images_per_s" in mean else ""
    wait = f", data wait {mean['data_wait']:.1%}" if "data_wait" in mean else ""
    yield f"run {part['name']}: {part['steps']} steps, loss {last.get('loss', float('nan')):.4f}{speed}{wait}"
    if (validation := part["validation"]) is not None and validation["loss"] is not None:
        loss = validation["loss"]
        yield f"  held-out loss {loss['value'][-1]:.4f} at step {loss['step'][-1]:g}"
