"""torch.compile, block by block.

What: `compile_blocks` makes each given block's forward pass one compiled graph per shape, for static shapes.
Why per block and not the whole model: all blocks share one graph, so a model of 60 compiles as fast as one of 20, and
FSDP2 gathers block by block between the graphs. Why static: inductor cannot compile the whole block for dynamic shapes
(torch 2.13). Why `forward` and not the module's call: FSDP2's hooks then stay outside of the graph, which is whole.
Why a limit: dynamo stops compiling at its own (8 shapes) and would go on without, quietly; here too many are an error.
Price: each shape is compiled when it first comes (inductor took two to three minutes a shape on two CPU cores). Call it
after `checkpoint_blocks` (which exchanges the class whose forward pass is compiled) and before `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def compile_blocks(blocks: Sequence[nn.Module], backend: str, shapes: int) -> None:
    """Compile each block, in place. Names of modules and parameters stay.

    Args:
        backend: of torch.compile.
        shapes: how many different shapes there may be; the first one too many raises `FailOnRecompileLimitHit`.
    """
    limit = torch._dynamo.config
    limit.recompile_limit = max(limit.recompile_limit, shapes + 1)  # once more for a model without gradients
    limit.accumulated_recompile_limit = max(limit.accumulated_recompile_limit, limit.recompile_limit)
    for block in blocks:
        compiled = torch.compile(block.forward, backend=backend, dynamic=False, fullgraph=True)
        block.forward = compiled
