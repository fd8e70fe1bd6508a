"""Count the batch shapes of a snapshot: a compiled model is compiled once for each.

`check` counts the shapes of all microbatches (buckets, padded text lengths, sizes of the last microbatch) and refuses
more than the configuration allows. This happens before the run, because a shape costs minutes of compilation at some
step of the first epoch; a limit that is reached then would stop a run that has begun, or run the rest uncompiled.
Price: possible shapes are counted, whether or not the order needs them.
"""

from __future__ import annotations

import math

import pyarrow.compute as pc

from pipeline.cache.snapshot import Snapshot
from pipeline.config import TrainConfig
from pipeline.errors import ConfigError


def check(snapshot: Snapshot, train: TrainConfig, data_world: int) -> None:
    """Refuse to compile for too many shapes.

    Args:
        data_world: data-parallel processes that share a global batch.

    Raises:
        ConfigError: the snapshot has more shapes than `train.compile_max_shapes`; lists what would lower their number.
    """
    multiple = snapshot.head.policies.pad_text_multiple
    longest = _longest(snapshot)
    lengths = math.ceil(min(longest, snapshot.text_recipe.max_length) / multiple)
    sizes = [len(_sizes(bucket.batch // data_world, train.microbatch)) for bucket in snapshot.buckets]
    shapes = lengths * sum(sizes)
    if shapes <= train.compile_max_shapes:
        return
    fixes = []
    if lengths > 1:
        fixes.append(f"one text length for all: --set bucket.pad_text_multiple={longest} and sana-pipe bucket again")
    if sum(sizes) > len(sizes):
        fixes.append("a train.microbatch that divides every process's share of a batch")
    if len(sizes) > 1:
        fixes.append("fewer data.buckets")
    raise ConfigError(
        f"train.compile: block would have to compile the blocks for {shapes} shapes: {len(sizes)} bucket(s), "
        f"{lengths} text length(s)" + (", and last microbatches that are smaller" if sum(sizes) > len(sizes) else ""),
        expected=f"at most train.compile_max_shapes = {train.compile_max_shapes} (each costs a compilation)",
        fix="; or ".join([*fixes, f"--set train.compile_max_shapes={shapes}", "--set train.compile=none"]),
    )


def _sizes(share: int, microbatch: int) -> set[int]:
    """Sizes of the microbatches of a process's share of a batch."""
    return {size for size in (min(share, microbatch), share % microbatch) if size}


def _longest(snapshot: Snapshot) -> int:
    """Rows of the longest caption or, if there are more, the valid rows of the null record."""
    rows = [pc.max(pc.struct_field(pc.list_flatten(t.column("captions")), "rows")).as_py() for t in snapshot.tables()]
    return max([snapshot.null.valid, *(count for count in rows if count is not None)])
