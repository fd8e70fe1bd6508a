"""Validation: the loss on held-out samples, which the training does not notice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import sana_pipe.stages.bucket
import sana_pipe.stages.pack
import sana_pipe.stages.train
from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.base.launch import Launch
from sana_pipe.config import Config
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.loader.inputs import Inputs
from sana_pipe.data.loader.loader import Batch, LoaderSettings
from sana_pipe.data.loader.validation_loader import FixedOrder, ValidationLoader
from sana_pipe.data.snapshots import heldout
from sana_pipe.train.models.flow_matching import FlowMatching, equidistant
from sana_pipe.train.parallel.mesh import Layout
from sana_pipe.train.training import checkpoint, lock, metrics, trainer
from sana_pipe.train.training.config import EmaConfig
from sana_pipe.train.training.ema import EMA
from sana_pipe.train.training.task import Report, TrainingTask
from tests.support import tiny_cache
from tests.support.checkpoints import load_model_state
from tests.support.foreign_lock import ELSEWHERE, plant
from tests.support.launched import results_by_case
from tests.support.messages import naming
from tests.support.runs import dropout
from tests.support.workers import tiny_run, validations

pytestmark = pytest.mark.usefixtures("one_thread")


def settings(output: Path, steps: int = 3, *, every: int = 1, **train: Any) -> Config:
    validation = {"every": every, "samples": 100}
    return tiny_run.config(output, layers=1, steps=steps, **{"validation": validation, **train})


def run(config: Config, *, resume: str | None = None, task: TrainingTask | None = None, log: Any = None) -> Report:
    given = task or tiny_run.task(config)
    return trainer.fit(config.train, given, Launch(), resume=resume, log=log or (lambda line: None))


def rows(config: Config) -> list[dict[str, Any]]:
    return metrics.read_events(Path(config.train.output) / "metrics.jsonl").get("validation", [])


def values(config: Config) -> dict[int, tuple[Any, ...]]:
    return {row["step"]: (row["loss"], row["by_sigma"], row["by_bucket"], row["ema_loss"]) for row in rows(config)}


def plain(config: Config, weights: dict[str, Tensor] | None = None) -> dict[str, dict[str, list[float]]]:
    """The losses of the held-out samples one by one, by bucket and by level."""
    model = tiny_run.model(config).eval()
    if weights is not None:
        model.load_state_dict(weights)
    losses: dict[str, dict[str, list[float]]] = {}
    for bucket, count in enumerate(tiny_run.HELD_OUT):
        whole = tiny_run.global_batch(1000 + bucket)
        for i in range(count):
            one = tiny_run.part(whole, i, i + 1)
            x = one.latents.float()
            for sigma in equidistant(8):
                noised = (1 - sigma) * x + sigma * one.noise
                with torch.no_grad():
                    found = model(noised, one.captions.float(), one.mask, torch.tensor([float(int(sigma * 1000))]))
                by_level = losses.setdefault("{}x{}".format(*one.bucket), {}).setdefault(str(sigma), [])
                by_level.append(float((found - (one.noise - x)).square().mean()))
    return losses


def by_age(losses: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """The means of `plain` over old and over new samples."""
    ages: dict[str, list[float]] = {"old": [], "new": []}
    for bucket, levels in enumerate(losses.values()):
        for values in levels.values():
            for number, value in enumerate(values):
                ages["old" if (1000 + bucket) * 1000 + number in tiny_run.OLD else "new"].append(value)
    assert len(ages["old"]) == 8 * len(tiny_run.OLD)
    return {age: float(np.mean(values)) for age, values in ages.items()}


# ------------------------------------------------------------------------------------------------------ the values


def test_the_value_is_the_mean_over_samples_and_levels(tmp_path: Path) -> None:
    config = settings(tmp_path / "run", 2, ema={"decay": 0.5})
    printed: list[str] = []
    run(config, task=tiny_run.task(config, old=True), log=printed.append)
    first, _, last = rows(config)
    line = [line for line in printed if line.startswith("validation ")][-1]
    assert f"old samples {last['by_age']['old']:.4f}  new samples {last['by_age']['new']:.4f}" in line
    _, trained = load_model_state(tmp_path / "run/checkpoints/step-00000002")
    averaged = load_model_state(tmp_path / "run/checkpoints/step-00000002", ema=True)[1]
    for prefix, row, weights in (("", first, None), ("", last, trained), ("ema_", last, averaged)):
        expected = plain(config, weights)
        flat = [loss for levels in expected.values() for losses in levels.values() for loss in losses]
        assert row[f"{prefix}loss"] == pytest.approx(np.mean(flat), rel=1e-6)
        assert row[f"{prefix}by_bucket"] == pytest.approx(
            {name: np.mean(list(levels.values())) for name, levels in expected.items()}, rel=1e-6
        )
        by_sigma = {s: np.mean([x for levels in expected.values() for x in levels[s]]) for s in row["by_sigma"]}
        assert row[f"{prefix}by_sigma"] == pytest.approx(by_sigma, rel=1e-6)
        assert row[f"{prefix}by_age"] == pytest.approx(by_age(expected), rel=1e-6)
    assert list(first["by_sigma"]) == [f"{level:g}" for level in equidistant(8)]
    assert (first["samples"], first["ema_loss"]) == (11, first["loss"])
    assert last["ema_loss"] != last["loss"]


def test_levels_are_the_benchmarks() -> None:
    """The middles of eight equal parts; the model's timestep is rounded down as in training."""
    assert equidistant(8) == [0.0625, 0.1875, 0.3125, 0.4375, 0.5625, 0.6875, 0.8125, 0.9375]
    flow = FlowMatching(tiny_run.config().train.flow)
    sigma, timesteps = flow.at(0.0625, 3)
    assert (sigma.tolist(), timesteps.tolist()) == ([0.0625] * 3, [62.0] * 3)
    index = 400
    entry = float(flow.table[index])
    assert float(flow.at(entry, 1)[1]) == float(flow.timestep_table[index])


