"""Decide `train.parallel`, `microbatch`, `activation_checkpointing` and `compile` where they are `auto`.

`decide` searches the first three (`Search.choose`), `decide_compile` decides the last; nothing else gives them values.
A resumed run on as many processes keeps the values of its checkpoint. On a CPU, whose memory is no limit, microbatch
and checkpointing are `FIXED`; for `parallel` it may use half of the main memory, divided by the node's processes. In a
launch the first process decides, for the smallest memory of all (`for_the_smallest`).
Price: up to a minute of CPU time for Sana 1.6B at the first start, by the number of options.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from pydantic import ValidationError

from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.base.gpus import CARDS, CPU, GIB, Card, card, like, memory_of, of_device
from sana_pipe.base.launch import Launch, check_compiler
from sana_pipe.base.options import value_at
from sana_pipe.tools.planning.predict import Machine, least_nodes
from sana_pipe.tools.planning.search import MARGIN, Search
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.parallel.collectives import all_gather_objects, broadcast_from_rank_0
from sana_pipe.train.parallel.config import ParallelConfig
from sana_pipe.train.parallel.mesh import check_sizes, open_mesh
from sana_pipe.train.training.remedies import changed

T = TypeVar("T")
PREDICTION_S = 300
"""Seconds that the other processes wait at least, in addition to the usual ones, for the predictions of the first."""
BARE_CONTEXT = 450 << 20
"""Bytes of a CUDA context before a library is used; an estimate."""
FIXED: dict[str, Any] = {"microbatch": 8, "activation_checkpointing": "full"}
_SIZES = ("dp_replicate", "dp_shard", "tp_size", "pp_size")
_EACH = "parallel.reduce_each_microbatch"
_DECIDED = (*(f"parallel.{name}" for name in (*_SIZES, "offload")), _EACH, "microbatch", "activation_checkpointing")
"""The options that a search decides, as names below `train`."""


@dataclass(frozen=True)
class Begun:
    """The checkpoint that is resumed. train: its options, as a tree. processes: the number that wrote it; None: it does
    not say."""

    train: dict[str, Any]
    processes: int | None = None


def decide(
    train: TrainConfig,
    machine: Machine,
    search: Callable[[], Search],
    begun: Begun | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> tuple[TrainConfig, list[str]]:
    """The options with values for what is `auto` but for `compile`, and lines to print.

    Args:
        search: opens the search of this model, data and machine, where it is needed.
        log: prints a line before a search, which takes up to a minute.

    Raises:
        NothingFitsError: nothing fits.
    """
    undecided = tuple(name for name in train.undecided if name != "compile")
    if not undecided:
        return train, []
    values = as_it_began(train, begun, machine.gpus)
    if values is None and not machine.card.is_gpu:
        fixed = {name: value for name, value in FIXED.items() if name in undecided}
        if fixed:
            train, searched = decide(train.model_copy(update=fixed), machine, search, log=log)
            values_text = ", ".join(f"train.{name}: {value}" for name, value in fixed.items())
            return train, [f"auto: {values_text} (on a CPU)", *searched]
    reason = "as in the checkpoint"
    if values is None:
        log(f"auto: predicting memory and speed, to choose {', '.join(f'train.{name}' for name in undecided)}")
        values, reason = _fastest(search(), train, undecided)
    decided = _with_values(train, undecided, values)
    named = {
        "parallel": str(check_sizes(decided.parallel, machine.gpus)),
        "microbatch": str(decided.microbatch),
        "activation_checkpointing": decided.activation_checkpointing,
    }
    if decided.parallel.offload == "all":
        named["parallel"] += ", offload: all"
    chosen = ", ".join(f"train.{name}: {named[name]}" for name in undecided)
    if decided.parallel.reduce_each_microbatch and not train.parallel.reduce_each_microbatch:
        chosen += ", train.parallel.reduce_each_microbatch: true"
    return decided, [f"auto: {chosen} ({reason})"]


def _fastest(search: Search, train: TrainConfig, undecided: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    """The values of the fastest configuration, and why they were chosen."""
    axes = {*undecided, *(["offload"] if "parallel" in undecided else [])}
    if train.parallel.reduce_each_microbatch is None and axes & {"parallel", "microbatch"}:
        axes.add("reduce")
    best = search.choose(train, axes)
    total, memory = best.prediction.total, search.machine.memory
    free = f"{MARGIN:.0%} and more stay" if total <= (1 - MARGIN) * memory else f"only {1 - total / memory:.1%} stay"
    return best.changes, f"{total / GIB:.1f} of {memory / GIB:.1f} GiB are predicted, {free} free"


def _with_values(train: TrainConfig, undecided: tuple[str, ...], values: dict[str, Any]) -> TrainConfig:
    """values: by the names of `_DECIDED`."""
    chosen = {name: values[name] for name in _DECIDED if name == _EACH or name.partition(".")[0] in undecided}
    if "parallel" in undecided:
        chosen["parallel.sizes"] = "given"
    if (each := train.parallel.reduce_each_microbatch) is not None:
        chosen[_EACH] = each
    try:
        return changed(train, chosen)
    except ValidationError as error:
        raise ConfigError(
            f"the values of the checkpoint do not fit this configuration: {error.errors()[0]['msg']}",
            found=", ".join(f"train.{name}: {value}" for name, value in chosen.items()),
            fix="give these options values instead of auto",
        ) from None


def as_it_began(train: TrainConfig, begun: Begun | None, world: int) -> dict[str, Any] | None:
    """The values in the checkpoint by the names of `_DECIDED`; None if it was made on another number of processes."""
    if begun is None or begun.processes not in (None, world):
        return None
    values = {name: value_at(begun.train, name) for name in _DECIDED}
    sizes = {name: values[f"parallel.{name}"] for name in _SIZES}
    try:
        before = check_sizes(ParallelConfig(**sizes), world)
        if "parallel" not in train.undecided and check_sizes(train.parallel, world) != before:
            return None
    except ConfigError:
        return None
    return None if -1 in sizes.values() and "parallel" in train.undecided else values


def decide_compile(
    train: TrainConfig, device: torch.device, begun: Begun | None = None
) -> tuple[TrainConfig, list[str]]:
    """The options with a value for `compile`, and lines to print. After `decide`.

    Raises:
        UserError: this machine cannot compile kernels for its GPU.
    """
    check_compiler(device)
    if train.compile != "auto":
        return train, []
    reason = None if begun is None or begun.train.get("compile") == "block" else "as in the checkpoint"
    reason = reason or _uncompiled(device)
    if reason is None:
        try:
            changed(train, {"compile": "block"})
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
    value = "none" if reason else "block"
    lines = [f"auto: train.compile: {value}" + (f" ({reason})" if reason else "")]
    return train.model_copy(update={"compile": value}), lines if device.type == "cuda" else []


def _uncompiled(device: torch.device) -> str | None:
    """Say why inductor makes no kernels for this device that are worth the time of compiling them; None if it does."""
    if device.type != "cuda":
        return "on a CPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None if torch.cuda.get_device_capability(device) >= (8, 0) else "compute capability below 8.0"


def for_the_smallest(launch: Launch, machine: Machine, choose: Callable[[Machine], T], patience_s: float) -> T:
    """Return, on every process, what the first chooses for the smallest memory of all devices. It chooses between two
    process groups, since a prediction opens one that sends nothing."""
    opened, chosen = partial(open_mesh, launch, ParallelConfig(), torch.device("cpu")), Future[T]()
    patience_s = max(PREDICTION_S, patience_s)
    with opened(patience_s=patience_s):
        memory = min(all_gather_objects(machine.memory))
    if launch.is_main:
        try:
            chosen.set_result(choose(replace(machine, memory=memory)))
        except Exception as error:
            chosen.set_exception(error)
    with opened(patience_s=patience_s):
        return broadcast_from_rank_0(chosen.result)


def present(device: torch.device, launch: Launch) -> Machine:
    """The machine of a launch whose processes each have a device like this, without the memory that other programs use
    on a GPU."""
    here, nodes = of_device(device), max(1, launch.world // launch.local_world)
    if here is None:  # its speed counts for the ranking only
        memory = torch.cuda.get_device_properties(device).total_memory
        return Machine(like(memory), memory - used_by_others(device), launch.world, nodes, assumed=True)
    memory = usable(here, launch.local_world)
    return Machine(here, memory - used_by_others(device) if here.is_gpu else memory, launch.world, nodes)


def used_by_others(device: torch.device) -> int:
    """Bytes of a GPU that neither torch's allocator nor, as far as it can be estimated, this process's context uses."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device) - BARE_CONTEXT)


