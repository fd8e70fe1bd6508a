"""Pictures while a run goes on: they are `sample`'s, and the training does not notice."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import sana_pipe.stages.bucket
import sana_pipe.stages.report
import sana_pipe.stages.sample
import sana_pipe.stages.train
from sana_pipe.base import disk, processes
from sana_pipe.base.errors import CacheError, ConfigError, UserError
from sana_pipe.base.launch import Launch
from sana_pipe.config import Config, dump
from sana_pipe.data.cache import layout, prompts
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.tools.planning import trace as tracing
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.config import SampleConfig
from sana_pipe.train.parallel.mesh import Layout
from sana_pipe.train.training import checkpoint, lock, metrics, throughput, trainer
from sana_pipe.train.training import drawings as in_training
from sana_pipe.train.training.task import Report, TrainingTask
from tests.support.checkpoints import load_model_state
from tests.support.drawings import draw_prompts
from tests.support.foreign_lock import ELSEWHERE, plant
from tests.support.launched import results_by_case
from tests.support.messages import naming
from tests.support.narrow import COMPUTE, NARROW
from tests.support.parameters import first_quick
from tests.support.runs import dropout
from tests.support.waiting import until
from tests.support.workers import drawings, tiny_run
from tests.support.workers.drawings import distance, drawn, plain

pytestmark = pytest.mark.usefixtures("one_thread")


def settings(
    output: Path, steps: int = 3, *, every: int = 1, sample: dict[str, Any] | None = None, **train: Any
) -> Config:
    config = tiny_run.config(output, layers=1, steps=steps, **{"pictures": {"every": every}, **train})
    return config.model_copy(update={"sample": SampleConfig(**{"steps": 2, **(sample or {})})})


def run(config: Config, *, resume: str | None = None, task: TrainingTask | None = None, log: Any = None) -> Report:
    given = task or tiny_run.task(config)
    return trainer.fit(config.train, given, Launch(), resume=resume, log=log or (lambda line: None))


def files(config: Config) -> dict[int, bytes]:
    folder = Path(config.train.output) / "pictures"
    assert all(path.suffix == ".safetensors" for path in folder.iterdir())
    return {int(path.stem.removeprefix("step-")): path.read_bytes() for path in folder.iterdir()}


def rows(config: Config) -> list[dict[str, Any]]:
    return metrics.read_events(Path(config.train.output) / "metrics.jsonl").get("pictures", [])


@contextmanager
def at_model_call(number: int, action: Callable[[], None]) -> Iterator[None]:
    """`action` is called after call `number` (from 0) of the model by the sampler."""
    calls, original = itertools.count(), in_training.sample

    def sample(model: Any, *inputs: Any) -> Tensor:
        def called(*tensors: Tensor) -> Tensor:
            if next(calls) == number:
                action()
            return model(*tensors)

        return original(called, *inputs)

    with mock.patch.object(in_training, "sample", sample):
        yield


# ------------------------------------------------------------------------------------------------------ what is drawn


@pytest.mark.parametrize("ema", [True, False])
def test_they_are_what_sample_draws_from_the_checkpoint(ema: bool, tmp_path: Path) -> None:
    config = settings(
        tmp_path / "run",
        2,
        every=2,
        microbatch=3,
        ema={"decay": 0.5} if ema else None,
        optim={"lr": 1e-2},
        flow={"shift": 2.0},
        sample={"steps": 3, "guidance": 3.0, "seed": 7},
    )
    run(config)
    folder = tmp_path / "run/checkpoints/step-00000002"
    latents, description = drawn(tmp_path / "run", 2)
    assert list(latents) == ["0000", "0001", "0002", "0003", "0004"]
    assert {(t.dtype, tuple(t.shape)) for t in latents.values()} == {(torch.float32, (4, 8, 8))}
    expected = plain(config, load_model_state(folder, ema=ema)[1])
    assert distance(latents, expected) <= 1e-5
    others = [
        plain(config, load_model_state(folder)[1] if ema else None),  # weights: the last, the first
        *(
            plain(config.model_copy(update={"sample": config.sample.model_copy(update=change)}), weights)
            for change in ({"seed": 8}, {"guidance": 4.0}, {"steps": 4})
            for weights in [load_model_state(folder, ema=ema)[1]]
        ),
    ]
    assert all(distance(latents, other) > 1e-3 for other in others)
    assert description == {
        "step": 2,
        "phase": 0,
        "snapshot": "5eed",
        "latent_encoding": "latents",
        "prompt_set": "five",
        "prompts": list(tiny_run.TEXTS),
        "sampling_steps": 3,
        "guidance": 3.0,
        "seed": 7,
        "ema": ema,
        "height": 64,
        "width": 64,
    }
    assert [(row["step"], row["count"], row["prompt_set"], row["file"]) for row in rows(config)] == [
        (step, 5, "five", f"pictures/step-{step:08d}.safetensors") for step in (0, 2)
    ]
    assert all(0 < row["seconds"] < 600 for row in rows(config))
    assert [row["step"] for row in metrics.read(tmp_path / "run/metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("precision", first_quick("bf16", "bf16_pure"))
def test_the_training_does_not_notice(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint is saved between the steps: that would free gathered parameters."""
    dropout(monkeypatch)
    options: dict[str, Any] = {"precision": precision, "ema": {"decay": 0.5, "device": "cpu"}}
    digests, losses, states = [], [], []
    for name, given in (("with", {"every": 1}), ("without", None)):
        config = settings(tmp_path / name, **options, pictures=given)
        run(config)
        written = checkpoint.read_document(tmp_path / name / "checkpoints/step-00000003").files
        digests.append({file: digest for file, digest in written.items() if file != ".metadata"})
        losses.append([(row["step"], row["loss"]) for row in metrics.read(tmp_path / name / "metrics.jsonl")])
        states.append(torch.get_rng_state())
        assert (tmp_path / name / "pictures").exists() == (given is not None)
    assert digests[0] == digests[1]
    assert losses[0] == losses[1]
    assert torch.equal(states[0], states[1]), "the last drawing follows the last step"


