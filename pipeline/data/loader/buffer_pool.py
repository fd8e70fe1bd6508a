"""Buffers for batches, which are reused.

`BufferPool.take` lends a buffer of a fixed size. It returns to the pool when the last array or tensor over it is
garbage-collected, so a buffer in use is never overwritten.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

ALIGN = 4096


class _Lease:
    """One use of a buffer. It is the base of every array over the buffer, so that it lives as long as they do."""

    def __init__(self, pool: BufferPool, memory: torch.Tensor):
        self._pool, self._memory = pool, memory
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (len(memory),),
            "data": (memory.data_ptr(), False),
        }

    def __del__(self) -> None:
        self._pool.free.append(self._memory)  # atomic: this may run in any thread, in the middle of anything


class BufferPool:
    """Lends buffers of `size` bytes; safe for several threads.

    Args:
        size: bytes of a buffer.
        pin: page-locked memory, for asynchronous copies to a GPU.

    Attributes:
        made: number of buffers.
    """

    def __init__(self, size: int, *, pin: bool):
        self.size, self.pin = size, pin
        self.free: deque[torch.Tensor] = deque()
        self.made = 0

    def take(self) -> np.ndarray:
        """A (size,) uint8 array of undefined content, reserved until it and all its views are garbage-collected."""
        try:
            memory = self.free.pop()  # the buffer used last is the most likely in the CPU's caches
        except IndexError:
            # numpy asks for huge pages, torch does not
            memory = (
                torch.empty(self.size + ALIGN, dtype=torch.uint8, pin_memory=True)
                if self.pin
                else torch.from_numpy(np.empty(self.size + ALIGN, np.uint8))
            )
            start = -memory.data_ptr() % ALIGN
            memory = memory[start : start + self.size]
            self.made += 1
        return np.asarray(_Lease(self, memory))


class Allocator:
    """Cuts arrays out of a buffer, one after the other."""

    def __init__(self, buffer: np.ndarray):
        self._buffer, self._at = buffer, 0

    def cut(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A C-contiguous array of undefined content.

        Raises:
            ValueError: the buffer is full.
        """
        try:
            piece = np.ndarray(shape, dtype, self._buffer, self._at)
        except TypeError:
            raise ValueError(
                f"a buffer of {len(self._buffer)} bytes has no space for {shape} {dtype} at {self._at}"
            ) from None
        self._at += aligned(piece.nbytes)
        return piece


def aligned(size: int) -> int:
    """Bytes that an array of `size` bytes occupies in a buffer."""
    return -(-size // ALIGN) * ALIGN
