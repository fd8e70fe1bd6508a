"""Encodes units of plans. Every engine, and `verify --repair`, makes records through `UnitEncoder`.

An encoder is loaded when the first unit asks for it and stays loaded until a unit of another kind comes; the old
encoder is dropped before the new is read, so that one encoder at a time is in memory. What makes records beside those
of a unit, from the same pixels (see `encoding.plan.plan_beside`), stays loaded with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import click
import pyarrow as pa

from pipeline.base import launch
from pipeline.base.errors import CacheError
from pipeline.data.cache import codec, index
from pipeline.data.cache.cache import Cache, Unit, WorkPlan
from pipeline.data.cache.recipes import Recipe
from pipeline.data.encoding import estimate, unit_records
from pipeline.data.encoding.encoder_settings import EncoderSettings
from pipeline.data.signals import CaptionSignal, Comparison, PictureSignal, Signal
from pipeline.data.sources.reject_kinds import kind
from pipeline.data.sources.source import Source
from pipeline.data.work.disk_space import DiskSpace
from pipeline.data.work.engine import is_done
from pipeline.data.work.progress import Meter


class UnitEncoder:
    """Makes units (see `work.engine.UnitMaker`).

    Args:
        settings: which encoders, and how they run.
        sources: name -> source; those that units of pictures are read from.
        beside: recipes of the picture records that are made beside others.
        check: compare the encoder with each unit's recipe first (where another machine chose the recipe).

    Attributes:
        meter: counts what the encoders do; a new one may be set between units.
        limits: the batch sizes that fit; its `halved` counts those of the last unit.
    """

    def __init__(
        self,
        settings: EncoderSettings,
        cache: Cache,
        sources: Mapping[str, Source],
        beside: Sequence[Recipe] = (),
        *,
        check: bool = False,
    ):
        self.settings, self.cache, self.sources, self.meter = settings, cache, dict(sources), Meter()
        self._models = settings.models
        self._checks = check
        self._checked: set[str] = set()
        self._encoder: Any = None
        self._name = ""
        self._costs: dict[str, _StorageCosts] = {}
        self._recipes: dict[str, Recipe] = {}
        self.limits = unit_records.Limits()
        self._recipes_beside = beside
        self._plans_beside = dict[tuple[str, int], list[tuple[WorkPlan, dict[tuple[int, int], Unit]]]]()
        self._encoders_beside: dict[str, Any] = {}
        self._comparisons: dict[str, Comparison | None] = {}

    def make(self, plan: WorkPlan, unit: Unit, progress: Callable[[int, int], None]) -> index.Commit:
        """Encode and commit one unit. `progress` as in `unit_records.write_unit`."""
        recipe = self._recipe(plan.recipe)
        costs = self._costs.get(recipe.name)
        if costs is None:  # the first unit of this recipe here
            costs = self._costs[recipe.name] = _StorageCosts(recipe)
        rows = self.cache.unit_rows(plan, unit)
        self.limits.halved = 0
        with ExitStack() as stack:
            beside = [stack.enter_context(each) for each in self._units_beside(plan, unit, rows)]
            batches = self._batches(recipe, unit, rows, None, beside)
            provenance = recipe.provenance(self._models)
            if mode := getattr(self._encoder, "mode", None):
                provenance[f"{recipe.kind}_mode"] = mode
            commit = unit_records.write_unit(
                self.cache, recipe, plan, unit, batches, progress, provenance, costs.measured, self.limits
            )
            for each in beside:
                extra = each.commit(unit_records.provenance())
                self.meter.beside[each.recipe.kind] += extra.records
                self.meter.bytes += extra.bytes
        costs.log()
        self.meter.bytes += commit.bytes
        self.meter.rejects.update(kind(reject.item, reject.reason) for reject in commit.rejects)
        comparison = self._comparisons.get(recipe.name)
        if comparison is not None and comparison.ready:
            self._name, self._encoder = "", None  # one encoder at a time
            self._comparisons[recipe.name] = None
            click.echo(comparison.line(device(self.settings.encode.device)))
        return commit

    def _pairs(self, plan: WorkPlan, unit: Unit) -> Iterator[tuple[WorkPlan, Unit]]:
        """The units that are made with a unit and that are not made yet."""
        of = plan.recipe, plan.number
        if of not in self._plans_beside:
            every = (
                each for recipe in self._recipes_beside for each in self.cache.plans(recipe.name) if each.beside == of
            )
            self._plans_beside[of] = [(each, {(u.start, u.count): u for u in each.units}) for each in every]
        for each, units in self._plans_beside[of]:
            other = units.get((unit.start, unit.count))
            if other is not None and not is_done(self.cache, each, other):
                yield each, other

    def _units_beside(self, plan: WorkPlan, unit: Unit, rows: pa.Table) -> Iterator[unit_records.UnitBeside]:
        """Makers of `_pairs`. rows: the unit's."""
        for each, other in self._pairs(plan, unit):
            recipe, own = self._recipe(each.recipe), self.cache.unit_rows(each, other)
            if own.drop(["key"]) != rows.drop(["key"]):  # the plan that it was beside was lost: another has its number
                continue
            if recipe.kind not in self._encoders_beside:
                self._encoders_beside[recipe.kind] = self._load(recipe)
            encoder = self._encoders_beside[recipe.kind]
            yield unit_records.UnitBeside(self.cache, recipe, each, other, own, rows, encoder)

    def remake(
        self, plan: WorkPlan, unit: Unit, commit: index.Commit, only: Container[bytes], rows: pa.Table
    ) -> Iterable[unit_records.Made]:
        """Encode again those batches of a committed unit that hold one of the keys, in the mode of its provenance.

        Loads no encoder if there is no such batch.

        Args:
            rows: the unit's.
        """
        recipe = self._recipe(plan.recipe)
        if not any(key in only for key in rows.column("key").to_pylist()):
            return []
        if (mode := commit.provenance.get(f"{recipe.kind}_mode")) is not None:
            self._loaded(recipe).mode = mode
        batches = self._batches(recipe, unit, rows, only)
        self.limits.halved = 0
        return batches

    def disk_space(self, sleep: Callable[[float], None] = time.sleep) -> DiskSpace:
        """The space for units of this cache. `sleep` as in `DiskSpace`."""

        def unit_bytes(plan: WorkPlan, unit: Unit) -> int:
            pairs = [(plan, unit), *self._pairs(plan, unit)]
            return sum(estimate.unit_bytes(self.cache, *pair) for pair in pairs)

        return DiskSpace(self.cache, unit_bytes, sleep)

    def _batches(
        self,
        recipe: Signal,
        unit: Unit,
        rows: pa.Table,
        only: Container[bytes] | None,
        beside: Sequence[unit_records.UnitBeside] = (),
    ) -> Iterable[unit_records.Made]:
        """The encoded batches of a unit."""
        encoder = self._loaded(recipe)
        if isinstance(recipe, CaptionSignal):
            metered: Any = _Metered(encoder, self.meter)
            return unit_records.caption_records(recipe, unit, rows, metered, only=only, limits=self.limits)
        assert isinstance(recipe, PictureSignal)
        if recipe.name not in self._comparisons:
            self._comparisons[recipe.name] = recipe.comparison(self._models)
        return unit_records.image_records(
            recipe,
            unit,
            rows,
            self.sources,
            _Metered(encoder, self.meter, self._comparisons[recipe.name]),
            beside=beside,
            max_pixels=self.settings.max_pixels,
            workers=self.settings.encode.workers,
            only=only,
            limits=self.limits,
        )

    def _recipe(self, name: str) -> Any:
        if name not in self._recipes:
            self._recipes[name] = self.cache.recipe(name)
        return self._recipes[name]

    def _loaded(self, recipe: Any) -> Any:
        """The encoder of the units of a recipe."""
        if self._name != recipe.name:
            self._name, self._encoder = "", None  # before the other encoder is read
            self._name, self._encoder = recipe.name, self._load(recipe)
        return self._encoder

    def _load(self, recipe: Any) -> Any:
        """Load an encoder.

        Raises:
            CacheError: the configured model gives other values than the recipe says.
        """
        if self._checks and recipe.name not in self._checked:
            if differences := recipe.unlike(recipe.model(self._models)):
                raise CacheError(
                    f"the {recipe.section} model of this machine is not the one that made this cache (cache | here)",
                    found="; ".join(differences),
                    fix=f"give every machine the same {recipe.section} model",
                )
            self._checked.add(recipe.name)
        return recipe.encoder(self._models, device(self.settings.encode.device))


