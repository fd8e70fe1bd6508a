"""The Ray engine: each unit is a Ray task on an existing cluster (RAY_ADDRESS) or a local cluster.

This process scans and plans, then hands out units, a few more than the cluster can run at the same time. Nodes that
join get units; units of nodes that die run again (`RETRIES`). A Ray worker process keeps its `UnitMaker`,
and with it the loaded encoder, from one unit to the next.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import click

from sana_pipe import __version__
from sana_pipe.base import counters, launch
from sana_pipe.base.errors import NoSpaceError, UserError
from sana_pipe.data.cache.cache import Unit, WorkList
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.work import engine
from sana_pipe.data.work.disk_space import DiskSpace
from sana_pipe.data.work.progress import Meter, Progress
from sana_pipe.data.work.stop import Stop, Stopped


class MeteredMaker(engine.UnitMaker, Protocol):
    """A `UnitMaker` for Ray tasks.

    Attributes:
        meter: counts what the encoders do; the engine sets a new meter for each unit.
    """

    meter: Meter

    def disk_space(self) -> DiskSpace: ...


CPUS = 1.0
"""CPUs of a task. More would leave GPUs without work on nodes with few CPUs for each."""

RETRIES = 10
"""Limit on nodes and processes lost while running one unit."""

_POLL_S = 0.5
_CONNECT_S = 10.0


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of a Ray worker process; the same for every unit of a run.

    Args:
        key: a maker is reused for orders with this key.
        folder: the driver's working directory, to which relative paths of the configuration refer.
        version: the driver's version of this package.
        build: makes the worker's maker.
    """

    key: str
    folder: str
    version: str
    build: Callable[[], MeteredMaker]


@dataclass(frozen=True)
class Done:
    """The result of a task. All zero if another process had committed the unit."""

    records: int
    rejects: int
    meter: Meter


makers: dict[str, MeteredMaker] = {}
"""The maker of the last order of a Ray worker process, by its key."""

plans: dict[tuple[str, str, int], dict[str, tuple[WorkList, Unit]]] = {}
"""The units of the last plan of a Ray worker process by their id, by (key of the order, encoding, number)."""


def make_unit(order: WorkerSettings, encoding: str, plan_number: int, unit_id: str) -> Done:
    """The body of a task."""
    if order.version != __version__:
        raise UserError(
            "this node has a different version of sana-pipe than the process that hands out the work",
            expected=order.version,
            found=__version__,
            fix="install the same version on every node",
        )
    with suppress(OSError):
        os.chdir(order.folder)
    if order.key not in makers:
        makers.clear()
        plans.clear()
        makers[order.key] = order.build()
    maker = makers[order.key]
    key = order.key, encoding, plan_number
    if key not in plans:  # a large plan has 10^5 units
        plans.clear()
        plan = maker.cache.plan(encoding, plan_number)
        plans[key] = {unit.unit: (plan, unit) for unit in plan.units}
    plan, unit = plans[key][unit_id]
    meter = maker.meter = Meter(wall_s=0.0)
    if engine.is_done(maker.cache, plan, unit):  # a retry of a task whose node died after the commit
        return Done(0, 0, meter)
    began, counted = time.monotonic(), counters.totals()
    space = maker.disk_space()
    while True:
        try:
            space.check(plan, unit)
            commit = maker.make(plan, unit, lambda records, rejects: None)
            break
        except NoSpaceError as error:
            space.wait(plan, unit, error)
    space.unit_made()
    meter.wall_s = time.monotonic() - began
    meter.stores.update(counters.since(counted))
    return Done(commit.records, len(commit.rejects), meter)