@pytest.mark.slow
def test_dropout_is_off_and_blocks_run_uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropout(monkeypatch)
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr("sana_pipe.train.parallel.parallelize.COMPILE_BACKEND", counter)
    config = settings(tmp_path / "run", 1, compile="block")
    run(config)
    assert counter.frame_count == 2, "blocks, and what prepares text and timestep"
    weights = load_model_state(tmp_path / "run/checkpoints/step-00000001")[1]
    assert distance(drawn(tmp_path / "run", 1)[0], plain(config, weights)) <= 1e-5


def test_the_time_does_not_count_as_that_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = [0.0]

    def pause() -> None:
        later[0] = 1e9

    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + later[0]))
    config = settings(tmp_path / "run", 2)
    with at_model_call(7, pause):  # between the first step and the second one
        run(config)
    assert later[0]
    assert [row["step"] for row in metrics.read(tmp_path / "run/metrics.jsonl") if row["images_per_s"] > 1e-5] == [1, 2]


# ------------------------------------------------------------------------------------------------- when, and how often


def test_after_a_resume_nothing_is_drawn_twice_and_nothing_is_missing(tmp_path: Path) -> None:
    whole, parts = (settings(tmp_path / name, 5, every=2, save_every=2, ema={}) for name in ("whole", "parts"))
    run(whole)
    assert sorted(files(whole)) == [0, 2, 4, 5]
    run(settings(tmp_path / "parts", 3, every=2, save_every=2, ema={}))
    shutil.rmtree(tmp_path / "parts/checkpoints/step-00000003")
    before = (tmp_path / "parts/pictures/step-00000002.safetensors").stat()
    (tmp_path / "parts/pictures/step-00000004.safetensors").write_bytes(b"of an attempt that was given up")
    run(parts, resume="auto")
    after = (tmp_path / "parts/pictures/step-00000002.safetensors").stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)
    there = files(parts)
    assert {step: there[step] for step in (0, 2, 4, 5)} == files(whole)
    assert [row["step"] for row in rows(parts)] == [0, 2, 4, 5]


