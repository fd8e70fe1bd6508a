"""Activation checkpointing and compression: what each block saves for the backward pass.

`apply_activation_checkpointing` replaces a block's class with a subclass: names and state dict stay as they are (a
wrapper would rename them), a deep copy recomputes the copy, and `fully_shard` gathers the parameters once for the
recomputation. Compression: of a recomputed block its first input in 8 bits (the tokens; the other inputs are shared by
all blocks); of any other block what its Linear layers and groups of convolutions save.
Price: full costs one more forward pass of each block, about a third of the step's arithmetic; selective an eighth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sana_pipe.base.layer_classes import LayerMixin, add_mixin
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.kernels import joined_linear  # noqa: F401  registers the operation
from sana_pipe.train.parallel.saved_tensors import Compressor

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_PRODUCTS = {  # operation: which argument holds the second factor, (contracted, result) dimension of it
    torch.ops.aten.mm.default: (1, 0, 1),
    torch.ops.aten.addmm.default: (2, 0, 1),
    torch.ops.aten.bmm.default: (1, 1, 2),
    torch.ops.aten.linear.default: (1, 1, 0),
    torch.ops.sana_pipe.joined_linear.default: (1, 1, 0),  # each of its three
}


@dataclass(frozen=True)
class ActivationPolicy:
    """The way in which a block treats its activations.

    checkpointing: full or selective. random: the block draws random numbers (dropout), so the state of the
    generators is restored for the recomputation; on a GPU saving it takes a copy to the host per block.
    """

    checkpointing: str
    compressor: Compressor | None = None
    random: bool = True


class ManagedActivations(LayerMixin):
    """Mixin before a block's class: the forward pass follows `activation_policy`."""

    place = "activations"
    activation_policy: ActivationPolicy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward, policy = super().forward, self.activation_policy  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=policy.random)
        if policy.checkpointing == "full":
            forward = partial(again, forward)
        elif policy.checkpointing == "selective":
            contexts = partial(create_selective_checkpoint_contexts, _selective_policy)
            forward = partial(again, forward, context_fn=contexts)
        if policy.compressor is None:
            return forward(*args, **kwargs)
        with policy.compressor.hooks(self, only=args[0]):  # type: ignore[arg-type]
            return forward(*args, **kwargs)


class CompressedActivations(LayerMixin):
    """Mixin before the class of a Linear or a group of convolutions: its saved tensors are compressed."""

    place = "compression"
    compressor: Compressor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with self.compressor.hooks(self):  # type: ignore[arg-type]
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def apply_activation_checkpointing(blocks: Sequence[nn.Module], train: TrainConfig) -> None:
    """Set up each block in place, before `fully_shard`. Idempotent.

    full: save the block's input, recompute the rest. every-k: the same for each k-th block. selective: also save what
    is expensive per byte (`_worth_saving`): for Sana two thirds of the matrix arithmetic is then not repeated.

    Args:
        blocks: all blocks of the model, in order. Their first argument is the tokens.
    """
    mode = train.activation_checkpointing
    assert mode != "auto", "sana_pipe.tools.planning.auto.decide comes first"
    compressor = None if train.activation_compression == "none" else Compressor()
    every = int(mode.removeprefix("every-")) if mode.startswith("every-") else None
    for number, block in enumerate(blocks, start=1):
        checkpointing = mode if every is None else ("full" if number % every == 0 else "none")
        if checkpointing != "none":
            add_mixin(block, ManagedActivations)
            block.activation_policy = ActivationPolicy(checkpointing, compressor, _is_random(block))  # type: ignore[assignment]
        elif compressor is not None:
            for module in compressible_modules(block):
                add_mixin(module, CompressedActivations)
                module.compressor = compressor  # type: ignore[assignment]


def _is_random(block: nn.Module) -> bool:
    """Return whether a forward pass in training draws random numbers."""
    return any(isinstance(module, _DROPOUT) and module.p > 0 for module in block.modules())


def compressible_modules(block: nn.Module) -> list[nn.Module]:
    """The parts of a block whose saved tensors tolerate 8 bits: Linear layers, and modules that contain convolutions
    (with the activations and gates between them). Not norms, attention itself or modulation."""
    modules: list[nn.Module] = []
    for child in block.children():
        group = any(isinstance(inner, _CONVOLUTIONS) for inner in child.children())
        if group or isinstance(child, (nn.Linear, *_CONVOLUTIONS)):
            modules.append(child)
        else:
            modules.extend(compressible_modules(child))
    return modules


def _selective_policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Called for every operation of a block's forward pass."""
    return CheckpointPolicy.MUST_SAVE if _worth_saving(operation, args) else CheckpointPolicy.PREFER_RECOMPUTE


def _worth_saving(operation: Any, args: Sequence[Any]) -> bool:
    """Return whether recomputation is expensive per byte: 2 * contraction operations per value of the result."""
    if operation in _PRODUCTS:
        position, contracted, result = _PRODUCTS[operation]
        factor: Tensor = args[position]
        return factor.shape[contracted] >= factor.shape[result]
    if operation is torch.ops.aten.convolution.default:
        weight, transposed, groups = args[1], args[6], args[8]
        return not transposed and groups == 1 and weight[0].numel() >= weight.shape[0]
    return False
