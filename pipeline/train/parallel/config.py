"""The section `train.parallel`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from sana_pipe.base.config import Positive, Section


class ParallelConfig(Section):
    """The way in which the model is parallelized. dp_replicate, dp_shard, tp_size and pp_size multiply to the processes
    of the launch."""

    sizes: Literal["given", "auto"] = "given"
    """given: those below. auto (`parallel: auto` for short): a run chooses dp_replicate, dp_shard, tp_size, pp_size and
    offload when it starts, the fastest by prediction that fits (see `microbatch` for the memory). Its configuration and
    checkpoints have the choice; a run that is resumed on as many processes keeps it."""
    dp_replicate: Annotated[int, Field(ge=-1)] = 1
    """Replicas of the model, whose gradients are averaged (DDP; with dp_shard HSDP). -1: what the other sizes leave."""
    dp_shard: Annotated[int, Field(ge=-1)] = -1
    """Processes that share the parameters of a replica (FSDP2). -1: what the other sizes leave."""
    tp_size: Positive = 1
    """Processes that share each matrix (tensor parallelism)."""
    pp_size: Positive = 1
    """Groups of processes with consecutive blocks each (pipeline parallelism, 1F1B)."""
    reshard_after_forward: bool | None = None
    """Free a block's gathered parameters before the backward pass and after each microbatch: less memory, more gathers.
    null: yes where several processes share the parameters or `offload` is set, and no with a pipeline (it would gather
    again for each microbatch). One process gathers nothing, but casts its fp32 parameters to the compute dtype: no
    keeps 2 bytes per parameter and casts once per step."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are sent and summed."""
    reduce_each_microbatch: bool | None = None
    """Reduce gradients over the processes after each microbatch of a step: no process then keeps a whole gradient (4
    bytes per parameter, on the GPU also under `offload`) between microbatches, and gradients are sent as often as there
    are microbatches. One process alone sends nothing and needs no memory for the reduced gradient in addition to the
    whole one. bf16_pure then sums them in bf16. null: no, unless a search (`microbatch` or `parallel` auto) finds that
    nothing fits without or, on one GPU, that it is faster. A step of one microbatch is the same either way. Not with a
    pipeline."""
    offload: Literal["none", "all"] = "none"
    """all: parameters, gradients and optimizer states stay in host memory, and the optimizer runs on the CPU; a block's
    parameters are copied to the GPU when it runs."""

    @classmethod
    def from_word(cls, word: str) -> Any:
        return {"sizes": word} if word == "auto" else word

    def _conflicts(self) -> Iterator[str]:
        given = {"dp_replicate": 1, "dp_shard": -1, "tp_size": 1, "pp_size": 1, "offload": "none"}
        if self.sizes == "auto" and (others := [name for name, usual in given.items() if getattr(self, name) != usual]):
            yield f"sizes: auto chooses {', '.join(others)}, too: leave them out, or write sizes: given"
        for name in ("dp_replicate", "dp_shard"):
            if getattr(self, name) == 0:
                yield f"{name} must be -1 (what remains) or a positive number"
        if self.dp_replicate == self.dp_shard == -1:
            yield "only one of dp_replicate and dp_shard can be -1 (what remains)"
        if self.reduce_each_microbatch and self.pp_size > 1:
            yield "reduce_each_microbatch does not go with pp_size > 1: a pipeline reduces once a step"

    def reshards(self, shards: int) -> bool:
        """`reshard_after_forward`, null resolved. `shards`: processes that share the parameters of a replica."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return self.pp_size == 1 and (shards > 1 or self.offload == "all")
