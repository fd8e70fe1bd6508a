"""Exchange Python objects and errors between the processes of a run, over gloo.

Why: an error that one process finds (a damaged checkpoint, a full disk) must stop all of them with the same message;
otherwise the others hang until the timeout.
Objects travel pickled between processes of one launch: paths, numbers, dataclasses. A second thread needs a `group` of
its own (all processes), since two threads of a process meet those of other processes in no fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sana_pipe.base.errors import NoSpaceError, UserError, machine_error

Value = TypeVar("Value")


def broadcast_from_rank_0(function: Callable[[], Value], group: dist.ProcessGroup | None = None) -> Value:
    """Run `function` on rank 0 only. Every process returns its result or raises its error."""
    box: list[Any] = [None, None]  # result, error
    if dist.get_rank() == 0:
        try:
            box[0] = function()
        except Exception as error:
            box[1] = error
    if dist.get_world_size() > 1:
        box[1] = _picklable(box[1])
        dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    _raise(box[1])
    return box[0]


def raise_first_error(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Every process passes its error or None; the first error in rank order is raised on all of them."""
    if dist.get_world_size() == 1:
        _raise(error)
        return
    errors = all_gather_objects(_picklable(error), group)
    _raise(next((other for other in errors if other is not None), None))


def run_on_all(function: Callable[[], Value], group: dist.ProcessGroup | None = None) -> Value:
    """Run `function` on every process; if it fails on one, all of them raise that error."""
    value: Any = None
    error: Exception | None = None
    try:
        value = function()
    except Exception as caught:
        error = caught
    raise_first_error(error, group)
    return value


def all_gather_objects(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Every process's value, in rank order, on every process. `[value]` where no process group is open."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def require_equal(value: object, what: str, fix: str) -> None:
    """Refuse, on every process, values that the processes found for themselves and that are not equal; of mappings
    the entries that differ are shown."""
    first, *others = all_gather_objects(value)
    for rank, other in enumerate(others, start=1):
        if other == first:
            continue
        if isinstance(first, dict) and isinstance(other, dict):
            differing = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            other, first = [{name: each.get(name) for name in differing} for each in (other, first)]
        _raise(UserError(what, found=f"process {rank}: {other}; process 0: {first}", fix=fix))


def _raise(error: Exception | None) -> None:
    if isinstance(error, UserError):
        error.everywhere = True
    if error is not None:
        raise error


def _picklable(error: Exception | None) -> Exception | None:
    """Our own errors and that of a full disk as they are, any other as a RuntimeError with its text."""
    if error is None or isinstance(error, UserError):
        return error
    if isinstance(full := machine_error(error), NoSpaceError):
        return full
    return RuntimeError(f"{type(error).__name__}: {error}")
