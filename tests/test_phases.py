"""Rounds of training: a run that begins from another run's checkpoint, and chains of such runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.cache.root import Cache
from pipeline.config import Config, dump, load
from pipeline.errors import ConfigError
from pipeline.launch import Launch
from pipeline.loader.loader import Batch
from pipeline.training import checkpoint, metrics
from pipeline.training.task import Report
from pipeline.training.trainer import fit
from tests.support.workers import tiny_run

pytestmark = pytest.mark.usefixtures("one_thread")
EMA = {"ema": {"decay": 0.9, "every": 2}}


def train(settings: Config, *, printed: list[str] | None = None, snapshot: str = "5eed", **options: Any) -> Report:
    """`fit` with made-up batches; `after`: they are those of a run that has done so many steps."""
    after, touch = options.pop("after", 0), options.pop("touch", None)

    def batch(step: int) -> Batch:
        return (touch(step) if touch else None) or tiny_run.global_batch(step + after)

    task = tiny_run.task(settings, touch=batch, snapshot=snapshot)
    say = (lambda line: None) if printed is None else printed.append
    return fit(settings, task, Launch(), say=say, **options)


def tensors(folder: Path) -> dict[str, Any]:
    """Digests of the files that hold weights, moments and averages."""
    return {name: value for name, value in checkpoint.read_document(folder).files.items() if name != ".metadata"}


def step(run: Path, number: int) -> Path:
    return checkpoint.folder_of(run / "checkpoints", number)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints after 2, 4 and 6, and averages. Not to be changed."""
    run = tmp_path_factory.mktemp("first") / "run"
    train(tiny_run.config(run, steps=6, save_every=2, **EMA))
    return run


# ------------------------------------------------------------------------------------------------- one run, one origin


def test_a_run_that_begins_from_a_checkpoint_has_its_weights_moments_and_averages(first: Path, tmp_path: Path) -> None:
    """With the batches of the first run's further steps the end is the first run's, bit for bit; through two origins,
    too. The decay of the averages goes on: it depends on all steps."""
    printed: list[str] = []
    second = tiny_run.config(tmp_path / "second", steps=2, phase=1, **EMA)
    train(second, begin=step(first, 2), after=2, printed=printed)
    third = tiny_run.config(tmp_path / "third", steps=2, phase=2, **EMA)
    train(third, begin=tmp_path / "second", after=4)
    assert tensors(step(tmp_path / "second", 2)) == tensors(step(first, 4))
    assert tensors(step(tmp_path / "third", 2)) == tensors(step(first, 6))
    (line,) = [line for line in printed if line.startswith("begins from")]
    assert "weights, moments, averages are kept" in line and "phase 1, steps, warm-up and schedule from 0" in line
    document = checkpoint.read_document(step(tmp_path / "third", 2))
    assert (document.state.step, document.state.phase) == (2, 2)
    assert document.began_from == {"snapshot": "5eed", "seed": 0, "phase": 1, "step": 2, "total": 4}
    assert checkpoint.read_document(step(first, 6)).began_from is None


def test_warm_up_and_schedule_begin_anew(first: Path, tmp_path: Path) -> None:
    rule = {"lr": 1e-3, "warmup_steps": 2, "schedule": "linear"}
    train(tiny_run.config(tmp_path / "run", steps=4, phase=1, optim=rule), begin=first)
    rates = [row["lr"] for row in metrics.read(tmp_path / "run/metrics.jsonl")]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])


