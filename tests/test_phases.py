"""Rounds of training: a run that begins from another run's checkpoint, and chains of such runs."""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import shutil
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from pipeline.cache.cache import Cache
from pipeline.config import SHIPPED, Config, dump, load
from pipeline.errors import CacheError, ConfigError, UserError
from pipeline.launch import Launch
from pipeline.loader.loader import Batch, LoaderState
from pipeline.training import checkpoint, loss_scale, metrics, trainer
from pipeline.training.phases import PhaseState, summarize, table
from pipeline.training.task import Report
from pipeline.training.trainer import fit
from tests.support.checkpoints import load_model_state
from tests.support.command_lines import dry_run, words_of
from tests.support.messages import naming
from tests.support.workers import tiny_run

pytestmark = pytest.mark.usefixtures("one_thread")
EMA = {"ema": {"decay": 0.9}}


def train(settings: Config, *, printed: list[str] | None = None, snapshot: str = "5eed", **options: Any) -> Report:
    """`fit` with made-up batches; `after`: they are those of a run that has done so many steps."""
    after, touch = options.pop("after", 0), options.pop("touch", None)

    def batch(step: int) -> Batch:
        return (touch(step) if touch else None) or tiny_run.global_batch(step + after)

    task = tiny_run.task(settings, touch=batch, snapshot=snapshot)
    log = (lambda line: None) if printed is None else printed.append
    return fit(settings, task, Launch(), log=log, **options)


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


@pytest.mark.slow
def test_a_run_that_begins_from_a_checkpoint_has_its_weights_moments_and_averages(first: Path, tmp_path: Path) -> None:
    """With the batches of the first run's further steps the end is the first run's, bit for bit; through two origins,
    too. The decay of the averages goes on: it depends on all steps."""
    printed: list[str] = []
    second = tiny_run.config(tmp_path / "second", steps=2, phase=1, **EMA)
    train(second, origin=step(first, 2), after=2, printed=printed)
    third = tiny_run.config(tmp_path / "third", steps=2, phase=2, **EMA)
    train(third, origin=tmp_path / "second", after=4)
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
    train(tiny_run.config(tmp_path / "run", steps=4, phase=1, optim=rule), origin=first)
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

    train(settings("whole"), origin=step(first, 4))
    with pytest.raises(KeyboardInterrupt):
        train(settings("parts"), origin=os.path.relpath(step(first, 4)), touch=dies_at(1))
    assert json.loads((tmp_path / "parts/from.json").read_text())["checkpoint"] == str(step(first, 4))
    printed: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        train(settings("parts"), resume="auto", touch=dies_at(3), printed=printed)
    assert any(line.startswith(f"begins from {step(first, 4)}") for line in printed)
    printed = []
    train(settings("parts"), resume="auto", origin=step(first, 6), printed=printed)
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
    train(run, origin=step(first, 2), after=2, printed=printed)
    (line,) = [line for line in printed if line.startswith("begins from")]
    assert "weights are kept" in line and "moments are fresh" in line and "adamw" in line and "came" in line
    expected = metrics.read(first / "metrics.jsonl")[2]["loss"]
    assert metrics.read(tmp_path / "run/metrics.jsonl")[0]["loss"] == expected, "the weights are the checkpoint's"