def test_the_value_differs_by_the_weights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rate that fp32 rounds to 0 it is the same bit for bit, whatever was drawn between, also with dropout; with
    microbatches of another size to rounding."""
    dropout(monkeypatch)
    config = settings(tmp_path / "run", 3, optim={"lr": 1e-50, "weight_decay": 0.0})
    run(config)
    first, *others = values(config).values()
    assert len(others) == 3
    assert all(other == first for other in others)
    other = settings(tmp_path / "other", 1, microbatch=3)
    run(other)
    assert values(other)[0][0] == pytest.approx(first[0], rel=1e-6)


@pytest.mark.parametrize(("precision", "every"), [("fp32", 1), ("bf16_pure", 3)])  # a save frees gathered parameters
def test_the_training_does_not_notice(
    precision: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropout(monkeypatch)
    options: dict[str, Any] = {"precision": precision, "ema": {"decay": 0.5, "device": "cpu"}, "save_every": every}
    files, losses = [], []
    for name, validation in (("with", {"every": 1}), ("without", None)):
        config = settings(tmp_path / name, **options, validation=validation)
        run(config)
        saved = range(every, 4, every)
        steps = [checkpoint.read_document(tmp_path / name / f"checkpoints/step-0000000{i}").files for i in saved]
        files.append([{k: v for k, v in one.items() if k != ".metadata"} for one in steps])
        losses.append([(row["step"], row["loss"]) for row in metrics.read(tmp_path / name / "metrics.jsonl")])
        assert len(rows(config)) == (4 if validation else 0)
    assert files[0] == files[1]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_no_graph_is_compiled_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr("sana_pipe.train.parallel.parallelize.COMPILE_BACKEND", counter)
    config = settings(tmp_path / "run", 2, compile="block")
    run(config)
    assert (counter.frame_count, len(rows(config))) == (2, 3), "blocks, and what prepares text and timestep"


# --------------------------------------------------------------------------------------------------- the averages


class _Sudden(Exception):
    pass


@pytest.mark.parametrize(("dtype", "device"), [(torch.float32, "same"), (torch.bfloat16, "cpu")])
def test_averages_are_exchanged_and_come_back_after_an_error(dtype: torch.dtype, device: Any) -> None:
    model = torch.nn.Linear(5, 3).to(dtype)
    ema = EMA(model, EmaConfig(device=device))
    for value in ema.values.values():
        value.add_(torch.randn_like(value))
    before = [{name: t.clone() for name, t in tree.items()} for tree in (dict(model.named_parameters()), ema.values)]
    with pytest.raises(_Sudden), ema.swapped_in():
        assert all(torch.equal(p, before[1][name].to(dtype)) for name, p in model.named_parameters())
        raise _Sudden
    for tree, earlier in zip((dict(model.named_parameters()), ema.values), before, strict=True):
        assert all(torch.equal(tree[name], earlier[name]) for name in earlier)


# ------------------------------------------------------------------------------------------------ when, and how long


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    whole, parts = (settings(tmp_path / name, 5, every=2, save_every=2) for name in ("whole", "parts"))
    run(whole)
    assert list(values(whole)) == [0, 2, 4, 5]
    run(settings(tmp_path / "parts", 3, every=2, save_every=2))
    assert list(values(parts)) == [0, 2, 3]
    shutil.rmtree(tmp_path / "parts/checkpoints/step-00000003")
    run(parts, resume="auto")
    assert values(parts) == values(whole), "the row after step 3 is of an earlier attempt"
    assert [row["step"] for row in metrics.read(tmp_path / "parts/metrics.jsonl")] == [1, 2, 3, 4, 5]
    lines = [json.loads(line) for line in (tmp_path / "parts/metrics.jsonl").read_text().splitlines()]
    assert Counter(line["step"] for line in lines if line.get("event") == "validation")[2] == 1


def interrupted_task(config: Config, at: int, action: Callable[[], None]) -> TrainingTask:
    """`action` is called before the second microbatch of validation number `at` (0 for the first)."""
    task, passes = tiny_run.task(config), iter(range(100))
    samples = task.validation

    class Parts:
        def __iter__(self) -> Iterator[tuple[Batch, int]]:
            assert samples is not None
            number = next(passes)
            for i, part in enumerate(samples(None)):  # type: ignore[arg-type]
                if (number, i) == (at, 1):
                    action()
                yield part

    return replace(task, validation=lambda layout: Parts())


@pytest.mark.parametrize(("ema", "at"), [(None, 1), ({"decay": 0.5}, 3)], ids=["weights", "averages"])
def test_a_stop_request_ends_it_early_and_the_resumed_run_makes_up_for_it(
    ema: dict[str, Any] | None, at: int, tmp_path: Path
) -> None:
    config = settings(tmp_path / "run", 4, every=2, ema=ema)
    report = run(config, task=interrupted_task(config, at, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert (report.step, report.stopped_by) == (2, "SIGTERM")
    assert report.checkpoint == tmp_path / "run/checkpoints/step-00000002"
    assert list(values(config)) == [0]
    run(config, resume="auto")
    whole = settings(tmp_path / "whole", 4, every=2, ema=ema)
    run(whole)
    assert values(config) == values(whole)


@pytest.mark.parametrize("at", [2, None], ids=["in its validation", "before its validation"])
def test_a_stop_at_the_last_step_leaves_its_validation_to_the_resumed_run(at: int | None, tmp_path: Path) -> None:
    """The run was complete, so that nothing did it for ever after."""

    def stop(step: int | None = None) -> None:
        if step in (None, 3):
            os.kill(os.getpid(), signal.SIGTERM)

    printed = list[str]()
    config = settings(tmp_path / "run", 4, every=2)
    task = interrupted_task(config, at, stop) if at is not None else tiny_run.task(config, touch=stop)
    report = run(config, task=task, log=printed.append)
    assert (report.step, report.stopped_by, list(values(config))) == (4, "SIGTERM", [0, 2])
    assert any("--resume auto" in line and "validation" in line for line in printed)
    resumed = run(config, resume="auto")
    assert (resumed.step, resumed.checkpoint, resumed.stopped_by) == (4, report.checkpoint, None)
    whole = settings(tmp_path / "whole", 4, every=2)
    run(whole)
    assert values(config) == values(whole)
    assert run(config, resume="auto", log=printed.append).loss is None and "nothing to do" in printed[-1]


def test_a_sample_that_cannot_be_read_ends_the_run_after_a_checkpoint(tmp_path: Path) -> None:
    def fail() -> None:
        raise UserError("a record is damaged")

    config = settings(tmp_path / "run", 4, every=2)
    with pytest.raises(UserError, match="a record is damaged"):
        run(config, task=interrupted_task(config, 1, fail))
    assert checkpoint.read_document(tmp_path / "run/checkpoints/step-00000002").state.step == 2


@pytest.mark.parametrize("where", ["validation", "loader"])
def test_the_last_checkpoint_is_told_of_before_the_error(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever handles the error may wait for other processes."""
    printed: list[str] = []
    save = dcp.save

    def slow(*args: Any, **options: Any) -> Any:
        threading.Event().wait(0.3)
        return save(*args, **options)

    @contextmanager
    def handled(*_: int) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            printed.append(error.what)
            raise

    def fail(step: int = 2) -> None:
        if step == 2:
            raise UserError("a record is damaged")

    monkeypatch.setattr(dcp, "save", slow)
    monkeypatch.setattr(trainer, "printed_first", handled)
    config = settings(tmp_path / "run", 4, every=2)
    task = tiny_run.task(config, touch=fail) if where == "loader" else interrupted_task(config, 1, fail)
    with pytest.raises(UserError, match="a record is damaged"):
        run(config, task=task, log=printed.append)
    assert [line.startswith("saved ") for line in printed[-2:]] == [True, False]


