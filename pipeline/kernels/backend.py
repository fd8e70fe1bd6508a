"""Which implementation of an operation runs (its Triton kernels or its PyTorch reference)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Kernels:
    """The functions of `pipeline.kernels.<name>_triton`, run on one GPU.

    Triton launches on the current GPU, whichever one the tensors are on. Custom operations run outside of graphs, so a
    compiled block, too, comes here.
    """

    def __init__(self, name: str, device: torch.device):
        self.module = importlib.import_module(f"pipeline.kernels.{name}_triton")
        self.device = device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self.module, name)

        def on_device(*args: Any) -> Any:
            with torch.cuda.device(self.device):
                return function(*args)

        return on_device


def kernels(name: str, *tensors: Tensor) -> Kernels | None:
    """The Triton kernels of an operation for these tensors, or None where the reference runs: not on a GPU, on one
    below compute capability 8.0, in float64 (the kernels compute in float32), or without Triton (it comes with
    torch's wheels for CUDA on Linux)."""
    if all(tensor.is_cuda and tensor.dtype in _DTYPES for tensor in tensors) and triton_is_installed():
        device = tensors[0].device
        return Kernels(name, device) if is_new_enough(device) else None
    return None


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
