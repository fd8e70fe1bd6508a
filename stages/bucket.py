"""`sana-pipe bucket`: the cache to an immutable snapshot. Moves no tensor bytes; takes seconds."""

from __future__ import annotations

from typing import Any

import click

from pipeline.cache import layout, snapshot
from pipeline.cache.store import Cache
from pipeline.config import Config
from pipeline.data import buckets
from pipeline.data.captions import instruction
from pipeline.data.join import Joined, assemble, join
from pipeline.errors import CacheError


def run(config: Config, name: str | None = None) -> str:
    """Make a snapshot of every source in the cache.

    Args:
        name: a name that will point to it, beside `latest`.

    Returns:
        The snapshot's id.

    Raises:
        CacheError: no source yet, or sources of different recipes, or of other settings than the configuration.
        UserError: nothing is left to train on.
    """
    cache = Cache.of(config)
    scans = {source: cache.last_scan(source) for source in cache.sources()}
    found = {source: body for source, body in scans.items() if body is not None}
    if not found:
        raise CacheError(
            f"{config.cache}: no source has been encoded into this cache", fix="sana-pipe encode --data DIR"
        )
    latent, text = _recipes(config, cache, found)
    table = buckets.table(config.data, latent.compression)
    latents, texts = cache.index(latent.name), cache.index(text.name)
    joined = Joined()
    for source, body in sorted(found.items()):
        join(joined, source, cache.table(body["table"]), table, latent, text, latents, texts)
    head, samples, names, report = assemble(
        joined, table, batch=config.bucket.batch, small=config.bucket.small,
        pad_text_multiple=config.bucket.pad_text_multiple, latent=latent, text=text, latents=latents, texts=texts,
        sources={source: body["table"] for source, body in sorted(found.items())},
    )  # fmt: skip
    snapshot_id = cache.add_snapshot(snapshot.build(cache.files, head, samples, names), name)

    click.echo(f"{'bucket':>11} {'samples':>9} {'batch':>6} {'steps/epoch':>12} {'crop loss':>10}")
    for row in report:
        click.echo(
            f"{row.height:>5}x{row.width:<5} {row.samples:>9} {row.batch:>6} {row.steps:>12.2f} {row.crop:>10.1%}"
            + (f"  {row.note}" if row.note else "")
        )
    click.echo(f"{head['counts']['samples']} samples, {sum(row.steps for row in report):.2f} optimizer steps per epoch")
    for reason, count in head["left_out"].items():
        click.echo(f"left out: {count:6d}  {reason}")
    click.echo(f"snapshot {snapshot_id}" + (f" ({name})" if name else ""))
    return snapshot_id


def _recipes(
    config: Config, cache: Cache, scans: dict[str, dict[str, Any]]
) -> tuple[layout.LatentRecipe, layout.TextRecipe]:
    """The recipes of the sources, which must agree with one another and with the configuration."""
    chosen: dict[str, layout.Recipe] = {}
    for kind in ("latent", "text"):
        by_source = {source: cache.recipe(body[kind]) for source, body in scans.items()}
        first_source, first = next(iter(sorted(by_source.items())))
        for source, recipe in by_source.items():
            if recipe != first:
                raise CacheError(
                    f"sources {first_source!r} and {source!r} were encoded with different {kind} recipes",
                    found="; ".join(first.difference(recipe)),
                    fix="encode both with the same configuration",
                )
        chosen[kind] = first
    latent, text = chosen["latent"], chosen["text"]
    assert isinstance(latent, layout.LatentRecipe)
    assert isinstance(text, layout.TextRecipe)
    wanted: list[tuple[str, Any, Any]] = [
        ("vae.dtype", config.vae.dtype, latent.dtype),
        ("text.dtype", config.text.dtype, text.dtype),
        ("text.recipe", config.text.recipe, text.normalisation),
        ("text.max_length", config.text.max_length, text.max_length),
        ("text.instruction", instruction(config.text), text.instruction),
        ("data.background", config.data.background, latent.background),
    ]
    wanted += [
        ("encode.storage.latent", config.encode.storage.latent, latent.storage),
        ("encode.storage.text", config.encode.storage.text, text.storage),
    ]
    if config.vae.scaling_factor is not None:
        wanted.append(("vae.scaling_factor", config.vae.scaling_factor, latent.scaling_factor))
    for key, section, recipe in (("vae", config.vae, latent), ("text", config.text, text)):
        if recipe.model:
            wanted += [(f"{key}.id", section.id, recipe.model), (f"{key}.revision", section.revision, recipe.revision)]
    wrong = [f"{key}: configuration {mine!r}, cache {theirs!r}" for key, mine, theirs in wanted if mine != theirs]
    if wrong:
        raise CacheError(
            "the cache was encoded with other settings than this configuration asks for", found="; ".join(wrong),
            fix="run sana-pipe encode with this configuration, or use the configuration of the cache",
        )  # fmt: skip
    return latent, text