def named(gpu: str | None, gpu_memory: str | None, gpus: int, nodes: int | None = None) -> Machine:
    """The machine that a command line describes.

    Args:
        gpu, gpu_memory: the card, and memory that is not the card's. nodes: None: as `least_nodes`; of CPUs one.

    Raises:
        UserError: neither a card nor a memory size, an unknown card, nodes that do not divide the GPUs.
    """
    if gpu is None and gpu_memory is None:
        raise UserError("which GPU?", expected=f"--gpu NAME, or --gpu-memory 24GiB; NAME is one of {', '.join(CARDS)}")
    if nodes is None:
        nodes = 1 if gpu == CPU else least_nodes(gpus)
    if gpus % nodes:
        raise UserError(
            f"--gpus {gpus} (of all nodes together) cannot be divided by --nodes {nodes}",
            expected="one of " + ", ".join(str(n) for n in range(1, gpus + 1) if gpus % n == 0) + " nodes",
        )
    given = None if gpu_memory is None else memory_of(gpu_memory)
    chosen = like(given or 0) if gpu is None else card(gpu)
    memory = usable(chosen, max(1, gpus // nodes)) if given is None else given
    return Machine(chosen, memory, gpus, nodes, assumed=gpu is None)


def usable(of: Card, processes: int) -> int:
    """Bytes of a card for each of so many processes on its node: all of a GPU; half of main memory, shared."""
    return of.memory if of.is_gpu else of.memory // (2 * processes)