def test_a_run_that_was_taken_over_writes_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks: list[lock.Lock] = []
    original = lock.run_lock

    @contextmanager
    def recorded(*inputs: Any) -> Iterator[lock.Lock]:
        with original(*inputs) as held:
            locks.append(held)
            yield held

    def lose() -> None:
        plant(tmp_path / "run", ELSEWHERE)
        locks[0].lost = True

    monkeypatch.setattr(trainer, "run_lock", recorded)
    config = settings(tmp_path / "run", 4, every=2)
    with pytest.raises(lock.RunTaken):
        run(config, task=interrupted_task(config, 1, lose))
    assert list(values(config)) == [0]


def test_the_journal_says_value_and_change(tmp_path: Path) -> None:
    printed: list[str] = []
    config = settings(tmp_path / "run", 2, ema={"decay": 0.5}, trackers=[])
    run(config, log=printed.append)
    lines = [line for line in printed if line.startswith("validation ")]
    row = rows(config)
    assert f"loss {row[1]['loss']:.4f} ({row[1]['loss'] - row[0]['loss']:+.4f})" in lines[1]
    assert f"EMA {row[1]['ema_loss']:.4f} ({row[1]['ema_loss'] - row[0]['ema_loss']:+.4f})" in lines[1]
    assert "(" not in lines[0] and "old samples" not in lines[0]
    assert [entry["step"] for entry in metrics.read(tmp_path / "run/metrics.jsonl")] == [1, 2]
    assert all(entry["images_per_s"] > 0 for entry in metrics.read(tmp_path / "run/metrics.jsonl"))


