"""Context parallelism: every process of a group holds a band of rows of each picture.

What: `apply` joins the bands where rows of a picture meet. The state of linear attention is summed over the group, and
the convolution is given one row of tokens from each neighbour. Everything else is per token. `ContextParallelModel`
(`parallelize`) cuts the inputs and sums the losses. Bands need not be equal.
Gradients: the backward pass of a sum is a sum, that of an exchange of rows is the exchange back. Each process then has
its part of the gradient times the size of the group, and FSDP2's mean over all processes is the gradient. Parameters
are sharded over the group like over data-parallel processes.
Why the row is sent before the convolution that widens it: it has a fifth of the bytes, and joining it copies a fifth
of the memory.
Price: each process widens up to two rows more than it has. For B pictures of width W in tokens, D channels in heads of
d, each block and pass sends at most 2 B W D values to and from the neighbours, and sums B D (d + 1) fp32 values; with
full checkpointing the recomputation does so again.

Every linear attention is a sum over tokens: arXiv 2006.16236.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from pipeline.config import ParallelConfig
from pipeline.errors import ConfigError
from pipeline.parallel.shards import all_reduce


def check(rows: Mapping[str, int], parallel: ParallelConfig, dropout: float) -> None:
    """Refuse a `cp_size` that does not fit the model, the pictures or the other sizes.

    Args:
        rows: rows of tokens of a picture, by the name of its bucket.

    Raises:
        ConfigError: with the values that would work.
    """
    size = parallel.cp_size
    if size == 1:
        return
    if others := [name for name in ("tp_size", "pp_size") if getattr(parallel, name) > 1]:
        raise ConfigError(
            f"train.parallel.cp_size = {size} does not go with {others[0]} = {getattr(parallel, others[0])}",
            expected="cp_size with dp_replicate and dp_shard alone",
            fix=f"--set train.parallel.{others[0]}=1, or --set train.parallel.cp_size=1",
        )
    if dropout:
        raise ConfigError(
            f"the model has dropout = {dropout:g}, which would repeat itself in the bands of a picture",
            fix="dropout = 0 as in every released Sana, or train.parallel.cp_size = 1",
        )
    name, least = min(rows.items(), key=lambda item: item[1], default=("", size))
    if least < size:
        raise ConfigError(
            f"train.parallel.cp_size = {size} processes cannot share the {least} rows of tokens of {name}",
            expected=f"train.parallel.cp_size of at most {least}",
            fix=f"--set train.parallel.cp_size={least}",
        )


def band(rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """First and last row (exclusive) of this process, as equal as possible.

    Raises:
        ConfigError: fewer rows than processes; the same on every process.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    if rows < size:
        raise ConfigError(
            f"a picture has {rows} rows of tokens, fewer than train.parallel.cp_size = {size}",
            fix=f"--set train.parallel.cp_size={rows}",
        )
    return rank * rows // size, (rank + 1) * rows // size


def apply(
    blocks: Iterable[nn.Module], plan: Mapping[str, str], shards: DeviceMesh, parallel: ParallelConfig
) -> DeviceMesh | None:
    """Join the bands within each block, in place.

    Args:
        plan: what an attribute of a submodule is set to. total: a function that sums a tensor over the group; surround:
            adds the neighbours' rows to tokens; margins: how many it adds above and below.
        shards: one dimension, the processes that share parameters. A group is neighbours among them.

    Returns:
        This process's group, one dimension; None where every process has whole pictures.
    """
    if parallel.cp_size == 1:
        return None
    mesh = _group(shards, parallel)
    size, rank = mesh.size(), mesh.get_local_rank()
    margins = int(rank > 0), int(rank < size - 1)
    neighbours = [int(abs(other - rank) == 1) for other in range(size)]
    given = {
        "total": partial(all_reduce, mesh=mesh),
        "surround": partial(_surround, margins=margins, neighbours=neighbours, group=mesh.get_group()),
        "margins": margins,
    }
    for block in blocks:
        for place, role in plan.items():
            name, _, attribute = place.rpartition(".")
            setattr(block.get_submodule(name), attribute, given[role])
    return mesh


def _group(shards: DeviceMesh, parallel: ParallelConfig) -> DeviceMesh:
    """This process's group, with a communicator apart from FSDP2's."""
    ranks, size = dist.get_process_group_ranks(shards.get_group()), parallel.cp_size
    first = shards.get_local_rank() // size * size
    members, timeout = ranks[first : first + size], timedelta(seconds=parallel.timeout_s)
    group = dist.new_group(members, timeout=timeout, use_local_synchronization=True)
    return DeviceMesh.from_group(group, shards.device_type, mesh_dim_names=("cp",))


def _surround(
    x: Tensor, width: int, *, margins: tuple[int, int], neighbours: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Tokens (B, rows*width, D) with the rows of the neighbours, (B, (above + rows + below)*width, D).

    Args:
        margins: rows to be added above and below.
        neighbours: rows for and from each process of the group.
    """
    above, below = margins
    edges = torch.stack([x[:, :width]] * above + [x[:, -width:]] * below)
    received = all_to_all_single_autograd(edges, neighbours, neighbours, group)
    return torch.cat([*received[:above], x, *received[above:]], dim=1)
