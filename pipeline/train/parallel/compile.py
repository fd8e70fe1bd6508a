"""torch.compile, block by block.

Why per block: all blocks share one graph, so 60 compile as fast as 20, and FSDP2 gathers between them. Why dynamic
shapes: buckets and text lengths are many; convolutions and attention are opaque operations, which leave sizes free.
Why `forward` and not the module's call: FSDP2's hooks stay outside. Why `fullgraph`: otherwise dynamo silently runs
uncompiled beyond its limit (8 graphs); here another graph is an error.
Price: the first step compiles (inductor: a minute on two CPU cores), and again for a last microbatch of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import nn
from torch.fx.experimental import _config as shapes


def compile_blocks(blocks: Sequence[nn.Module], backend: str) -> None:
    """Compile each block in place, after `apply_activation_checkpointing` and before `fully_shard`. Names of modules
    and parameters stay. Dynamo's settings are those of the process: sizes that are equal by chance stay independent,
    and floating numbers (epsilons) are constants. A graph beyond dynamo's limit raises `FailOnRecompileLimitHit`."""
    torch._dynamo.config.specialize_float = True
    torch._dynamo.config.force_nn_module_property_static_shapes = False  # rows of a dropout's masks: of any number
    shapes.use_duck_shape = False
    _tag_caches()
    for block in blocks:
        compiled = torch.compile(block.forward, backend=backend, dynamic=True, fullgraph=True)
        block.forward = compiled


def _tag_caches() -> None:
    """Compiled code is cached on disk by the graph, which names our operations without their arguments. So a digest of
    these is added to the user's tag (`TORCH_COMPILE_CACHE_KEY_TAG`). It is short: torch makes file names of the tag."""
    schemas = (str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("sana_pipe::"))
    digest = xxhash.xxh3_64_hexdigest(" ".join(sorted(schemas)).encode())
    if digest not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += f"-{digest}"


def compile_conditions(model: nn.Module, backend: str) -> None:
    """Compile the method `conditions` of a model or pipeline stage, and of modules in it, in place, where there is one;
    after `compile_blocks`."""
    for module in model.modules():
        conditions: Any = getattr(module, "conditions", None)
        if conditions is not None:
            compiled: Any = torch.compile(conditions, backend=backend, dynamic=True, fullgraph=True)
            module.conditions = compiled
