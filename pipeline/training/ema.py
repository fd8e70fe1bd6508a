"""Exponential moving average (EMA) of the weights, sharded like them.

`EMA` keeps an fp32 average of every trained parameter, by name: FSDP2's modules cannot be copied. The decay grows with
the step, min(decay, (1 + step) / (10 + step)), so that an average that began with random weights forgets them.
Price: 4 bytes per parameter, on the device or on the host. On the host an update waits for a copy of the weights to
page-locked memory, which occupies as much again, and for the CPU's arithmetic; `every` makes updates rarer, with the
same decay per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeline.config import EmaConfig
from pipeline.parallel.shards import local
from pipeline.training.host_copy import HostCopy


def ema_decay(config: EmaConfig, step: int) -> float:
    """EMA decay after optimizer step `step` (1-based), for an update that covers `every` steps. The warm-up is
    TensorFlow's (`num_updates`)."""
    return min(config.decay, (1 + step) / (10 + step)) ** config.every


class EMA:
    """EMA of the parameters that are trained, by name.

    Attributes:
        values: fp32, plain or sharded like the parameters, on their device or on the CPU.
    """

    def __init__(self, model: nn.Module, config: EmaConfig):
        """Start from the current weights. Call it after `parallelize`."""
        self.config, self._host = config, HostCopy()
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.values = {name: self._copy(parameter) for name, parameter in self._parameters.items()}

    def _copy(self, parameter: Tensor) -> Tensor:
        device = "cpu" if self.config.device == "cpu" else parameter.device
        return parameter.detach().to(device, torch.float32, copy=True)

    @torch.no_grad()
    def restart(self) -> None:
        """Start anew from the current weights."""
        for name, parameter in self._parameters.items():
            local(self.values[name]).copy_(local(parameter))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the weights after optimizer step `step` (1-based)."""
        if step % self.config.every:
            return
        averages = [local(value) for value in self.values.values()]
        weights = [local(parameter.detach()) for parameter in self._parameters.values()]
        share = 1 - ema_decay(self.config, step)
        if any(w.device != a.device for w, a in zip(weights, averages, strict=True)):
            weights = self._host.of(weights)
        if all(w.dtype == a.dtype for w, a in zip(weights, averages, strict=True)):
            torch._foreach_lerp_(averages, weights, share)
            return
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight.float(), share)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the parameters have the averages' values; afterwards both have their values again, bit for bit. They
        are exchanged one tensor at a time; bf16 parameters, into which averages do not fit, are copied to the host."""
        originals: list[tuple[Tensor, Tensor, Tensor]] = []
        try:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    weight, average = local(parameter.detach()), local(self.values[name])
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