def test_interrupted_after_a_beginning_and_resumed_is_uninterrupted(first: Path, tmp_path: Path) -> None:
    """Before the first checkpoint of the new run and after it; the origin need not be given again."""

    def settings(run: str) -> Config:
        return tiny_run.config(tmp_path / run, steps=4, phase=1, save_every=2, async_save=False, **EMA)

    def dies_at(number: int) -> Callable[[int], None]:
        def touch(step: int) -> None:
            if step == number:
                raise KeyboardInterrupt

        return touch

    train(settings("whole"), begin=step(first, 4))
    with pytest.raises(KeyboardInterrupt):
        train(settings("parts"), begin=step(first, 4), touch=dies_at(1))
    assert json.loads((tmp_path / "parts/from.json").read_text())["checkpoint"] == str(step(first, 4))
    printed: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        train(settings("parts"), resume="auto", touch=dies_at(3), printed=printed)
    assert any(line.startswith(f"begins from {step(first, 4)}") for line in printed)
    printed = []
    train(settings("parts"), resume="auto", begin=step(first, 6), printed=printed)
    assert any("--from" in line and "not used" in line and "step-00000002" in line for line in printed)
    assert tensors(step(tmp_path / "parts", 4)) == tensors(step(tmp_path / "whole", 4))
    whole, parts = (metrics.read(tmp_path / run / "metrics.jsonl") for run in ("whole", "parts"))
    assert [row["loss"] for row in parts] == [row["loss"] for row in whole]


def test_a_new_run_forgets_where_an_earlier_attempt_began(first: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "from.json").write_text(json.dumps({"checkpoint": str(step(first, 2))}))
    train(tiny_run.config(run, steps=1))
    assert not (run / "from.json").exists()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "from.json").write_text("{")
    with pytest.raises(checkpoint.CheckpointError, match=r"(?s)from\.json.*--from"):
        train(tiny_run.config(damaged, steps=1), resume="auto")


def test_another_optimizer_begins_with_fresh_moments(first: Path, tmp_path: Path) -> None:
    printed: list[str] = []
    came = {"optim": {"name": "came", "eps": None, "betas": None}}
    run = tiny_run.config(tmp_path / "run", steps=2, phase=1, **came)
    train(run, begin=step(first, 2), after=2, printed=printed)
    (line,) = [line for line in printed if line.startswith("begins from")]
    assert "weights are kept" in line and "moments are fresh" in line and "adamw" in line and "came" in line
    expected = metrics.read(first / "metrics.jsonl")[2]["loss"]
    assert metrics.read(tmp_path / "run/metrics.jsonl")[0]["loss"] == expected, "the weights are the checkpoint's"


def test_averages_that_the_checkpoint_lacks_begin_with_its_weights(first: Path, tmp_path: Path) -> None:
    train(tiny_run.config(tmp_path / "plain", steps=1, save_every=1))
    printed: list[str] = []
    settings = tiny_run.config(tmp_path / "run", steps=1, phase=1, ema={"decay": 0.9, "every": 9})
    train(settings, begin=tmp_path / "plain", printed=printed)
    assert any("averages begin with its weights" in line for line in printed)
    average = checkpoint.load_model_state(step(tmp_path / "run", 1), ema=True)[1]
    weights = checkpoint.load_model_state(step(tmp_path / "plain", 1))[1]
    assert all(torch.equal(average[name], weights[name]) for name in weights)


def test_only_the_position_embedding_may_differ(first: Path, tmp_path: Path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match="num_layers: the checkpoint has 3, this run 4") as caught:
        train(tiny_run.config(tmp_path / "a", layers=4), begin=first)
    assert str(caught.value).count("the checkpoint has") == 1
    with pytest.raises(checkpoint.CheckpointError, match="qk_norm"):
        train(tiny_run.config(tmp_path / "b", arch={"qk_norm": "rms_norm_across_heads"}), begin=first)
    larger = {"interpolation_scale": 1.0, "sample_size": 16}
    train(tiny_run.config(tmp_path / "c", arch=larger, steps=1, phase=1), begin=step(first, 2), after=2)
    (row,) = metrics.read(tmp_path / "c/metrics.jsonl")
    assert row["loss"] != metrics.read(first / "metrics.jsonl")[2]["loss"], "the embedding is on"
    assert checkpoint.read_document(step(tmp_path / "c", 1)).architecture.interpolation_scale == 1.0


def test_origins_that_cannot_be_are_refused(first: Path, tmp_path: Path) -> None:
    run = tiny_run.config(tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match="name two checkpoints"):
        train(run, begin=first, resume=step(first, 2))
    with pytest.raises(ConfigError, match="no such folder"):
        train(run, begin="auto")
    assert not (tmp_path / "run").exists()
    train(run)
    with pytest.raises(ConfigError, match="already holds checkpoints"):
        train(run, begin=first)
    (tmp_path / "other/checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds no checkpoint yet"):
        train(tiny_run.config(tmp_path / "new", steps=1), begin=tmp_path / "other")


