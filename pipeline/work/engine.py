"""Engines: who encodes which unit. What a unit becomes does not depend on them.

What: `Runner` holds one process's encoder, loaded when the first unit asks for it, and encodes given units: the one
path by which every engine makes records. `run_here` is the local engine: a process does its share of the units, then
those of others that nobody is at (see `pipeline.work.claims`). The other engine is `pipeline.work.ray_engine`.
Why: shares (torchrun, SLURM, `--task-index`) need no collective and no coordinator; taking over what is left makes up
for machines that are slow, late or gone.
Price: a process without work waits until it has seen every other owner's sign of life once, at most
`encode.claim_timeout_s`. It does not wait for living owners to finish: what they hold is reported as left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import click
import pyarrow as pa

from pipeline import launch
from pipeline.cache import codec, index, layout
from pipeline.cache.layout import Paths
from pipeline.cache.store import Cache, Plan, Unit
from pipeline.config import Config
from pipeline.encoding import calibrate, worker
from pipeline.encoding import scan as scanning
from pipeline.errors import CacheError, NoSpaceError
from pipeline.models import encoders
from pipeline.sources import caption_rules
from pipeline.sources.source import Source
from pipeline.work.claims import BEATS, Claims
from pipeline.work.disk_space import Room
from pipeline.work.progress import Meter, Progress
from pipeline.work.stop import Stop

Work = list[tuple[Plan, Unit]]


class Worker(Protocol):
    """What makes units of a cache: `Runner`, or what packs snapshots."""

    cache: Cache

    def encode(self, plan: Plan, unit: Unit, progress: Callable[[int, int], None]) -> index.Commit:
        """Make and commit one unit."""


class Runner:
    """Encodes units with encoders that stay loaded, one kind at a time.

    Args:
        sources: name -> source; those that image units read.
        check: compare the encoder with the unit's recipe first (where another machine chose the recipe).
    """

    def __init__(self, config: Config, cache: Cache, sources: Mapping[str, Source], *, check: bool = False):
        self.config, self.cache, self.sources, self._check = config, cache, dict(sources), check
        self.meter = Meter()
        self._image: encoders.LatentEncoder | None = None
        self._text: encoders.TextEncoder | None = None
        self._costs: dict[str, _StorageCosts] = {}
        self._recipes: dict[str, layout.Recipe] = {}

    def encode(self, plan: Plan, unit: Unit, progress: Callable[[int, int], None]) -> index.Commit:
        """Encode and commit one unit. `progress` as in `worker.encode`."""
        recipe = self._recipe(plan.recipe)
        rows = self.cache.table(plan.table).slice(unit.start, unit.count)
        costs = self._costs.get(recipe.name)
        if costs is None:  # the first unit of this recipe here
            calibrate.ensure(self.cache, recipe, self.cache.plans(recipe.name), partial(self._made, recipe))
            costs = self._costs[recipe.name] = _StorageCosts(recipe)
        made = self._made(recipe, unit, rows, None)
        assert made is not None
        how = encoders.origin(self.config.text if recipe.kind == "text" else self.config.vae)
        if recipe.kind == "text" and self._text is not None:
            how["text_mode"] = self._text.mode
        commit = worker.encode(self.cache, recipe, plan, unit, made, progress, how, costs.measured)
        costs.tell()
        return commit

    def again(self, plan: Plan, unit: Unit, commit: index.Commit, only: Container[bytes]) -> Iterable[worker.Made]:
        """Make the batches of a committed unit again that hold one of the keys, in the way that its provenance names.

        Loads no encoder if there is none.
        """
        recipe = self._recipe(plan.recipe)
        rows = self.cache.table(plan.table).slice(unit.start, unit.count)
        if not any(key in only for key in rows.column("key").to_pylist()):
            return []
        if isinstance(recipe, layout.TextRecipe):
            self._captions(recipe).mode = commit.provenance.get("text_mode", self.config.text.mode)
        made = self._made(recipe, unit, rows, only)
        assert made is not None
        return made

    def _made(
        self, recipe: layout.Recipe, unit: Unit, rows: pa.Table, only: Container[bytes] | None
    ) -> Iterable[worker.Made] | None:
        """The records of a unit; None if its pictures are of a source that is not here."""
        if isinstance(recipe, layout.LatentRecipe):
            if set(rows.column("source").to_pylist()) - set(self.sources):
                return None
            encoder = _Metered(self._latents(recipe), self.meter)
            return worker.image_records(
                recipe,
                unit,
                rows,
                self.sources,
                encoder,
                max_pixels=self.config.data.max_pixels,
                workers=self.config.encode.workers,
                only=only,
                max_bytes=self.config.data.max_bytes,
            )
        assert isinstance(recipe, layout.TextRecipe)
        return worker.caption_records(recipe, unit, rows, _Metered(self._captions(recipe), self.meter), only=only)

    @property
    def unshared(self) -> int:
        """Captions so far that changed the instruction's own tokens."""
        return self._text.unshared if self._text is not None else 0

    @property
    def truncated(self) -> int:
        """Captions that were cut so far."""
        return self._text.truncated if self._text is not None else 0

    def _recipe(self, name: str) -> layout.Recipe:
        if name not in self._recipes:
            self._recipes[name] = self.cache.recipe(name)
        return self._recipes[name]

    def _latents(self, recipe: layout.LatentRecipe) -> encoders.LatentEncoder:
        if self._image is None:
            self._text = None
            if self._check:
                _same(recipe, encoders.describe_vae(self.config.vae), "vae")
            self._image = encoders.LatentEncoder.load(self.config.vae, device(self.config))
        return self._image

    def _captions(self, recipe: layout.TextRecipe) -> encoders.TextEncoder:
        if self._text is None:
            self._image = None
            instruction = caption_rules.instruction(self.config.text)
            if self._check:
                _same(recipe, encoders.describe_text(self.config.text, instruction), "text")
            self._text = encoders.TextEncoder.load(self.config.text, instruction, device(self.config))
        return self._text


