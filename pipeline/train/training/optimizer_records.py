"""The records of optimizers, one for each `train.optim.name`: what is said of it by its name, read by everything else.

A new optimizer is a record here and the module that it names, with a function `build`. Torch is not imported: the
configuration reads this file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer.

    Attributes:
        title: its name in messages.
        module: has `build(groups, config, named, device, seed=, nvlabs=)`, which gives torch's optimizer. groups: its
            parameter groups, with their weight decay. named: the parameters with their names.
        state: kind of state in a checkpoint; a run goes on under another optimizer of the same kind.
        state_bytes: in a checkpoint, per fp32 parameter. pure_state_bytes: per bf16 one, under `bf16_pure`.
        betas: values of `optim.betas: null`, and their number.
        eps: value of `optim.eps: null`; None: the option must be null. fixed_eps: what it is then, for a message.
        extra: of the package, which must be installed; None: nothing more is needed.
        price: why it is not proposed first to a run that lacks memory; None: it is not proposed. The order of the
            records is that of the proposals.
        joins: under `numerics: nvlabs` it takes several parameters as one, in a form of its state that the default
            numerics cannot continue. None: it has no such form.
        stacks: an update makes tensors that stack the parameters of several blocks; False: with fp32 parameters, a
            prediction may take fewer blocks to extrapolate from.
        kernels: operations of torch that update in place, although their forms for fake tensors make copies.
    """

    title: str
    module: str
    state: str
    state_bytes: float
    pure_state_bytes: float
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float | None = 1e-8
    fixed_eps: str | None = None
    extra: str | None = None
    price: str | None = None
    joins: str | None = None
    stacks: bool = True
    kernels: tuple[str, ...] = ()


_ROOM = "sana_pipe.train.training.optimizers"
_SCALES = 4 / 256
"""Bytes of scales per 8-bit value: one in fp32 for 256 values."""

OPTIMIZERS: dict[str, OptimizerRecord] = {
    "adamw": OptimizerRecord(
        title="AdamW",
        module=f"{_ROOM}.adamw",
        state="AdamW",
        state_bytes=8.0,
        pure_state_bytes=4.0,
        stacks=False,
        kernels=("_fused_adamw_",),
    ),
    "adamw8bit": OptimizerRecord(
        title="8-bit AdamW",
        module=f"{_ROOM}.adamw_8bit",
        state="AdamW",
        state_bytes=2 * (1 + _SCALES),
        pure_state_bytes=2 * (1 + _SCALES),
        extra="torchao",
        price="2 instead of 8 bytes of optimizer state per parameter",
    ),
    "came": OptimizerRecord(
        title="CAME",
        module=f"{_ROOM}.came",
        state="CAME",
        state_bytes=4.0,
        pure_state_bytes=2.0,
        betas=(0.9, 0.999, 0.9999),
        eps=None,
        fixed_eps="1e-30 and 1e-16",
        price="4 instead of 8 bytes per parameter; another optimizer: look at lr and weight_decay",
        joins="query, key and value",
    ),
}
"""The optimizers by name, in the order in which documentation and messages list them."""
