"""Encodes units of plans. Every engine, and `verify --repair`, makes records through `UnitEncoder`.

An encoder is loaded when the first unit asks for it and stays loaded until a unit of another kind comes; the old
encoder is dropped before the new is read, so that one encoder at a time is in memory. What makes records with those
of a unit, from the same pixels (see `encoding.plan.plan_following`), stays loaded with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import click
import pyarrow as pa

from sana_pipe.base import launch
from sana_pipe.base.errors import CacheError
from sana_pipe.data.cache import codec, index
from sana_pipe.data.cache.cache import Cache, Unit, WorkList
from sana_pipe.data.cache.encodings import Encoding
from sana_pipe.data.encoding import estimate, unit_records
from sana_pipe.data.encoding.encoder_settings import EncoderSettings
from sana_pipe.data.signals import CaptionSignal, Comparison, PictureSignal, Signal
from sana_pipe.data.sources.reject_kinds import kind
from sana_pipe.data.sources.source import Source
from sana_pipe.data.work.disk_space import DiskSpace
from sana_pipe.data.work.engine import is_done
from sana_pipe.data.work.progress import Meter


class UnitEncoder:
    """Makes units (see `work.engine.UnitMaker`).

    Args:
        settings: which encoders, and how they run.
        sources: name -> source; those that units of pictures are read from.
        following: encodings of the picture records that are made with others, from the same pixels.
        check: compare the encoder with each unit's encoding first (where another machine chose the encoding).

    Attributes:
        meter: counts what the encoders do; a new one may be set between units.
        limits: the batch sizes that fit; its `halved` counts those of the last unit.
    """

    def __init__(
        self,
        settings: EncoderSettings,
        cache: Cache,
        sources: Mapping[str, Source],
        following: Sequence[Encoding] = (),
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
        self._encodings: dict[str, Encoding] = {}
        self.limits = unit_records.Limits()
        self._following = following
        self._following_plans = dict[tuple[str, int], list[tuple[WorkList, dict[tuple[int, int], Unit]]]]()
        self._following_encoders: dict[str, Any] = {}
        self._comparisons: dict[str, Comparison | None] = {}

    def make(self, plan: WorkList, unit: Unit, progress: Callable[[int, int], None]) -> index.Commit:
        """Encode and commit one unit. `progress` as in `unit_records.write_unit`."""
        encoding = self._encoding(plan.encoding)
        costs = self._costs.get(encoding.name)
        if costs is None:  # the first unit of this encoding here
            costs = self._costs[encoding.name] = _StorageCosts(encoding)
        rows = self.cache.unit_rows(plan, unit)
        self.limits.halved = 0
        with ExitStack() as stack:
            following = [stack.enter_context(each) for each in self._following_units(plan, unit, rows)]
            batches = self._batches(encoding, unit, rows, None, following)
            provenance = encoding.provenance(self._models)
            if mode := getattr(self._encoder, "mode", None):
                provenance[f"{encoding.kind}_mode"] = mode
            commit = unit_records.write_unit(
                self.cache, encoding, plan, unit, batches, progress, provenance, costs.measured, self.limits
            )
            for each in following:
                extra = each.commit(unit_records.provenance())
                self.meter.following[each.encoding.kind] += extra.records
                self.meter.bytes += extra.bytes
        costs.log()
        self.meter.bytes += commit.bytes
        self.meter.rejects.update(kind(reject.item, reject.reason) for reject in commit.rejects)
        comparison = self._comparisons.get(encoding.name)
        if comparison is not None and comparison.ready:
            self._name, self._encoder = "", None  # one encoder at a time
            self._comparisons[encoding.name] = None
            click.echo(comparison.line(device(self.settings.encode.device)))
        return commit

    def _pairs(self, plan: WorkList, unit: Unit) -> Iterator[tuple[WorkList, Unit]]:
        """The units that are made with a unit and that are not made yet."""
        of = plan.encoding, plan.number
        if of not in self._following_plans:
            every = (
                each for encoding in self._following for each in self.cache.plans(encoding.name) if each.lead == of
            )
            self._following_plans[of] = [(each, {(u.start, u.count): u for u in each.units}) for each in every]
        for each, units in self._following_plans[of]:
            other = units.get((unit.start, unit.count))
            if other is not None and not is_done(self.cache, each, other):
                yield each, other

    def _following_units(self, plan: WorkList, unit: Unit, rows: pa.Table) -> Iterator[unit_records.FollowingUnit]:
        """Makers of `_pairs`. rows: the unit's."""
        for each, other in self._pairs(plan, unit):
            encoding, own = self._encoding(each.encoding), self.cache.unit_rows(each, other)
            if own.drop(["key"]) != rows.drop(["key"]):  # the plan that it follows was lost: another has its number
                continue
            if encoding.kind not in self._following_encoders:
                self._following_encoders[encoding.kind] = self._load(encoding)
            encoder = self._following_encoders[encoding.kind]
            yield unit_records.FollowingUnit(self.cache, encoding, each, other, own, rows, encoder)

    def remake(
        self, plan: WorkList, unit: Unit, commit: index.Commit, only: Container[bytes], rows: pa.Table
    ) -> Iterable[unit_records.Made]:
        """Encode again those batches of a committed unit that hold one of the keys, in the mode of its provenance.

        Loads no encoder if there is no such batch.

        Args:
            rows: the unit's.
        """
        encoding = self._encoding(plan.encoding)
        if not any(key in only for key in rows.column("key").to_pylist()):
            return []
        if (mode := commit.provenance.get(f"{encoding.kind}_mode")) is not None:
            self._loaded(encoding).mode = mode
        batches = self._batches(encoding, unit, rows, only)
        self.limits.halved = 0
        return batches

    def disk_space(self, sleep: Callable[[float], None] = time.sleep) -> DiskSpace:
        """The space for units of this cache. `sleep` as in `DiskSpace`."""

        def unit_bytes(plan: WorkList, unit: Unit) -> int:
            pairs = [(plan, unit), *self._pairs(plan, unit)]
            return sum(estimate.unit_bytes(self.cache, *pair) for pair in pairs)

        return DiskSpace(self.cache, unit_bytes, sleep)

    def _batches(
        self,
        encoding: Signal,
        unit: Unit,
        rows: pa.Table,
        only: Container[bytes] | None,
        following: Sequence[unit_records.FollowingUnit] = (),
    ) -> Iterable[unit_records.Made]:
        """The encoded batches of a unit."""
        encoder = self._loaded(encoding)
        if isinstance(encoding, CaptionSignal):
            metered: Any = _Metered(encoder, self.meter)
            return unit_records.caption_records(encoding, unit, rows, metered, only=only, limits=self.limits)
        assert isinstance(encoding, PictureSignal)
        if encoding.name not in self._comparisons:
            self._comparisons[encoding.name] = encoding.comparison(self._models)
        return unit_records.image_records(
            encoding,
            unit,
            rows,
            self.sources,
            _Metered(encoder, self.meter, self._comparisons[encoding.name]),
            following=following,
            max_pixels=self.settings.max_pixels,
            workers=self.settings.encode.workers,
            only=only,
            limits=self.limits,
        )

    def _encoding(self, name: str) -> Any:
        if name not in self._encodings:
            self._encodings[name] = self.cache.encoding(name)
        return self._encodings[name]

    def _loaded(self, encoding: Any) -> Any:
        """The encoder of the units of an encoding."""
        if self._name != encoding.name:
            self._name, self._encoder = "", None  # before the other encoder is read
            self._name, self._encoder = encoding.name, self._load(encoding)
        return self._encoder

    def _load(self, encoding: Any) -> Any:
        """Load an encoder.

        Raises:
            CacheError: the configured model gives other values than the encoding says.
        """
        if self._checks and encoding.name not in self._checked:
            if differences := encoding.unlike(encoding.model(self._models)):
                raise CacheError(
                    f"the {encoding.section} model of this machine is not the one that made this cache (cache | here)",
                    found="; ".join(differences),
                    fix=f"give every machine the same {encoding.section} model",
                )
            self._checked.add(encoding.name)
        return encoding.encoder(self._models, device(self.settings.encode.device))


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

    def __init__(self, encoding: Encoding):
        self.encoding = encoding
        self.measured = None if encoding.storage == codec.PLAIN else codec.Measured()

    def log(self) -> None:
        if self.measured is not None and self.measured.records:
            click.echo(self.measured.line(self.encoding.kind, self.encoding.storage))
            self.measured = None
