"""Several processes of `sana-pipe train`, a pretended card each: all must issue the same collectives in the same order,
for each strategy; and a step waits and copies as that of a single process does."""

from __future__ import annotations

import json
import shutil
import socket
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
from sana_pipe.config import Config, dump
from tests.cuda import cards
from tests.cuda.cards import Log

pytestmark = pytest.mark.cuda

RANKS, STEPS = 4, 5

EACH = """
import json, os, sys
from sana_pipe.cli import main
from sana_pipe.train.training.step import TrainStep
from tests.cuda.cards import mark

call = TrainStep.__call__

def marked(self, batches, step, *more, **named):
    mark("number", step)
    return call(self, batches, step, *more, **named)

TrainStep.__call__ = marked
commands = json.loads(sys.argv[1])
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # else a command would find the keys of the one before it
for name, (port, words) in commands.items():
    os.environ["MASTER_PORT"] = str(port)
    mark("command", name)
    try:
        main(words)
        code = 0
    except SystemExit as ended:
        code = ended.code
    mark("end", name)
    if code:
        sys.exit(f"{name}: exit {code}")
"""
"""Commands one after the other in the processes of one launch, which saves starts."""


class Strategy(NamedTuple):
    """Options, and what its steps send: (operation, processes of the group)."""

    options: tuple[str, ...]
    sends: set[tuple[str, int]]


SHARDED = {("allgather", 4), ("reducescatter", 4)}
HSDP = {("allgather", 2), ("reducescatter", 2), ("allreduce", 2)}
TENSOR = ("train.parallel.tp_size=2",)
REPLICAS = ("train.parallel.dp_replicate=2",)
FROZEN = ("train.adapter={rank: 2}",)
STRATEGIES = {
    "fsdp": Strategy((), SHARDED),
    "fsdp_recomputed": Strategy(("train.activation_checkpointing=full", "train.microbatch=1"), SHARDED),
    "ddp": Strategy(("train.parallel.dp_replicate=4",), {("allreduce", 4)}),
    "hsdp": Strategy(REPLICAS, HSDP),
    "tp": Strategy(TENSOR, {("allgather", 2), ("reducescatter", 2), ("allreduce", 2)}),
    "hsdp_tp": Strategy((*REPLICAS, *TENSOR), {("allreduce", 2)}),
    "lora": Strategy(FROZEN, SHARDED),
    "controlnet": Strategy(("train.controlnet={control_drop: 0.2}",), SHARDED),
    "preserve": Strategy((*FROZEN, "train.preserve={}"), SHARDED),
    "preserve_packed": Strategy((*FROZEN, "train.preserve={}", "train.text=packed"), SHARDED),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def cache_with_controls(
    small_cache: Path, photos: Path, make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("controls")
    shutil.copytree(small_cache, folder / "cache")
    config = make_config(folder, "data.pictures.control.made=canny")
    sana_pipe.stages.encode.run(config, str(photos))
    sana_pipe.stages.bucket.run(config)
    return folder / "cache"


class Group(NamedTuple):
    """What each rank of a group issued, in order."""

    size: int
    by_rank: dict[int, list[tuple[str, ...]]]

    def agrees(self) -> bool:
        return len(self.by_rank) == self.size and len({tuple(ops) for ops in self.by_rank.values()}) == 1


class Ran(NamedTuple):
    """Of a strategy: its part of the log by rank, and its groups."""

    by_rank: dict[int, Log]
    groups: dict[str, Group]


def of_ranks(log: Log) -> dict[int, Log]:
    return {rank: Log([line for line in log.lines if line.rank == rank]) for rank in {line.rank for line in log.lines}}


def between(log: Log, word: str) -> dict[str, Log]:
    """The stretches of a process's log that begin with a mark of this word, by its next word, up to the next mark of
    that kind or of an end."""
    parts: dict[str, Log] = {}
    here: Log | None = None
    for line in log.lines:
        if line.words[:2] in (("mark", word), ("mark", "end")):
            here = parts.setdefault(line.words[2], Log([])) if line.words[1] == word else None
        elif here is not None:
            here.lines.append(line)
    return parts


@pytest.fixture(scope="module")
def ran(
    cache_with_controls: Path, make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ran]:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "each.py").write_text(EACH, encoding="utf-8")
    usual = [f"cache={cache_with_controls}", "train.device=auto", "train.precision=bf16", "train.log_every=100"]
    usual += [f"train.steps={STEPS}", "train.microbatch=2", "train.compile=none"]
    commands = {}
    for name, strategy in STRATEGIES.items():
        file = folder / f"{name}.yaml"
        file.write_text(dump(make_config(folder, *usual, f"train.output={folder / name}", *strategy.options)))
        commands[name] = (free_port(), ["train", "--config", str(file)])
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS)
    words = (folder / "each.py", json.dumps(commands))
    done = cards.python(*launch, *words, card="H100", cards=RANKS, timeout=800).succeed()
    ranks = {rank: between(log, "command") for rank, log in of_ranks(done.log).items()}
    results = {}
    for name in STRATEGIES:
        parts = {rank: logs[name] for rank, logs in ranks.items()}
        groups: dict[str, Group] = {}
        for rank, log in parts.items():
            for line in log.of("group"):
                _, group, _, _, _, size, *_ = line.words
                groups.setdefault(group, Group(int(size), defaultdict(list)))
                groups[group].by_rank[rank] = log.operations().get(group, {}).get(rank, [])
        results[name] = Ran(parts, groups)
    return results


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_processes_issue_the_same_collectives_in_the_same_order(ran: dict[str, Ran], name: str) -> None:
    """Edit: in `TrainStep.__call__`, an `all_reduce` of the last rank alone (`if self.rank == 3`)."""
    assert set(ran[name].by_rank) == set(range(RANKS))
    for group, operations in ran[name].groups.items():
        assert operations.agrees(), (group, operations)
    sent = {(op[0], group.size) for group in ran[name].groups.values() for ops in group.by_rank.values() for op in ops}
    assert STRATEGIES[name].sends <= sent
    for rank, log in ran[name].by_rank.items():
        assert not log.hangs()
        assert log.contexts() <= {(rank, rank)}, "a context on another card"


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_of_each_strategy_waits_once_and_copies_no_pageable_memory(ran: dict[str, Ran], name: str) -> None:
    """Edit: `batches[0].mask.cuda().any().item()` in `TrainStep.__call__`."""
    for rank, log in ran[name].by_rank.items():
        steps = between(log, "number")
        assert list(steps) == [str(step) for step in range(1, STEPS + 1)]
        for step in list(steps.values())[2:-1]:
            assert len(step.waits()) <= 1, (rank, step.waits())
            # numbers to the card go into the driver's queue
            large = [line for line in step.pageable() if line.words[2] == "to_host" or int(line.words[-1]) > 1 << 16]
            assert not large, (rank, large)


def test_a_process_that_sends_something_else_is_seen() -> None:
    same, other = [("allreduce", "8", "7"), ("allgather", "8", "7")], [("allgather", "8", "7"), ("allreduce", "8", "7")]
    assert Group(2, {0: same, 1: list(same)}).agrees()
    assert not Group(2, {0: same, 1: other}).agrees()
    assert not Group(2, {0: same, 1: same[:1]}).agrees()
    assert not Group(2, {0: same}).agrees(), "a process that is not in its group"