# -------------------------------------------------------------------------------------------------- processes


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_by_case(validations, tmp_path_factory.mktemp("validations"))


@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for cases in validations.CASES.values() for name in cases])
def test_every_strategy_measures_what_one_process_measures(results: dict[str, Any], name: str) -> None:
    row = results[name]
    assert row["steps"] == ([1, 2] if "resumed" in name else [0, 1, 2])
    assert set(row["samples"]) == {sum(tiny_run.HELD_OUT)}
    assert row["distance"] <= 1e-5
    assert all(row["same training"]), "bit for bit, on every process"


# ------------------------------------------------------------------------------------------------ which samples


def loader(cache: Cache, rank: int, world: int, samples: int, seed: int = 0, size: int = 2) -> ValidationLoader:
    given = LoaderSettings(
        seed=seed,
        phase=0,
        rank=rank,
        world=world,
        microbatch=size,
        caption_drop=0.0,
        prefetch=2,
        threads=1,
    )
    return ValidationLoader(cache.open_snapshot(), given, samples)


def counted(cache: Cache, world: int, samples: int, **options: Any) -> dict[int, tuple[Any, ...]]:
    """The samples that count on all ranks together, with the bytes that the model would see."""
    found: dict[int, tuple[Any, ...]] = {}
    lengths = set()
    for rank in range(world):
        parts = list(loader(cache, rank, world, samples, **options))
        lengths.add(len(parts))
        for batch, count in parts:
            assert len(batch.sample_ids) == options.get("size", 2)
            for i, identity in enumerate(batch.sample_ids[:count]):
                assert identity not in found, "counted twice"
                text = batch.captions[i][batch.mask[i]].view(torch.int16)
                tensors = batch.latents[i].view(torch.int16), batch.noise[i], text
                found[identity] = (batch.bucket, *(tensor.numpy().tobytes() for tensor in tensors))
    assert len(lengths) == 1, "equally many microbatches on every rank"
    return found