def test_the_stage_begins_on_the_newest_snapshot(small_cache_copy: Path, make_config: Any, tmp_path: Path) -> None:
    """Phase and snapshot: a new run from a checkpoint takes the newest and the next number; what is resumed keeps both,
    says so, and gives the command that would not."""
    import stages.bucket
    import stages.train

    def settings(run: str, *more: str) -> Config:
        few = [
            "train.save_every=2",
            "train.log_every=1",
            "train.optim.warmup_steps=0",
            f"train.output={tmp_path / run}",
        ]
        return make_config(tmp_path, *few, *more)

    def state(run: str) -> tuple[str, int, int]:
        newest = checkpoint.newest(tmp_path / run / "checkpoints")
        assert newest is not None
        found = checkpoint.read_document(newest).state
        return found.snapshot, found.phase, found.step

    printed: list[str] = []
    stages.train.run(settings("one", "train.steps=2"), say=printed.append)
    stages.bucket.run(settings("one", "bucket.batch=6"))
    old, new = state("one")[0], Cache(settings("one").cache).open_snapshot(None).id
    assert old != new
    stages.train.run(settings("two", "train.steps=2"), begin=tmp_path / "one", say=printed.append)
    assert state("two") == (new, 1, 2)
    stages.train.run(settings("two", "train.steps=3"), resume="auto", say=printed.append)
    assert state("two") == (new, 1, 3)
    assert not any("the newest is" in line for line in printed)
    stages.train.run(settings("one", "train.steps=3"), resume="auto", say=printed.append)
    assert state("one") == (old, 0, 3)
    (line,) = [line for line in printed if "the newest is" in line]
    assert new[:12] in line and f"--from {tmp_path / 'one'} --set train.output=DIR" in line
    with pytest.raises(checkpoint.CheckpointError, match=r"--from .*step-00000003 --set train.output=DIR"):
        stages.train.run(settings("one", "train.steps=4"), snapshot="latest", resume="auto", say=printed.append)
    stages.train.run(settings("three", "train.steps=1", "train.phase=7"), begin=tmp_path / "two", say=printed.append)
    assert state("three") == (new, 7, 1)


# ------------------------------------------------------------------------------------------------------------- epochs


def test_epochs_are_counted_in_steps_of_the_snapshot(small_cache_copy: Path, make_config: Any, tmp_path: Path) -> None:
    """Three buckets of four pictures and batches of twelve, carried on: three steps in three epochs. A resumed run that
    is given more epochs goes on."""
    import stages.train

    def settings(*more: str) -> Config:
        return make_config(tmp_path, "train.save_every=2", "train.log_every=1", "train.optim.warmup_steps=0", *more)

    printed: list[str] = []
    assert stages.train.run(settings("train.epochs=3"), say=printed.append).step == 3
    assert "3 steps: train.epochs of this snapshot" in printed
    assert "steps: 3\n" in (tmp_path / "run/config.yaml").read_text()
    assert stages.train.run(settings("train.epochs=6"), resume="auto", say=printed.append).step == 6
    with pytest.raises(ConfigError, match=r"train\.epochs = 1"):
        stages.train.run(settings("train.epochs=1", f"train.output={tmp_path / 'other'}"), say=printed.append)
    with pytest.raises(ConfigError, match=r"train\.epochs"):
        train(settings("train.epochs=3"))


def test_steps_and_epochs_exclude_each_other(tmp_path: Path) -> None:
    """A flag replaces what the file says of the other; two of one origin are refused by their names."""
    assert load("tiny", ["train.epochs=4"]).train.steps is None
    file = tmp_path / "own.yaml"
    file.write_text(dump(load("tiny", ["train.epochs=4"])))
    assert load(file).train.epochs == 4
    chosen = load(file, ["train.steps=7"]).train
    assert (chosen.steps, chosen.epochs) == (7, None)
    for refused in (["train.epochs=4", "train.steps=7"], ["train.steps=null"]):
        with pytest.raises(ConfigError, match=r"(?s)train\.steps.*train\.epochs"):
            load("tiny", refused)
