"""The fastest way to run a configuration on a machine, and what helps where nothing fits.

`Search.choose` varies what does not change the result: checkpointing, the microbatch, the data-parallel layout, when
gradients are reduced (over several processes where nothing else fits) and, where nothing else fits, offload.
`Search.cures` names settings under which a configuration fits; those of `remedies.LADDER` cost more than time, so they
are proposed and never taken.
Each candidate is a whole trace, seconds of CPU time for Sana 1.6B; a search takes five to 20: less recomputation, more
replicas and larger microbatches need more memory, so what needs more than something that does not fit is not traced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from sana_pipe.base.amounts import figure
from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.tools.planning import predict as predicting
from sana_pipe.tools.planning.cost import Time
from sana_pipe.tools.planning.predict import Data, Machine, Prediction
from sana_pipe.tools.planning.recorder import BUFFERS, GRADIENTS, LASTING
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.spec import ModelSpec
from sana_pipe.train.parallel.data_parallel import is_managed
from sana_pipe.train.parallel.mesh import Layout, check_sizes
from sana_pipe.train.training.remedies import LADDER, OFFLOAD, accepted, changed, flags

AXES = frozenset(("parallel", "offload", "microbatch", "reduce", "activation_checkpointing"))
"""The options that can be varied. parallel: the data-parallel layout. offload: of the parameters, where nothing fits
without. reduce: gradients after each microbatch; over several processes where no microbatch fits without."""
MARGIN = 0.1
"""Share of a GPU's memory that is left free, in addition to the estimates of context and fragmentation."""
CHECKPOINTING = ("full", "selective", "none")
"""The most frugal first."""


@dataclass(frozen=True)
class Candidate:
    """A way to run the configuration on a machine."""

    train: TrainConfig
    prediction: Prediction
    time: Time

    @property
    def changes(self) -> dict[str, Any]:
        """The options that the search decides, as names below `train`."""
        names = ("pp_size", "dp_replicate", "dp_shard", "tp_size")
        sizes = self.prediction.layout.sizes
        return {
            **{f"parallel.{name}": size for name, size in zip(names, sizes, strict=True)},
            "parallel.offload": self.train.parallel.offload,
            "parallel.reduce_each_microbatch": self.train.parallel.reduce_each_microbatch,
            "activation_checkpointing": self.train.activation_checkpointing,
            "microbatch": self.train.microbatch,
        }


class NothingFitsError(UserError):
    """Nothing that was considered fits into the memory.

    Attributes:
        smallest: what needs least.
    """

    smallest: Candidate