@pytest.mark.parametrize("change", ["guidance", "removed", "damaged"])
def test_a_resumed_run_draws_a_missing_file_again(change: str, tmp_path: Path) -> None:
    run(settings(tmp_path / "run", 2, every=2, save_every=1))
    path = tmp_path / "run/pictures/step-00000002.safetensors"
    original = path.read_bytes()
    if change == "removed":
        path.unlink()
    elif change == "damaged":
        path.write_bytes(original[:-1])
    guidance = 2.0 if change == "guidance" else 4.5
    config = settings(tmp_path / "run", 3, every=2, save_every=1, sample={"guidance": guidance})
    run(config, resume="auto")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    count = sum(line.get("event") == "pictures" and line["step"] == 2 for line in lines)
    assert count == (1 if change == "guidance" else 2)
    assert path.read_bytes() == original
    assert drawn(tmp_path / "run", 3)[1]["guidance"] == guidance


def test_a_file_of_an_abandoned_attempt_does_not_count(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every": 2, "save_every": 1}
    run(settings(tmp_path / "run", 4, **options))
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000004")
    run(settings(tmp_path / "run", 4, **options, optim={"lr": 1e-2}, pictures=None), resume="auto")
    config = settings(tmp_path / "run", 5, **options)
    run(config, resume="auto")
    weights = load_model_state(tmp_path / "run/checkpoints/step-00000004")[1]
    assert distance(drawn(tmp_path / "run", 4)[0], plain(config, weights)) <= 1e-5


def test_a_stop_request_ends_it_early_and_the_resumed_run_makes_up_for_it(tmp_path: Path) -> None:
    config = settings(tmp_path / "run", 4, every=2)
    with at_model_call(7, lambda: os.kill(os.getpid(), signal.SIGTERM)):  # a drawing has 3 passes of 2 steps
        report = run(config)
    assert (report.step, report.stopped_by) == (2, "SIGTERM")
    assert report.checkpoint == tmp_path / "run/checkpoints/step-00000002"
    assert sorted(files(config)) == [0]
    run(config, resume="auto")
    whole = settings(tmp_path / "whole", 4, every=2)
    run(whole)
    assert files(config) == files(whole)


def test_a_stop_in_the_last_drawing_leaves_it_to_the_resumed_run(tmp_path: Path) -> None:
    config = settings(tmp_path / "run", 4, every=2)
    with at_model_call(13, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        report = run(config)
    assert (report.step, report.stopped_by, sorted(files(config))) == (4, "SIGTERM", [0, 2])
    run(config, resume="auto")
    whole = settings(tmp_path / "whole", 4, every=2)
    run(whole)
    assert files(config) == files(whole)


# ------------------------------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize("moment", ["drawing", "writing"])
def test_a_run_that_was_taken_over_writes_no_file(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(tmp_path / "run", 4, every=2)
    theirs = tmp_path / "run/pictures/.step-00000002.safetensors.1.partial"

    def take_over() -> None:
        plant(tmp_path / "run", ELSEWHERE)
        theirs.write_bytes(b"of the other training")

    def written(path: Path) -> None:
        if path.name.startswith(".step-00000002") and moment == "writing":
            take_over()

    monkeypatch.setattr(disk, "sync_path", written)
    with at_model_call(7 if moment == "drawing" else -1, take_over), pytest.raises(lock.RunTaken):
        run(config)
    theirs.unlink()
    assert sorted(files(config)) == [0]
    assert [row["step"] for row in rows(config)] == [0]


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(tmp_path / "run", 2, every=2)
    (tmp_path / "run/pictures").mkdir(parents=True)
    (tmp_path / "run/pictures/.step-00000002.safetensors.1.partial").write_bytes(b"of a killed attempt")
    present: list[list[str]] = []

    def full(path: Path) -> None:
        if path.name.startswith(".step-"):
            present.append(sorted(other.name for other in path.parent.iterdir()))
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "sync_path", full)
        with pytest.raises(UserError, match=naming("step-00000000.safetensors", "No space")):
            run(config)
    assert [len(names) for names in present] == [1], "nothing is left of the killed attempt"
    assert present[0][0].startswith(".step-00000000.")
    assert files(config) == {}
    run(config)
    assert sorted(files(config)) == [0, 2]


# ------------------------------------------------------------------------------------------------------------- refusals


def test_sizes_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    config = settings(tmp_path / "run", microbatch=2)
    task = tiny_run.task(config)

    def of(height: int, width: int) -> TrainingTask:
        return replace(task, pictures=tiny_run.prompts(config, (height, width)))

    with pytest.raises(ConfigError, match=r"(?s)64x100.*train.pictures.size=\[64, 96\]"):
        run(config, task=of(64, 100))
    with pytest.raises(ConfigError, match="12288 pixels"):
        run(config, task=of(104, 128))
    assert not (tmp_path / "run").exists()
    sizes = {size: in_training.drawn_at_once(2, of(*size)) for size in ((64, 64), (32, 32), (48, 32), (96, 128))}
    assert sizes == {(64, 64): 1, (32, 32): 4, (48, 32): 2, (96, 128): 1}
    single = replace(of(64, 64), sample=SampleConfig(guidance=1.0))
    assert in_training.drawn_at_once(2, single) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "controlnet", "most"),
    [(NARROW, None, in_training._MOST), (replace(NARROW, num_layers=8), {"layers": 7}, 2)],
)
def test_the_largest_pass_needs_no_more_memory_than_the_smallest_step(
    shape: Any, controlnet: dict[str, int] | None, most: int
) -> None:
    """Full recomputation and updates in the backward pass: nothing is left of a step but a block at a time. A
    ControlNet's picture has the size of a bucket, so a pass has two samples."""
    optim = {"clip": None, "in_backward": True}
    train = TrainConfig.model_validate({**COMPUTE, "microbatch": 1, "controlnet": controlnet, "optim": optim})

    class Drawing(tracing.TracedStep):
        def __call__(self, batches: Any, step: int, *, stop: bool = False) -> Any:
            for batch in batches:
                self.model.predict(**self.prepare(batch, 0.5).inputs)

    def peak(samples: int, passes: Any) -> float:
        with passes:
            found = tracing.trace(shape, train, Layout(1, 1, 8, 1), tracing.Shape(32, 32, 300, samples)).peak
        return found["activations"] + found["temporaries"] + found["buffers"] + found["gradients"] + found["inputs"]

    step = peak(1, nullcontext())
    drawing = peak(most, mock.patch.multiple(tracing, TracedStep=Drawing, watch_updates=lambda *_: nullcontext()))
    assert 0 < drawing <= step