def test_a_run_that_begins_counts_its_own_overflows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a scale of 2^24 the first steps of both runs overflow."""
    monkeypatch.setattr(loss_scale, "INITIAL", 2.0**24)
    first, second = (tiny_run.config(tmp_path / name, steps=1, precision="fp16") for name in ("first", "second"))
    train(first)
    train(second, origin=tmp_path / "first")
    rows = [metrics.read(tmp_path / name / "metrics.jsonl")[-1] for name in ("first", "second")]
    assert [(row["skipped_steps"], row["loss_scale"]) for row in rows] == [(1, 2.0**23), (1, 2.0**22)]


def test_averages_that_the_checkpoint_lacks_begin_with_its_weights(first: Path, tmp_path: Path) -> None:
    train(tiny_run.config(tmp_path / "plain", steps=1, save_every=1))
    printed: list[str] = []
    settings = tiny_run.config(tmp_path / "run", steps=1, phase=1, ema={"decay": 0.9})
    train(settings, origin=tmp_path / "plain", printed=printed)
    assert any("averages begin with its weights" in line for line in printed)
    average = load_model_state(step(tmp_path / "run", 1), ema=True)[1]
    begin, end = (load_model_state(step(tmp_path / name, 1))[1] for name in ("plain", "run"))
    for name, value in average.items():
        torch.testing.assert_close(value, begin[name].lerp(end[name], 1 - 3 / 12), rtol=1e-6, atol=1e-7)


def test_only_the_position_embedding_may_differ(first: Path, tmp_path: Path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match=r"num_layers: .* 3, .* 4") as caught:
        train(tiny_run.config(tmp_path / "a", layers=4), origin=first)
    assert str(caught.value).count("the checkpoint has") == 1
    with pytest.raises(checkpoint.CheckpointError, match="qk_norm"):
        train(tiny_run.config(tmp_path / "b", arch={"qk_norm": "rms_norm_across_heads"}), origin=first)
    larger = {"interpolation_scale": 1.0, "sample_size": 16}
    train(tiny_run.config(tmp_path / "c", arch=larger, steps=1, phase=1), origin=step(first, 2), after=2)
    (row,) = metrics.read(tmp_path / "c/metrics.jsonl")
    assert row["loss"] != metrics.read(first / "metrics.jsonl")[2]["loss"], "the embedding is on"
    assert checkpoint.read_document(step(tmp_path / "c", 1)).architecture.interpolation_scale == 1.0


def test_origins_that_cannot_be_are_refused(first: Path, tmp_path: Path) -> None:
    run = tiny_run.config(tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match=naming(f"--from {first}", f"--resume {step(first, 2)}")):
        train(run, origin=first, resume=step(first, 2))
    with pytest.raises(ConfigError, match=naming("auto")):
        train(run, origin="auto")
    assert not (tmp_path / "run").exists()
    train(run)
    with pytest.raises(ConfigError, match=naming(tmp_path / "run", "--resume auto", "train.output")):
        train(run, origin=first)
    (tmp_path / "other/checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=naming(tmp_path / "other")):
        train(tiny_run.config(tmp_path / "new", steps=1), origin=tmp_path / "other")


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
    stages.train.run(settings("one", "train.steps=2"), log=printed.append)
    stages.bucket.run(settings("one", "bucket.batch=6"))
    old, new = state("one")[0], Cache(settings("one").cache).open_snapshot(None).id
    assert old != new
    stages.train.run(settings("two", "train.steps=2"), origin=tmp_path / "one", log=printed.append)
    assert state("two") == (new, 1, 2)
    stages.train.run(settings("two", "train.steps=3"), resume="auto", log=printed.append)
    assert state("two") == (new, 1, 3)
    assert not any("the newest is" in line for line in printed)
    stages.train.run(settings("one", "train.steps=3"), resume="auto", log=printed.append)
    assert state("one") == (old, 0, 3)
    (line,) = [line for line in printed if "the newest is" in line]
    assert new[:12] in line and f"--from {tmp_path / 'one'} --set train.output=DIR" in line
    with pytest.raises(checkpoint.CheckpointError, match=r"--from .*step-00000003 --set train.output=DIR"):
        stages.train.run(settings("one", "train.steps=4"), snapshot="latest", resume="auto", log=printed.append)
    stages.train.run(settings("three", "train.steps=1", "train.phase=7"), origin=tmp_path / "two", log=printed.append)
    assert state("three") == (new, 7, 1)
    for run, file in (
        ("four", tmp_path / "two/config.yaml"),
        ("five", tmp_path / "printed.yaml"),
    ):  # of the first round
        if run == "five":
            file.write_text(dump(settings("one")))
        written = load(file, [f"train.output={tmp_path / run}", "train.steps=1"])
        stages.train.run(written, origin=tmp_path / "two", log=printed.append)
        assert state(run) == (new, 2, 1), "a file that was written out counts on"


# ------------------------------------------------------------------------------------------------------------- epochs


def test_epochs_are_counted_in_steps_of_the_snapshot(small_cache_copy: Path, make_config: Any, tmp_path: Path) -> None:
    """Three buckets of four pictures and batches of twelve, carried on: three steps in three epochs. A resumed run that
    is given more epochs goes on."""
    import stages.train

    def settings(*more: str) -> Config:
        return make_config(tmp_path, "train.save_every=2", "train.log_every=1", "train.optim.warmup_steps=0", *more)

    printed: list[str] = []
    assert stages.train.run(settings("train.epochs=3"), log=printed.append).step == 3
    assert "3 steps: train.epochs of this snapshot" in printed
    assert "steps: 3\n" in (tmp_path / "run/config.yaml").read_text()
    assert stages.train.run(settings("train.epochs=6"), resume="auto", log=printed.append).step == 6
    with pytest.raises(ConfigError, match=r"train\.epochs = 1"):
        stages.train.run(settings("train.epochs=1", f"train.output={tmp_path / 'other'}"), log=printed.append)


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


# ------------------------------------------------------------------------------------------------------------- phases


def phases(*parts: dict[str, Any]) -> str:
    return f"phases={json.dumps(list(parts))}"


A: dict[str, Any] = {"name": "a", "snapshot": "one", "steps": 3}
B: dict[str, Any] = {"name": "b", "snapshot": "two", "steps": 2}
B["set"] = {"train.optim.lr": 5e-4, "train.ema.decay": 0.5}
C: dict[str, Any] = {"name": "c", "snapshot": "two", "epochs": 2, "set": {"train.caption_drop": 0.0}}


@pytest.fixture
def rounds(small_cache_copy: Path, make_config: Any, tmp_path: Path) -> Callable[..., Config]:
    """`rounds(A, B)`: configurations of phases over a cache with snapshots `one` and `two`."""
    import stages.bucket

    common = ["train.save_every=2", "train.log_every=1", "train.optim.warmup_steps=1", "train.ema={decay: 0.9}"]

    def make(*parts: dict[str, Any], output: str = "run") -> Config:
        return make_config(tmp_path, *common, f"train.output={tmp_path / output}", phases(*parts))

    stages.bucket.run(make(), name="one")
    stages.bucket.run(make_config(tmp_path, "bucket.batch=4"), name="two")
    return make


def run_phases(settings: Config, **options: Any) -> tuple[Report, list[str]]:
    import stages.train

    printed: list[str] = []
    return stages.train.run(settings, log=printed.append, **options), printed


@pytest.mark.slow
def test_a_chain_is_its_phases_one_by_one(rounds: Callable[..., Config], tmp_path: Path) -> None:
    """Bit for bit what `--from` gives by hand; nothing of a phase is in memory when the next is built."""
    import stages.train

    alive: list[int] = []
    models: list[weakref.ref[Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        original = trainer.build

        def build(*args: Any) -> Any:
            alive.append(sum(model() is not None for model in models))
            run = original(*args)
            models.append(weakref.ref(run.model.module))
            return run

        patch.setattr(trainer, "build", build)
        gc.disable()  # what is freed, the chain frees
        try:
            report, printed = run_phases(rounds(A, B, C))
        finally:
            gc.enable()
    assert alive == [0, 0, 0]
    assert report.step == 6 and report.checkpoint == step(tmp_path / "run/c", 6)
    before = None
    for number, name in enumerate("abc"):
        part = rounds(A, B, C, output="hand").of_phase(name)
        snapshot = "one" if name == "a" else "two"
        hand = stages.train.run(part, snapshot=snapshot, origin=before, log=lambda line: None)
        before = hand.checkpoint
        assert before is not None
        assert tensors(step(tmp_path / f"run/{name}", hand.step)) == tensors(before)
        assert checkpoint.read_document(before).state.phase == number
    summaries = [json.loads((tmp_path / f"run/{name}/summary.json").read_text()) for name in "abc"]
    assert [(s["name"], s["phase"], s["steps"], s["samples"]) for s in summaries] == [
        *(("a", 0, 3, 36), ("b", 1, 2, 8), ("c", 2, 6, 24))
    ]
    rows = metrics.read(tmp_path / "run/b/metrics.jsonl")
    assert summaries[1]["loss"] == rows[-1]["loss"] and summaries[1]["lr"] == 5e-4
    assert summaries[1]["validation"] is None and summaries[1]["seconds"] >= rows[-1]["seconds"]
    table = [line.split()[0] for line in printed[-4:]]
    assert table == ["phase", "a", "b", "c"]


def test_a_summary_and_a_table_of_what_the_journal_says(tmp_path: Path) -> None:
    state = LoaderState("5eed" * 8, seed=0, phase=2, step=20)
    last: Any = checkpoint.Resumed(tmp_path / "checkpoints/step-00000020", SimpleNamespace(state=state))  # type: ignore[arg-type]
    place = PhaseState("second", tmp_path, last, True)
    empty = {
        "name": "second",
        "phase": 2,
        "snapshot": "5eed" * 8,
        "steps": 20,
        "samples": None,
        "loss": None,
        "lr": None,
    }
    empty |= {"seconds": 0, "images_per_s": None, "validation": None, "checkpoint": "step-00000020"}
    assert summarize(place, None) == empty
    rows: list[dict[str, Any]] = [
        {"event": "start", "step": 0},
        {"step": 9, "loss": 9.0, "lr": 2.0, "images_per_s": 7.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    early = summarize(place, None)
    assert (early["loss"], early["lr"], early["images_per_s"]) == (9.0, 2.0, 7.0), "the last row there is"
    assert early["seconds"] == 0, "an attempt that left no row with its time"
    rows = [
        {"event": "start", "step": 0},
        *(
            {"step": n, "loss": float(n), "lr": 1e-3 * (n == 5), "images_per_s": 30.0 - n, "seconds": n}
            for n in (5, 18)
        ),
        {"event": "start", "step": 18},
        *({"step": n, "loss": float(n), "lr": 1e-4, "images_per_s": 1.0 * n, "seconds": n} for n in (19, 20)),
        *({"event": "validation", "step": n, "loss": n / 100, "by_age": {"old": 0.5, "new": None}} for n in (5, 20)),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = summarize(place, None)
    assert done == {
        **empty,
        "loss": 19.5,
        "lr": 1e-3,
        "seconds": 38,
        "images_per_s": 20.0,
        "validation": rows[-1],
    }
    assert json.loads((tmp_path / "summary.json").read_text()) == done
    assert [line.split() for line in table([early, {**done, "samples": 1234}])] == [
        ["phase", "snapshot", "steps", "samples", "rate", "loss", "validation", "old", "new", "images/s", "time"],
        ["second", "5eed5eed5eed", "20", "-", "2.00e+00", "9.0000", "-", "-", "-", "7.0", "0s"],
        ["second", "5eed5eed5eed", "20", "1234", "1.00e-03", "19.5000", "0.2000", "0.5000", "-", "20.0", "38s"],
    ]
    plain = table([early, {**done, "validation": {"loss": None}}])
    assert plain[0].split()[-3:] == ["validation", "images/s", "time"] and "- " in plain[2]
    assert plain[0].index("snapshot") == plain[1].index("5eed") == plain[2].index("5eed") == len("second  ")
    (tmp_path / "summary.json").unlink()
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(UserError, match=naming("summary.json", "--resume auto")):
        summarize(place, None)


@pytest.mark.slow
def test_finished_phases_are_left_alone_and_later_ones_begin(rounds: Callable[..., Config], tmp_path: Path) -> None:
    run_phases(rounds(A, B))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("step-*")}
    _, printed = run_phases(rounds(A, {**B, "steps": 5}), resume="auto")
    assert not any(line.startswith("training ") for line in printed), "more steps are another phase"
    (tmp_path / "run/a/summary.json").unlink()
    with open(tmp_path / "run/a/metrics.jsonl", "a") as file:
        file.write(json.dumps({"event": "validation", "step": 3, "loss": 0.25}) + "\n")
    report, printed = run_phases(rounds({**A, "set": {"train.optim.lr": 2e-4}, "snapshot": "two"}, B, C), resume="auto")
    assert report.checkpoint == step(tmp_path / "run/c", 6)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert any(re.match(r"phase a \(1 of 3\): finished after step 3, as .*run/a/config.yaml", line) for line in printed)
    assert json.loads((tmp_path / "run/a/summary.json").read_text())["validation"]["loss"] == 0.25
    assert any(line.startswith("a ") and "0.2500" in line for line in printed)
    for name in ("summary.json", "metrics.jsonl"):
        (tmp_path / "run/a" / name).unlink()
    _, printed = run_phases(rounds(A, B, C), resume="auto")
    assert not any(line.startswith("training ") for line in printed), "nothing is left to do"
    without = json.loads((tmp_path / "run/a/summary.json").read_text())
    assert without["steps"] == 3 and [without[name] for name in ("loss", "lr", "images_per_s")] == [None] * 3
    assert printed[-1].startswith("c ")
    with pytest.raises(ConfigError, match=r"'a2' .*before 'b'"):
        run_phases(rounds(A, {**A, "name": "a2"}, B, C), resume="auto")
    with pytest.raises(ConfigError, match=naming("--resume auto", "train.output")):
        run_phases(rounds(A, B, C))


@pytest.mark.slow
def test_a_phase_tells_what_the_one_before_was_validated_on_from_what_is_new(
    rounds: Callable[..., Config], make_config: Any, tmp_path: Path
) -> None:
    """A larger held-out share has the samples of a smaller one, and more."""
    import stages.bucket

    ids = []
    for name, share in (("first", 0.3), ("second", 0.7)):
        stages.bucket.run(make_config(tmp_path, f"bucket.heldout={share}"), name=name)
        ids.append(Cache(tmp_path / "cache").open_snapshot(f"{name}.heldout").id)
    validation = {"every": 2, "samples": 50}
    a = {"name": "a", "snapshot": "first", "steps": 2, "set": {"train.validation": validation}}
    b = {**a, "name": "b", "snapshot": "second", "steps": 4}
    report, printed = run_phases(rounds(a, b))
    assert not any(
        "by_age" in row for row in metrics.read_events(tmp_path / "run/a/metrics.jsonl").get("validation", [])
    )
    rows = metrics.read_events(tmp_path / "run/b/metrics.jsonl").get("validation", [])
    last = rows[-1]
    counts = [len(Cache(tmp_path / "cache").open_snapshot(each)) for each in ids]
    share = counts[0] / counts[1]
    assert 0 < share < 1
    ages = last["by_age"]
    assert last["loss"] == pytest.approx(share * ages["old"] + (1 - share) * ages["new"], rel=1e-6)
    heads = next(line for line in printed if line.startswith("phase ") and "validation" in line and "old" in line)
    assert heads.split()[6:9] == ["validation", "old", "new"]
    assert printed[-1].split()[7:9] == [f"{ages['old']:.4f}", f"{ages['new']:.4f}"]
    assert json.loads((tmp_path / "run/b/summary.json").read_text())["validation"]["by_age"] == ages
    assert report.checkpoint is not None
    kept = checkpoint.read_document(report.checkpoint).config["train"]["validation"]
    assert (kept["snapshot"], kept["old"]) == (ids[1], ids[0])

    cache, kept_names = Cache(tmp_path / "cache"), {f"trained-{each[:16]}" for each in ids}
    for each in kept_names:
        cache.forget_name(each)
    shutil.rmtree(step(tmp_path / "run/b", 4))  # resumed in the middle: the same samples are old
    run_phases(rounds(a, {**b, "set": {"train.validation": validation, "train.save_every": 2}}), resume="auto")
    again = metrics.read_events(tmp_path / "run/b/metrics.jsonl").get("validation", [])[-1]
    assert again["by_age"] == pytest.approx(ages, rel=1e-6)
    assert kept_names <= set(cache.snapshot_names()), "gc leaves old and new samples"
    _, printed = run_phases(rounds(a, b), resume="auto")
    assert not any(line.startswith("note: phase b") and "old" in line for line in printed)


@pytest.mark.slow
def test_a_phase_that_has_begun_keeps_its_snapshot_and_says_so(rounds: Callable[..., Config], tmp_path: Path) -> None:
    """Also when its name now points to another, and when it was stopped in the middle."""
    import stages.bucket

    run_phases(rounds(A))
    first = Cache(rounds().cache).snapshot_of("two")
    longer = {**B, "steps": 4}

    def stops(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        original = trainer.Loop.step_once

        def stepped(loop: Any, batches: Any, number: int) -> Any:
            stops(number)
            return original(loop, batches, number)

        patch.setattr(trainer.Loop, "step_once", stepped)
        report, _ = run_phases(rounds(A, longer, C), resume="auto")
    assert (report.stopped_by, report.step) == ("SIGTERM", 3)
    assert not (tmp_path / "run/c").exists(), "the signal ends the chain"
    assert not (tmp_path / "run/b/summary.json").exists()
    other = rounds(A).model_copy(update={"bucket": rounds().bucket.model_copy(update={"batch": 3})})
    stages.bucket.run(other, name="two", move=True)
    second = Cache(rounds().cache).snapshot_of("two")
    report, printed = run_phases(rounds(A, longer, {**C, "epochs": None, "steps": 1}), resume="auto")
    assert first != second
    states = [checkpoint.read_document(step(tmp_path / "run" / name, n)).state for name, n in (("b", 4), ("c", 1))]
    assert [(state.snapshot, state.phase) for state in states] == [(first, 1), (second, 2)]
    (line,) = [line for line in printed if "keeps it" in line]
    assert str(second)[:12] in line


def test_options_of_a_phase_are_validated_like_all_others(tmp_path: Path) -> None:
    for wrong, says in (
        ({**A, "set": {"train.optim.lrr": 1.0}}, r"phases: a: unknown key 'train\.optim\.lrr'; did you mean"),
        ({**A, "set": {"train.precision": "fp8"}}, r"phases: a: 'train\.precision'"),
        ({**A, "set": {"bucket.batch": 3}}, r"does not read bucket\.batch"),
        ({**A, "set": {"train.steps": 3}}, r"train\.steps is given by the option steps"),
        ({**A, "epochs": 2}, r"(?s)train\.steps.*train\.epochs"),
        ({**A, "epoch": 1}, r"unknown key 'phases\.0\.epoch'; did you mean 'phases\.0\.epochs'"),
        ({**A, "lr": 1e-4}, r"unknown key 'phases\.0\.lr'; .* its set: {train\.optim\.lr: VALUE}"),
        ({**A, "data.resolution": 512}, r"unknown key .* its set: {data\.resolution: VALUE}"),
        ({**A, "name": "../a"}, r"phases\.0\.name"),
        ({**A, "name": "checkpoints"}, "'checkpoints' is a folder"),
    ):
        with pytest.raises(ConfigError, match=says):
            load("tiny", [phases(wrong)])
    with pytest.raises(ConfigError, match=r"'a' .*twice"):
        load("tiny", [phases(A, B, A)])
    config = load("tiny", ["train.phase=3", "train.epochs=7", phases(A, B, {"name": "c", "snapshot": "x"})])
    a, b, c = (config.of_phase(name).train for name in "abc")
    assert (a.phase, a.steps, a.epochs, a.optim.lr, a.output) == (3, 3, None, 1e-3, "runs/tiny/a")
    assert b.phase is None and b.optim.lr == 5e-4 and b.ema is not None and b.ema.decay == 0.5
    assert (c.steps, c.epochs) == (None, 7)
    file = tmp_path / "own.yaml"
    file.write_text(dump(config))
    assert load(file) == config


def test_an_option_that_every_phase_replaces_is_refused_on_the_command_line() -> None:
    b = {**B, "set": {"train.optim.lr": 5e-4, "train.flow.shift": 4.0}}
    a = {**A, "set": {"train.optim.lr": 1e-3, "train.flow.shift": 2.0}}
    for option in ("train.steps=9", "train.epochs=9", "train.flow.shift=1.0", "train.optim.lr=1.0"):
        name = option.partition("=")[0]
        for command in ("train", "plan"):
            with pytest.raises(ConfigError, match=naming(name, "--set 'phases=[]'")):
                load("tiny", [phases(a, b), option], command)
        load("tiny", [phases(a, b, {"name": "c", "snapshot": "x"}), option], "train")
        load("tiny", ["phases=[]", option], "train")
    load("tiny", [phases(a, b), "train.microbatch=2"], "train")
    load("tiny", [phases(a, b), "train.output=runs/other"], "export")


def test_a_chain_is_sampled_and_exported_at_its_last_phase_that_has_a_checkpoint(tmp_path: Path) -> None:
    config = load("tiny", [f"train.output={tmp_path}", phases(A, B, C)])
    with pytest.raises(ConfigError, match="holds no checkpoint yet"):
        checkpoint.find(config, "auto")
    for folder in ("a/checkpoints/step-00000009", "b/checkpoints/step-00000002", "c/checkpoints/step-00000004.x.tmp"):
        (tmp_path / folder).mkdir(parents=True)
    for place in ("auto", str(tmp_path), f"{tmp_path}/b/.."):
        assert checkpoint.find(config, place) == tmp_path / "b/checkpoints/step-00000002"


def looked_at(run: Path, **losses: float) -> None:
    rows = [{"event": "validation", "step": int(name[1:]), "loss": loss} for name, loss in losses.items()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_best_of_a_chain_is_that_of_its_last_phase(tmp_path: Path) -> None:
    config = load("tiny", [f"train.output={tmp_path}", phases(A, B, C)])
    for folder in ("a/checkpoints/step-00000009", "b/checkpoints/step-00000002", "b/checkpoints/step-00000004"):
        (tmp_path / folder).mkdir(parents=True)
    looked_at(tmp_path / "a", s9=0.1)
    looked_at(tmp_path / "b", s2=0.2, s4=0.3)
    for place in ("auto", str(tmp_path), str(tmp_path / "b")):
        assert checkpoint.find_best(config, place) == (tmp_path / "b/checkpoints/step-00000002", 0.2)


@pytest.mark.parametrize("option", ["--checkpoint", "--best", "auto", "--from", "--resume"])
def test_a_folder_of_phases_in_place_of_a_run_names_them_and_the_fix_works(option: str, tmp_path: Path) -> None:
    """The configuration has no phases, or is another."""
    chain = tmp_path / "my chain"
    for number, folder in enumerate(("a/checkpoints/step-00000009", "b/checkpoints/step-00000002", "c/checkpoints")):
        (chain / folder).mkdir(parents=True)
        os.utime(chain / folder, (number, number))
    looked_at(chain / "b", s2=0.2)
    config = load("tiny", [f"train.output={chain if option == 'auto' else tmp_path / 'other'}"])
    tries: dict[str, Callable[[str], Any]] = {
        "auto": lambda place: checkpoint.find(config, "auto" if place == str(chain) else place),
        "--checkpoint": lambda place: checkpoint.find(config, place),
        "--best": lambda place: checkpoint.find_best(config, place)[0],
        "--from": lambda place: checkpoint.resolve(chain, place, "--from"),
        "--resume": lambda place: checkpoint.resolve(chain, place),
    }
    with pytest.raises(ConfigError, match=naming(str(chain), "a, b")) as refused:
        tries[option](str(chain))
    given, place, *_ = shlex.split(str(refused.value.fix))
    assert given == (option if option in ("--from", "--resume") else "--checkpoint")
    assert tries[option](place) == chain / "b/checkpoints/step-00000002"


@pytest.mark.slow
def test_a_chain_begins_where_it_is_told_and_nowhere_by_accident(rounds: Callable[..., Config], tmp_path: Path) -> None:
    run_phases(
        rounds(output="plain").model_copy(
            update={
                "train": rounds(A, output="plain")
                .of_phase("a")
                .train.model_copy(update={"output": str(tmp_path / "plain")})
            }
        ),
        snapshot="one",
    )
    with pytest.raises(ConfigError, match=r"--from .*plain"):
        run_phases(rounds(B, output="plain"), resume="auto")
    missing = {**C, "name": "later", "snapshot": "nowhere"}
    with pytest.raises(CacheError, match="nowhere"):
        run_phases(rounds(B, missing, output="plain"), resume="auto", origin=tmp_path / "plain")
    assert checkpoint.read_document(step(tmp_path / "plain/b", 2)).state.phase == 1
    _, printed = run_phases(rounds(B, output="plain"), resume="auto", origin=tmp_path / "plain")
    assert any("not used" in line for line in printed)
    for refused in ({"snapshot": "one"}, {"resume": tmp_path / "plain"}):
        with pytest.raises(ConfigError, match=naming("--" + next(iter(refused)), "phases")):
            run_phases(rounds(B), **refused)
    assert checkpoint.find(rounds(A, B, C, output="plain"), "auto") == step(tmp_path / "plain/b", 2)
    assert rounds(A, B, output="plain").at(step(tmp_path / "plain/b", 2)).train.optim.lr == 5e-4
    assert rounds(A, B, output="plain").at(tmp_path / "elsewhere").train.optim.lr == 1e-3


EXAMPLE = SHIPPED / "phases/sana_600m_512_1024.yaml"


def test_the_examples_of_phases_are_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped file and the page's block; the commands in the head of the file are accepted."""
    page = (SHIPPED.parent / "docs/training.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    file = tmp_path / "own.yaml"
    whole = yaml.safe_load((SHIPPED / "sana_1600m_1024.yaml").read_text())
    file.write_text(yaml.safe_dump({**whole, **yaml.safe_load(block)}))
    first, second = (load(file).of_phase(name) for name in ("first", "second"))
    assert (first.data.resolution, first.train.epochs, second.train.microbatch) == (512, 4, 4)
    small, large = (load(EXAMPLE).of_phase(name) for name in ("small", "large"))
    assert (small.data.resolution, small.train.flow.shift, small.train.optim.lr) == (512, 3.0, 1e-4)
    assert (large.data.resolution, large.train.flow.shift, large.train.optim.lr) == (1024, 4.0, 5e-5)
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^#   (sana-pipe .*?)(?:  #.*)?$", EXAMPLE.read_text(), flags=re.MULTILINE)
    assert {words_of(line)[0] for line in lines} == {"encode", "bucket", "train", "plan", "sample"}
    for line in lines:
        code, calls = dry_run(monkeypatch, words_of(line.replace("FILE", str(EXAMPLE)).replace("DIR", "pictures")))
        assert code == 0 and calls, line + capsys.readouterr().err


@pytest.mark.slow
def test_the_example_of_phases_trains(small_cache_copy: Path, tmp_path: Path) -> None:
    """Everything that the file says of training, for a small model on a real cache, whose snapshots have its names."""
    import stages.bucket

    small = load("tiny").model.arch
    common = [f"cache={small_cache_copy}", f"train.output={tmp_path / 'run'}", "train.device=cpu", "train.trackers=[]"]
    config = load(EXAMPLE, [*common, "model.weights=null", f"model.arch={json.dumps(small)}"])
    for name in ("small", "large"):
        stages.bucket.run(load("tiny", [f"cache={small_cache_copy}"]), name=name)
    report, _ = run_phases(config, resume="auto")
    assert report.checkpoint is not None and report.checkpoint.parent.parent == tmp_path / "run/large"
    assert metrics.read(tmp_path / "run/large/metrics.jsonl")[-1]["lr"] == pytest.approx(5e-5 * report.step / 12)


def test_a_plan_wants_one_phase() -> None:
    import stages.plan

    with pytest.raises(UserError, match="--phase a"):
        stages.plan.run(load("tiny", [phases(A, B)]), stages.plan.Options(gpu="a40"))
    with pytest.raises(ConfigError, match="'x'"):
        stages.plan.run(load("tiny", [phases(A, B)]), stages.plan.Options(gpu="a40", phase="x"))


@pytest.mark.slow
def test_a_phase_is_planned_by_its_name(rounds: Callable[..., Config], capsys: pytest.CaptureFixture[str]) -> None:
    import stages.plan

    options = stages.plan.Options(gpu="a40", phase="b")
    assert stages.plan.run(rounds(A, {**B, "set": {"train.microbatch": 2}}), options) == 0
    assert "4 samples a GPU and step, 2 x 2" in capsys.readouterr().out, "batches of its snapshot"