class Search:
    """Candidates for a model and its data on a machine. Each is traced once.

    Args:
        supports: whether the weights work in a precision.
    """

    def __init__(
        self,
        shape: ModelSpec,
        data: Data,
        machine: Machine,
        supports: Callable[[str], bool] = lambda precision: True,
    ):
        self.shape, self.data, self.machine, self.supports = shape, data, machine, supports
        self._made: dict[tuple[str, Layout], Candidate] = {}

    def choose(self, train: TrainConfig, axes: Collection[str]) -> Candidate:
        """The fastest that leaves `MARGIN` of the memory free; if none does, what needs least, if it fits.

        Raises:
            NothingFitsError: with `cures`.
            ConfigError: the configuration is refused whatever the values of `axes` are.
        """
        try:
            return self._best(train, axes)
        except NothingFitsError as error:
            raise self.refusal(train, error.smallest) from None

    def _best(self, train: TrainConfig, axes: Collection[str]) -> Candidate:
        try:
            return self.ranked(train, axes, 1 - MARGIN)[0]
        except NothingFitsError as error:
            if error.smallest.prediction.fits:
                return error.smallest
            raise

    def refusal(self, train: TrainConfig, smallest: Candidate) -> NothingFitsError:
        """The error for a configuration of which `smallest` is the most frugal."""
        machine, cures = self.machine, self.cures(train, smallest)
        error = NothingFitsError(
            f"the configuration does not fit into {machine.gpus} x {machine.memory / 2**30:.1f} GiB",
            expected=f"at least {smallest.prediction.total / 2**30:.1f} GiB each"
            + (" in the most frugal case that was considered" if train.undecided else ""),
            fix="one of these, each of which fits as predicted:\n    " + "\n    ".join(cures)
            if cures
            else "more GPUs, or GPUs with more memory: no setting that was tried helps enough",
        )
        error.smallest = smallest
        return error

    def ranked(self, train: TrainConfig, axes: Collection[str] = AXES, share: float = 1.0) -> list[Candidate]:
        """Return what fits into a share of the memory, the fastest first: of each layout and checkpointing the largest
        microbatch.

        Raises:
            NothingFitsError: with what needs least.
            ConfigError: see `choose`.
        """
        train, limit = with_placeholders(predicting.uncompiled(train)), self.machine.memory * share
        on_gpu, given = self.machine.card.is_gpu, train.parallel.offload
        found: list[Candidate] = []
        seen: list[Candidate] = []
        for offload in ("none", "all") if "offload" in axes and on_gpu else (given,):
            for layout in self._layouts(train, axes):
                fitting = self._of_layout(changed(train, sizes_of(layout, offload)), layout, axes, limit, seen)
                if not fitting and seen:
                    break  # replicas need more
                found += fitting
            if found:
                break
        if not seen:
            predicting.check(train, self.shape, self.data, self.machine.gpus)  # says what is wrong with the sizes
            raise ConfigError("no microbatch fits these sizes of train.parallel", fix="--set train.parallel=auto")
        if not found:
            error = NothingFitsError("nothing fits")
            error.smallest = min(seen, key=lambda candidate: candidate.prediction.total)
            raise error
        return sorted(found, key=lambda candidate: (candidate.time.step, candidate.prediction.total))

    def _layouts(self, train: TrainConfig, axes: Collection[str]) -> list[Layout]:
        """The layouts that the batch allows, the one with the most shards first."""
        given, gpus = train.parallel, self.machine.gpus
        if "parallel" not in axes:
            return [check_sizes(given, gpus)]
        others = given.tp_size * given.pp_size
        data = gpus // others
        per_node = max(1, self.machine.per_node // given.tp_size)
        sizes = sorted({data, min(data, per_node), 1}, reverse=True)
        layouts = [
            Layout(given.pp_size, data // shards, shards, given.tp_size)
            for shards in sizes
            if data % shards == 0 and data * others == gpus
        ]
        return [each for each in layouts if not any(b % each.data_world for b in self.data.buckets.values())]

    def _of_layout(
        self, train: TrainConfig, layout: Layout, axes: Collection[str], limit: float, seen: list[Candidate]
    ) -> list[Candidate]:
        """Return what fits, of each checkpointing; adds all that was traced to `seen`."""
        kinds = CHECKPOINTING if "activation_checkpointing" in axes else (train.activation_checkpointing,)
        variants = []
        for kind in kinds:
            with_kind = accepted(train, {"activation_checkpointing": kind})
            if with_kind is not None and (sizes := self._microbatches(with_kind, layout, axes)):
                variants.append((with_kind, sizes))

        def at(each: TrainConfig, size: int) -> Candidate:
            seen.append(self.candidate(changed(each, {"microbatch": size}), layout))
            return seen[-1]

        if len(variants) > 1 and at(variants[0][0], variants[0][1][-1]).prediction.total <= limit:
            fastest, sizes = variants[-1]
            if (at_once := at(fastest, sizes[0])).prediction.total <= limit:
                return [at_once]
        found, most = list[Candidate](), max(self.data.shares(layout.data_world).values())
        keeps, reduce = is_managed(train, layout.data_world), bool(train.parallel.reduce_each_microbatch)
        may = keeps and "reduce" in axes
        for each, sizes in variants:
            largest = None if reduce else _largest(partial(at, each), sizes, limit, keeps)
            fitting = [] if largest is None else [largest]
            # alone it sends nothing, so that larger microbatches may be faster with it
            if reduce or (may and (layout.world == 1 or largest is None)):
                least = 0 if largest is None else largest.train.microbatch
                several = [
                    size for size in sizes if least < size and (size < most or train.parallel.reduce_each_microbatch)
                ]
                reducing = accepted(each, {"parallel.reduce_each_microbatch": True})  # None: in a pipeline
                if reducing is not None and several:
                    frugal = _largest(partial(at, reducing), several, limit, False)
                    fitting += [] if frugal is None else [frugal]
                    reduce |= largest is None
            if not fitting:
                break  # less recomputation needs more
            found += fitting
            keeps = largest is not None and largest.train.microbatch == most  # else the whole batch fits nowhere below
        return found

    def _microbatches(self, train: TrainConfig, layout: Layout, axes: Collection[str]) -> list[int]:
        """Sizes of nearly equal microbatches that `train` accepts, the largest first."""
        most = max(self.data.shares(layout.data_world).values())
        sizes = {-(-most // count) for count in range(1, most + 1)} if "microbatch" in axes else {train.microbatch}
        return [size for size in sorted(sizes, reverse=True) if self._runs(changed(train, {"microbatch": size}))]

    def _runs(self, train: TrainConfig) -> bool:
        try:
            predicting.check(train, self.shape, self.data, self.machine.gpus)
        except ConfigError:
            return False
        return True

    def candidate(self, train: TrainConfig, layout: Layout) -> Candidate:
        """One configuration, traced whole."""
        tree = predicting.uncompiled(train).model_dump(mode="json")
        tree["parallel"] |= {"sizes": None, "dp_replicate": None, "dp_shard": None}  # of the layout
        key = json.dumps(tree), layout
        if key not in self._made:
            prediction = predicting.predict(train, self.shape, self.data, self.machine, layout=layout)
            self._made[key] = Candidate(train, prediction, Time.of(prediction, self.data))
        return self._made[key]

    # ------------------------------------------------------------------------------------------------------ what helps

    def cures(self, train: TrainConfig, smallest: Candidate) -> list[str]:
        """Settings with which it fits, as `--set` lines, each checked by a trace: what costs time alone, else rungs of
        `LADDER`, several together where one is not enough, the cheapest first.

        Args:
            smallest: the most frugal of the configuration that was traced.
        """
        if self.machine.memory <= predicting.CONTEXT:
            return []
        try:
            best = self._best(train, AXES - {"offload"})
        except NothingFitsError as error:
            return self._rungs(train, smallest, min(smallest, error.smallest, key=lambda each: each.prediction.total))
        return [
            f"{flags(_given(train, smallest, best))}   (the same result, {figure(best.time.images_per_s)} images/s)"
        ]

    def _rungs(self, train: TrainConfig, smallest: Candidate, least: Candidate) -> list[str]:
        """least: the most frugal with the same result."""
        taken, reasons, base, lines = dict[str, Any](), list[str](), least, list[str]()
        while not lines:
            tried = [
                (candidate, change, why)
                for change, why in LADDER
                if not change.keys() & taken.keys()
                and (candidate := self._rung(base, change)) is not None
                and candidate.prediction.total < base.prediction.total
            ]
            lines = [
                f"{flags({**_given(train, smallest, candidate), **taken, **change})}   ({'; '.join([*reasons, why])})"
                for candidate, change, why in tried
                if candidate.prediction.fits
            ]
            if not tried:
                break
            base, change, why = min(tried, key=lambda each: each[0].prediction.total)
            taken, reasons = {**taken, **change}, [*reasons, why]
        change, why = OFFLOAD
        offloaded = self._rung(least, change) if self.machine.card.is_gpu else None
        if offloaded is not None and offloaded.prediction.fits:
            lines.append(f"{flags({**_given(train, smallest, offloaded), **change})}   ({why})")
        return lines

    def _rung(self, base: Candidate, change: dict[str, Any]) -> Candidate | None:
        """A candidate with a change; None: it changes nothing, or `train` would refuse it."""
        train, layout = accepted(base.train, change), base.prediction.layout
        if train is None or train == base.train or not self.supports(train.precision):
            return None
        if not self._runs(train):  # such as an update in the backward pass, which needs the whole share at once
            train = changed(train, {"microbatch": max(self.data.shares(layout.data_world).values())})
        try:
            return self.candidate(train, layout) if self._runs(train) else None
        except UserError:  # torchao is missing
            return None


def _given(train: TrainConfig, before: Candidate, after: Candidate) -> dict[str, Any]:
    """The options that the search decides and that `train` must be given to become `after`; a start decides what is
    `auto`, and on the reduction where nothing says."""
    undecided, each = {*train.undecided}, "parallel.reduce_each_microbatch"
    open_too = (
        {each} if train.parallel.reduce_each_microbatch is None and undecided & {"parallel", "microbatch"} else ()
    )
    return {
        name: value
        for name, value in after.changes.items()
        if value != before.changes[name] and name.partition(".")[0] not in undecided and name not in open_too
    }


def _largest(at: Callable[[int], Candidate], sizes: list[int], limit: float, keeps: bool) -> Candidate | None:
    """Return the choice with the largest microbatch that fits.

    Args:
        sizes: the largest first. keeps: several microbatches keep a whole gradient, so one may need less.
    """
    one = at(sizes[-1])
    if len(sizes) == 1 or (one.prediction.total > limit and not keeps):
        return one if one.prediction.total <= limit else None
    whole = at(sizes[0])
    if whole.prediction.total <= limit:
        return whole
    if one.prediction.total > limit:
        return None
    lasting = (*LASTING, GRADIENTS, BUFFERS, "context")
    brief = sum(size for kind, size in whole.prediction.kinds.items() if kind not in lasting)
    most = sizes[-1] + (limit - one.prediction.total) / (brief / sizes[0])
    for size in sizes[1:-1]:
        if size <= most and (candidate := at(size)).prediction.total <= limit:
            return candidate
    return one


# ------------------------------------------------------------------------------------------------------- configurations


def with_placeholders(train: TrainConfig) -> TrainConfig:
    """Return the options with plain values for what is `auto`."""
    values = {
        "parallel": train.parallel.model_copy(update={"sizes": "given"}),
        "microbatch": 1,
        "activation_checkpointing": "full",
    }
    return train.model_copy(update={name: values[name] for name in train.undecided})


def sizes_of(layout: Layout, offload: str) -> dict[str, Any]:
    """The options of a data-parallel layout."""
    return {
        "parallel.dp_replicate": layout.dp_replicate,
        "parallel.dp_shard": layout.dp_shard,
        "parallel.offload": offload,
    }
