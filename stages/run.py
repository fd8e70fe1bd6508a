"""`sana-pipe run`: encode, bucket, train, sample and export as one chain of the single commands.

Each command is printed as a user types it and runs in a process of its own, so no process holds two models. All of them
continue what an earlier, killed run began. The chain ends at the first command that fails, with its exit code.
Pictures and export go to folders of the run directory, so that no run replaces what another made.
"""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from sana_pipe.base.amounts import amount
from sana_pipe.base.options import flat, put, value_at
from sana_pipe.base.processes import INTERRUPTED, alongside, call, command, free_memory, shown
from sana_pipe.config import LOCAL_NAME, Config, Given, reads
from sana_pipe.data.snapshots import provenance
from sana_pipe.tools import outputs
from sana_pipe.tools.locations import cache_location
from sana_pipe.tools.reporting import run_pictures
from sana_pipe.train.training import changes, checkpoint, heldout
from sana_pipe.train.training.config import PicturesConfig

PROMPTS = "prompts.txt"
STAGES = ("encode", "bucket", "train", "sample", "export")
SAMPLES, EXPORT = "samples", "export"
"""Folders of the results in `train.output`."""
_DECODER, _BYTES_PER_PIXEL = 2 << 30, 3 << 10
"""Memory of a process that decodes: libraries with weights in fp32, and the activations for each pixel."""
TORCHRUN = ("--standalone", "--nproc-per-node")


@dataclass(frozen=True)
class Step:
    """A command of the chain. processes: one for each GPU of this machine."""

    words: tuple[str, ...]
    processes: int = 1

    @property
    def arguments(self) -> list[str]:
        """The argument vector."""
        words = command("--quiet", *self.words)  # the next command follows by itself
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
        prompts: as for `encode --prompts`; None: with `train.pictures` those of `prompts.txt` next to the
            configuration or here.

    Returns:
        0, or the exit code of the command that failed.

    Raises:
        UserError: results would lie over what the configuration reads; the checkpoints are of other data or weights.
    """
    for folder in (SAMPLES, EXPORT):
        place = Path(config.train.output, folder)
        outputs.check(config, place, whole=folder == EXPORT, option="train.output", sources=data)
    if path is None and given.file.name != LOCAL_NAME:
        click.echo(
            f"{given.file.stem} trains the whole model; "
            f"{shown('init', *(word for each in data for word in ('--data', each)))} writes a configuration for these "
            "pictures, with a LoRA if they are few"
        )
    steps = list(chain(config, given, path, overrides, data, prompts))
    sampling = _options("sample", given, path, overrides)
    for number, step in enumerate(steps, 1):
        click.echo(f"\n[{number}/{len(steps)}] $ {step}")
        if step.words[0] == "train":
            check_unchanged(config)
        with _decoding(config, sampling) if step.words[0] == "train" else nullcontext():
            code, stopped_by = call(step.arguments)
        if code or stopped_by is not None:
            what = (
                f"was ended by {stopped_by.name};"
                if stopped_by
                else f"ended with exit code {code}; once that is fixed,"
            )
            click.echo(f"\nstopped: {step} {what} the same command goes on from here", err=True)
            return INTERRUPTED if stopped_by == signal.SIGINT else code
    for line in best(Path(config.train.output)):
        click.echo(line)
    return 0


@contextmanager
def _decoding(config: Config, options: Sequence[str]) -> Iterator[None]:
    """Decode what a training draws while the block runs, on the CPU with the least priority, if pictures are drawn and
    twice the memory that this takes is free. The training decodes what is left when it has ended."""
    pictures = config.train.pictures
    if pictures is None:
        yield
        return
    if free_memory() < 2 * (needed := _decoder_bytes(pictures, config.data.resolution)):
        click.echo(f"note: pictures are decoded after the training: less than twice {amount(needed)} of memory is free")
        yield
        return
    output = config.train.output
    click.echo(f"pictures during the training: {output}, in folders called {run_pictures.FOLDER}")
    watching = ("sample", "--watch", output, *options, "--set", "encode.device=cpu")
    with alongside(command("--quiet", *watching)) as failure:
        yield
        if (why := failure()) is not None:
            click.echo(
                f"note: decoding during the training ended early, so the rest is decoded afterwards: {why}", err=True
            )


def _decoder_bytes(pictures: PicturesConfig, resolution: int) -> int:
    """About what decoding a picture on the CPU takes: libraries and weights, and activations by pixel."""
    height, width = pictures.size or (resolution, resolution)
    return _DECODER + _BYTES_PER_PIXEL * height * width


def best(output: Path) -> list[str]:
    """The checkpoint with the lowest held-out loss among those that are left of a run directory, for
    people, with what it drew; empty: nothing was held out."""
    there = {checkpoint.step_of(path): path for path in checkpoint.complete(output / "checkpoints")}
    chosen = heldout.best(output, there)
    if chosen is None:
        return []
    step, losses = chosen
    lines = [f"lowest held-out loss of the checkpoints: {losses[step]:.4f}, {there[step]}"]
    if step != (last := max(losses)):
        way = shown("export", "--checkpoint", str(there[step]), "--out", "DIR")
        lines[0] += f" (the last: {losses[last]:.4f}); {way}"
    pictures = run_pictures.files(output)
    drawn = [path.with_suffix("") for path in pictures if int(path.stem.removeprefix("step-")) <= step]
    if drawn and drawn[-1].is_dir():
        lines.append(f"its pictures: {drawn[-1]}")
    return lines


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
    samples, export = (str(Path(config.train.output, folder)) for folder in (SAMPLES, EXPORT))
    yield Step(("sample", "--out", samples, *options["sample"]))
    yield Step(("export", "--out", export, "--overwrite", *options["export"]))


def check_unchanged(config: Config) -> None:
    """Refuse to go on with a run whose data or base weights have changed since it began."""
    output = Path(config.train.output)
    folder = checkpoint.newest(output / "checkpoints")
    if folder is not None:
        cache, document = cache_location(config).open(), checkpoint.read_document(folder)
        differing = provenance.since(cache, document.state.snapshot, cache.snapshot_of("latest"))
        changes.refuse(output, [*changes.of_weights(config.model.weights, document), *differing])


def _options(stage: str, given: Given, path: str | None, overrides: Sequence[str]) -> list[str]:
    """`--config`, and each `--set` that the stage reads; of a section the part that it reads."""
    words = [] if path is None else ["--config", path]
    for option, text in zip(given.overridden, overrides, strict=True):
        values = dict(flat({option: value_at(given.tree, option)}))
        read: dict[str, Any] = {}
        for name in filter(partial(reads, stage), values):
            put(read, name, values[name])
        if all(reads(stage, name) for name in values):
            words += ["--set", text]
        elif read:
            words += ["--set", f"{option}={json.dumps(value_at(read, option), ensure_ascii=False)}"]
    return words


def _prompts(config: Config, file: Path) -> str | None:
    """The file of prompts next to the configuration, if there is one; none where no pictures are drawn, or another set
    is named."""
    if config.train.pictures is None or config.train.pictures.prompts is not None:
        return None
    places = (file.with_name(PROMPTS), Path(PROMPTS))
    return next((str(place) for place in places if place.is_file()), None)


def _processes(device: str) -> int:
    return max(1, torch.cuda.device_count()) if device in ("auto", "cuda") else 1
