"""The Ray engine: each unit is a Ray task on an existing cluster (RAY_ADDRESS) or a local one.

What: this process scans and plans, then hands out units, a few more than the cluster can run at once; nodes that join
get units, units of nodes that die are run again (`encode.ray.retries`). A worker process keeps its encoder loaded from
one unit to the next.
Why: Ray knows which machines there are; the cache knows what is done. A task that is run twice, or that comes back from
a node that was thought dead, commits once (put-if-absent), so nothing here decides about correctness.
Price: every node must see the cache, the sources and the models under the same paths, and have this package installed.
The driver only counts; if it dies, its tasks die with it, and the same command continues.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import click

from pipeline import __version__, launch
from pipeline.cache.store import Cache, Plan, Unit
from pipeline.config import Config
from pipeline.errors import NoSpaceError, UserError
from pipeline.sources.source import Source
from pipeline.work import engine
from pipeline.work.disk_space import Room
from pipeline.work.progress import Progress
from pipeline.work.stop import Stop, Stopped

Openers = dict[str, Callable[[], Source]]
"""Source name -> how a worker opens it."""

_LOOK_S = 0.5
_CONNECT_S = 10.0
_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Order:
    """What a worker must know, the same for every unit of a run."""

    config: str
    folder: str
    version: str
    openers: tuple[tuple[str, Callable[[], Source]], ...]


@dataclass(frozen=True)
class Done:
    """What came of one unit."""

    records: int = 0
    rejects: int = 0
    truncated: int = 0
    unshared: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    wall_s: float = 0.0

    def __add__(self, other: Done) -> Done:
        return Done(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


_kept: dict[str, engine.Runner] = {}
"""In a worker process: the runner of the last configuration."""


def encode_unit(order: Order, recipe: str, plan: int, unit: str) -> Done:
    """The body of a task."""
    if order.version != __version__:
        raise UserError(
            "this node has another version of sana-pipe than the one that hands out the work",
            expected=order.version,
            found=__version__,
            fix="install the same version on every node",
        )
    with suppress(OSError):  # relative paths of the configuration mean the same here
        os.chdir(order.folder)
    runner = _kept.get(order.config)
    if runner is None:
        _kept.clear()
        config = Config.model_validate_json(order.config)
        sources = {name: opened() for name, opened in order.openers}
        runner = _kept[order.config] = engine.Runner(config, Cache.of(config), sources, check=True)
    whole = runner.cache.plan(recipe, plan)
    wanted = next(u for u in whole.units if u.unit == unit)
    if engine.is_done(runner.cache, whole, wanted):  # a retry of a task whose node died after the commit
        return Done()
    truncated, unshared, tokens, busy_s = runner.truncated, runner.unshared, runner.meter.tokens, runner.meter.busy_s
    began = time.monotonic()
    room = Room(runner.cache, runner.config.encode)
    while True:
        try:
            room.check(whole, wanted)
            commit = runner.encode(whole, wanted, lambda records, rejects: None)
            room.passed()
            break
        except NoSpaceError as error:
            room.wait(whole, wanted, error)
    return Done(
        commit.records,
        len(commit.rejects),
        max(0, runner.truncated - truncated),
        max(0, runner.unshared - unshared),
        runner.meter.tokens - tokens,
        runner.meter.busy_s - busy_s,
        time.monotonic() - began,
    )


class Cluster:
    """A connection to a Ray cluster, made when first needed.

    Raises:
        UserError: ray is not installed, or there is no cluster where RAY_ADDRESS says.
    """

    def __init__(self, config: Config, openers: Openers, stop: Stop):
        try:
            import ray
        except ImportError:
            raise UserError(
                "--engine ray needs the package ray, which is not installed", fix="pip install 'sana-pipe[ray]'"
            ) from None
        self._ray: Any = ray
        self._config, self._stop = config, stop
        self._order = Order(config.model_dump_json(), str(Path.cwd()), __version__, tuple(sorted(openers.items())))
        self._ours = False
        self._shared: Any = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        if self._ours:
            self._ray.shutdown()

    def run(self, todo: engine.Work, bar: Progress) -> Done:
        """Encode every unit of `todo`.

        Raises:
            Stopped: a signal asked for the end; tasks in hand were cancelled.
            UserError: what a task raised, or a unit that outlived its retries.
        """
        if not todo:
            return Done()
        ray = self._connect()
        need = self._need()
        task = ray.remote(encode_unit).options(max_retries=self._config.encode.ray.retries, **need)
        bar.expect(sum(unit.count for _, unit in todo))
        waiting = list(reversed(todo))
        running: dict[Any, tuple[Plan, Unit]] = {}
        made = Done()
        told = False
        with self._stop.polite():
            try:
                while waiting or running:
                    self._stop.check()
                    slots = self._slots(need)
                    if slots == 0 and not told:
                        told = True
                        click.echo(f"no node of the Ray cluster has {_shown(need)} yet: waiting for one")
                    while waiting and len(running) < 2 * slots + 2:
                        plan, unit = waiting.pop()
                        ref = task.remote(self._shared, plan.recipe, plan.number, unit.unit)
                        running[ref] = (plan, unit)
                    ready, _ = ray.wait(list(running), num_returns=1, timeout=_LOOK_S)
                    for ref in ready:
                        done = self._result(ref, *running.pop(ref))
                        made += done
                        if bar.meter is not None:
                            bar.meter.tokens += done.tokens
                            bar.meter.busy_s += done.busy_s
                            bar.meter.wall_s = (bar.meter.wall_s or 0.0) + done.wall_s
                        bar.add(done.records, done.rejects)
            except BaseException:
                self._cancel(list(running))
                raise
        return made

    def _connect(self) -> Any:
        ray = self._ray
        if not ray.is_initialized():
            # The package is found on the nodes even where it is run from a checkout; `${PYTHONPATH}` is theirs.
            variables = {"PYTHONPATH": f"{_ROOT}:${{PYTHONPATH}}"}
            _reachable()
            try:
                ray.init(runtime_env={"env_vars": variables}, logging_level="WARNING", log_to_driver=True)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise _unreachable(error) from error
            self._ours = True
            self._stop.catch()  # ray.init puts a handler of its own on SIGTERM
        if self._shared is None:
            self._shared = ray.put(self._order)
        return ray

    def _need(self) -> dict[str, float]:
        asked = self._config.encode.ray
        gpus = asked.gpus
        if gpus is None:
            has = self._ray.cluster_resources().get("GPU", 0) > 0
            gpus = 1.0 if has and self._config.encode.device != "cpu" else 0.0
        return {"num_cpus": asked.cpus, "num_gpus": gpus}

    def _slots(self, need: dict[str, float]) -> int:
        """How many units the nodes that are alive now can run at once."""
        total = 0
        for node in self._ray.nodes():
            if node["Alive"]:
                room = [
                    int(node["Resources"].get(kind, 0) / need[option])
                    for option, kind in (("num_cpus", "CPU"), ("num_gpus", "GPU"))
                    if need[option]
                ]
                total += min(room, default=1)
        return total

    def _result(self, ref: Any, plan: Plan, unit: Unit) -> Done:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise
        except exceptions.RayError as error:
            raise UserError(
                f"unit {unit.unit} of {plan.recipe} could not be encoded on the Ray cluster",
                expected=f"at most {self._config.encode.ray.retries} deaths of its node or process",
                found=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
                fix="look at the nodes (ray status), or raise encode.ray.retries; the same command continues",
            ) from error

    def _cancel(self, running: list[Any]) -> None:
        """Tasks that run are interrupted and clean up after themselves; those that wait are forgotten."""
        with suppress(Exception, Stopped):
            for ref in running:
                self._ray.cancel(ref, force=False)
            if running:
                self._ray.wait(running, num_returns=len(running), timeout=self._config.encode.grace_s)


def _reachable() -> None:
    """Try the port that RAY_ADDRESS names: ray.init itself goes on trying for many minutes."""
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


def _shown(need: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {option.removeprefix('num_').upper()}" for option, amount in need.items())
