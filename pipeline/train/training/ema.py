"""Exponential moving average (EMA) of the weights, sharded like them.

`EMA` keeps an fp32 average of every trained parameter, by name: FSDP2's modules cannot be copied. The decay grows with
the step, min(decay, (1 + step) / (10 + step)), so that an average that began with random weights forgets them.
Price: 4 bytes per parameter, on the device or on the host. On the host the weights are copied to page-locked memory,
which occupies as much again, alongside the next step's passes, and a thread does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sana_pipe.train.parallel.shards import local
from sana_pipe.train.training.config import EmaConfig
from sana_pipe.train.training.host_copy import HostCopy, thread_of_this_device


def ema_decay(config: EmaConfig, step: int) -> float:
    """EMA decay after optimizer step `step` (1-based). The warm-up is TensorFlow's (`num_updates`)."""
    return min(config.decay, (1 + step) / (10 + step))


class EMA:
    """EMA of the parameters that are trained, by name. `await_copy` must run before the weights change again."""

    def __init__(self, model: nn.Module, config: EmaConfig):
        """Start from the current weights. Call it after `parallelize`."""
        self.config, self._host = config, HostCopy()
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._values = {name: self._copy(parameter) for name, parameter in self._parameters.items()}
        on_gpu = any(parameter.is_cuda for parameter in self._parameters.values())
        self._stream = torch.cuda.Stream() if on_gpu and config.device == "cpu" else None
        self._thread = None if self._stream is None else thread_of_this_device("ema")
        self._update: Future[None] | None = None

    def _copy(self, parameter: Tensor) -> Tensor:
        device = "cpu" if self.config.device == "cpu" else parameter.device
        return parameter.detach().to(device, torch.float32, copy=True)

    @property
    def values(self) -> dict[str, Tensor]:
        """fp32, plain or sharded like the parameters, on their device or on the CPU. Waits for the last update."""
        update, self._update = self._update, None
        if update is not None:
            update.result()
        return self._values

    @torch.no_grad()
    def restart(self) -> None:
        """Start anew from the current weights."""
        for name, value in self.values.items():
            local(value).copy_(local(self._parameters[name]))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the weights after optimizer step `step` (1-based)."""
        averages = [local(value) for value in self.values.values()]
        weights = [local(parameter.detach()) for parameter in self._parameters.values()]
        share = 1 - ema_decay(self.config, step)
        if self._stream is None or self._thread is None:
            _move(averages, weights, share)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = self._host.of(weights, wait=False)
        self._update = self._thread.submit(_move, averages, copies, share, self._stream)

    def await_copy(self) -> None:
        """Let the current stream wait until the weights of the last update are copied; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the parameters have the averages' values; afterwards both have their values again, bit for bit. They
        are exchanged one tensor at a time; bf16 parameters, into which averages do not fit, are copied to the host."""
        originals: list[tuple[Tensor, Tensor, Tensor]] = []
        try:
            with torch.no_grad():
                for name, value in self.values.items():
                    weight, average = local(self._parameters[name].detach()), local(value)
                    exact = weight.dtype == average.dtype
                    original = weight.to(average.device if exact else "cpu", copy=True)
                    originals.append((weight, average, average if exact else original))
                    weight.copy_(average)
                    if exact:
                        average.copy_(original)
            yield
        finally:
            with torch.no_grad():
                for weight, average, original in originals:
                    averaged = weight.to(average.device, copy=True) if original is average else None
                    weight.copy_(original)
                    if averaged is not None:
                        average.copy_(averaged)


@torch.no_grad()
def _move(averages: list[Tensor], weights: list[Tensor], share: float, copied: torch.cuda.Stream | None = None) -> None:
    """Move the averages by `share` of the way to the weights. copied: what the weights' copies wait for."""
    if copied is not None:
        copied.synchronize()
    if all(w.dtype == a.dtype for w, a in zip(weights, averages, strict=True)):
        torch._foreach_lerp_(averages, weights, share)
        return
    for average, weight in zip(averages, weights, strict=True):
        average.lerp_(weight.float(), share)
