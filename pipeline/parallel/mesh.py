"""The processes of a run: start them, lay them out, agree between them, stop them.

What: `check_sizes` refuses sizes that do not factor, `started` opens the process group and yields the `DeviceMesh`,
`on_main` runs a function on one process and hands every process its result or its error.
Why: a wrong size must be an error before any process waits for another one, and a mistake found by one process
(a damaged checkpoint, a full disk) must stop all of them with the same words; otherwise the rest hangs until the
timeout. A run of one process takes the same path, with a store in its own memory, so it needs no free port.
Price: a group of one process costs some milliseconds at the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipeline.config import ParallelConfig
from pipeline.errors import ConfigError, UserError
from pipeline.launch import Launch

PP, REPLICATE, SHARD, TP = DIMS = "pp", "dp_replicate", "dp_shard", "tp"
"""The mesh's dimensions, outermost first: neighbours in tp are neighbours in rank, so they share a node."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh's dimensions, all positive."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def data_world(self) -> int:
        """How many parts a global batch has."""
        return self.dp_replicate * self.dp_shard

    @property
    def copies(self) -> int:
        """How many processes read the same part of a batch."""
        return self.pp * self.tp

    def data_rank(self, rank: int) -> int:
        """Which part of a global batch a process reads."""
        return rank // self.tp % self.data_world

    def __str__(self) -> str:
        named = [f"{size} {name}" for name, size in zip(DIMS, self.sizes, strict=True) if size > 1]
        return " x ".join(named) or "one process"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """In the order of `DIMS`."""
        return self.pp, self.dp_replicate, self.dp_shard, self.tp


def check_sizes(parallel: ParallelConfig, world: int) -> Layout:
    """The layout of a launch of `world` processes.

    Raises:
        ConfigError: the sizes do not multiply to the number of processes.
    """
    given = {"dp_replicate": parallel.dp_replicate, "dp_shard": parallel.dp_shard}
    fixed = {"tp_size": parallel.tp_size, "pp_size": parallel.pp_size}
    free = next((name for name, size in given.items() if size == -1), None)
    known = math.prod([*fixed.values(), *(size for name, size in given.items() if name != free)])
    sizes = {**given, **({free: world // known} if free else {})}
    layout = Layout(fixed["pp_size"], sizes["dp_replicate"], sizes["dp_shard"], fixed["tp_size"])
    if layout.world != world:
        named = ", ".join(f"{name} = {size}" for name, size in {**given, **fixed}.items() if size != 1)
        raise ConfigError(
            f"train.parallel ({named}) does not fit a launch of {world} process(es)",
            expected=f"a multiple of {known} process(es)" if free else f"{known} process(es), or dp_shard = -1",
            found=f"{world} process(es)",
            fix=f"launch {known if not free else known * max(1, round(world / known))} process(es), or --set "
            "train.parallel.dp_shard=-1 and sizes whose product divides the number of processes",
        )
    return layout


@contextmanager
def started(launch: Launch, parallel: ParallelConfig, device: torch.device) -> Iterator[DeviceMesh]:
    """Open the process group, yield a mesh with the dimensions `DIMS`, close the group.

    gloo for CPU tensors and NCCL for CUDA tensors in one group, so that checkpoints and small agreements of Python
    objects need no GPU. `parallel.timeout_s` bounds every wait for another process.

    Raises:
        ConfigError: sizes that do not factor (before anything is started).
        UserError: the processes do not find each other, or a group is open already.
    """
    layout = check_sizes(parallel, launch.world)
    if dist.is_initialized():
        raise UserError("this process already belongs to a process group", fix="start the training in its own process")
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    where: dict[str, Any] = {"store": dist.HashStore()} if launch.world == 1 else {"init_method": launch.rendezvous}
    try:
        dist.init_process_group(
            backend,
            rank=launch.rank,
            world_size=launch.world,
            timeout=timedelta(seconds=parallel.timeout_s),
            device_id=device if device.type == "cuda" else None,
            **where,
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise UserError(
            f"the {launch.world} processes of this launch did not find each other: {error}",
            expected=f"all of them at {launch.rendezvous} within {parallel.timeout_s} s",
            fix="check that every process was started and that the port is reachable",
        ) from None
    try:
        yield _mesh(layout, device, timedelta(seconds=parallel.timeout_s))
    finally:
        dist.destroy_process_group()


def _mesh(layout: Layout, device: torch.device, timeout: timedelta) -> DeviceMesh:
    """The processes laid out, each dimension with groups that wait no longer than `timeout`. `init_device_mesh` takes
    none: its groups would wait for half an hour over gloo, ten minutes over NCCL, whatever the configuration says."""
    ranks = torch.arange(layout.world).view(layout.sizes)
    groups: list[Any] = []
    for dim in range(len(DIMS)):
        rows = ranks.movedim(dim, -1).flatten(0, -2).tolist()
        (mine,) = (row for row in rows if dist.get_rank() in row)
        if len(mine) == layout.world:
            groups.append(dist.group.WORLD)
        else:  # each process makes its own groups only; the other way takes every process once for every group
            groups.append(dist.new_group(mine, timeout=timeout, use_local_synchronization=True))
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=DIMS)


def broadcast_from_rank_0(function: Callable[[], Value], group: dist.ProcessGroup | None = None) -> Value:
    """Run `function` on rank 0 and return its result everywhere; an error of rank 0 is raised everywhere.

    The result travels pickled between processes of one launch: paths, numbers, dataclasses. A thread beside the main
    one needs a `group` of its own (all processes), since two threads of a process meet others in no fixed order.
    """
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = function()
        except Exception as error:  # handed to the other processes, then raised on all of them
            box[1] = error
    _raise(_broadcast(box, group))
    return box[0]


def agree(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Called by every process with its own error or None: the first error in rank order is raised on all of them."""
    errors: list[Any] = [None] * dist.get_world_size()
    if dist.get_world_size() == 1:
        errors = [error]
    else:
        dist.all_gather_object(errors, _portable(error), group)
    _raise(next((found for found in errors if found is not None), None))


def together(function: Callable[[], Value]) -> Value:
    """Run `function` on every process; if one of them fails, all of them raise its error."""
    value: Any = None
    error: Exception | None = None
    try:
        value = function()
    except Exception as caught:
        error = caught  # raised by `agree`, here and on the other processes
    agree(error)
    return value


def gather(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Every process's value, in rank order, on every process. Without a group there is one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def _broadcast(box: list[Any], group: dist.ProcessGroup | None) -> Exception | None:
    if dist.get_world_size() > 1:
        box[1] = _portable(box[1])
        dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    return box[1]


def _raise(error: Exception | None) -> None:
    """Raise what every process raises."""
    if isinstance(error, UserError):
        error.everywhere = True
    if error is not None:
        raise error


def _portable(error: Exception | None) -> Exception | None:
    """What can be pickled for sure: our own errors as they are, any other as its text."""
    if error is None or isinstance(error, UserError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