def test_every_topology_sees_the_same_samples(tmp_path: Path) -> None:
    cache = tiny_cache.build(tmp_path)
    for samples in (20, 1000):
        alone = counted(cache, 1, samples)
        assert len(alone) == min(samples, 63)
        assert counted(cache, 1, samples, size=5) == alone
        assert all(counted(cache, world, samples) == alone for world in (2, 4))
    shares = Counter(bucket for bucket, *_ in counted(cache, 1, 20).values())
    for size, count in tiny_cache.SIZES.items():
        assert abs(shares[size] - 20 * count / 63) < 1
    again, other = counted(cache, 1, 20), counted(cache, 1, 20, seed=1)
    assert counted(cache, 1, 20) == again
    assert other.keys() != again.keys()


def test_each_sample_counts_once_in_a_fixed_order() -> None:
    order = FixedOrder([7, 0, 1, 30], 1000, 4, seed=3)
    seen = Counter(
        (order.step(step).bucket, position)
        for step in range(len(order))
        for position in order.step(step).positions[: order.counted(step)].tolist()
    )
    assert seen == Counter({(bucket, i): 1 for bucket, count in enumerate([7, 0, 1, 30]) for i in range(count)})
    assert all(len(order.step(step).positions) == 4 for step in range(len(order)))
    # Written down: with other samples, values of a run before and after an upgrade could not be compared.
    some = FixedOrder([50, 9], 12, 4, seed=3)
    assert [some.step(step).positions[: some.counted(step)].tolist() for step in range(len(some))] == [
        [7, 11, 17, 19],
        [27, 30, 33, 42],
        [44, 48],
        [2, 8],
    ]


# --------------------------------------------------------------------------------------------------- the stage


@pytest.fixture
def small(make_config: Callable[..., Config], small_cache_copy: Path) -> Callable[..., Config]:
    """The tiny configuration on a copy of the photographs' cache, with a few steps."""

    def make(*overrides: str) -> Config:
        short = ["train.steps=2", "train.validation={samples: 3, every: 1}", "train.log_every=1"]
        return make_config(small_cache_copy.parent, *short, *overrides)

    return make


def test_the_held_out_part_belongs_to_the_snapshot(small: Callable[..., Config], tmp_path: Path) -> None:
    config = small("bucket.heldout=0.3")
    trained = sana_pipe.stages.bucket.run(config)
    cache = Cache(config.cache)
    part = cache.snapshot_of("latest.heldout")
    assert heldout.find(cache, cache.open_snapshot()) == part
    printed: list[str] = []
    sana_pipe.stages.train.run(config, log=printed.append)
    assert {row["snapshot"] for row in rows(config)} == {part}
    assert cache.names_of(part or "") == sorted(["latest.heldout", f"trained-{part[:16]}"] if part else [])
    # Nor does the part of another snapshot to which a name has moved.
    cache.point("run", trained)
    cache.point("run.heldout", part)
    sana_pipe.stages.bucket.run(small("bucket.heldout=0.3", "bucket.filter='width < height'"))
    assert cache.snapshot_of("latest.heldout") != part
    cache.point("latest", trained, move=True)
    assert heldout.find(cache, cache.open_snapshot(trained)) == part
    for name in ("run", "run.heldout"):
        cache.forget_name(name)
    # A newer part does not take its place in a run that is resumed.
    newer = sana_pipe.stages.bucket.run(small("bucket.heldout=0.5"))
    assert heldout.find(cache, cache.open_snapshot(trained)) == part, "training has named it"
    cache.point("latest", trained, move=True)
    assert heldout.find(cache, cache.open_snapshot(trained)) == part, "`latest.heldout` is the newer one's"
    cache.point("latest", newer, move=True)
    sana_pipe.stages.train.run(small("train.steps=3"), resume="auto", log=printed.append)
    assert {row["snapshot"] for row in rows(config)} == {part}
    assert not [line for line in printed if line.startswith("changed since") and "snapshot" in line]
    # Without the option a line says that there is one.
    sana_pipe.stages.train.run(small("train.validation=null", f"train.output={tmp_path / 'other'}"), log=printed.append)
    assert any("train.validation={}" in line for line in printed)


