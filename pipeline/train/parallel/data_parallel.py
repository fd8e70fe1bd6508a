"""Data parallelism: FSDP2 on each block and on the rest of the model.

A mesh of one dimension is FSDP2; of two, (replicas, shards), HSDP; with one shard per replica it averages as DDP does.
Frozen parameters have the dtype of the computation; where nothing is sharded FSDP2 does not manage them.
Why in DDP's place and for one process in bf16, too: mixed precision, checkpoints and clipping are the same everywhere,
and autocast would cache bf16 copies of all parameters (3 GiB for Sana 1.6B) and run linear attention's fp32 in bf16.
Price: without `reduce_each_microbatch` every process has a full fp32 gradient between microbatches, and the last is
reduced next to it in memory of another stream. In DDP's place FSDP2 copies parameters before use, and they stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from sana_pipe.train.config import TrainConfig
from sana_pipe.train.parallel.mesh import REPLICATE, SHARD

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "bf16_pure": torch.bfloat16}
STORED = {"bf16_pure": torch.bfloat16}
"""Dtype of the parameters that are trained, where it is not fp32."""


def stored_dtype(parameter: nn.Parameter, precision: str) -> torch.dtype:
    """Return the dtype of a trained parameter, or of a frozen one: that of the computation."""
    return STORED.get(precision, torch.float32) if parameter.requires_grad else COMPUTE[precision]


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of a run's mesh over which parameters are sharded and gradients averaged."""
    return mesh[REPLICATE, SHARD] if mesh[REPLICATE].size() > 1 else mesh[SHARD]


def is_managed(train: TrainConfig, processes: int) -> bool:
    """Tell whether FSDP2 manages the parameters of so many data-parallel processes. In fp32 one alone has nothing to
    shard or to cast."""
    return train.precision != "fp32" or processes > 1 or train.parallel.offload == "all"


def apply_fsdp(model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, train: TrainConfig) -> nn.Module:
    """Shard `model` in place, on the mesh's device, and return it.

    In fp32 with one process there is nothing to shard or to cast: the model is only moved to the device. With
    `train.parallel.offload: all` parameters and gradients stay in host memory (pinned where there is a GPU), and so do
    the optimizer's states, which are made alongside their parameters.

    Args:
        model: parameters of `stored_dtype`, on the meta device (then they are undefined afterwards: see
            `load_sharded`) or with the same values on every process (each takes its shards from its copy).
        blocks: the modules whose parameters are gathered together; all of them inside `model`.
    """
    data = data_mesh(mesh)
    offload = train.parallel.offload == "all"
    # whole on every process and in the dtype of the computation: FSDP2 would copy them before each use
    as_they_are = {p for p in model.parameters() if not p.requires_grad and mesh[SHARD].size() == 1 and not offload}
    if not is_managed(train, data.size()):
        return _to_device(model, mesh.device_type)
    offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    compute, reduce = COMPUTE[train.precision], COMPUTE[train.parallel.reduce_dtype]
    reshard = train.parallel.reshards(mesh[SHARD].size())
    # No module casts its inputs; the caller does: in bf16 the timestep 873 is 872, nine times the error of all the rest
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    in_place = _InPlace(mesh.device_type) if is_reduced_in_place(train, mesh[SHARD].size()) else None
    for module in (*blocks, model):
        # None: the root's parameters stay gathered, since the backward pass begins with them
        freed = None if reshard and module is model else reshard
        fully_shard(
            module,
            mesh=data,
            reshard_after_forward=freed,
            mp_policy=policy,
            offload_policy=offload_policy,
            ignored_params=as_they_are,
        )
        if in_place is not None:
            cast(FSDPModule, module).set_custom_reduce_scatter(cast(Any, in_place))
    return _to_device(model, "cpu" if offload else mesh.device_type)


class _InPlace:
    """FSDP2's reduction over the shards of a replica where there is a single shard: the gradient stays in the buffer
    into which FSDP2 has cast it, and is not copied to a second buffer (8 bytes moved per parameter).

    Buffers have a pool of the allocator to themselves: among activations, which come and go, they would leave gaps
    that depend on everything's size, and so memory that no plan knows.
    """

    def __init__(self, device_type: str) -> None:
        self._device = torch.get_device_module(device_type)
        self._pool = self._device.Stream()
        self._input: weakref.ref[Tensor] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Called for the input, then, while that is alive, for the output of each reduction."""
        given = None if self._input is None else self._input()
        self._input = None
        if given is not None and (*given.shape, given.dtype, given.device) == (*size, dtype, device):
            return given
        with self._device.stream(self._pool):
            made = torch.empty(*size, dtype=dtype, device=device)
        self._input = weakref.ref(made)
        return made

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Some versions of FSDP2 call it for a single shard, too; others copy by themselves."""
        if output_tensor.data_ptr() != input_tensor.data_ptr():
            output_tensor.copy_(input_tensor)


def is_reduced_in_place(train: TrainConfig, shards: int) -> bool:
    """Return whether gradients lie in the buffer of their reduction until the update, which is in the stream of the
    computation, as the next writing into that memory is.

    Not where FSDP2 frees the buffer earlier, while a stream apart may still read it: copies to the host, updates in the
    backward pass, casts, sums of several reductions. Pipelines are left as they are.
    """
    parallel, stored = train.parallel, STORED.get(train.precision, torch.float32)
    freed_earlier = parallel.offload == "all" or train.optim.in_backward or parallel.reduce_each_microbatch
    of_one_dtype = COMPUTE[parallel.reduce_dtype] == stored
    return shards == 1 and of_one_dtype and not freed_earlier and parallel.pp_size == 1


def _to_device(model: nn.Module, device: str) -> nn.Module:
    """Move the model; a model on the meta device gets memory for this process's shards, with undefined values."""
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    return model.to_empty(device=device) if on_meta else model.to(device)


def prepare_microbatch(model: nn.Module, last: bool, keep_gathered: bool = False, reduce_each: bool = False) -> None:
    """Before a microbatch's forward pass: the last microbatch of a step reduces gradients over the processes.

    Args:
        keep_gathered: the next microbatch of the step uses the parameters that this microbatch has gathered. They are
            valid until the update.
        reduce_each: the others, too, reduce gradients over the shards of a replica. Only the last one sums over
            replicas.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or reduce_each)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or not keep_gathered)


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of a model and of all modules inside."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
