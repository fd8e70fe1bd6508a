"""The process group of a run and its layout as a device mesh.

`check_sizes` is apart, since a wrong size must be an error before any process waits for another. A run of one process
takes the same path, with a store in its own memory, so it needs no free port.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sana_pipe.base.errors import ConfigError, UserError, printed_first
from sana_pipe.base.launch import Launch
from sana_pipe.train.parallel.collectives import require_equal
from sana_pipe.train.parallel.config import ParallelConfig

WAITING_S = 10.0
"""Time after which a process says that it waits for the others of its launch."""
PP, REPLICATE, SHARD, TP = DIMS = "pp", "dp_replicate", "dp_shard", "tp"
"""The mesh's dimensions, outermost first: neighbours in tp are neighbours in rank, so they share a node."""
WAIT_S = 300
"""Seconds that a process waits for another one, in addition to `patience_s`."""


@dataclass(frozen=True)
class Layout:
    """Sizes of `train.parallel`, all positive."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int

    @property
    def world(self) -> int:
        return math.prod(self.sizes)

    @property
    def data_world(self) -> int:
        """Number of data-parallel ranks: how many shares a global batch is divided into."""
        return self.dp_replicate * self.dp_shard

    @property
    def model_parallel_size(self) -> int:
        """Number of processes that share one model and so read the same share of a batch (pp x tp)."""
        return self.pp * self.tp

    def data_rank(self, rank: int) -> int:
        """Data-parallel rank of a process: which share of a global batch it reads."""
        return rank // self.tp % self.data_world

    def __str__(self) -> str:
        named = [f"{size} {name}" for name, size in zip(DIMS, self.sizes, strict=True) if size > 1]
        return " x ".join(named) or "one process"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the sizes of the mesh, in the order of `DIMS`."""
        return self.pp, self.dp_replicate, self.dp_shard, self.tp


