"""The number of pictures of a size that go through the VAE at a time where `encode.image_batch` is auto.

`fitting` gives for a target size the pictures whose tensors fit into the GPU with `MARGIN` left free, and whose
largest tensor has at most `INDEXED` values (15 pictures of 1024 x 1024 pixels, 63 of 512 x 512).
On a CPU it is `FIXED`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from sana_pipe.base import launch
from sana_pipe.data.encoders.vae import Footprint
from sana_pipe.data.encoding.plan import FIXED, Fitting

MARGIN = 0.1
"""Share of the memory that is left free."""
INDEXED = 2**31 - 1
"""Above so many values in a tensor cuDNN's convolutions are split or refused; the GPU is busy long before."""


def fitting(footprint: Callable[[int, int], Footprint | None], device: Callable[[], torch.device]) -> Fitting:
    """The batch by target size on this process's device, for `plan_images`. Nothing is read before its first call.

    Args:
        footprint: (height, width) -> what the encoder needs; see `PictureSignal.footprint`.

    Raises (when called):
        UserError: there is no such device; the encoder's configuration cannot be read.
    """

    @cache
    def memory() -> int:
        return available(device())

    @cache
    def batch(height: int, width: int) -> int:
        each = footprint(height, width) if memory() else None
        if each is None:
            return FIXED
        return max(1, min((memory() - each.weights) // each.picture, INDEXED // each.largest))

    return batch


def available(where: torch.device) -> int:
    """Bytes of a GPU that the encoder may fill: what is free now or held by this process, in equal parts for the
    processes of this node that use the GPU, less `MARGIN`. 0: the device is no GPU."""
    if where.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(where)
    sharing = -(-launch.detect().local_world // max(1, torch.cuda.device_count()))
    return int((free + torch.cuda.memory_reserved(where)) / sharing * (1 - MARGIN))
