"""What is kept of a block for the backward pass: all, some, its input alone; as it is, in 8 bits, in host memory.

What: `keep_activations` gives each block of a model the way of `train.activation_checkpointing`,
`train.activation_compression` and `train.activation_offload`.
- full: the block's input is kept and the rest computed again. every-k: so for each k-th block.
- selective: kept are also the results of matrix products and ungrouped convolutions whose contraction is at least as
  long as their result is wide. What is wide or cheap per byte is computed again: the widening convolution, norms,
  gates, attention over the short text. For Sana two thirds of the matrix arithmetic is then not repeated.
- compression: of a block that recomputes, its first input (what runs through the blocks; the rest is shared by all of
  them); of any other block, what its Linear layers and its groups of convolutions keep.
- offload: every saved tensor of a block, so its inputs if it recomputes. What `selective` adds stays on the device.
Why this way: the block keeps its name, its parameters' names and its place in the state dict (a wrapper module would
rename them), a deep copy of it recomputes the copy, and `fully_shard` on top gathers the parameters once for the
recomputation. The class is exchanged for one that inherits from it, so nothing can be half on: a flag that is set
while no function is installed, as in diffusers, does not exist.
Price: full costs one more forward pass of each block per step, about a third of the step's arithmetic, selective about
an eighth; see `compression` and `saved` for theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pipeline.config import TrainConfig
from pipeline.parallel.saved_tensors import Keeper

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PRODUCTS = {  # operation: which argument holds the second factor, (contracted, result) dimension of it
    torch.ops.aten.mm.default: (1, 0, 1),
    torch.ops.aten.addmm.default: (2, 0, 1),
    torch.ops.aten.bmm.default: (1, 1, 2),
    torch.ops.aten.linear.default: (1, 1, 0),
}


@dataclass(frozen=True)
class _Way:
    """How one block is kept. checkpointing: none, full or selective."""

    checkpointing: str = "none"
    keeper: Keeper | None = None


class Kept:
    """Mixed in before a block's own class: its forward pass leaves behind what its `_Way` says."""

    kept: _Way

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if self.kept.checkpointing == "full":
            run = partial(checkpoint, run, use_reentrant=False)
        elif self.kept.checkpointing == "selective":
            contexts = partial(create_selective_checkpoint_contexts, _policy)
            run = partial(checkpoint, run, use_reentrant=False, context_fn=contexts)
        keeper = self.kept.keeper
        if keeper is None:
            return run(*args, **kwargs)
        recomputes = self.kept.checkpointing != "none"
        with keeper.around(self, only=args[0] if recomputes else None, compress=recomputes):  # type: ignore[arg-type]
            return run(*args, **kwargs)


class Compressed:
    """Mixed in before the class of a Linear or a group of convolutions: what it saves is compressed."""

    keeper: Keeper

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with self.keeper.around(self):  # type: ignore[arg-type]
            return super().forward(*args, **kwargs)  # type: ignore[misc]


_CLASSES: dict[tuple[type, type[nn.Module]], type[nn.Module]] = {}


def _mix(module: nn.Module, mixin: type) -> None:
    """Exchange the module's class for one that has `mixin` before it, once."""
    cls = type(module)
    if isinstance(module, mixin):
        return
    if (mixin, cls) not in _CLASSES:
        _CLASSES[mixin, cls] = type(mixin.__name__ + cls.__name__, (mixin, cls), {"__module__": cls.__module__})
    module.__class__ = _CLASSES[mixin, cls]


def apply_activation_checkpointing(blocks: Sequence[nn.Module], train: TrainConfig) -> None:
    """Set up every block as the configuration says, in place, before `fully_shard`. Twice is once.

    Args:
        blocks: all blocks of the model, in order. Their first argument is what runs through them.
    """
    mode, compress = train.activation_checkpointing, train.activation_compression
    keeper = None
    if compress != "none" or train.activation_offload:
        keeper = Keeper(None if compress == "none" else compress, train.activation_offload)
    every = int(mode.removeprefix("every-")) if mode.startswith("every-") else None
    for number, block in enumerate(blocks, start=1):
        way = mode if every is None else ("full" if number % every == 0 else "none")
        if way == "none" and keeper is not None and keeper.compress is not None:
            for part in compressible(block):
                _mix(part, Compressed)
                part.keeper = keeper  # type: ignore[assignment]
        outside = keeper if keeper is not None and (way != "none" or keeper.offload) else None
        if way != "none" or outside is not None:
            _mix(block, Kept)
            block.kept = _Way(way, outside)  # type: ignore[assignment]


def checkpoint_blocks(blocks: Iterable[nn.Module], how: str = "full") -> None:
    """Turn recomputation on for each block (`how`: full or selective), in place, before `fully_shard`."""
    for block in blocks:
        _mix(block, Kept)
        block.kept = _Way(how)  # type: ignore[assignment]


def compressible(block: nn.Module) -> list[nn.Module]:
    """The parts of a block whose saved tensors bear 8 bits: Linear layers, and modules that hold convolutions (with the
    activations and gates between them). Not norms, attention itself, modulation."""
    found: list[nn.Module] = []
    for child in block.children():
        group = any(isinstance(inner, _CONVOLUTIONS) for inner in child.children())
        if group or isinstance(child, (nn.Linear, *_CONVOLUTIONS)):
            found.append(child)
        else:
            found.extend(compressible(child))
    return found


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Called for every operation of a block's forward pass: whether its result is kept."""
    return CheckpointPolicy.MUST_SAVE if _pays(operation, args) else CheckpointPolicy.PREFER_RECOMPUTE


def _pays(operation: Any, args: Sequence[Any]) -> bool:
    """Much arithmetic per byte: 2 * contraction operations per value of the result."""
    if operation in _PRODUCTS:
        which, contracted, result = _PRODUCTS[operation]
        factor: Tensor = args[which]
        return factor.shape[contracted] >= factor.shape[result]
    if operation is torch.ops.aten.convolution.default:
        weight, transposed, groups = args[1], args[6], args[8]
        return not transposed and groups == 1 and weight[0].numel() >= weight.shape[0]
    return False
