"""Which implementation of an operation runs (its Triton kernels or its PyTorch twin), and for which gradients."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def kernels(name: str, *tensors: Tensor) -> ModuleType | None:
    """The module `pipeline.kernels.<name>_triton`, or None where the twin runs: elsewhere than on a GPU, in float64
    (the kernels compute in float32), or without Triton (it comes with torch's wheels for CUDA on Linux)."""
    if all(tensor.is_cuda and tensor.dtype in _DTYPES for tensor in tensors) and triton_is_installed():
        return importlib.import_module(f"pipeline.kernels.{name}_triton")
    return None


@functools.cache
def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Inside, operations compute in the dtype of their inputs."""
    if device.type == "meta":  # autocast does not support the device
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def executed(ctx: Any) -> list[bool]:
    """For each input: does the running backward pass need its gradient?

    `ctx.needs_input_grad` says only whether an input wants a gradient at all.
    """
    return [node is not None and _runs(node) for node, _ in ctx.next_functions]


def _runs(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch answers so for a leaf whose gradient was asked for by `torch.autograd.grad`
        return True
