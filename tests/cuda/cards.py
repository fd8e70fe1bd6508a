"""Processes on a pretended card, and what its log says of them.

    done = sana_pipe("train", "tiny", card="4090", cwd=folder)       # or python(...), torchrun(2, ...)
    done.code, done.output, done.log.waits(), done.log.contexts(), done.log.operations()

Kernels compute nothing and take no time; copies up to 1 MiB are done. Real are the allocator, the use of streams and
page-locked memory, FSDP2, the order of collectives, inductor, Triton and ptxas for the card's capability. What the
environment says: FAKE_GPU (T4, 3060, 3090, 4090, 5090, A40, A100, H100, B200), FAKE_GPUS, FAKE_OTHER_MIB (memory of
other processes), FAKE_INIT_ERROR (35: the driver is too old, 100: no card), FAKE_INIT_ERROR_RANK (that process only),
FAKE_CONTEXT_MIB, FAKE_NCCL_MIB, FAKE_NCCL_WAIT_S, FAKE_REGISTER_MIB, FAKE_WORKSPACE (bytes), FAKE_CUBLAS_ERROR (3: no
memory), FAKE_VERDICT=0 (see `site/`). On 9.0 and newer cuDNN's attention, which padded captions take, has no plan.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.cuda.building import ROOT, Installation, set_up

CONSOLE = "import sys; from sana_pipe.cli import console; console()"

EACH = """
import json, sys
from sana_pipe.cli import main
from tests.cuda.cards import mark
codes = {}
for name, words in json.loads(sys.argv[1]).items():
    mark("command", name)
    try:
        main(words)
    except SystemExit as ended:
        codes[name] = ended.code
print(json.dumps(codes))
"""


class Line(NamedTuple):
    """A line of the log: `words` that a thread of a process wrote (thread: pid in the main one)."""

    rank: int
    pid: int
    thread: int
    words: tuple[str, ...]


class Log:
    """What the pretended libraries wrote, in order.

    Words of a line: `context CARD`, `wait stream|event|device`, `copy queued|waits to_card|to_host|on_card
    pinned|pageable BYTES`, `pin BYTES`, `register BYTES`, `refused ...` (what a card would not launch), `group NAME
    rank R of N on CARD`, `op GROUP NUMBER WHAT COUNT TYPE`, `hang ...`, `mark ...` (see `mark`).
    """

    def __init__(self, lines: list[Line], title: tuple[str, ...] = ()):
        self.lines, self.title = lines, title

    @classmethod
    def read(cls, path: Path) -> Log:
        rows = map(str.split, path.read_text(encoding="utf-8").splitlines())
        return cls([Line(int(row[0]), int(row[1]), int(row[2]), tuple(row[3:])) for row in rows])

    def of(self, *words: str) -> list[Line]:
        """Lines that begin with these words."""
        return [line for line in self.lines if line.words[: len(words)] == words]

    def waits(self) -> list[Line]:
        """Where the host waits for the card."""
        return [*self.of("wait"), *self.of("copy", "waits")]

    def pageable(self) -> list[Line]:
        """Copies for which the driver waits: between the card and memory that is not page-locked. To the card up to
        64 KiB go into its queue."""
        rows = [line for line in self.of("copy") if "pageable" in line.words]
        return [line for line in rows if line.words[2] == "to_host" or int(line.words[-1]) > 1 << 16]

    def refused(self) -> list[Line]:
        return self.of("refused")

    def contexts(self) -> set[tuple[int, int]]:
        """Rank and card of each context that was opened."""
        return {(line.rank, int(line.words[1])) for line in self.of("context")}

    def hangs(self) -> list[Line]:
        return self.of("hang")

    def operations(self) -> dict[str, dict[int, list[tuple[str, ...]]]]:
        """By group and rank, the collectives in the order of their issue: (what, count, type)."""
        made: dict[str, dict[int, list[tuple[str, ...]]]] = defaultdict(lambda: defaultdict(list))
        for line in self.of("op"):
            _, group, _, *words = line.words
            made[group][line.rank].append(tuple(words))
        return made

    def parts(self, word: str | None = None) -> list[Log]:
        """The stretches that begin with a mark (of this first word), whose words are their titles; without what
        precedes the first. For the log of one process."""
        made: list[Log] = []
        for line in self.lines:
            if line.words[0] == "mark" and word in (None, line.words[1]):
                made.append(Log([], line.words[1:]))
            elif made:
                made[-1].lines.append(line)
        return made


def mark(*words: object) -> None:
    """Write a line into this process's log."""
    with open(os.environ["FAKE_LOG"], "a", encoding="utf-8") as log:
        print(os.environ.get("RANK", "0"), os.getpid(), threading.get_native_id(), "mark", *words, file=log)


@dataclass(frozen=True)
class Done:
    """A process that has ended. output: both streams."""

    code: int
    output: str
    log: Log

    def succeed(self) -> Done:
        assert self.code == 0, self.output[-4000:]
        return self


@cache
def installation() -> Installation:
    return set_up()


def environ(card: str, cards: int, log: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process on this card."""
    from_outside = {key: value for key, value in os.environ.items() if not key.startswith("FAKE_")}
    own = {"FAKE_GPU": card, "FAKE_GPUS": str(cards), "FAKE_LOG": str(log), "FAKE_NCCL_DIR": f"{log}.nccl"}
    return {**from_outside, **installation().environ(), **own, **(more or {})}


def python(
    *arguments: object,
    card: str = "4090",
    cards: int = 1,
    cwd: Path = ROOT,
    more: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> Done:
    """Run this interpreter with these arguments. more: of the environment."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        log.touch()
        words = [sys.executable, *map(str, arguments)]
        settings = environ(card, cards, log, more)
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env=settings,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, 9)
            process.wait()
            raise
        return Done(process.returncode, output, Log.read(log))


def sana_pipe(*arguments: object, **settings: object) -> Done:
    """Run a command of the product; settings: of `python`."""
    return python("-c", CONSOLE, *arguments, **settings)  # type: ignore[arg-type]


def one_after_the_other(commands: Mapping[str, list[str]], **settings: object) -> dict[str, Log]:
    """Run commands of the product in one process, which saves starts. All must succeed; the log of each, by its name (a
    word)."""
    done = python("-c", EACH, json.dumps(commands), **settings).succeed()  # type: ignore[arg-type]
    codes = json.loads(done.output.splitlines()[-1])
    logs = {log.title[1]: log for log in done.log.parts("command")}
    assert all(code == 0 for code in codes.values()), (codes, done.output[-6000:])
    return {name: logs[name] for name in commands}


def torchrun(processes: int, *arguments: object, cards: int | None = None, **settings: object) -> Done:
    """Run a command of the product in a launch, a card for each process."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes, "-m", "sana_pipe.cli")
    return python(*launch, *arguments, cards=cards or processes, **settings)  # type: ignore[arg-type]
