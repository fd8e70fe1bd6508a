"""`sana-pipe verify`: reads a whole cache, names what is damaged, and with `--repair` makes just that again."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any

import click

from pipeline import launch
from pipeline.amounts import amount
from pipeline.cache import audit, layout
from pipeline.cache.index import Commit
from pipeline.cache.store import Cache, Plan, Unit
from pipeline.config import Config
from pipeline.data import captions, packing
from pipeline.data.source import Source
from pipeline.encoding import repair, worker
from pipeline.encoding.scan import reopen
from pipeline.errors import CacheError, IntegrityError, UserError
from pipeline.models import encoders


def run(config: Config, mend: bool = False, data: tuple[str, ...] = (), as_json: bool = False) -> int:
    """Verify, and repair if asked.

    Args:
        mend: encode damaged records again and restore their shards.
        data: folders of the sources, where they are no longer where they were scanned (`NAME=DIR`).

    Returns:
        0 if everything is right (or was restored), else the exit code of an integrity error.

    Raises:
        CacheError: there is no cache.
        UserError: a repair needs a source or a model that is not there.
    """
    cache = Cache.of(config)
    read = [0, 0]

    def count(size: int) -> None:
        read[0] += 1
        read[1] += size

    findings = list(audit.verify(cache, count))
    outcomes = _repair(config, cache, findings, data) if mend and findings else {}
    left = [f for f in findings if outcomes.get(f.path) not in ("restored", "replaced")]
    if as_json:
        told: dict[str, Any] = {
            "files": read[0], "bytes": read[1], "ok": not left,
            "findings": [{**vars(f), "outcome": outcomes.get(f.path)} for f in findings],
        }  # fmt: skip
        click.echo(json.dumps(told))
        return IntegrityError.exit_code if left else 0
    for finding in findings:
        click.echo(f"{cache.files.where(finding.path)}: {finding.problem}")
        for key in finding.records[:20]:
            click.echo(f"  record {key}")
        if len(finding.records) > 20:
            click.echo(f"  and {len(finding.records) - 20} more records")
        if finding.path in outcomes:
            click.echo(f"  {outcomes[finding.path]}")
    click.echo(f"{read[0]} files, {amount(read[1])} read: " + (f"{len(left)} damaged" if left else "all is right"))
    if left and not mend:
        click.echo("fix: sana-pipe verify --repair")
    if "replaced" in outcomes.values():
        click.echo("this machine makes other bytes than the one before: run sana-pipe bucket for a new snapshot")
    return IntegrityError.exit_code if left else 0


def _repair(config: Config, cache: Cache, findings: list[audit.Finding], data: tuple[str, ...]) -> dict[str, str]:
    """What became of each damaged path. Tables first: repairing a shard reads them."""
    outcomes: dict[str, str] = {}
    for finding in findings:
        name = PurePosixPath(finding.path)
        if name.parts[0] == "tables" and name.suffix == ".arrow":
            outcomes[finding.path] = _table_again(cache, name.stem)
    tools = _Encoders(config, cache, data)
    for finding in findings:
        if finding.unit:
            try:
                recipe = cache.recipe(finding.recipe)
                outcomes[finding.path] = repair.repair_unit(cache, recipe, finding, tools.of(recipe))
            except CacheError as error:
                outcomes[finding.path] = f"failed: {error.what} (once that is mended, repair again)"
    for finding in findings:
        if finding.path.startswith(f"shards/{layout.PACKED}"):
            outcomes[finding.path] = _packed_again(cache, finding.path)
    for finding in findings:
        if finding.path.startswith("snapshots/"):
            again = list(audit.verify_snapshot(cache, finding.path))
            outcomes[finding.path] = "failed: restore it from a copy of the cache" if again else "restored"
        elif finding.path not in outcomes:
            outcomes[finding.path] = "failed: restore it from a copy of the cache"
    return outcomes


def _table_again(cache: Cache, digest: str) -> str:
    problem = "run sana-pipe bucket for a new snapshot"
    for recipe in audit.recipe_names(cache):
        try:
            for plan in cache.plans(recipe):
                if repair.repair_table(cache, recipe, plan.number, digest):
                    return "restored"
        except CacheError as error:  # of this recipe; the table may be another's
            problem = error.what
    return f"failed: {problem}"


def _packed_again(cache: Cache, path: str) -> str:
    try:
        return "restored" if packing.restored(cache, path) else "failed: restore it from a copy of the cache"
    except CacheError as error:
        return f"failed: the snapshot that it was packed from cannot be read: {error}"


class _Encoders:
    """Loads an encoder when the first damaged record asks for it, and refuses one of another recipe."""

    def __init__(self, config: Config, cache: Cache, data: tuple[str, ...]):
        self.config, self.cache = config, cache
        self.given = dict(_pair(text) for text in data)
        self.image: encoders.LatentEncoder | None = None
        self.text: encoders.TextEncoder | None = None

    def of(self, recipe: layout.Recipe) -> repair.Encode:
        def encode(plan: Plan, unit: Unit, commit: Commit, bad: Container[bytes]) -> Iterable[worker.Made]:
            rows = self.cache.table(plan.table).slice(unit.start, unit.count)
            return self._made(recipe, unit, commit, rows, bad)

        return encode

    def _made(
        self, recipe: layout.Recipe, unit: Unit, commit: Commit, rows: Any, bad: Container[bytes]
    ) -> Iterator[worker.Made]:
        if not any(key in bad for key in rows.column("key").to_pylist()):
            return
        device = launch.resolve_device(self.config.encode.device)
        if isinstance(recipe, layout.LatentRecipe):
            if self.image is None:
                _same(recipe, encoders.describe_vae(self.config.vae), "vae")
                self.image = encoders.LatentEncoder.load(self.config.vae, device)
            names = sorted(set(rows.column("source").to_pylist()))
            yield from worker.image_records(
                recipe, unit, rows, {name: self._source(name) for name in names}, self.image,
                max_pixels=self.config.data.max_pixels, workers=self.config.encode.workers, only=bad,
                max_bytes=self.config.data.max_bytes,
            )  # fmt: skip
        elif isinstance(recipe, layout.TextRecipe):
            if self.text is None:
                instruction = captions.instruction(self.config.text)
                _same(recipe, encoders.describe_text(self.config.text, instruction), "text")
                self.text = encoders.TextEncoder.load(self.config.text, instruction, device)
            self.text.mode = commit.provenance.get("text_mode", self.config.text.mode)
            yield from worker.caption_records(recipe, unit, rows, self.text, only=bad)

    def _source(self, name: str) -> Source:
        try:
            return reopen(self.cache, name, self.config.data, self.given.get(name))
        except UserError as error:
            raise UserError(
                f"damaged latents need source {name!r}: {error.what}", fix=f"--data {name}=DIR, where it is now"
            ) from None


def _pair(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not equals:
        raise UserError(f"--data {text!r} is not of the form NAME=DIR")
    return name, folder


def _same(recipe: layout.Recipe, found: dict[str, Any], section: str) -> None:
    if wrong := recipe.unlike(found):
        raise UserError(
            f"the damaged records were made by another {section} than the configuration names (cache | configuration)",
            found="; ".join(wrong), fix=f"give the configuration whose {section} made this cache",
        )  # fmt: skip