def check_sizes(parallel: ParallelConfig, world: int) -> Layout:
    """The layout of a launch of `world` processes. Sizes that do not multiply to that number are refused."""
    data = {"dp_replicate": parallel.dp_replicate, "dp_shard": parallel.dp_shard}
    model = {"tp_size": parallel.tp_size, "pp_size": parallel.pp_size}
    free = next((name for name, size in data.items() if size == -1), None)
    known = math.prod([*model.values(), *(size for name, size in data.items() if name != free)])
    sizes = {**data, **({free: world // known} if free else {})}
    layout = Layout(model["pp_size"], sizes["dp_replicate"], sizes["dp_shard"], model["tp_size"])
    if layout.world != world:
        named = ", ".join(f"{name} = {size}" for name, size in {**data, **model}.items() if size != 1)
        raise ConfigError(
            f"train.parallel ({named}) does not fit a launch of {world} process(es)",
            expected=f"a multiple of {known} process(es)" if free else f"{known} process(es), or dp_shard = -1",
            found=f"{world} process(es)",
            fix=f"launch {known if not free else known * max(1, round(world / known))} process(es), or --set "
            "train.parallel.dp_shard=-1 and sizes whose product divides the number of processes",
        )
    return layout


def wait(patience_s: float) -> timedelta:
    """Return how long a process waits for another one, which may wait for storage itself."""
    return timedelta(seconds=patience_s + WAIT_S)


def reopening(launch: Launch, patience_s: float) -> Launch:
    """The launch for a process that opens several groups, one after the other. The groups share one store, each under
    another prefix. A store that is closed and opened again would still have the addresses of the group before
    (torchrun's), or its port would not be free yet."""
    # `train` meets twice: to compare the devices, and to train. Ranks 0 and 1 of a launch:
    #   rank 0   store (server)  "group-0/device-0", "group-0/devices"   "group-1/..." addresses of gloo and NCCL
    #   rank 1   store (client)  "group-0/device-1"                      "group-1/..."
    # Each rank takes the next prefix for its next group, so the n-th group of all ranks has one prefix, and no address
    # of an earlier group is read. The iterator stays in the launch; with it the server lives as long as the process.
    return replace(launch, stores=_stores(launch, wait(patience_s)))


def _stores(launch: Launch, limit: timedelta) -> Iterator[dist.Store]:
    store: dist.Store = dist.HashStore()
    if launch.world > 1:
        with _waiting(launch):
            store, _, _ = next(dist.rendezvous(str(launch.rendezvous), launch.rank, launch.world, timeout=limit))
    for number in itertools.count():
        yield dist.PrefixStore(f"group-{number}", store)


@contextmanager
def _waiting(launch: Launch) -> Iterator[None]:
    """Print for whom this process waits, where and why, if that takes `WAITING_S`."""
    ranks = "process 1" if launch.world == 2 else f"processes 1 to {launch.world - 1}"
    others = ranks if launch.is_main else "process 0"
    text = f"process {launch.rank} waits for {others} at {launch.place}, as {_said(launch)}; {_alone(launch)}"
    timer = threading.Timer(WAITING_S, lambda: print(f"sana-pipe: {text}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _said(launch: Launch) -> str:
    return f"{' and '.join(launch.said_by) or 'the launcher'} say"


def _alone(launch: Launch) -> str:
    names = [variable.partition("=")[0] for variable in launch.said_by]
    return f"for a single process: unset {' '.join(names)}"


@contextmanager
def open_mesh(
    launch: Launch,
    parallel: ParallelConfig,
    device: torch.device,
    layout: Layout | None = None,
    *,
    patience_s: float = 0.0,
) -> Iterator[DeviceMesh]:
    """Open the process group, yield a mesh with the dimensions `DIMS`, close the group. After an error of this process
    alone the error is printed and the group aborted.

    One group uses gloo for CPU tensors and NCCL for CUDA tensors, so checkpoints and Python objects need no GPU.

    Args:
        layout: what `check_sizes` returned; called here if None.
        patience_s: how long another process may wait for storage; no wait for it is longer than `wait` of that.

    Raises:
        UserError: the processes do not find each other, or a group is open already.
    """
    layout = layout or check_sizes(parallel, launch.world)
    if dist.is_initialized():
        raise UserError("this process already belongs to a process group", fix="start the training in its own process")
    on_gpu, limit = device.type == "cuda", wait(patience_s)
    if on_gpu:
        torch.cuda.set_device(device)
    hook = sys.excepthook  # torch wraps it in each group
    with _meeting(launch, limit) as store:
        compare_devices(store, launch, device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=launch.rank,
            world_size=launch.world,
            timeout=limit,
            device_id=device if on_gpu else None,
        )
    try:
        with printed_first(launch.rank, launch.world):
            require_equal(  # with other sizes a process would wait in groups that the others do not make
                layout,
                "the processes have different sizes of train.parallel",
                "give every node the same configuration; numbers instead of train.parallel=auto where nodes have "
                "different GPUs",
            )
            yield _mesh(layout, device, limit)
    except BaseException as error:
        _close_after(error, launch.world)
        raise
    else:
        dist.destroy_process_group()
        sys.excepthook = hook


def agreed_device(launch: Launch, patience_s: float, resolve: Callable[[], torch.device]) -> torch.device:
    """Return this process's device. An error of one process, or a GPU in some processes and the CPU in others, is
    raised on all of them, before any of them waits in a process group.

    Args:
        launch: of `reopening`.
    """
    if launch.world == 1:
        return resolve()
    try:
        device: torch.device | UserError = resolve()
    except UserError as error:
        device = error
    with _meeting(launch, wait(patience_s)) as store:
        compare_devices(store, launch, device)
    assert isinstance(device, torch.device)
    return device


@contextmanager
def _meeting(launch: Launch, limit: timedelta) -> Iterator[dist.Store]:
    """The store in which the processes of the launch meet."""
    try:
        store = next(launch.stores or _stores(launch, limit))
        store.set_timeout(limit)
        yield store
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the {launch.world} processes of this launch did not find each other: {reason}",
            expected=f"all of them at {launch.place} within {limit.total_seconds():g} s (patience_s plus {WAIT_S} s), "
            f"as {_said(launch)}",
            fix="check that every process was launched, and that the port is reachable and no other program's (for "
            "another port: torchrun --standalone or --master-port PORT, export MASTER_PORT=PORT before srun); "
            f"{_alone(launch)}",
        ) from None


def compare_devices(store: dist.Store, launch: Launch, device: torch.device | UserError) -> None:
    """Raise, on every process, the error of one that has no device, or that some have a GPU and others have not: NCCL
    would wait for these. The first process reads what all say."""
    if launch.world == 1:
        return
    fields = device.fields() if isinstance(device, UserError) else None
    kind = device.type if isinstance(device, torch.device) else None
    store.set(f"device-{launch.rank}", json.dumps({"host": platform.node(), "kind": kind, "error": fields}))
    if launch.is_main:
        said = [json.loads(store.get(f"device-{rank}")) for rank in range(launch.world)]
        store.set("devices", json.dumps(_verdict(said)))
    verdict = json.loads(store.get("devices"))
    if verdict is not None:
        refused = UserError.of(verdict)
        refused.everywhere = True
        raise refused


def _verdict(said: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The error of the devices of all processes, by rank; None: they are alike."""
    places = [f"process {rank} on {each['host']}" for rank, each in enumerate(said)]
    failed = next((rank for rank, each in enumerate(said) if each["error"] is not None), None)
    if failed is not None:
        error = said[failed]["error"]
        return {**error, "what": f"{places[failed]}: {error['what']}"}
    without = [place for place, each in zip(places, said, strict=True) if each["kind"] == "cpu"]
    if len(without) in (0, len(said)):
        return None
    more = f" and {len(without) - 4} more" if len(without) > 4 else ""
    with_one = next(place for place, each in zip(places, said, strict=True) if each["kind"] != "cpu")
    return UserError(
        "some processes of this launch have a GPU, and others have none",
        expected="a GPU for each, or for none",
        found=f"without a GPU: {', '.join(without[:4])}{more}; with a GPU: {with_one}",
        fix="run nvidia-smi where a GPU is missing (--set train.device=cuda says why it cannot be used), or leave that "
        "host out; --set train.device=cpu computes on the CPU everywhere",
    ).fields()


def _close_after(error: BaseException, world: int) -> None:
    """Close the group without waiting for processes that do not know of the error: NCCL's ordinary end waits for the
    operations in flight, which wait for the others."""
    if world == 1 or getattr(error, "everywhere", False):
        dist.destroy_process_group()
        return
    with suppress(Exception):  # the error that is being raised goes first
        dist.distributed_c10d._abort_process_group()


def _mesh(layout: Layout, device: torch.device, timeout: timedelta) -> DeviceMesh:
    """The mesh, with `timeout` on the groups of every dimension. `init_device_mesh` takes no timeout: its groups always
    wait half an hour over gloo and ten minutes over NCCL."""
    ranks = torch.arange(layout.world).view(layout.sizes)
    groups: list[Any] = []
    for dim in range(len(DIMS)):
        rows = ranks.movedim(dim, -1).flatten(0, -2).tolist()
        (members,) = (row for row in rows if dist.get_rank() in row)
        if len(members) == layout.world:
            groups.append(dist.group.WORLD)
        else:  # local synchronization: a process joins only the creation of the groups that it is a member of
            groups.append(dist.new_group(members, timeout=timeout, use_local_synchronization=True))
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=DIMS)
