"""`sana-pipe run`: encode, bucket, train, sample and export as one chain of the single commands.

Each command is printed as a user types it and runs in a process of its own, so no process holds two models. All of them
continue what an earlier, killed run began. The chain ends at the first command that fails, with its exit code.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import click
import torch

from pipeline.config import Config, Given, reads
from pipeline.options import flat, value_at
from pipeline.processes import catching, command, end_with_parent, shown

PROMPTS = "prompts.txt"
STAGES = ("encode", "bucket", "train", "sample", "export")
TORCHRUN = ("--standalone", "--nproc-per-node")
INTERRUPTED = 130


@dataclass(frozen=True)
class Step:
    """A command of the chain. processes: one for each GPU of this machine."""

    words: tuple[str, ...]
    processes: int = 1

    @property
    def arguments(self) -> list[str]:
        """The argument vector."""
        words = command(*self.words)
        if self.processes == 1:
            return words
        launcher = [words[0], "-m", "torch.distributed.run", *TORCHRUN, str(self.processes), "--no-python"]
        return [*launcher, *words]

    def __str__(self) -> str:
        launch = ["torchrun", *TORCHRUN, str(self.processes), "--no-python"] if self.processes > 1 else []
        return " ".join(filter(None, [shlex.join(launch), shown(*self.words)]))


def run(
    config: Config, given: Given, path: str | None, overrides: Sequence[str], data: Sequence[str], prompts: str | None
) -> int:
    """Run the chain.

    Args:
        given: what the file and `--set` say. path: of `--config`. overrides: of `--set`; each goes to the commands that
            read it.
        data: sources, as for `encode --data`.
        prompts: as for `encode --prompts`; None: with `train.pictures` those of `prompts.txt` beside the
            configuration or here.

    Returns:
        0, or the exit code of the command that failed.
    """
    steps = list(chain(config, given, path, overrides, data, prompts))
    for number, step in enumerate(steps, 1):
        click.echo(f"\n[{number}/{len(steps)}] $ {step}")
        code, stopped_by = _call(step)
        if code or stopped_by is not None:
            what = f"ended with {code}" if stopped_by is None else f"was ended by {signal.Signals(stopped_by).name}"
            click.echo(f"\nstopped: {step} {what}; the same command goes on from here", err=True)
            return INTERRUPTED if stopped_by == signal.SIGINT else code
    return 0


def chain(
    config: Config, given: Given, path: str | None, overrides: Sequence[str], data: Sequence[str], prompts: str | None
) -> Iterator[Step]:
    """The commands; see `run`."""
    options = {stage: _options(stage, given, path, overrides) for stage in STAGES}
    encoders, trainers = _processes(config.encode.device), _processes(config.train.device)
    drawn = prompts or _prompts(config, given.file)
    for place, source in enumerate(data, 1):
        also = ["--prompts", drawn] if drawn is not None and place == len(data) else []
        yield Step(("encode", "--data", source, *also, *options["encode"]), encoders)
    yield Step(("bucket", *options["bucket"]))
    yield Step(("train", "--resume", "auto", *options["train"]), trainers)
    yield Step(("sample", *options["sample"]))
    yield Step(("export", "--overwrite", *options["export"]))


def _options(stage: str, given: Given, path: str | None, overrides: Sequence[str]) -> list[str]:
    """`--config`, and each `--set` that the stage reads."""
    words = [] if path is None else ["--config", path]
    for option, text in zip(given.overridden, overrides, strict=True):
        names = [name for name, _ in flat({option: value_at(given.tree, option)})]
        if all(reads(stage, name) for name in names):
            words += ["--set", text]
    return words


def _prompts(config: Config, file: Path) -> str | None:
    """The file of prompts beside the configuration, if there is one; none where no pictures are drawn, or another set
    is named."""
    if config.train.pictures is None or config.train.pictures.prompts is not None:
        return None
    places = (file.with_name(PROMPTS), Path(PROMPTS))
    return next((str(place) for place in places if place.is_file()), None)


def _processes(device: str) -> int:
    return max(1, torch.cuda.device_count()) if device in ("auto", "cuda") else 1


def _call(step: Step) -> tuple[int, int | None]:
    """Run a command; signals are passed on to it.

    Returns:
        Its exit code, 128 + N if signal N ended it, and the signal that was passed on.
    """
    passed, children = list[int](), list[subprocess.Popen[bytes]]()

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed.append(number)
        for child in children:
            child.send_signal(number)

    with catching([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1], pass_on):
        # A group of its own: the terminal sends Ctrl-C to this process alone, and the command gets it once.
        child = subprocess.Popen(step.arguments, process_group=0, preexec_fn=end_with_parent)
        early = list(passed)
        children.append(child)
        for number in early:
            child.send_signal(number)
        code = child.wait()
    return code if code >= 0 else 128 - code, passed[0] if passed else None
