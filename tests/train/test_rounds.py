"""Rounds of training: a run that begins from another run's checkpoint, and what each has learned."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.base.launch import Launch
from sana_pipe.base.options import value_at
from sana_pipe.base.yaml_text import as_yaml
from sana_pipe.config import Config, dump, load
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.loader.loader import Batch, LoaderState
from sana_pipe.data.loader.schedule import Schedule
from sana_pipe.train.training import checkpoint, loss_scale, metrics, trainer
from sana_pipe.train.training.summary import summarize, table
from sana_pipe.train.training.task import Report
from sana_pipe.train.training.trainer import fit
from tests.support.checkpoints import load_model_state
from tests.support.command_lines import dry_run, words_of
from tests.support.messages import naming
from tests.support.workers import tiny_run

pytestmark = pytest.mark.usefixtures("one_thread")
EMA = {"ema": {"decay": 0.9}}


def train(settings: Config, *, printed: list[str] | None = None, snapshot: str = "5eed", **options: Any) -> Report:
    """`fit` with made-up batches; `after`: they are those of a run that has done so many steps."""
    after, touch, phase = options.pop("after", 0), options.pop("touch", None), options.pop("phase", 0)

    def batch(step: int) -> Batch:
        return (touch(step) if touch else None) or tiny_run.global_batch(step + after)

    task = tiny_run.task(settings, touch=batch, snapshot=snapshot, phase=phase)
    log = (lambda line: None) if printed is None else printed.append
    return fit(settings.train, task, Launch(), log=log, **options)


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
    second = tiny_run.config(tmp_path / "second", steps=2, **EMA)
    train(second, origin=step(first, 2), after=2, printed=printed, phase=1)
    third = tiny_run.config(tmp_path / "third", steps=2, **EMA)
    train(third, origin=tmp_path / "second", after=4, phase=2)
    assert tensors(step(tmp_path / "second", 2)) == tensors(step(first, 4))
    assert tensors(step(tmp_path / "third", 2)) == tensors(step(first, 6))
    (line,) = [line for line in printed if line.startswith("begins from")]
    assert "weights, moments, averages are kept" in line and "round 2" in line
    document = checkpoint.read_document(step(tmp_path / "third", 2))
    assert (document.state.step, document.state.phase) == (2, 2)
    assert document.began_from == {"snapshot": "5eed", "seed": 0, "phase": 1, "step": 2, "total": 4}
    assert checkpoint.read_document(step(first, 6)).began_from is None


def test_warm_up_and_schedule_begin_anew(first: Path, tmp_path: Path) -> None:
    rule = {"lr": 1e-3, "warmup_steps": 2, "schedule": "linear"}
    train(tiny_run.config(tmp_path / "run", steps=4, optim=rule), origin=first)
    rates = [row["lr"] for row in metrics.read(tmp_path / "run/metrics.jsonl")]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])


def test_interrupted_after_a_beginning_and_resumed_is_uninterrupted(first: Path, tmp_path: Path) -> None:
    """Before the first checkpoint of the new run and after it; the origin need not be given again."""

    def settings(run: str) -> Config:
        return tiny_run.config(tmp_path / run, steps=4, save_every=2, **EMA)

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
    run = tiny_run.config(tmp_path / "run", steps=2, **came)
    train(run, origin=step(first, 2), after=2, printed=printed)
    (line,) = [line for line in printed if line.startswith("begins from")]
    assert "weights are kept" in line and "moments start anew" in line and "adamw" in line and "came" in line
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
    settings = tiny_run.config(tmp_path / "run", steps=1, ema={"decay": 0.9})
    train(settings, origin=tmp_path / "plain", printed=printed)
    assert any("average of the weights starts" in line for line in printed)
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
    train(tiny_run.config(tmp_path / "c", arch=larger, steps=1), origin=step(first, 2), after=2)
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
    """Order and snapshot: a new run from a checkpoint takes the newest and draws anew; what is resumed keeps both, says
    so, and gives the command that would not."""
    import sana_pipe.stages.bucket
    import sana_pipe.stages.train

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
    sana_pipe.stages.train.run(settings("one", "train.steps=2"), log=printed.append)
    sana_pipe.stages.bucket.run(settings("one", "bucket.batch=6"))
    old, new = state("one")[0], Cache(settings("one").cache).open_snapshot(None).id
    assert old != new
    sana_pipe.stages.train.run(settings("two", "train.steps=2"), origin=tmp_path / "one", log=printed.append)
    assert state("two") == (new, 1, 2)
    sana_pipe.stages.train.run(settings("two", "train.steps=3"), resume="auto", log=printed.append)
    assert state("two") == (new, 1, 3)
    assert not any("the newest is" in line for line in printed)
    sana_pipe.stages.train.run(settings("one", "train.steps=3"), resume="auto", log=printed.append)
    assert state("one") == (old, 0, 3)
    (line,) = [line for line in printed if "the newest is" in line]
    assert new[:12] in line and f"--from {tmp_path / 'one'} --set train.output=DIR" in line
    with pytest.raises(checkpoint.CheckpointError, match=r"--from .*step-00000003 --set train.output=DIR"):
        sana_pipe.stages.train.run(
            settings("one", "train.steps=4"), snapshot="latest", resume="auto", log=printed.append
        )
    sana_pipe.stages.train.run(settings("three", "train.steps=1"), origin=tmp_path / "two", log=printed.append)
    assert state("three") == (new, 2, 1)
    for run, file in (
        ("four", tmp_path / "two/config.yaml"),
        ("five", tmp_path / "printed.yaml"),
    ):  # of the first round
        if run == "five":
            file.write_text(dump(settings("one")))
        written = load(file, [f"train.output={tmp_path / run}", "train.steps=1"])
        sana_pipe.stages.train.run(written, origin=tmp_path / "two", log=printed.append)
        assert state(run) == (new, 2, 1), "a file that was written out counts on"


# ------------------------------------------------------------------------------------------------------------- epochs


def test_epochs_are_counted_in_steps_of_the_snapshot(small_cache_copy: Path, make_config: Any, tmp_path: Path) -> None:
    """Three buckets of four pictures and batches of twelve, carried on: three steps in three epochs. A resumed run that
    is given more epochs goes on."""
    import sana_pipe.stages.train

    def settings(*more: str) -> Config:
        return make_config(tmp_path, "train.save_every=2", "train.log_every=1", "train.optim.warmup_steps=0", *more)

    printed: list[str] = []
    assert sana_pipe.stages.train.run(settings("train.epochs=3"), log=printed.append).step == 3
    assert any(line.startswith("3 steps: train.epochs") for line in printed)
    assert "steps: 3\n" in (tmp_path / "run/config.yaml").read_text()
    assert sana_pipe.stages.train.run(settings("train.epochs=6"), resume="auto", log=printed.append).step == 6
    with pytest.raises(ConfigError, match=r"train\.epochs = 1"):
        sana_pipe.stages.train.run(settings("train.epochs=1", f"train.output={tmp_path / 'other'}"), log=printed.append)


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


# ---------------------------------------------------------------------------------------------------------- summaries


@pytest.fixture
def rounds(small_cache_copy: Path, make_config: Any, tmp_path: Path) -> Callable[..., Config]:
    """`rounds("a", "train.steps=3")`: configurations of runs over a cache with snapshots `one` and `two`."""
    import sana_pipe.stages.bucket

    common = ["train.save_every=2", "train.log_every=1", "train.optim.warmup_steps=1", "train.ema={decay: 0.9}"]

    def make(name: str, *settings: str) -> Config:
        return make_config(tmp_path, *common, f"train.output={tmp_path / 'run' / name}", *settings)

    sana_pipe.stages.bucket.run(make("a"), name="one")
    sana_pipe.stages.bucket.run(make_config(tmp_path, "bucket.batch=4"), name="two")
    return make


def run_round(settings: Config, **options: Any) -> tuple[Report, list[str]]:
    import sana_pipe.stages.train

    printed: list[str] = []
    return sana_pipe.stages.train.run(settings, log=printed.append, **options), printed


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


@pytest.mark.slow
def test_a_finished_run_has_a_summary_next_to_those_that_it_began_from(
    rounds: Callable[..., Config], tmp_path: Path
) -> None:
    """Each draws anew; a second start of a finished round does nothing but its summary, with what the journal says."""
    a, b, c = (tmp_path / "run" / name for name in "abc")
    _, printed = run_round(rounds("a", "train.steps=3"), snapshot="one")
    assert summary_of(a)["steps"] == 3 and not any(line.startswith("round ") for line in printed)
    run_round(rounds("b", "train.steps=2", "train.optim.lr=5e-4"), snapshot="two", origin=a)
    report, printed = run_round(rounds("c", "train.epochs=2"), snapshot="two", origin=b)
    assert (report.step, report.checkpoint) == (6, step(c, 6))
    summaries = [summary_of(run) for run in (a, b, c)]
    assert [(s["name"], s["phase"], s["steps"], s["samples"]) for s in summaries] == [
        *(("a", 0, 3, 36), ("b", 1, 2, 8), ("c", 2, 6, 24))
    ]
    rows = metrics.read(b / "metrics.jsonl")
    assert summaries[1]["loss"] == rows[-1]["loss"] and summaries[1]["lr"] == 5e-4
    assert summaries[1]["validation"] is None and summaries[1]["seconds"] >= rows[-1]["seconds"]
    assert [line.split()[0] for line in printed[-4:]] == ["round", "a", "b", "c"]

    (b / "summary.json").unlink()
    with open(b / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"event": "validation", "step": 2, "loss": 0.25}) + "\n")
    _, printed = run_round(rounds("b", "train.steps=2"), snapshot="two", origin=a, resume="auto")
    assert not any(line.startswith("training ") for line in printed), "nothing is left to do"
    assert summary_of(b)["validation"]["loss"] == 0.25 and [line.split()[0] for line in printed[-2:]] == ["a", "b"]
    shutil.rmtree(a)
    _, printed = run_round(rounds("c", "train.epochs=2"), snapshot="two", resume="auto")
    assert [line.split()[0] for line in printed[-2:]] == ["b", "c"], "as far as they are there"


def test_a_stopped_run_has_no_summary(small_cache_copy: Path, make_config: Any, tmp_path: Path) -> None:
    settings = make_config(tmp_path, "train.steps=4", "train.optim.warmup_steps=0")
    with pytest.MonkeyPatch.context() as patch:
        original = trainer.Loop.step_once

        def stepped(loop: Any, batches: Any, number: int) -> Any:
            if number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(loop, batches, number)

        patch.setattr(trainer.Loop, "step_once", stepped)
        report, _ = run_round(settings)
    assert report.stopped_by == "SIGTERM" and not Path(settings.train.output, "summary.json").exists()


def test_a_summary_and_a_table_of_what_the_journal_says(small_cache: Path, tmp_path: Path) -> None:
    head = Cache(small_cache).open_snapshot().head
    state, last = LoaderState("5eed" * 8, seed=0, phase=2, step=20), tmp_path / "second/checkpoints/step-00000020"
    run = tmp_path / "second"
    run.mkdir()
    empty = {"name": "second", "phase": 2, "snapshot": "5eed" * 8, "steps": 20, "loss": None, "lr": None}
    empty |= {"samples": Schedule.of(head, seed=0, phase=2).samples_upto(20)}
    empty |= {"seconds": 0, "images_per_s": None, "validation": None, "checkpoint": "step-00000020"}
    assert summarize(last, state, head) == empty
    rows: list[dict[str, Any]] = [
        {"event": "start", "step": 0},
        {"step": 9, "loss": 9.0, "lr": 2.0, "images_per_s": 7.0},
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    early = summarize(last, state, head)
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
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = summarize(last, state, head)
    changed = {"loss": 19.5, "lr": 1e-3, "seconds": 38, "images_per_s": 20.0, "validation": rows[-1]}
    assert done == {**empty, **changed} and summary_of(run) == done
    assert [line.split() for line in table([{**early, "samples": None}, {**done, "samples": 1234}])] == [
        ["round", "snapshot", "steps", "samples", "rate", "loss", "validation", "old", "new", "images/s", "time"],
        ["second", "5eed5eed5eed", "20", "-", "2.00e+00", "9.0000", "-", "-", "-", "7.0", "0s"],
        ["second", "5eed5eed5eed", "20", "1234", "1.00e-03", "19.5000", "0.2000", "0.5000", "-", "20.0", "38s"],
    ]
    plain = table([early, {**done, "validation": {"loss": None}}])
    assert plain[0].split()[-3:] == ["validation", "images/s", "time"] and "- " in plain[2]
    assert plain[0].index("snapshot") == plain[1].index("5eed") == plain[2].index("5eed") == len("second  ")
    (run / "summary.json").unlink()
    (run / "summary.json").mkdir()
    with pytest.raises(UserError, match=naming("summary.json", "--resume auto")):
        summarize(last, state, head)


@pytest.mark.slow
def test_a_round_tells_what_the_one_before_was_validated_on_from_what_is_new(
    rounds: Callable[..., Config], make_config: Any, tmp_path: Path
) -> None:
    """A larger held-out share has the samples of a smaller one, and more."""
    import sana_pipe.stages.bucket

    ids = []
    for name, share in (("first", 0.3), ("second", 0.7)):
        sana_pipe.stages.bucket.run(make_config(tmp_path, f"bucket.heldout={share}"), name=name)
        ids.append(Cache(tmp_path / "cache").open_snapshot(f"{name}.heldout").id)
    a, b = (tmp_path / "run" / name for name in "ab")
    validated = "train.validation={every: 2, samples: 50}"
    kept = "train.keep_checkpoints=2"
    run_round(rounds("a", "train.steps=2", validated), snapshot="first")
    assert not any("by_age" in row for row in metrics.read_events(a / "metrics.jsonl").get("validation", []))
    report, printed = run_round(rounds("b", "train.steps=4", kept, validated), snapshot="second", origin=a)
    last = metrics.read_events(b / "metrics.jsonl").get("validation", [])[-1]
    counts = [len(Cache(tmp_path / "cache").open_snapshot(each)) for each in ids]
    share = counts[0] / counts[1]
    assert 0 < share < 1
    ages = last["by_age"]
    assert last["loss"] == pytest.approx(share * ages["old"] + (1 - share) * ages["new"], rel=1e-6)
    heads = next(line for line in printed if line.startswith("round ") and "validation" in line and "old" in line)
    assert heads.split()[6:9] == ["validation", "old", "new"]
    assert printed[-1].split()[7:9] == [f"{ages['old']:.4f}", f"{ages['new']:.4f}"]
    assert summary_of(b)["validation"]["by_age"] == ages
    assert report.checkpoint is not None
    document = checkpoint.read_document(report.checkpoint)
    assert document.config["train"]["validation"]["snapshot"] == ids[1]
    assert (document.began_from or {})["heldout"] == ids[0]

    cache, kept_names = Cache(tmp_path / "cache"), {f"trained-{each[:16]}" for each in ids}
    for each in kept_names:
        cache.forget_name(each)
    shutil.rmtree(step(b, 4))  # resumed in the middle: the same samples are old
    shutil.rmtree(a)
    run_round(rounds("b", "train.steps=4", kept, validated), snapshot="second", resume="auto")
    again = metrics.read_events(b / "metrics.jsonl").get("validation", [])[-1]
    assert again["by_age"] == pytest.approx(ages, rel=1e-6)
    assert kept_names <= set(cache.snapshot_names()), "gc leaves old and new samples"


# ------------------------------------------------------------------------------------------------------ folders of runs


def looked_at(run: Path, **losses: float) -> None:
    rows = [{"event": "validation", "step": int(name[1:]), "loss": loss} for name, loss in losses.items()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("option", ["--checkpoint", "--best", "auto", "--from", "--resume"])
def test_a_folder_of_rounds_in_place_of_a_run_names_them_and_the_fix_works(option: str, tmp_path: Path) -> None:
    chain = tmp_path / "my chain"
    for number, folder in enumerate(("a/checkpoints/step-00000009", "b/checkpoints/step-00000002", "c/checkpoints")):
        (chain / folder).mkdir(parents=True)
        os.utime(chain / folder, (number, number))
    looked_at(chain / "b", s2=0.2)
    config = load("tiny", [f"train.output={chain if option == 'auto' else tmp_path / 'other'}"])
    tries: dict[str, Callable[[str], Any]] = {
        "auto": lambda place: checkpoint.find(config.train.output, "auto" if place == str(chain) else place),
        "--checkpoint": lambda place: checkpoint.find(config.train.output, place),
        "--best": lambda place: checkpoint.find_best(config.train.output, place)[0],
        "--from": lambda place: checkpoint.resolve(chain, place, "--from"),
        "--resume": lambda place: checkpoint.resolve(chain, place),
    }
    with pytest.raises(ConfigError, match=naming(str(chain), "a, b")) as refused:
        tries[option](str(chain))
    given, place, *_ = shlex.split(str(refused.value.fix))
    assert given == (option if option in ("--from", "--resume") else "--checkpoint")
    assert tries[option](place) == chain / "b/checkpoints/step-00000002"


# --------------------------------------------------------------------------------------------------- phases in the file

PHASES: list[dict[str, Any]] = [
    {"name": "small", "snapshot": "one", "steps": 2, "set": {"train.optim.lr": 1e-3, "train.caption_drop": 0.5}},
    {"name": "large", "snapshot": "two", "epochs": 2, "set": {"train.ema": {"decay": 0.5}, "data.resolution": 64}},
]


def with_phases(place: Path, config: Config, phases: Any) -> tuple[Path, list[str]]:
    """A file with `phases`, without them after its refusal was read, and the commands that the refusal names."""
    place.write_text(dump(config) + as_yaml({"phases": phases}))
    with pytest.raises(ConfigError, match="phases") as refused:
        load(place)
    place.write_text(dump(config))
    return place, [line.strip() for line in str(refused.value.fix).splitlines() if "sana-pipe train" in line]


@pytest.mark.slow
def test_the_commands_in_place_of_phases_train_them(rounds: Callable[..., Config], tmp_path: Path) -> None:
    from click.testing import CliRunner

    from sana_pipe.cli import cli

    file, commands = with_phases(tmp_path / "mine.yaml", rounds("chain"), PHASES)
    for command in commands:
        result = CliRunner().invoke(cli, words_of(command))
        assert result.exit_code == 0, result.output
    states = []
    for phase, last in zip(PHASES, (2, 6), strict=True):
        run = tmp_path / "run/chain" / phase["name"]
        document = checkpoint.read_document(step(run, last))
        states.append((document.state.snapshot, document.state.phase))
        tree = {**document.config, "train": document.config["train"]}
        assert {option: value_at(tree, option) for option in phase["set"] if option != "train.ema"} == {
            option: value for option, value in phase["set"].items() if option != "train.ema"
        }
    cache = Cache(load(file).cache)
    assert states == [(cache.open_snapshot("one").id, 0), (cache.open_snapshot("two").id, 1)]
    assert json.loads((tmp_path / "run/chain/large/from.json").read_text())["checkpoint"] == str(
        step(tmp_path / "run/chain/small", 2)
    )


def test_phases_are_refused_with_a_command_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file anywhere, in `./sana-pipe.yaml`, by `--set`; also where they are not as they should be."""
    tiny = load("tiny")
    file, commands = with_phases(tmp_path / "my file.yaml", tiny, PHASES)
    first, second = (words_of(command) for command in commands)
    assert first[:3] == second[:3] == ["train", "--config", str(file)]
    assert "--from" not in first and second[second.index("--from") + 1] == "runs/tiny/small"
    for words, expected in ((first, (2, None, 1e-3, 0.5, None)), (second, (None, 2, 1e-3, 0.1, {"decay": 0.5}))):
        code, calls = dry_run(monkeypatch, words)
        assert code == 0 and calls[0][1]["resume"] == "auto"
        train = load(file, [word for flag, word in pairwise(words) if flag == "--set"]).train
        ema = None if train.ema is None else {"decay": train.ema.decay}
        assert (train.steps, train.epochs, train.optim.lr, train.caption_drop, ema) == expected
    monkeypatch.chdir(tmp_path)
    commands = with_phases(Path("sana-pipe.yaml"), tiny, PHASES)[1]
    assert not any("--config" in command for command in commands)
    for other in ("some", [{"snapshot": "one"}], {"a": 1}, [3], [PHASES[0], 3]):
        (command,) = with_phases(file, tiny, other)[1]
        assert "--from" in words_of(command)
    for nothing in ([], None):
        assert with_phases(file, tiny, nothing)[1] == []
    with pytest.raises(ConfigError, match="phases"):
        load("tiny", ["phases=[{name: a}]"])