def test_a_packed_snapshot_is_validated_as_its_source(small: Callable[..., Config], tmp_path: Path) -> None:
    """Also when `bucket` has moved `latest.heldout` since: the same samples, and at step 0 the same loss."""
    config = small("bucket.heldout=0.3")
    source = sana_pipe.stages.bucket.run(config)
    part = Cache(config.cache).snapshot_of("latest.heldout")
    packed = sana_pipe.stages.pack.run(config)
    sana_pipe.stages.bucket.run(small("bucket.heldout=0.3", "bucket.filter='width < height'"))
    starts = []
    for name in (source, packed):
        run = small(f"train.output={tmp_path / str(name)}")
        sana_pipe.stages.train.run(run, snapshot=name, log=lambda line: None)
        assert {row["snapshot"] for row in rows(run)} == {part}
        assert [row["step"] for row in rows(run)] == [0, 1, 2]
        starts.append(rows(run)[0]["loss"])
    assert starts[0] == starts[1]


def test_no_option_of_the_training_changes_the_samples(small: Callable[..., Config]) -> None:
    config = small("bucket.heldout=0.3")
    sana_pipe.stages.bucket.run(config)
    cache, found = Cache(config.cache), []
    part = cache.open_snapshot("latest.heldout")
    for other in ((), ("train.caption_drop=1.0", "train.seed=5", "train.length_window=3")):
        samples = sana_pipe.stages.train.training_task(
            small(*other), Inputs(cache.open_snapshot(), 64, part, phase=2 * bool(other)), Launch()
        ).validation
        assert samples is not None
        parts = [(b.sample_ids, n, b.noise.clone(), b.captions.clone()) for b, n in samples(Layout(1, 1, 1, 1))]
        found.append(parts)
    for one, changed in zip(*found, strict=True):
        assert one[:2] == changed[:2]
        assert torch.equal(one[2], changed[2])
        assert torch.equal(one[3], changed[3])


def test_what_cannot_validate_is_refused(small: Callable[..., Config]) -> None:
    plain = small()
    sana_pipe.stages.bucket.run(plain, name="all")
    with pytest.raises(ConfigError, match=naming("train.validation", "sana-pipe bucket --set bucket.heldout")):
        sana_pipe.stages.train.run(plain)
    sana_pipe.stages.bucket.run(small("bucket.heldout=0.3"), name="some")
    cache = Cache(plain.cache)
    every, part = cache.open_snapshot("all"), cache.open_snapshot("some.heldout")
    with pytest.raises(ConfigError, match=f"{len(part)} of the {len(part)} samples .* are trained on"):
        sana_pipe.stages.train.run(small("train.validation.snapshot=some.heldout"), snapshot="all")
    assert not (Path(plain.train.output) / "checkpoints").exists()
    with pytest.raises(ConfigError, match="are trained on"):
        heldout.check_disjoint(cache.open_snapshot("some"), every)
    heldout.check_disjoint(cache.open_snapshot("some"), part)
    for name, shape in (("tall", "width < height"), ("wide", "width >= height")):
        sana_pipe.stages.bucket.run(small(f"bucket.filter='{shape}'"), name=name)
    heldout.check_disjoint(cache.open_snapshot("tall"), cache.open_snapshot("wide"))


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    ours, other = (tiny_cache.build(tmp_path / name, weights=name).open_snapshot() for name in ("w", "v"))
    heldout.check(ours, ours)
    with pytest.raises(ConfigError, match=naming("latent", "weights: 'w' | 'v'")):
        heldout.check(ours, other)