class _Metered:
    """An encoder whose time and tokens are counted."""

    def __init__(self, encoder: Any, meter: Meter):
        self._encoder, self._meter = encoder, meter

    def encode(self, batch: Any) -> Any:
        before = getattr(self._encoder, "tokens", 0)
        with self._meter.computing():
            found = self._encoder.encode(batch)
        self._meter.tokens += getattr(self._encoder, "tokens", 0) - before
        return found

    def null(self) -> Any:
        with self._meter.computing():
            return self._encoder.null()


class _StorageCosts:
    """Says once, after the first unit with records to measure, what a storage other than plain bf16 saves and costs."""

    def __init__(self, recipe: layout.Recipe):
        self.recipe, self.storage = recipe, codec.storage_of(recipe)
        self.measured = None if self.storage == codec.PLAIN else codec.Measured()

    def tell(self) -> None:
        if self.measured is not None and self.measured.records:
            click.echo(self.measured.line(self.recipe.kind, self.storage))
            self.measured = None


def reopened(config: Config, name: str) -> Source:
    """A source of the cache as another process reads it: not listed again."""
    return scanning.reopen(Cache.of(config), name, config.data)


def device(config: Config) -> Any:
    """Where this process encodes. Several processes of a node take its GPUs in turn (one may serve two)."""
    name = config.encode.device
    here = launch.detect()
    if name in ("auto", "cuda") and here.local_world > 1:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        name = f"cuda:{here.local_rank % count}" if count else name
    return launch.resolve_device(name)


def is_done(cache: Cache, plan: Plan, unit: Unit) -> bool:
    """Whether somebody has committed a unit."""
    exists = cache.files.exists
    return exists(Paths.unit(plan.recipe, plan.number, unit.unit)) or exists(Paths.segment(plan.recipe, plan.number))


def run_here(
    runner: Worker,
    todo: Work,
    task: int,
    tasks: int,
    claims: Claims,
    stop: Stop,
    bar: Progress,
    room: Room | None = None,
) -> tuple[int, int]:
    """The local engine.

    Args:
        todo: every unit that is missing, of all tasks.
        task, tasks: this process's share, which it does first.
        room: where to wait for space; None: a full disk is an error at once.

    Returns:
        Records made here, and units that living workers still had in hand at the end.

    Raises:
        Stopped: a signal asked for the end.
        NoSpaceError: there was no room for too long.
    """
    cache = runner.cache
    mine = worker.share(todo, task, tasks)
    own = {(plan.number, unit.unit) for plan, unit in mine}
    others = [(plan, unit) for plan, unit in todo if (plan.number, unit.unit) not in own]
    # Every process goes through the others' units in an order of its own, so that two seldom meet at one.
    others.sort(key=lambda item: layout.digest(claims.token, item[1].unit))
    waiting, made, left = [*mine, *others], 0, 0
    bar.expect(sum(unit.count for _, unit in mine))

    def attempt(plan: Plan, unit: Unit, ours: bool) -> bool:
        """Encode a unit whose claim is ours, unless it is done by now."""
        nonlocal made
        counted = bar.done, bar.rejected
        with claims.held(plan.recipe, plan.number, unit.unit):
            if is_done(cache, plan, unit):  # committed between our first look and our claim
                bar.expect(-unit.count if ours else 0)
                return False
            bar.expect(0 if ours else unit.count)
            try:
                if room is not None:
                    room.check(plan, unit)
                made += runner.encode(plan, unit, batch).records
            except NoSpaceError:
                bar.expect(0 if ours else -unit.count)
                bar.forget(*counted)
                raise
        if room is not None:
            room.passed()
        return True

    def batch(records: int, rejects: int) -> None:
        bar.add(records, rejects)
        stop.check_batch()

    idle = False
    with stop.polite():
        while waiting:
            later: Work = []
            worked = False
            for plan, unit in waiting:
                stop.check()
                ours = (plan.number, unit.unit) in own
                if is_done(cache, plan, unit):
                    bar.expect(-unit.count if ours else 0)
                    continue
                try:
                    found = claims.take(plan.recipe, plan.number, unit.unit)
                    if found == "mine":
                        worked = attempt(plan, unit, ours) or worked
                        continue
                except NoSpaceError as error:
                    if room is None:
                        raise
                    room.wait(plan, unit, error)
                    later.append((plan, unit))
                    worked = True
                    continue
                if idle and found == "moving":
                    left += 1  # its owner lives and will finish it
                    bar.expect(-unit.count if ours else 0)
                else:
                    later.append((plan, unit))
            waiting, idle = later, not worked
            if waiting and idle:
                stop.sleep(claims.stale_s / (4 * BEATS))
    return made, left


def _same(recipe: layout.Recipe, found: dict[str, Any], section: str) -> None:
    if wrong := recipe.unlike(found):
        raise CacheError(
            f"this machine's {section} is not the one that this cache's recipe names (recipe | here)",
            found="; ".join(wrong),
            fix=f"give every machine the same {section} model",
        )
