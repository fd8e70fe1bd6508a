"""torch.compile, block by block.

What: `compile_blocks` compiles each block's forward pass into one graph per (static) shape.
Why per block and not the whole model: all blocks share one graph, so a model of 60 blocks compiles as fast as one of
20, and FSDP2 gathers block by block between the graphs. Why static shapes: inductor cannot compile the whole block for
dynamic ones (torch 2.13). Why `forward` and not the module's call: FSDP2's hooks then stay outside of the graph, which
needs no graph breaks. Why a limit on shapes: dynamo gives up at its default (8 shapes) and silently runs uncompiled;
here one shape too many is an error.
Price: each shape is compiled at its first use (inductor: two to three minutes on two CPU cores). Call it after
`apply_activation_checkpointing` (which replaces the class whose forward pass is compiled) and before `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def compile_blocks(blocks: Sequence[nn.Module], backend: str, shapes: int) -> None:
    """Compile each block in place. Names of modules and parameters stay.

    Args:
        backend: of torch.compile.
        shapes: maximum number of different shapes; one more raises `FailOnRecompileLimitHit`.
    """
    limit = torch._dynamo.config
    limit.recompile_limit = max(limit.recompile_limit, shapes + 1)  # +1: a forward pass without gradients
    limit.accumulated_recompile_limit = max(limit.accumulated_recompile_limit, limit.recompile_limit)
    for block in blocks:
        compiled = torch.compile(block.forward, backend=backend, dynamic=False, fullgraph=True)
        block.forward = compiled