class Cluster:
    """A connection to a Ray cluster, made when first needed.

    Args:
        key, build: see `WorkerSettings`.

    Raises:
        UserError: ray is not installed, or there is no cluster where RAY_ADDRESS says.
    """

    def __init__(self, config: EncodeConfig, key: str, build: Callable[[], MeteredMaker], stop: Stop):
        try:
            import ray
        except ImportError:
            raise UserError(
                "--engine ray needs the package ray, which is not installed", fix="pip install 'sana-pipe[ray]'"
            ) from None
        self._ray: Any = ray
        self._config, self._stop = config, stop
        self.order = WorkerSettings(key, str(Path.cwd()), __version__, build)
        self._initialized_here = False
        self._order_ref: Any = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        if self._initialized_here:
            self._ray.shutdown()

    def run(self, todo: engine.Work, bar: Progress) -> int:
        """Make every unit of `todo`; returns the number of records. The bar's meter counts what all nodes do.

        Raises:
            Stopped: a signal asked for the end; running tasks were cancelled.
            UserError: what a task raised, or a unit that outlived its retries.
        """
        if not todo:
            return 0
        ray = self.connect()
        need = self.need()
        task = ray.remote(make_unit).options(max_retries=RETRIES, **need)
        bar.expect(sum(unit.count for _, unit in todo))
        waiting = list(reversed(todo))
        running: dict[Any, tuple[WorkList, Unit]] = {}
        records, announced = 0, False
        with self._stop.polite():
            try:
                while waiting or running:
                    self._stop.check()
                    slots = self.slots(need)
                    if slots == 0 and not announced:
                        announced = True
                        click.echo(f"no node of the Ray cluster has {_resources(need)} yet: waiting for one")
                    while waiting and len(running) < 2 * slots + 2:
                        plan, unit = waiting.pop()
                        ref = task.remote(self._order_ref, plan.encoding, plan.number, unit.unit)
                        running[ref] = (plan, unit)
                    ready, _ = ray.wait(list(running), num_returns=1, timeout=_POLL_S)
                    for ref in ready:
                        done = self._result(ref, *running.pop(ref))
                        records += done.records
                        bar.meter.add(done.meter)
                        bar.add(done.records, done.rejects)
            except BaseException:
                self._cancel(list(running))
                raise
        return records

    def connect(self) -> Any:
        ray = self._ray
        if not ray.is_initialized():
            check_reachable()
            try:
                ray.init(logging_level="WARNING", log_to_driver=True)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise _unreachable(error) from error
            self._initialized_here = True
            self._stop.catch()  # ray.init replaces the handler of SIGTERM
        if self._order_ref is None:
            self._order_ref = ray.put(self.order)
        return ray

    def need(self) -> dict[str, float]:
        """The resources of a task: a GPU if the cluster has any and `device` is not the CPU."""
        has_gpus = self._ray.cluster_resources().get("GPU", 0) > 0
        return {"num_cpus": CPUS, "num_gpus": 1.0 if has_gpus and self._config.device != "cpu" else 0.0}

    def slots(self, need: dict[str, float]) -> int:
        """Count the units that the living nodes can run at the same time."""
        total = 0
        for node in self._ray.nodes():
            if node["Alive"]:
                units_by_resource = [
                    int(node["Resources"].get(kind, 0) / need[option])
                    for option, kind in (("num_cpus", "CPU"), ("num_gpus", "GPU"))
                    if need[option]
                ]
                total += min(units_by_resource, default=1)
        return total

    def _result(self, ref: Any, plan: WorkList, unit: Unit) -> Done:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise
        except exceptions.RayError as error:
            raise UserError(
                f"a unit of the work for {plan.encoding} could not be made on the Ray cluster",
                expected=f"its node or process ends at most {RETRIES} times",
                found=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
                fix="look at the nodes (ray status), then run the same command again: it continues",
            ) from error

    def _cancel(self, running: list[Any]) -> None:
        """Interrupt the running tasks, which clean up after themselves, and forget the waiting ones."""
        with suppress(Exception, Stopped):
            for ref in running:
                self._ray.cancel(ref, force=False)
            if running:
                self._ray.wait(running, num_returns=len(running), timeout=self._stop.grace_s)


def check_reachable() -> None:
    """Try the port that RAY_ADDRESS names: ray.init itself retries for many minutes."""
    address = launch.ray_address()
    if address is None:
        return
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except OSError as error:
        raise _unreachable(f"RAY_ADDRESS={address[0]}:{address[1]}: {error}") from None


def _unreachable(found: object) -> UserError:
    return UserError(
        "the Ray cluster cannot be reached",
        found=str(found).strip().partition("\n")[0],
        fix="ray start --head (then export RAY_ADDRESS=HOST:6379), or unset RAY_ADDRESS for a local one",
    )


def _resources(need: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {option.removeprefix('num_').upper()}" for option, amount in need.items())