def device(name: str, log: Callable[[str], None] | None = None) -> Any:
    """Return the torch device of this process, set up for exact fp32.

    Several processes of a node take its GPUs in turn (one may serve two).

    Args:
        name: `encode.device`. log: as of `launch.resolve_device`.
    """
    launch.set_tf32(False)
    here = launch.detect()
    if name in ("auto", "cuda") and here.local_world > 1:
        count = launch.gpus().count
        name = f"cuda:{here.local_rank % count}" if count else name
    return launch.resolve_device(name, option="encode.device", log=log)


class _Metered:
    """An encoder whose time and captions are counted."""

    def __init__(self, encoder: Any, meter: Meter, comparison: Comparison | None = None):
        self._encoder, self._meter, self._comparison = encoder, meter, comparison

    def encode(self, batch: Any) -> Any:
        before = self._counts()
        with self._meter.computing():
            outputs = self._encoder.encode(batch)
        tokens, truncated, unshared = (now - then for now, then in zip(self._counts(), before, strict=True))
        self._meter.add(Meter(tokens, truncated, unshared))
        if self._comparison is not None:
            self._comparison.add(batch, outputs)
        return outputs

    def null(self) -> Any:
        with self._meter.computing():
            return self._encoder.null()

    def _counts(self) -> tuple[int, ...]:
        return tuple(getattr(self._encoder, name, 0) for name in ("tokens", "truncated", "unshared"))


class _StorageCosts:
    """Prints once, after the first unit with records, what a storage other than plain bf16 saves and costs."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.measured = None if recipe.storage == codec.PLAIN else codec.Measured()

    def log(self) -> None:
        if self.measured is not None and self.measured.records:
            click.echo(self.measured.line(self.recipe.kind, self.recipe.storage))
            self.measured = None