# ------------------------------------------------------------------------------------------------------------ the stage


@pytest.fixture
def small(make_config: Callable[..., Config], small_cache_copy: Path) -> Callable[..., Config]:
    """The tiny configuration on a copy of the photographs' cache, with a few steps."""

    def make(*overrides: str) -> Config:
        short = ["train.steps=1", "train.pictures={every: 1}", "sample.steps=2", "train.precision=fp32"]
        return make_config(small_cache_copy.parent, *short, *overrides)

    return make


def publish(cache: Cache) -> tuple[TextEncoding, list[bytes], prompts.PromptSet]:
    """A set of three prompts that have the records of captions."""
    (encoding,) = cache.encodings("text")
    assert isinstance(encoding, TextEncoding)
    index = cache.index(encoding.name)
    keys = [key.tobytes() for key in index.keys if key.tobytes() != encoding.null_key][:3]
    published = prompts.publish(cache, "prompts", encoding, ["one", "two", "three"], keys)
    assert published is not None
    return encoding, keys, published


def test_the_stage_opens_the_prompt_set_of_the_snapshots_encoding(small: Callable[..., Config]) -> None:
    config = small()
    snapshot = sana_pipe.stages.bucket.run(config)
    cache = Cache(config.cache)
    output = Path(config.train.output)
    with pytest.raises(CacheError, match="'other'"):
        sana_pipe.stages.train.run(small("train.pictures.prompts=other"))
    encoding, keys, published = publish(cache)
    with pytest.raises(ConfigError, match="multiples of"):
        sana_pipe.stages.train.run(small("train.pictures.size=[65, 64]"))
    assert not output.exists()

    printed: list[str] = []
    sana_pipe.stages.train.run(config, log=printed.append)
    assert any(line == f"pictures: 3 prompts of set {published.id[:12]}, every 1 steps" for line in printed)
    latents, description = drawn(output, 1)
    opened = cache.open_snapshot(snapshot)
    resolution, latent = config.data.resolution, opened.encoding(LatentEncoding)
    assert (description["height"], description["width"]) == (resolution, resolution)
    names = ("prompts", "prompt_set", "snapshot", "latent_encoding", "latent")
    known = (["one", "two", "three"], published.id, snapshot, latent.id, latent.values())
    assert json.dumps([description[name] for name in names]) == json.dumps(known)

    architecture, weights = load_model_state(output / "checkpoints/step-00000001")
    shape = (latent.channels, *[resolution // latent.compression] * 2)
    expected = draw_prompts(config, architecture, weights, published, shape)
    assert distance(latents, {f"{number:04d}": picture for number, picture in enumerate(expected)}) <= 1e-5

    # A newer set does not take its place in a run that is resumed, unless its name is given.
    newer = prompts.publish(cache, "prompts", encoding, ["four"], keys[:1])
    assert newer is not None
    for more, expected_set in (((), published), (("train.pictures={every: 1, prompts: prompts}",), newer)):
        steps = len(files(config))
        sana_pipe.stages.train.run(small(f"train.steps={steps}", *more), resume="auto", log=printed.append)
        assert drawn(output, steps)[1]["prompt_set"] == expected_set.id
    assert len([line for line in printed if line.startswith("changed since") and "prompts" in line]) == 1

    sana_pipe.stages.sample.watch(config, output, once=True)
    decoded = sorted(str(path.relative_to(output)) for path in output.glob("pictures/step-*/*.png"))
    assert decoded == [f"pictures/step-{step:08d}/{number:04d}.png" for step in range(3) for number in range(3)] + [
        "pictures/step-00000003/0000.png"
    ]


def test_without_a_prompt_set_captions_of_the_snapshot_are_drawn(small: Callable[..., Config]) -> None:
    config = small()
    sana_pipe.stages.bucket.run(config)
    cache, output, printed = Cache(config.cache), Path(config.train.output), list[str]()
    opened = cache.open_snapshot()
    assert sana_pipe.stages.train.run(config, log=printed.append).step == 1
    latents, description = drawn(output, 1)
    count = len(description["prompts"])
    assert f"pictures: {count} captions of the snapshot, every 1 steps" in printed
    reader = opened.reader("text")
    written = {text for row in range(len(opened)) for text in opened.captions(row, reader)}
    assert {*description["prompts"]} <= written and count == len({*description["prompts"]}) == min(8, len(written))

    expected = prompts.of_snapshot(opened, 8)
    architecture, weights = load_model_state(output / "checkpoints/step-00000001")
    shape = (
        opened.encoding(LatentEncoding).channels,
        *[config.data.resolution // opened.encoding(LatentEncoding).compression] * 2,
    )
    pictures = draw_prompts(config, architecture, weights, expected, shape)
    assert distance(latents, {f"{number:04d}": picture for number, picture in enumerate(pictures)}) <= 1e-5

    # A set that is published later does not take their place in a resumed run; prompts of the trigger word join them.
    _, keys, published = publish(cache)
    trigger = prompts.publish(cache, prompts.TRIGGER, published.encoding, ["sks, at sea"], keys[:1])
    assert trigger is not None
    sana_pipe.stages.train.run(small("train.steps=2"), resume="auto", log=printed.append)
    assert drawn(output, 2)[1]["prompts"] == [*description["prompts"], "sks, at sea"]
    assert not [line for line in printed if line.startswith("changed since") and "prompts" in line]


def test_captions_of_a_snapshot_are_spread_without_repetitions_and_empty_ones() -> None:
    class Twice:
        """Two samples in a row have one caption; the second caption is the more probable; one is empty."""

        def __len__(self) -> int:
            return 40

        def sample(self, row: int) -> Any:
            place = SimpleNamespace(shard="s", offset=row, rows=3, key=b"k", checksum=b"c", length=None)
            return SimpleNamespace(
                captions=[SimpleNamespace(**vars(place), weight=w) for w in (0.2, 0.4, 0.4)],
            )

        def captions(self, row: int, reader: Any) -> list[str]:
            return ["rare", "" if row == 2 else f"{row // 2}", "as probable"]

        def reader(self, kind: str) -> Any:
            return SimpleNamespace(read=lambda shard, offset, key, checksum, into, length: into.fill(offset))

        caption, null = (
            TextEncoding(width=2),
            SimpleNamespace(shard="n", offset=7, rows=4, valid=1, key=b"", checksum=b""),
        )
        null.length = None

    made: Any = prompts.of_snapshot(Twice(), 8)  # type: ignore[arg-type]
    assert len(made.texts) == 8 and made.texts[0] == "3" and "" not in made.texts
    assert made.rows(0).tolist() in ([[6, 6]] * 3, [[7, 7]] * 3) and made.null()[0].tolist() == [[7, 7]] * 4
    assert len({*made.texts}) == 8 and max(map(int, made.texts)) >= 17
    some = prompts.of_snapshot(Twice(), 4, range(20, 30))  # type: ignore[arg-type]
    assert {*map(int, some.texts)} <= {*range(10, 15)} and [f"{row // 2}" for row in some.samples] == [*some.texts]
    assert prompts.of_snapshot(Twice(), 30).texts.count("19") == 1  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
def test_a_run_ends_with_its_pictures_and_its_page(small: Callable[..., Config], tmp_path: Path, lost: bool) -> None:
    """Real processes. A VAE that is not there fails no run."""
    config = small(*(["vae.id=" + str(tmp_path / "gone")] if lost else []))
    sana_pipe.stages.bucket.run(small())
    (tmp_path / "mine.yaml").write_text(dump(config))
    words = processes.command("train", "--config", str(tmp_path / "mine.yaml"))
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    output = Path(config.train.output)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith((output / "report.html").resolve().as_uri())
    assert bool(list(output.glob("pictures/*/*.png"))) != lost
    assert (f"sample --watch {output} --once --config {output}/config.yaml" in done.stdout) == lost
    assert "Traceback" not in done.stderr
    again = subprocess.run([*words, "--resume", "auto"], check=False)
    assert again.returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_decoding_after_a_training(
    number: signal.Signals,
    code: int,
    small: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As one of the training itself, which has saved. Its process does not go on, and the rest has its command."""
    ready, ended = tmp_path / "ready", tmp_path / "ended"
    program = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(ended)!r}).touch(), sys.exit(0)))
pathlib.Path({str(ready)!r}).touch()
time.sleep(60)
"""
    monkeypatch.setattr(processes, "command", lambda *words: [sys.executable, "-c", program])

    def send() -> None:
        until(ready.exists)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    assert sana_pipe.stages.report.finish(small(), tmp_path / "run", "run/config.yaml") == code
    thread.join()
    assert ended.exists()
    again = f"sana-pipe sample --watch {tmp_path / 'run'} --once --config run/config.yaml"
    said = capsys.readouterr().out
    assert number.name in said and again in said


def test_the_page_follows_a_finished_run_alone(small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[tuple[str, ...]] = []
    monkeypatch.setattr(sana_pipe.stages.train, "follow_with", lambda *words: followed.append(words))
    config = small()
    sana_pipe.stages.bucket.run(config)
    output = config.train.output

    def train(*changes: str) -> None:
        sana_pipe.stages.train.run(small(*changes), resume="auto", log=lambda line: None)

    with monkeypatch.context() as nodes:
        nodes.setattr(sana_pipe.stages.train, "reopening", lambda launch, patience_s: replace(launch, local_world=2))
        train()
    train("train.steps=2", "train.pictures=null", f"train.output={output}-other")
    assert not followed
    with mock.patch.object(trainer, "fit"), mock.patch.object(sana_pipe.stages.train, "fit") as fit:
        fit.return_value = Report(1, Path(output) / "checkpoints/step-00000001", None, "SIGTERM")
        train("train.steps=2")
    assert not followed, "a stop request leaves little time"
    train("train.steps=2")
    assert followed == [("finish", "--run", output, "--config", f"{output}/config.yaml")]


def test_sample_draws_in_bf16_what_the_training_drew(small: Callable[..., Config]) -> None:
    """With the precision between the blocks and the numerics of the training, whatever is configured now."""
    config = small("train.precision=bf16", "train.numerics=nvlabs", "train.optim.lr=0.01")
    sana_pipe.stages.bucket.run(config)
    cache = Cache(config.cache)
    published = publish(cache)[2]
    output = Path(config.train.output)
    sana_pipe.stages.train.run(config)
    latents, _ = drawn(output, 1)
    folder = output / "checkpoints/step-00000001"
    document = checkpoint.read_document(folder)
    today = small("train.precision=bf16")
    trained = today.model_copy(update={"train": checkpoint.as_trained(today.train, document.config)})
    latent = cache.open_snapshot().encoding(LatentEncoding)
    shape = (latent.channels, *[config.data.resolution // latent.compression] * 2)
    expected = draw_prompts(trained, *load_model_state(folder), published, shape)
    assert distance(latents, {f"{number:04d}": picture for number, picture in enumerate(expected)}) <= 1e-5


def test_a_prompt_set_of_another_encoding_is_refused(small: Callable[..., Config]) -> None:
    config = small()
    sana_pipe.stages.bucket.run(config)
    cache = Cache(config.cache)
    (encoding,) = cache.encodings("text")
    assert isinstance(encoding, TextEncoding)
    ours = prompts.publish(cache, "ours", encoding, [], [])
    assert ours is not None
    other = replace(encoding, instruction="Draw: ")
    cache.add_encoding(other)
    place = layout.Paths.numbered(layout.Paths.prompts("prompts"), 0)
    cache.files.put(place, layout.seal({**cache.files.document(ours.path), "name": "prompts", "text": other.name}))
    with pytest.raises(CacheError, match=naming("text encoding", "instruction")):
        sana_pipe.stages.train.run(config)
    assert not Path(config.train.output).exists()


# ------------------------------------------------------------------------------------------------------------ processes


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_by_case(drawings, tmp_path_factory.mktemp("drawings"), anew=True)


@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for cases in drawings.CASES.values() for name in cases])
def test_every_strategy_draws_what_one_process_draws(results: dict[str, Any], name: str) -> None:
    row = results[name]
    assert row["steps"] == ([1, 2] if "resumed" in name else [0, 1, 2])
    assert row["distances"] and all(distance <= row["tolerance"] for distance in row["distances"])
    assert row["distance of two steps"] > 2 * row["tolerance"], "the comparison sees one step of training"
    assert all(row["same training"]), "bit for bit, on every process"
    assert row["encoders"] == []


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_a_stop_request_to_one_process_ends_the_drawing_of_all(results: dict[str, Any]) -> None:
    assert results["stopped"] == {"steps": [0], "step": 1, "stopped_by": "SIGTERM"}
