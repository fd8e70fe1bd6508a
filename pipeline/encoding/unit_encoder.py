"""Encodes units of plans. Every engine, and `verify --repair`, makes records through `UnitEncoder`.

An encoder is loaded when the first unit asks for it and stays loaded until a unit of the other kind comes; the old
encoder is dropped before the new is read, so that one encoder at a time is in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any

import click
import numpy as np
import pyarrow as pa
import torch

from pipeline import launch
from pipeline.cache import codec, index
from pipeline.cache.recipes import Recipe
from pipeline.cache.root import Cache, Unit, WorkPlan
from pipeline.config import Config, VaeConfig
from pipeline.encoding import estimate, unit_records
from pipeline.encoding.scan import reopen
from pipeline.errors import CacheError, is_out_of_memory
from pipeline.models import encoders
from pipeline.models.frozen import from_bits, provenance_of
from pipeline.models.text import TextEncoder, describe_text
from pipeline.signals.latent import LatentRecipe
from pipeline.signals.text import TextRecipe
from pipeline.sources import caption_rules
from pipeline.sources.reasons import kind
from pipeline.sources.source import Source
from pipeline.work.disk_space import DiskSpace
from pipeline.work.progress import Meter


class UnitEncoder:
    """Makes units (see `pipeline.work.engine.UnitMaker`) with the encoders that a configuration names.

    Args:
        sources: name -> source; those that image units read.
        check: compare the encoder with each unit's recipe first (where another machine chose the recipe).

    Attributes:
        meter: counts what the encoders do; may be set to a new meter between units.
        limits: the batch sizes that fit; its `halved` counts those of the last unit.
    """

    def __init__(self, config: Config, cache: Cache, sources: Mapping[str, Source], *, check: bool = False):
        self.config, self.cache, self.sources, self.meter = config, cache, dict(sources), Meter()
        self._checks = check
        self._checked: set[str] = set()
        self._encoder: Any = None
        self._kind = ""
        self._costs: dict[str, _StorageCosts] = {}
        self._recipes: dict[str, Recipe] = {}
        self.limits = unit_records.Limits()
        self._numerics = None if encoders.is_exact(config.vae) else _Numerics(config.vae)

    def make(self, plan: WorkPlan, unit: Unit, progress: Callable[[int, int], None]) -> index.Commit:
        """Encode and commit one unit. `progress` as in `unit_records.write_unit`."""
        recipe = self._recipe(plan.recipe)
        costs = self._costs.get(recipe.name)
        if costs is None:  # the first unit of this recipe here
            costs = self._costs[recipe.name] = _StorageCosts(recipe)
        batches = self._batches(recipe, unit, self.cache.unit_rows(plan, unit), None)
        self.limits.halved = 0
        provenance = provenance_of(self.config.text if recipe.kind == "text" else self.config.vae)
        if recipe.kind == "text":
            provenance["text_mode"] = self._encoder.mode
        commit = unit_records.write_unit(
            self.cache, recipe, plan, unit, batches, progress, provenance, costs.measured, self.limits
        )
        costs.log()
        self.meter.bytes += commit.bytes
        self.meter.rejects.update(kind(reject.item, reject.reason) for reject in commit.rejects)
        if self._numerics is not None and self._numerics.pictures is not None:
            self._kind, self._encoder = "", None  # one encoder at a time
            self._numerics.log(lambda vae: encoders.LatentEncoder.load(vae, device(self.config)))
            self._numerics = None
        return commit

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
        if isinstance(recipe, TextRecipe):
            self._text_encoder(recipe).mode = commit.provenance.get("text_mode", self.config.text.mode)
        batches = self._batches(recipe, unit, rows, only)
        self.limits.halved = 0
        return batches

    def disk_space(self, sleep: Callable[[float], None] = time.sleep) -> DiskSpace:
        """The space for units of this cache. `sleep` as in `DiskSpace`."""
        return DiskSpace(self.cache, self.config.encode, partial(estimate.unit_bytes, self.cache), sleep)

    def _batches(
        self, recipe: Recipe, unit: Unit, rows: pa.Table, only: Container[bytes] | None
    ) -> Iterable[unit_records.Made]:
        """The encoded batches of a unit."""
        if isinstance(recipe, TextRecipe):
            text_encoder = _Metered(self._text_encoder(recipe), self.meter)
            return unit_records.caption_records(recipe, unit, rows, text_encoder, only=only, limits=self.limits)
        assert isinstance(recipe, LatentRecipe)
        return unit_records.image_records(
            recipe,
            unit,
            rows,
            self.sources,
            _Metered(self._latent_encoder(recipe), self.meter, self._numerics),
            max_pixels=self.config.data.max_pixels,
            workers=self.config.encode.workers,
            only=only,
            max_bytes=self.config.data.max_bytes,
            limits=self.limits,
        )

    def _recipe(self, name: str) -> Recipe:
        if name not in self._recipes:
            self._recipes[name] = self.cache.recipe(name)
        return self._recipes[name]

    def _latent_encoder(self, recipe: LatentRecipe) -> encoders.LatentEncoder:
        config = self.config
        self._check(recipe, lambda: encoders.describe_vae(config.vae), "vae")
        return self._loaded(recipe, lambda: encoders.LatentEncoder.load(config.vae, device(config)))

    def _text_encoder(self, recipe: TextRecipe) -> TextEncoder:
        config, instruction = self.config, caption_rules.instruction(self.config.text)
        self._check(recipe, lambda: describe_text(config.text, instruction), "text")
        return self._loaded(recipe, lambda: TextEncoder.load(config.text, instruction, device(config)))

    def _loaded(self, recipe: Recipe, load: Callable[[], Any]) -> Any:
        if self._kind != recipe.kind:
            self._kind, self._encoder = "", None  # before the other encoder is read
            self._kind, self._encoder = recipe.kind, load()
        return self._encoder

    def _check(self, recipe: Recipe, describe: Callable[[], dict[str, Any]], section: str) -> None:
        """CacheError unless the configured encoder gives the values of the recipe. Each recipe is checked once."""
        if not self._checks or recipe.name in self._checked:
            return
        if differences := recipe.unlike(describe()):
            raise CacheError(
                f"this machine's {section} is not the one that this cache's recipe names (recipe | here)",
                found="; ".join(differences),
                fix=f"give every machine the same {section} model",
            )
        self._checked.add(recipe.name)


def build(config_json: str, source_names: tuple[str, ...]) -> UnitEncoder:
    """The encoder of a Ray worker process. The sources are not listed again: their items are known from the scan."""
    launch.prefer_expandable_segments()
    config = Config.model_validate_json(config_json)
    cache = Cache.of(config)
    sources = {name: reopen(cache, name, config.data) for name in source_names}
    return UnitEncoder(config, cache, sources, check=True)


def device(config: Config) -> Any:
    """The torch device of this process, set up for exact fp32. Several processes of a node take its GPUs in turn (one
    may serve two)."""
    launch.set_tf32(False)
    name = config.encode.device
    here = launch.detect()
    if name in ("auto", "cuda") and here.local_world > 1:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        name = f"cuda:{here.local_rank % count}" if count else name
    return launch.resolve_device(name)


class _Metered:
    """An encoder whose time and captions are counted."""

    def __init__(self, encoder: Any, meter: Meter, numerics: _Numerics | None = None):
        self._encoder, self._meter, self._numerics = encoder, meter, numerics

    def encode(self, batch: Any) -> Any:
        before = self._counts()
        with self._meter.computing():
            outputs = self._encoder.encode(batch)
        tokens, truncated, unshared = (now - then for now, then in zip(self._counts(), before, strict=True))
        self._meter.add(Meter(tokens, truncated, unshared))
        if self._numerics is not None:
            self._numerics.add(batch, outputs)
        return outputs

    def null(self) -> Any:
        with self._meter.computing():
            return self._encoder.null()

    def _counts(self) -> tuple[int, ...]:
        return tuple(getattr(self._encoder, name, 0) for name in ("tokens", "truncated", "unshared"))


class _Numerics:
    """Prints once, after the first unit with latents, how far they are from those of the exact encoder.

    Attributes:
        pictures: the first few of this run, uint8 (n, H, W, 3).
    """

    MOST = 4

    def __init__(self, vae: VaeConfig):
        self._vae, self._latents = vae, np.zeros(0, np.uint16)
        self.pictures: np.ndarray | None = None

    def add(self, pictures: Any, latents: Any) -> None:
        if self.pictures is None and len(latents):
            self.pictures = np.stack(list(pictures[: self.MOST]))
            self._latents = np.stack(list(latents[: self.MOST]))

    def log(self, load: Callable[[VaeConfig], encoders.LatentEncoder]) -> None:
        assert self.pictures is not None
        chosen = [self._vae.dtype, *(name for name in ("tf32", "channels_last") if getattr(self._vae, name))]
        try:
            exact = load(encoders.exact(self._vae))
            wanted = np.concatenate([exact.encode(picture[None]) for picture in self.pictures])
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            click.echo(f"vae in {', '.join(chosen)}: not compared with fp32, for which the memory does not suffice")
            return
        ours, theirs = (from_bits(bits).double().flatten(1) for bits in (self._latents, wanted))
        errors = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
        click.echo(
            f"vae in {', '.join(chosen)}: the latents of {len(errors)} pictures differ from those in fp32 by "
            f"{100 * float(errors.mean()):.2f} % (relative L2; the worst by {100 * float(errors.max()):.2f} %)"
        )


class _StorageCosts:
    """Prints once, after the first unit with records, what a storage other than plain bf16 saves and costs."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.storage = recipe, codec.storage_of(recipe)
        self.measured = None if self.storage == codec.PLAIN else codec.Measured()

    def log(self) -> None:
        if self.measured is not None and self.measured.records:
            click.echo(self.measured.line(self.recipe.kind, self.storage))
            self.measured = None
