"""Choose the implementation of an operation (its Triton kernels or its PyTorch reference)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCRATCH: dict[str, Callable[..., tuple[Tensor, ...]]] = {}
"""Operation -> what its Triton kernels allocate in addition to the results: a function of the operation's
arguments that makes it. Predictions of memory count it."""


def kernels(name: str, *tensors: Tensor) -> ModuleType | None:
    """The Triton kernels of an operation for these tensors, or None where the reference runs: not on a GPU, on one
    below compute capability 8.0, in float64 (the kernels compute in float32), or without Triton (it comes with
    torch's wheels for CUDA on Linux)."""
    fit = all(tensor.is_cuda and tensor.dtype in _DTYPES for tensor in tensors)
    if not (fit and triton_is_installed() and is_new_enough(tensors[0].device)):
        return None
    return importlib.import_module(f"sana_pipe.train.kernels.{name}_triton")


@functools.cache
def is_new_enough(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Inside, operations compute in the dtype of their inputs."""
    if device.type == "meta":  # autocast does not support the device
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
