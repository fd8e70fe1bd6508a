"""AdamW with moments in 8 bits, on torchao's quantised tensors: an fp32 scale per 256 values (arXiv 2110.02861).

Why not torchao's class: it puts its tensors inside DTensors, which confuses the on-disk cache of compiled code; here
its kernel gets this process's plain shards. Stochastic rounding is ours, since replicas of a shard must draw alike. The
state dict has dequantised moments, as AdamW's: a run may switch between `adamw` and `adamw8bit`.
Price: a save needs 8 bytes per parameter of this process in host memory (briefly 16); values
quantised again for another sharding lose up to half a code. On a GPU the kernel is compiled once per shape.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.optim.adam import single_param_adam
from torchao.optim.quant_utils import quantize_8bit_with_qmap
from torchao.optim.subclass_8bit import OptimState8bit

from sana_pipe.train.parallel.shards import local
from sana_pipe.train.training.config import OptimConfig
from sana_pipe.train.training.optimizers.stochastic_rounding import RoundingAdamW, scaled, to_bf16

BLOCK = 256
_SMALLEST = 4096
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # name -> whether it is signed

# torchao makes its tables of codes at first use and keeps them. Made here, they never have the values of a prediction's
# fake tensors.
for _signed in _MOMENTS.values():
    OptimState8bit.zeros((BLOCK,), _signed, BLOCK)


class AdamW8bit(RoundingAdamW):
    """The optimizer, for fp32 or bf16 parameters. compiled: fuse the update with torch.compile; otherwise temporaries
    are several times a parameter's size."""

    def __init__(self, params: Iterable[Any], lr: float, *, compiled: bool = True, **options: Any):
        super().__init__(params, lr, **options)
        self.update_one, self.compiled = single_param_adam, compiled
        if compiled:
            warnings.filterwarnings("ignore", message=".*_stable_hash_for_caching")  # addressed to torchao's developers
            self.update_one = torch.compile(single_param_adam, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update. Parameters without a gradient stay as they are."""
        with torch._dynamo.utils.disable_cache_limit():  # one graph per shape
            for index, group, parameter, state in self._counted():
                self._update_parameter(parameter, state, group, index)

    def _zero_moment(self, parameter: Tensor, name: str) -> Tensor:
        return _zeros(parameter, _MOMENTS[name])

    def _update_parameter(self, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], index: int) -> None:
        stored, gradient = local(parameter.detach()), parameter.grad
        if not stored.numel():
            return
        assert gradient is not None
        gradient = local(gradient) if self.gradient_factor is None else scaled(local(gradient), self.gradient_factor)
        value = stored.float()
        self.update_one(
            value,
            gradient,
            state["step"],
            state["exp_avg"],
            state["exp_avg_sq"],
            None,
            torch.tensor(group["lr"], dtype=torch.float32),
            *group["betas"],
            group["weight_decay"],
            group["eps"],
            True,
            False,
        )
        if value is not stored:
            stored.copy_(to_bf16(value, self.noise.at(parameter, int(state["step"].item()), index)))

    def state_dict(self) -> dict[str, Any]:
        """Torch's form with fp32 moments on the CPU, DTensors where the parameters are."""
        state_dict = super().state_dict()
        parameters = dict(zip(_identities(state_dict), self._parameters(), strict=True))
        state_dict["state"] = {
            identity: {
                name: _dequantised(value, parameters[identity]) if name in _MOMENTS else value
                for name, value in state.items()
            }
            for identity, state in state_dict["state"].items()
        }
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take fp32 moments and quantise them."""
        super().load_state_dict({**state_dict, "state": {}})
        for identity, parameter in zip(_identities(state_dict), self._parameters(), strict=True):
            loaded = state_dict["state"].get(identity)
            if loaded is None:
                continue
            state = self.state[parameter]
            state["step"] = torch.as_tensor(loaded["step"], dtype=torch.float32).clone()
            for name, signed in _MOMENTS.items():
                state[name] = _zeros(parameter, signed)
                _quantise_into(state[name], local(loaded[name]).to(state[name].device, torch.float32))

    def _parameters(self) -> Iterable[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)


def _identities(state_dict: dict[str, Any]) -> list[Any]:
    return list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))


def _zeros(parameter: Tensor, signed: bool) -> Tensor:
    """A zero moment for this process's shard of a parameter."""
    shard = local(parameter.detach())
    if shard.numel() >= _SMALLEST and shard.numel() % BLOCK == 0:
        return OptimState8bit.zeros(shard.shape, signed, BLOCK, shard.device, dtype=torch.float32)
    return torch.zeros_like(shard, dtype=torch.float32)


def _dequantised(moment: Tensor, parameter: Tensor) -> Tensor:
    """fp32 on the CPU, sharded like the parameter."""
    whole = (moment.dequantize() if isinstance(moment, OptimState8bit) else moment).to("cpu", torch.float32, copy=True)
    if not isinstance(parameter, DTensor):
        return whole
    # not from_local: it would move the values to the mesh's device
    like = torch.empty_like(parameter, dtype=torch.float32).to("cpu")
    local(like).copy_(whole)
    return like


def _quantise_into(moment: Tensor, value: Tensor) -> None:
    """Quantise `value` into a moment. The scale gives the block's extreme value an exact code (1 above, -0.993 below),
    so that a dequantised moment gets its codes back."""
    if not isinstance(moment, OptimState8bit):
        moment.copy_(value)
        return
    blocks = value.reshape(-1, BLOCK)
    scale = blocks.amax(1)
    if moment.signed:
        scale = torch.maximum(scale, blocks.amin(1) / moment.qmap.min())
    scale = scale.clamp(min=1e-12)
    moment.codes.copy_(quantize_8bit_with_qmap((blocks / scale[:, None]).view(-1), moment.qmap).view(moment.shape))
    moment.scale.copy_(scale)


def build(
    groups: list[dict[str, Any]],
    config: OptimConfig,
    named: list[tuple[str, Tensor]],
    device: torch.device,
    *,
    seed: int,
    nvlabs: bool,
) -> AdamW8bit:
    """8-bit AdamW of these parameters, compiled on a GPU."""
    compiled = all(parameter.device.type == "cuda" for _, parameter in named)
    return AdamW8bit(groups, config.lr, betas=config.betas, eps=config.eps, compiled=compiled, seed=seed)
