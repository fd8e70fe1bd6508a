"""Decide `train.parallel`, `train.microbatch` and `train.activation_checkpointing` where they are `auto`.

What: `decide` searches the options that are `auto` by the code of `plan --search` and returns the configuration with
values, and lines that say so. It is the only place that gives them values: whoever reads these options calls it before
(`TrainConfig.undecided`). A resumed run on as many processes keeps the values of its checkpoint.
The memory: that of the GPU less `MARGIN`; on a CPU half of the main memory (or of the control group's limit), divided
by the node's processes.
Why on every process: there is no process group yet, whose sizes are what is decided. The search depends on the
configuration, the data and the card alone, and the start of the run compares the results.
Price: five to thirty seconds of CPU time for Sana 1.6B at the first start, by the number of options.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from pydantic import ValidationError

from pipeline.config import Config, ParallelConfig
from pipeline.errors import ConfigError
from pipeline.launch import Launch
from pipeline.models.sana_config import SanaConfig
from pipeline.parallel.mesh import check_sizes
from pipeline.planning import cards
from pipeline.planning.calibration import constants_or_default
from pipeline.planning.predict import Data, Machine
from pipeline.planning.search import search

MARGIN = 0.1
"""Share of a GPU's memory that is left free, beside the estimates of context and fragmentation."""
_SIZES = ("dp_replicate", "dp_shard", "tp_size", "pp_size")


def decide(
    config: Config,
    shape: SanaConfig,
    data: Data,
    machine: Machine,
    earlier: dict[str, Any] | None = None,
) -> tuple[Config, list[str]]:
    """The configuration with values for what is `auto`, and lines to print.

    Args:
        earlier: the configuration in the checkpoint that is resumed.

    Raises:
        UserError: nothing fits.
    """
    undecided, train = config.train.undecided, config.train
    if not undecided:
        return config, []
    values = as_it_began(config, earlier, machine.gpus)
    if values is not None:
        reason = "as in the checkpoint"
    else:
        memory = round(machine.memory * (1 - MARGIN))
        # What the compiler saves is not predicted; it is about as much.
        plain = train.model_copy(update={"compile": "none"})
        best = search(
            plain,
            shape,
            data,
            replace(machine, memory=memory),
            axes=undecided,
            constants=constants_or_default(machine),
            verified=1,
        )[0]
        sizes = dict(zip(_SIZES, _by_name(best.layout.sizes), strict=True))
        values = {
            "parallel": {**sizes, "offload": best.train.parallel.offload},
            "microbatch": best.train.microbatch,
            "activation_checkpointing": best.train.activation_checkpointing,
        }
        reason = (
            f"{best.total / cards.GIB:.1f} of {machine.memory / cards.GIB:.1f} GiB are predicted, "
            f"{MARGIN:.0%} and more stay free"
        )
    tree = {**train.model_dump(), **{name: values[name] for name in undecided}}
    chosen_sizes = values["parallel"] if "parallel" in undecided else {n: values["parallel"][n] for n in _SIZES}
    tree["parallel"] = {**train.parallel.model_dump(), **chosen_sizes, "sizes": "given"}
    try:
        decided = type(train).model_validate(tree)
    except ValidationError as error:
        raise ConfigError(
            f"what the run began with does not go with this configuration: {error.errors()[0]['msg']}",
            found=", ".join(f"train.{name}: {values[name]}" for name in undecided),
            fix="give these options values instead of auto",
        ) from None
    named = {
        "parallel": str(check_sizes(decided.parallel, machine.gpus)),
        "microbatch": str(decided.microbatch),
        "activation_checkpointing": decided.activation_checkpointing,
    }
    if decided.parallel.offload == "all":
        named["parallel"] += ", offload: all"
    chosen = ", ".join(f"train.{name}: {named[name]}" for name in undecided)
    return config.model_copy(update={"train": decided}), [f"auto: {chosen} ({reason})"]


def _by_name(sizes: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    pipeline, replicate, shard, tensor = sizes
    return replicate, shard, tensor, pipeline


def as_it_began(config: Config, earlier: dict[str, Any] | None, world: int) -> dict[str, Any] | None:
    """The values in the checkpoint; None if it was made on another number of processes, or has none."""
    if earlier is None:
        return None
    try:
        values = {name: earlier["train"][name] for name in ("microbatch", "activation_checkpointing")}
        values["parallel"] = {name: earlier["train"]["parallel"][name] for name in (*_SIZES, "offload")}
    except KeyError:  # of a version without one of these options
        return None
    sizes = [values["parallel"][name] for name in _SIZES]
    try:
        before = check_sizes(ParallelConfig(**dict(zip(_SIZES, sizes, strict=True))), world)
        if "parallel" not in config.train.undecided and check_sizes(config.train.parallel, world) != before:
            return None
    except ConfigError:
        return None
    return None if -1 in sizes else values


def present(device: torch.device, launch: Launch) -> Machine:
    """The machine of a launch whose processes each have a device like this."""
    card = cards.of_device(device)
    nodes = max(1, launch.world // launch.local_world)
    if card is None:  # its speed counts for the ranking only
        memory = torch.cuda.get_device_properties(device).total_memory
        return Machine(cards.card(cards.UNNAMED), memory, launch.world, nodes, assumed=True)
    return Machine(card, usable(card, launch.local_world), launch.world, nodes)


def usable(card: cards.Card, processes: int) -> int:
    """Bytes of a card for each of so many processes on its node: all of a GPU; half of main memory, shared."""
    return card.memory if card.is_gpu else card.memory // (2 * processes)
