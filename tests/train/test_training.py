"""The trainer in one process: the step, the optimizer's rules, recomputation, checkpoints, the loop."""

from __future__ import annotations

import copy
import gzip
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from sana_pipe import __version__
from sana_pipe.base import retrying
from sana_pipe.base.errors import ConfigError, IntegrityError, UserError
from sana_pipe.base.launch import Launch
from sana_pipe.config import Config, written
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.loader.inputs import Inputs
from sana_pipe.data.loader.loader import Batch, LoaderSettings
from sana_pipe.data.snapshots.config import BucketConfig
from sana_pipe.stages.train import training_task
from sana_pipe.tools.planning.expectation import Expectation
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_files import save_weights
from sana_pipe.train.parallel import collectives, data_parallel, mesh
from sana_pipe.train.parallel.activation_checkpoint import apply_activation_checkpointing
from sana_pipe.train.parallel.parallelize import ParallelModel, adjoining, parallelize
from sana_pipe.train.parallel.shards import local
from sana_pipe.train.training import build, checkpoint, checks, drawings, metrics, optimizers, stop_request
from sana_pipe.train.training.config import OptimConfig
from sana_pipe.train.training.objectives.flow import Flow
from sana_pipe.train.training.profiling import tracing
from sana_pipe.train.training.step import NonFiniteError, TrainStep, clip_factor
from sana_pipe.train.training.trainer import closable, fit
from tests.support import tiny_cache
from tests.support.checkpoints import load_model_state
from tests.support.forked import Forked
from tests.support.messages import naming
from tests.support.parameters import first_quick
from tests.support.runs import fit_tiny, same_checkpoints
from tests.support.workers import tiny_run

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
FULL = TrainConfig(activation_checkpointing="full")
ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------------------ optimizer


def test_learning_rate_rises_linearly_then_stays() -> None:
    config = OptimConfig(lr=1e-3, warmup_steps=4)
    rates = [optimizers.learning_rate(config, step, 6) for step in range(6)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])
    assert optimizers.learning_rate(OptimConfig(lr=1e-3, warmup_steps=0), 0, 6) == 1e-3


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({"schedule": "linear"}, [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ({"schedule": "cosine"}, [0.5, 1, *((1 + math.cos(math.pi * part / 8)) / 2 for part in range(8))]),
        ({"schedule": "wsd"}, [0.5, *[1] * 9]),
    ],
)
def test_the_rate_falls_after_the_warm_up_as_its_schedule_says(options: dict[str, Any], shares: list[float]) -> None:
    config = OptimConfig(lr=1e-3, warmup_steps=2, **options)
    rates = [optimizers.learning_rate(config, step, 10) for step in range(10)]
    assert rates == pytest.approx([1e-3 * share for share in shares])
    assert optimizers.learning_rate(config, 10, 10) == optimizers.learning_rate(config, 12, 10) == 0


@pytest.mark.parametrize(("warmup", "fall"), [(4, 4), (38, 2)])
def test_the_rate_of_wsd_falls_over_the_last_tenth_or_what_the_warm_up_leaves(warmup: int, fall: int) -> None:
    config = OptimConfig(lr=1e-3, warmup_steps=warmup, schedule="wsd")
    rates = [optimizers.learning_rate(config, step, 40) for step in range(warmup, 40)]
    shares = [*[1] * (40 - warmup - fall), *(1 - math.sqrt(part / fall) for part in range(fall))]
    assert rates == pytest.approx([1e-3 * share for share in shares])


def test_nvlabs_warm_up_begins_with_a_rate_of_nothing() -> None:
    config = OptimConfig(lr=1e-3, warmup_steps=4)
    rates = [optimizers.learning_rate(config, step, 6, "nvlabs") for step in range(6)]
    assert rates == pytest.approx([0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_under_nvlabs_numerics_everything_decays() -> None:
    model = tiny_run.model(tiny_run.config())
    optimizer = optimizers.build(model, OptimConfig(weight_decay=0.1), CPU, numerics="nvlabs")
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1}


@pytest.mark.parametrize(
    ("options", "steps", "says"),
    [
        ({"warmup_steps": 2000}, 250, [("warmup_steps = 2000", "rate of 1.", "warmup_steps=25 ")]),
        ({"warmup_steps": 125}, 250, []),
        ({"lr": 5e-5, "warmup_steps": 0}, 250, []),
        ({"lr": 2e-5, "warmup_steps": 0}, 250, [("is 2e-05", "below 5e-05", "lr=0.0001", "10,000 steps")]),
        ({"lr": 2e-5, "warmup_steps": 126}, 250, [("warmup_steps = 126",), ("is 2e-05",)]),
    ],
)
def test_a_rate_that_will_not_do_is_reported(options: dict[str, Any], steps: int, says: list[tuple[str, ...]]) -> None:
    actual = optimizers.advice(OptimConfig(**options), steps)
    assert len(actual) == len(says)
    assert all(part in line for line, parts in zip(actual, says, strict=True) for part in parts)


def test_the_start_of_a_run_says_once_what_its_rate_will_not_do(tmp_path: Path) -> None:
    printed: list[str] = []
    settings = tiny_run.config(tmp_path, steps=3, layers=1, optim={"lr": 1e-5, "warmup_steps": 2})
    fit(settings.train, tiny_run.task(settings), Launch(), log=printed.append)
    notes = [line for line in printed if line.startswith("note: ") and "train.optim" in line]
    assert len(notes) == 2
    assert "--set train.optim.warmup_steps=0" in notes[0]
    assert "--set train.optim.lr=0.0001" in notes[1]


def test_only_matrices_decay() -> None:
    model = tiny_run.model(tiny_run.config())
    optimizer = optimizers.build(model, OptimConfig(weight_decay=0.1), CPU)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decaying, free = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert decaying | free == set(names.values())
    assert not decaying & free
    assert "transformer_blocks.0.attn1.to_q.weight" in decaying
    assert "transformer_blocks.0.ff.conv_inverted.weight" in decaying
    assert {
        "scale_shift_table",
        "transformer_blocks.0.scale_shift_table",
        "caption_norm.weight",
        "proj_out.bias",
    } <= free


# ----------------------------------------------------------------------------------------------------------- step


@pytest.mark.parametrize("empty", [False, True])
def test_captions_that_are_never_padded_train_alike(empty: bool) -> None:
    """Also where one of them has no rows: it attends to padding, which then has to be there."""
    settings = tiny_run.config(text="packed")
    batch = tiny_run.global_batch(0)
    if empty:
        mask = batch.mask & (torch.arange(8) != 3)[:, None]
        batch = replace(batch, mask=mask, captions=batch.captions * mask[..., None])
    loss, norm, actual = tiny_run.gradients(tiny_run.model(settings), settings, [tiny_run.packed(batch)])
    expected = tiny_run.gradients(tiny_run.model(settings), settings, [batch])
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert norm == pytest.approx(expected[1], rel=1e-5)
    assert tiny_run.distance(actual, expected[2]) < 2e-6


@pytest.mark.parametrize("size", [4, 3, 1])
def test_any_split_into_microbatches_is_the_whole_batch(size: int) -> None:
    settings = tiny_run.config()
    batch = tiny_run.global_batch(0)
    expected = tiny_run.gradients(tiny_run.model(settings), settings, [batch])
    actual = tiny_run.gradients(tiny_run.model(settings), settings, tiny_run.microbatches(batch, size))
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    assert actual[1] == pytest.approx(expected[1], rel=1e-5)
    assert tiny_run.distance(actual[2], expected[2]) < 2e-6


def test_a_mean_of_means_would_be_noticed() -> None:
    """The same comparison with the mistake it is there for: microbatches of 3, 3 and 2, each with its own mean."""
    settings = tiny_run.config()
    batch = tiny_run.global_batch(0)
    _, _, expected = tiny_run.gradients(tiny_run.model(settings), settings, [batch])
    model = tiny_run.model(settings)
    pieces = tiny_run.microbatches(batch, 3)
    step = tiny_run.train_step(model, settings.train)
    for piece in pieces:
        (tiny_run.losses(step, piece).mean() / len(pieces)).backward()
    actual = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert tiny_run.distance(actual, expected) > 1e-3  # type: ignore[arg-type]


def test_clipping_scales_the_gradient_and_reports_the_norm_before() -> None:
    settings = tiny_run.config(optim={"clip": 0.1})
    batch = tiny_run.global_batch(0)
    _, norm, whole = tiny_run.gradients(tiny_run.model(settings), settings, [batch])
    assert norm == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in whole.values())), rel=1e-5)
    model = tiny_run.model(settings)
    recorder = tiny_run.Recorder(model)
    outcome = tiny_run.train_step(model, settings.train, recorder)([batch], 1)  # type: ignore[arg-type]
    assert float(outcome.grad_norm) == pytest.approx(norm)
    assert tiny_run.distance(recorder.gradients, {name: g * (0.1 / norm) for name, g in whole.items()}) < 1e-5


def test_a_loss_that_is_no_number_stops_and_names_the_sample() -> None:
    settings = tiny_run.config()
    batch = tiny_run.global_batch(0)
    latents = batch.latents.clone()
    latents[5, 0, 0, 0] = float("nan")
    model = tiny_run.model(settings)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = optimizers.build(model, settings.train.optim, CPU)
    step = tiny_run.train_step(model, settings.train, optimizer)
    with pytest.raises(NonFiniteError) as caught:
        step(tiny_run.microbatches(replace(batch, latents=latents), 3), 17)
    text = str(caught.value)
    assert caught.value.everywhere, "every process raises it; one prints it"
    assert "step 17" in text
    assert "64x64" in text
    assert "samples with such a loss: 0000000000000005\n" in text
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_bad_sample_is_called_by_the_name_of_its_item(tmp_path: Path) -> None:

    snapshot = tiny_cache.build(tmp_path / "cache").open_snapshot()
    settings = tiny_run.config()
    names = training_task(settings, Inputs(snapshot, settings.data.resolution), Launch()).names
    row = len(snapshot) - 1
    assert names([snapshot.sample_id(row), snapshot.sample_id(3), 5]) == {
        snapshot.sample_id(at): "item: " + snapshot.source_item(at)[1] for at in (row, 3)
    }
    batch = replace(tiny_run.global_batch(0), sample_ids=tuple(snapshot.sample_id(row - at) for at in range(8)))
    batch = replace(batch, noise=torch.where(torch.arange(8)[:, None, None, None] == 2, torch.nan, batch.noise))
    model = tiny_run.model(settings)
    optimizer = optimizers.build(model, settings.train.optim, CPU)
    step = tiny_run.train_step(model, settings.train, optimizer, names=names)
    with pytest.raises(NonFiniteError, match=f"such a loss: item: {snapshot.source_item(row - 2)[1]}\n"):
        step([batch], 1)


def test_a_gradient_that_is_no_number_stops_too() -> None:
    settings = tiny_run.config()
    model = tiny_run.model(settings)
    model.proj_out.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = model.proj_out.weight.clone()
    optimizer = optimizers.build(model, settings.train.optim, CPU)
    with pytest.raises(NonFiniteError, match=r"(?s)step 3: .*0000000000000007"):
        tiny_run.train_step(model, settings.train, optimizer)([tiny_run.global_batch(0)], 3)
    assert torch.equal(model.proj_out.weight, before)


# ------------------------------------------------------------------------------------------------- recomputation


def _saved_bytes(model: SanaTransformer, settings: Config, batch: Batch) -> tuple[int, dict[str, Tensor]]:
    """Bytes that autograd keeps between forward and backward, parameters left out, each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    step = tiny_run.train_step(model, settings.train)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = tiny_run.losses(step, batch).mean()
    loss.backward()
    return sum(saved.values()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_recomputation_is_really_on() -> None:
    settings = tiny_run.config(layers=24)
    plain, recomputed = tiny_run.model(settings), tiny_run.model(settings)
    names = list(recomputed.state_dict())
    apply_activation_checkpointing(recomputed.blocks, FULL)
    assert list(recomputed.state_dict()) == names
    batch = tiny_run.global_batch(0)
    without, expected = _saved_bytes(plain, settings, batch)
    with_it, actual = _saved_bytes(recomputed, settings, batch)
    assert without >= 19 * with_it, f"{without / with_it:.1f} times fewer"
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_the_count_of_saved_bytes_sees_a_single_block_left_out() -> None:
    settings = tiny_run.config(layers=24)
    model = tiny_run.model(settings)
    apply_activation_checkpointing(model.blocks[:-2], FULL)
    without, _ = _saved_bytes(tiny_run.model(settings), settings, tiny_run.global_batch(0))
    with_it, _ = _saved_bytes(model, settings, tiny_run.global_batch(0))
    assert without < 20 * with_it


def test_recomputation_survives_a_deep_copy_and_a_second_call() -> None:
    model = tiny_run.model(tiny_run.config())
    apply_activation_checkpointing(model.blocks, FULL)
    classes = [type(block) for block in model.blocks]
    apply_activation_checkpointing(model.blocks, FULL)
    assert [type(block) for block in model.blocks] == classes
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    settings = tiny_run.config()
    loss, _, _ = tiny_run.gradients(twin, settings, [tiny_run.global_batch(0)])
    original, _, _ = tiny_run.gradients(model, settings, [tiny_run.global_batch(0)])
    assert loss != original, "a copy must recompute itself, not the model it was copied from"


# ------------------------------------------------------------------------------------------------------ precision


def _late(step: int) -> Batch:
    """A batch whose timesteps lie between 750 and 990, where bf16 counts in steps of 4."""
    return tiny_run.global_batch(step, logit=1.5)


def _sharded_loss(settings: Config) -> float:
    with mesh.open_mesh(Launch(), settings.train.parallel, CPU) as device_mesh:
        model = tiny_run.model(settings)
        data_parallel.apply_fsdp(model, model.blocks, device_mesh, settings.train)
        assert all(isinstance(module, FSDPModule) for module in (model, *model.blocks))
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        return tiny_run.gradients(model, settings, [_late(0)])[0]


def test_bf16_compute_on_fp32_parameters_is_the_bf16_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 by default would cast the timestep too; the same check with that default must go red."""
    settings = tiny_run.config(precision="bf16")
    expected, _, _ = tiny_run.gradients(tiny_run.model(settings).bfloat16(), settings, [_late(0)])
    assert abs(_sharded_loss(settings) - expected) < 1e-3

    def default(**options: Any) -> MixedPrecisionPolicy:
        options.pop("cast_forward_inputs", None)
        return MixedPrecisionPolicy(**options)

    monkeypatch.setattr(data_parallel, "MixedPrecisionPolicy", default)
    # The sinusoid of the model refuses a timestep that is not fp32; take that guard away as well.
    monkeypatch.setattr("sana_pipe.train.models.sana_layers.timestep_sinusoid", _sinusoid_of_any_dtype())
    assert abs(_sharded_loss(settings) - expected) > 1e-3


def _sinusoid_of_any_dtype() -> Any:
    from sana_pipe.train.models import sana_layers

    original = sana_layers.timestep_sinusoid
    return lambda timesteps: original(timesteps.float())


def test_fp32_in_one_process_stays_a_plain_module() -> None:
    settings = tiny_run.config()
    with mesh.open_mesh(Launch(), settings.train.parallel, CPU) as device_mesh:
        model = tiny_run.model(settings)
        assert data_parallel.apply_fsdp(model, model.blocks, device_mesh, settings.train) is model
        assert not isinstance(model, FSDPModule)


# ------------------------------------------------------------------------------------------------------- the run


@pytest.mark.parametrize(
    ("named", "last", "traced"), [pytest.param("2-3", 3, 2, marks=pytest.mark.slow), ("4-12", 5, 2), (9, 9, 0)]
)
def test_some_steps_are_traced(tmp_path: Path, named: str | int, last: int, traced: int) -> None:
    """Those that the configuration names, as far as the run has them, and nothing changes."""
    options: dict[str, Any] = {"steps": 5, "microbatch": 8}
    plain = tiny_run.config(tmp_path / "plain", **options)
    settings = tiny_run.config(tmp_path / "traced", profile=named, **options)
    reports = [fit(one.train, tiny_run.task(one), Launch(), log=lambda line: None) for one in (plain, settings)]
    assert reports[0].loss == reports[1].loss
    assert not (tmp_path / "plain/profile").exists()
    files = list((tmp_path / "traced/profile").glob("*"))
    if not traced:
        assert not files
        return
    assert [path.name for path in files] == [f"trace-step-{last:08d}-process-0.json.gz"]
    with gzip.open(files[0]) as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name", "").startswith("Optimizer.step") for event in events) == traced
    assert any("backward" in event.get("name", "").lower() for event in events)


def test_only_the_first_process_traces(tmp_path: Path) -> None:
    lines: list[str] = []
    for rank in (0, 1):
        with tracing("2", tmp_path / str(rank), rank, CPU, lines.append) as done:
            done(1)
            torch.zeros(3).add_(1)
            done(2)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert len(lines) == 1


@pytest.mark.parametrize("named", ["1-3", 1, "12-10", "3-", "-3", "3,4", "3 - 4", "", 2.0, True, [3], {"start": 3}])
def test_steps_that_cannot_be_traced_are_refused(named: Any) -> None:
    with pytest.raises(ValidationError, match="profile"):
        TrainConfig.model_validate({"profile": named})
    assert TrainConfig.model_validate({"profile": 10}).profile == "10"


def test_a_trace_that_cannot_be_written_is_no_reason_to_lose_a_run(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    lines: list[str] = []
    with tracing("2", tmp_path, 0, CPU, lines.append) as done:
        done(1)
        done(2)
    (line,) = lines
    assert line.startswith("note: the profile could not be written")


def test_on_a_gpu_a_memory_snapshot_is_written_and_recording_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    on_gpu = torch.device("cuda")
    with tracing("4", tmp_path, 0, on_gpu, lambda line: None) as done:
        for step in (1, 2):
            done(step)
    assert not calls, "no step of such a short run is traced"
    with tracing("2", tmp_path, 0, on_gpu, lambda line: None) as done:
        for step in (1, 2, 3):
            done(step)
    assert calls[1] == str(tmp_path / "profile/memory-step-00000002-process-0.pickle")
    assert "max_entries" in calls[0] and calls[2:] == [{"enabled": None}]


class Launches(TorchDispatchMode):
    """Counts operations by name; each is a kernel on a GPU, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


class Casts(TorchDispatchMode):
    """Counts the casts of some tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.count, self.places = 0, {tensor.data_ptr() for tensor in tensors}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten._to_copy.default:
            self.count += args[0].data_ptr() in self.places
        return operation(*args, **(kwargs or {}))


@pytest.mark.slow
def test_one_process_casts_each_parameter_once_per_step() -> None:
    """Not again for each of four microbatches and its backward pass. The losses are the same, bit for bit."""
    casts, losses, parameters = {}, {}, 0
    for reshard in (None, True):
        settings = tiny_run.config(microbatch=2, precision="bf16", parallel={"reshard_after_forward": reshard})
        with mesh.open_mesh(Launch(), settings.train.parallel, CPU) as device_mesh:
            parallel_model = parallelize(tiny_run.model(settings), device_mesh, settings.train)
            shards = [local(parameter.detach()) for parameter in parallel_model.module.parameters()]
            parameters = len(shards)
            with Casts(shards) as counted:
                losses[reshard] = tiny_run.train_losses(parallel_model, settings, 2)
        casts[reshard] = counted.count
    assert casts[None] == 2 * parameters
    assert casts[True] > 2 * 4 * parameters
    assert losses[None] == losses[True]


class Copies(TorchDispatchMode):
    """Counts the values that are copied to other memory of the same dtype without autograd, as reductions do."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten.copy_.default and args[0].dtype == args[1].dtype and args[0].dim() == 1:
            self.values += args[0].numel() * (args[0].data_ptr() != args[1].data_ptr())
        return operation(*args, **(kwargs or {}))


REDUCED: dict[str, dict[str, Any]] = {
    "several microbatches": {"microbatch": 2},
    "one microbatch": {"microbatch": 8, "optim": {"name": "came", "betas": None, "eps": None}},
    "cast again for the backward pass": {"microbatch": 4, "parallel": {"reshard_after_forward": True}},
    "fp16": {"precision": "fp16"},
    "recomputed": {"activation_checkpointing": "full"},
    "LoRA": {"adapter": {"rank": 2}, "microbatch": 2},
    "clipped": {"optim": {"clip": 1e-3}, "microbatch": 3},
}


@pytest.mark.parametrize("name", first_quick(*REDUCED))
def test_one_process_reduces_gradients_in_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has the loss and the weights of a step whose gradients are copied, bit for bit. Edit: `apply_fsdp`
    without `_InPlace`; `_InPlace.allocate` that returns the buffer of the step before."""
    settings = tiny_run.config(layers=2, **{"precision": "bf16", **REDUCED[name]})
    copies, losses, weights = {}, {}, {}
    for in_place in (True, False):
        if not in_place:
            monkeypatch.setattr(data_parallel, "is_reduced_in_place", lambda train, shards: False)
        with mesh.open_mesh(Launch(), settings.train.parallel, CPU) as device_mesh:
            parallel_model = parallelize(tiny_run.model(settings), device_mesh, settings.train)
            with Copies() as counted:
                losses[in_place] = tiny_run.train_losses(parallel_model, settings, 2)
            trained = [local(p.detach()).clone() for p in parallel_model.module.parameters() if p.requires_grad]
        copies[in_place], weights[in_place] = counted.values, trained
    assert copies[False] - copies[True] == 2 * sum(values.numel() for values in weights[True])
    assert losses[True] == losses[False]
    assert all(map(torch.equal, weights[True], weights[False]))


@pytest.mark.parametrize(
    ("train", "shards", "expected"),
    [
        ({"precision": "bf16"}, 1, True),
        ({"precision": "bf16"}, 2, False),
        ({"precision": "bf16_pure"}, 1, False),
        ({"precision": "bf16_pure", "parallel": {"reduce_dtype": "bf16"}}, 1, True),
        ({"precision": "bf16", "parallel": {"reduce_dtype": "bf16"}}, 1, False),
        ({"precision": "bf16", "parallel": {"offload": "all"}}, 1, False),
        ({"precision": "bf16", "parallel": {"reduce_each_microbatch": True}}, 1, False),
        ({"precision": "bf16", "parallel": {"reshard_after_forward": True}}, 1, True),
        ({"precision": "bf16", "parallel": {"pp_size": 2}}, 1, False),
        ({"precision": "bf16", "optim": {"in_backward": True, "clip": None}}, 1, False),
    ],
)
def test_gradients_that_are_freed_before_the_update_are_copied(
    train: dict[str, Any], shards: int, expected: bool
) -> None:
    settings = tiny_run.config(microbatch=8, **train).train
    assert data_parallel.is_reduced_in_place(settings, shards) is expected


def test_gradients_of_a_block_adjoin_and_their_norm_is_that_of_all() -> None:
    settings = tiny_run.config(precision="bf16")
    with mesh.open_mesh(Launch(), settings.train.parallel, CPU) as device_mesh:
        parallel_model = parallelize(tiny_run.model(settings), device_mesh, settings.train)
        step = tiny_run.train_step(parallel_model, settings.train)
        tiny_run.losses(step, tiny_run.global_batch(0)).sum().backward()
        gradients = [local(gradient) for gradient in parallel_model.gradients()]
        blocks = len(parallel_model.module.blocks)  # type: ignore[arg-type]
    runs, single = adjoining(gradients)
    assert (len(runs), single) == (blocks + 1, []), "one of each block, one of the rest"
    values = [torch.cat([x.flatten() for x in parts]).sort().values for parts in (runs, gradients)]
    assert torch.equal(*values), "each value once"
    again, _ = adjoining(x.clone() for x in gradients)
    assert again == []


def test_only_tensors_that_follow_each_other_in_memory_adjoin() -> None:
    memory, other = torch.arange(24.0), torch.arange(4.0)
    parts = [memory[12:16], other, memory[:6].view(2, 3), memory[6:12], memory[18:20], memory[20:24].view(2, 2).t()]
    runs, single = adjoining(parts)
    assert [x.tolist() for x in runs] == [memory[:16].tolist()]
    assert [x.data_ptr() for x in single] == [x.data_ptr() for x in (memory[18:20], memory[20:24], other)]
    assert adjoining([memory[:2], memory[2:4].view(torch.int32)])[0] == [], "of one dtype"


def test_clipping_is_one_product_for_all_gradients() -> None:
    model = tiny_run.model(tiny_run.config())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    expected = [parameter.grad * torch.tensor(0.25) for parameter in model.parameters()]  # type: ignore[operator]
    with Launches() as launches:
        factor = clip_factor(torch.tensor(4.0 - 1e-6), 1.0, 1.0)
        assert factor is not None
        ParallelModel(model).scale_gradients(factor)
    assert launches.names["aten._foreach_mul_.Tensor"] == 1 and launches.names["aten.mul_.Tensor"] == 0
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=0)


def test_an_attempt_took_the_seconds_of_its_last_logged_step(tmp_path: Path) -> None:
    begin, logged, validated = (
        {"event": "start", "step": 0},
        {"step": 2, "seconds": 7.0},
        {"event": "validation", "step": 2},
    )
    rows = [begin, logged, {**validated, "seconds": 0.5}, {**begin, "step": 2}, {"step": 4, "seconds": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [start["seconds"] for start in metrics.read_events(tmp_path / "metrics.jsonl")["start"]] == [7.0, 3.0]


def test_the_samples_of_a_step_are_those_of_all_processes() -> None:
    settings, batch = tiny_run.config(layers=1), tiny_run.global_batch(0)
    step = tiny_run.train_step(ParallelModel(tiny_run.model(settings), data_world=2), settings.train)
    assert step([batch], 1).samples == 2 * len(batch.sample_ids)


@pytest.mark.parametrize("clip", first_quick(0.1, None))
def test_a_fused_optimizer_clips_in_its_kernel(clip: float | None) -> None:
    """With sharded parameters, as on a GPU. Loss scales of fp16 pass through the same factor."""
    losses, launched = {}, {}
    for fused in (False, True):
        settings = tiny_run.config(precision="bf16", optim={"clip": clip})
        with mesh.open_mesh(Launch(), settings.train.parallel, CPU) as device_mesh:
            parallel_model = parallelize(tiny_run.model(settings), device_mesh, settings.train)
            optimizer = torch.optim.AdamW(parallel_model.module.parameters(), lr=1e-2, foreach=False, fused=fused)
            step = TrainStep(parallel_model, Flow(settings.train.flow), optimizer, settings.train, CPU)
            losses[fused] = [float(step([tiny_run.global_batch(0)], 1).loss)]
            with Launches() as launches:
                losses[fused] += [float(step([tiny_run.global_batch(n)], n + 1).loss) for n in (1, 2)]
        launched[fused] = launches.names["aten._foreach_mul_.Tensor"]
    assert losses[True] == pytest.approx(losses[False], rel=2e-4)
    assert launched == {False: 0 if clip is None else 2, True: 0}
    norm, limit = torch.tensor(2.0), 0.5
    assert clip_factor(norm, None, 1.0) is None
    assert float(clip_factor(norm, None, 8.0)) == 1 / 8  # type: ignore[arg-type]
    assert float(clip_factor(norm, limit, 8.0)) == pytest.approx(0.25 / 8)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints after 2, 4 and 6. Not to be changed: copy it."""
    run = tmp_path_factory.mktemp("finished") / "run"
    fit_tiny(tiny_run.config(run, steps=6, save_every=2))
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(finished, tmp_path / "run")
    yield tmp_path / "run"
    assert not dist.is_initialized()


def test_a_run_directory_tells_the_run(finished: Path) -> None:
    settings = tiny_run.config(finished, steps=6, save_every=2)
    assert yaml.safe_load((finished / "config.yaml").read_text()) == settings.model_dump(mode="json")
    assert [path.name for path in sorted((finished / "checkpoints").iterdir())] == [
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]
    rows = metrics.read(finished / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["bucket"] == [64, 64]
    assert rows[1]["bucket"] == [48, 80]
    assert rows[1]["text_rows"] == 16
    assert rows[1]["padded_tokens"] == int((~tiny_run.global_batch(1).mask).sum())
    assert all(row["lr"] == 3e-4 and row["images_per_s"] > 0 and 0 <= row["data_wait"] <= 1 for row in rows)
    losses = tiny_run.train_losses(tiny_run.model(settings), settings, 6)
    assert [row["loss"] for row in rows] == losses


def test_rows_are_means_over_the_steps_between(finished: Path, tmp_path: Path) -> None:
    every = [row["loss"] for row in metrics.read(finished / "metrics.jsonl")]
    fit_tiny(tiny_run.config(tmp_path / "run", steps=6, log_every=4))
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [4, 6]
    assert [row["loss"] for row in rows] == pytest.approx([sum(every[:4]) / 4, sum(every[4:]) / 2])


def test_the_run_warms_up_from_its_first_step_also_when_resumed(tmp_path: Path) -> None:
    def settings(steps: int) -> Config:
        rule = {"lr": 1e-3, "warmup_steps": 4}
        return tiny_run.config(tmp_path / "run", steps=steps, optim=rule)

    fit_tiny(settings(2))
    fit_tiny(settings(6), resume="auto")
    rows = metrics.read(tmp_path / "run/metrics.jsonl")
    assert [row["lr"] for row in rows] == pytest.approx([1e-3 * share for share in (0.25, 0.5, 0.75, 1, 1, 1)])
    model = tiny_run.model(settings(6))
    assert [row["loss"] for row in rows] == tiny_run.train_losses(model, settings(6), 6), "the optimizer gets that rate"


def test_a_falling_rate_ends_with_the_run_and_goes_on_from_where_it_was_resumed(tmp_path: Path) -> None:
    def settings(steps: int) -> Config:
        return tiny_run.config(
            tmp_path / "run", steps=steps, layers=1, optim={"lr": 1e-3, "warmup_steps": 0, "schedule": "linear"}
        )

    fit_tiny(settings(2))
    fit_tiny(settings(5), resume="auto")
    rows = metrics.read(tmp_path / "run/metrics.jsonl")
    assert [row["lr"] for row in rows] == pytest.approx([1e-3, 5e-4, 6e-4, 4e-4, 2e-4])


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_interrupted_and_resumed_is_uninterrupted(precision: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": precision, "activation_checkpointing": "full"}
    fit_tiny(tiny_run.config(tmp_path / "whole", steps=6, **options))
    fit_tiny(tiny_run.config(tmp_path / "parts", steps=3, **options))
    fit_tiny(tiny_run.config(tmp_path / "parts", steps=6, **options), resume="auto")
    assert same_checkpoints(tmp_path / "whole/checkpoints/step-00000006", tmp_path / "parts/checkpoints/step-00000006")
    whole, parts = (metrics.read(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    assert [row["loss"] for row in whole] == [row["loss"] for row in parts]


def test_a_forgotten_moment_would_be_noticed(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above goes red when resuming restores the weights alone."""
    original = checkpoint.load

    def weights_only(folder: Path, document: Any, model: Any, optimizer: Any, more: Any, **options: Any) -> set[str]:
        absent = original(folder, document, model, optimizer, more, **options)
        optimizer.state.clear()
        return absent

    monkeypatch.setattr(checkpoint, "load", weights_only)
    settings = tiny_run.config(tmp_path / "run", steps=6, save_every=2)
    fit_tiny(settings, resume=finished / "checkpoints/step-00000002")
    assert not same_checkpoints(finished / "checkpoints/step-00000006", tmp_path / "run/checkpoints/step-00000006")


def test_a_used_run_directory_is_not_overwritten(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(ConfigError, match=r"(?s)--resume auto.*train.output"):
        fit_tiny(tiny_run.config(run, steps=6))
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_resuming_a_finished_run_does_nothing(run: Path) -> None:
    printed: list[str] = []
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    report = fit_tiny(tiny_run.config(run, steps=5, save_every=2), resume="auto", log=printed.append)
    assert report.step == 6
    assert printed == ["nothing to do: 6 steps are done, and train.steps is 5"]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_resume_auto_without_checkpoints_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says where it looked in full: from another folder a relative path looks right."""
    printed: list[str] = []
    monkeypatch.chdir(tmp_path)
    assert fit_tiny(tiny_run.config(Path("run"), steps=1), resume="auto", log=printed.append).step == 1
    assert any("from the beginning" in line and f"{tmp_path}/run/checkpoints" in line for line in printed)


def test_resuming_from_an_older_checkpoint_needs_another_run_directory(run: Path, tmp_path: Path) -> None:
    old = run / "checkpoints/step-00000002"
    with pytest.raises(ConfigError, match=r"(?s)step-00000006.*train.output"):
        fit_tiny(tiny_run.config(run, steps=6), resume=old)
    fit_tiny(tiny_run.config(tmp_path / "branch", steps=6), resume=old)
    assert same_checkpoints(run / "checkpoints/step-00000006", tmp_path / "branch/checkpoints/step-00000006")
    with pytest.raises(ConfigError, match=naming(tmp_path / "nothing")):
        fit_tiny(tiny_run.config(tmp_path / "c", steps=6), resume=tmp_path / "nothing")


def test_a_run_directory_stands_for_its_newest_checkpoint(run: Path, tmp_path: Path) -> None:
    printed: list[str] = []
    fit_tiny(tiny_run.config(run, steps=6), resume=os.path.relpath(run), log=printed.append)
    assert any("nothing to do: 6 steps" in line for line in printed)
    assert checkpoint.find(tmp_path / "other", str(run)) == run / "checkpoints/step-00000006"
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=naming(tmp_path / "empty")):
        fit_tiny(tiny_run.config(tmp_path / "c", steps=6), resume=tmp_path / "empty")


def test_nothing_that_a_run_writes_holds_the_password_of_a_url(tmp_path: Path) -> None:
    """The journal of TensorBoard holds the configuration, too."""
    run, printed = tmp_path / "run", list[str]()
    pytest.importorskip("tensorboard")

    def settings(steps: int) -> Config:
        made = tiny_run.config(run, steps=steps, trackers=["tensorboard"])
        mirror = made.mirror.model_copy(update={"path": "https://user:sesame@host/x?sig=sesame"})
        return made.model_copy(update={"cache": "s3://user:sesame@bucket/cache", "mirror": mirror})

    fit_tiny(settings(1))
    fit_tiny(settings(2), resume="auto", log=printed.append)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if b"sesame" in path.read_bytes()] == []
    assert "s3://bucket/cache" in (run / "config.yaml").read_text()
    assert not [line for line in printed if "cache" in line and "changed" in line]


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    fit_tiny(tiny_run.config(tmp_path / "run", steps=4, save_every=1, keep_checkpoints=2))
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000003", "step-00000004"]


def test_settings_of_the_optimizer_come_from_the_configuration_of_today(run: Path) -> None:
    printed: list[str] = []
    new = tiny_run.config(run, steps=7, save_every=2, optim={"lr": 1e-5, "weight_decay": 0.5})
    new = new.model_copy(update={"bucket": BucketConfig(batch=24)})
    fit_tiny(new, resume="auto", log=printed.append)
    assert "changed since the checkpoint: train.optim.weight_decay: 0.01 -> 0.5" in printed
    assert not [line for line in printed if "bucket.batch" in line], "training does not read it"
    older = written(new)
    del older["patience_s"]
    del older["train"]["compile"], older["train"]["optim"]["clip"]
    older["train"]["ema"] = {"decay": 0.5}
    assert tiny_run.written_of(new).changed_since(older) == ["train.ema: {'decay': 0.5} -> None"], (
        "nobody set what did not exist"
    )
    assert metrics.read(run / "metrics.jsonl")[-1]["lr"] == 1e-5
    model = tiny_run.model(new)
    optimizer = optimizers.build(model, new.train.optim, CPU)
    folder = run / "checkpoints/step-00000007"
    with mesh.open_mesh(Launch(), new.train.parallel, CPU):
        checkpoint.load(folder, checkpoint.read_document(folder), model, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    earlier = yaml.safe_load((run / "config-until-step-00000006.yaml").read_text())
    assert earlier["train"]["optim"]["weight_decay"] == 0.01


@pytest.mark.parametrize(
    ("train", "snapshot", "named"),
    [
        ({"seed": 1}, "5eed", "train.seed: the checkpoint has 0, this run 1"),
        ({"length_window": 4}, "5eed", "train.length_window: the checkpoint has 0, this run 4"),
        ({}, "0ther", "\n  snapshot: the checkpoint has 5eed, this run 0ther"),
        ({"layers": 4}, "5eed", "model.num_layers: the checkpoint has 3, this run 4"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(run: Path, train: dict[str, Any], snapshot: str, named: str) -> None:
    with pytest.raises(checkpoint.CheckpointError, match=named) as caught:
        fit_tiny(tiny_run.config(run, steps=8, **train), resume="auto", snapshot=snapshot)
    assert str(caught.value).count("the checkpoint has") == 1


def test_what_an_interrupted_save_left_is_named_and_passed_over(run: Path) -> None:
    shutil.copytree(run / "checkpoints/step-00000006", run / "checkpoints/step-00000008.07e4.tmp")
    printed: list[str] = []
    report = fit_tiny(tiny_run.config(run, steps=8, save_every=8), resume="auto", log=printed.append)
    assert any("step-00000008.07e4.tmp" in line and "ignored" in line for line in printed)
    assert any("resumed from" in line and "step-00000006" in line for line in printed)
    assert report.step == 8
    assert not list((run / "checkpoints").glob("*.tmp"))


def _damage(folder: Path, how: str) -> str:
    data = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    if how == "flip":
        raw = bytearray(data.read_bytes())
        raw[len(raw) // 2] ^= 1
        data.write_bytes(raw)
    elif how == "cut":
        data.write_bytes(data.read_bytes()[:-1])
    elif how == "missing":
        data.unlink()
    elif how == "metadata":
        data = folder / ".metadata"
        data.unlink()
    elif how == "document":
        data = folder / checkpoint.DOCUMENT
        data.write_text(data.read_text().replace('"step": 6', '"step": 5'))
    elif how == "torn document":
        data = folder / checkpoint.DOCUMENT
        data.write_text(data.read_text()[:100])
    elif how == "a list":
        data = folder / checkpoint.DOCUMENT
        data.write_text("[]")
    elif how == "no document":
        data = folder
        (folder / checkpoint.DOCUMENT).unlink()
    return data.name


@pytest.mark.parametrize(
    "how", ["flip", "cut", "missing", "metadata", "document", "torn document", "a list", "no document"]
)
def test_a_damaged_checkpoint_is_an_error_not_passed_over(run: Path, how: str) -> None:
    folder = run / "checkpoints/step-00000006"
    named = _damage(folder, how)
    with pytest.raises(checkpoint.CheckpointError, match=named) as error:
        fit_tiny(tiny_run.config(run, steps=8), resume="auto")
    assert "restore the file" in str(error.value.fix) or "remove this folder" in str(error.value.fix)
    with pytest.raises(checkpoint.CheckpointError, match=named):
        load_model_state(folder)
    shutil.rmtree(folder)
    printed: list[str] = []
    fit_tiny(tiny_run.config(run, steps=5), resume="auto", log=printed.append)
    assert any("step-00000004" in line for line in printed)


def test_a_checkpoint_of_a_later_version_is_refused(run: Path) -> None:
    path = run / "checkpoints/step-00000006" / checkpoint.DOCUMENT
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "version": 99}))
    with pytest.raises(checkpoint.CheckpointError, match="version 99"):
        load_model_state(path.parent)


def test_the_weights_of_a_checkpoint_in_one_process(finished: Path) -> None:
    settings = tiny_run.config(finished, steps=6)
    model = tiny_run.model(settings)
    tiny_run.train_losses(model, settings, 6)
    architecture, weights = load_model_state(finished / "checkpoints/step-00000006")
    assert architecture == model.config
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    document = json.loads((finished / "checkpoints/step-00000006" / checkpoint.DOCUMENT).read_text())
    assert "interleaved" in document["layout"]
    assert document["state"] == {"snapshot": "5eed", "seed": 0, "phase": 0, "step": 6}
    with pytest.raises(checkpoint.CheckpointError, match=naming(finished, checkpoint.DOCUMENT)):
        load_model_state(finished)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_a_signal_saves_and_ends_the_run(
    tmp_path: Path, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    def touch(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    printed: list[str] = []
    settings = tiny_run.config(tmp_path / "run", steps=6)
    report = fit_tiny(settings, touch=touch, log=printed.append)
    assert report.step == 3
    assert report.stopped_by == number.name
    assert report.checkpoint == tmp_path / "run/checkpoints/step-00000003"
    assert any("--resume auto" in line for line in printed)
    assert f"{number.name}: a checkpoint will be written" in capfd.readouterr().err
    assert signal.getsignal(number) is before
    assert fit_tiny(settings, resume="auto").step == 6


def test_the_end_of_a_terminal_stays_ignored_after_nohup(tmp_path: Path) -> None:
    def touch(step: int) -> None:
        os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        report = fit_tiny(tiny_run.config(tmp_path / "run", steps=3), touch=touch)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (report.step, report.stopped_by) == (3, None)


def test_a_signal_before_the_loop_promises_no_checkpoint(capfd: pytest.CaptureFixture[str]) -> None:
    with stop_request.catch_signals_of(Launch()) as request:
        os.kill(os.getpid(), signal.SIGTERM)
    assert request.name == "SIGTERM"
    printed = capfd.readouterr().err
    assert "SIGTERM: the run ends" in printed and "after this step" not in printed


def _interrupted_twice(between_s: float) -> int:
    """The status of a process that gets Ctrl-C twice in the loop."""
    child = os.fork()
    if child == 0:
        try:
            with stop_request.catch_signals_of(Launch(rank=1)) as request:
                request.looping = True
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(between_s)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_second_interrupt_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is the same Ctrl-C, passed on by a launcher."""
    assert 0.5 <= stop_request.AGAIN_S <= 2
    monkeypatch.setattr(stop_request, "AGAIN_S", 60.0)  # a busy machine may take long between the two
    assert _interrupted_twice(0.01) == 0
    monkeypatch.setattr(stop_request, "AGAIN_S", 0.05)
    assert _interrupted_twice(0.2) == -signal.SIGINT


def test_an_interrupt_before_the_first_step_has_nothing_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt), stop_request.catch_signals_of(Launch(rank=1)):
        os.kill(os.getpid(), signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_request.catch_signals_of(
            Launch(rank=1)
        ) as request:  # a job in the background: Ctrl-C is not meant for it
            os.kill(os.getpid(), signal.SIGINT)
        assert request.name is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_stop_by_a_bad_number_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    def touch(step: int) -> Batch | None:
        batch = tiny_run.global_batch(step)
        return replace(batch, noise=batch.noise * float("nan")) if step == 3 else None

    settings = tiny_run.config(tmp_path / "run", steps=6, save_every=2)
    with pytest.raises(NonFiniteError, match="step 4"):
        fit_tiny(settings, touch=touch)
    assert [path.name for path in checkpoint.complete(tmp_path / "run/checkpoints")] == ["step-00000002"]
    assert fit_tiny(settings, resume="auto").step == 6


def test_a_model_and_a_snapshot_that_do_not_fit(tmp_path: Path) -> None:
    settings = tiny_run.config(tmp_path / "run")
    odd = replace(tiny_run.task(settings), text_width=25)
    with pytest.raises(ConfigError, match=r"caption_channels.*24.* 25"):
        fit(settings.train, odd, Launch(), log=lambda line: None)
    assert not (tmp_path / "run").exists()


def test_weights_and_rows_of_another_text_encoder(tmp_path: Path) -> None:
    """As wide as those that they were trained with; a model from scratch may learn from any."""
    scratch = tiny_run.config(tmp_path / "run", steps=1)
    fit(scratch.train, replace(tiny_run.task(scratch), text_kind="t5gemma"), Launch(), log=lambda line: None)
    model = tiny_run.model(scratch)
    save_weights(model.state_dict(), model.config, tmp_path / "weights", torch.float32)
    tree = tiny_run.config(tmp_path / "tuned", steps=1).model_dump()
    tree["model"] = {"weights": {"id": str(tmp_path / "weights")}, "arch": None}
    tuned = Config.model_validate(tree)
    with pytest.raises(ConfigError, match=naming("gemma2", "t5gemma", "text.id")):
        fit(tuned.train, replace(tiny_run.task(tuned), text_kind="t5gemma"), Launch(), log=lambda line: None)
    assert (
        fit(tuned.train, replace(tiny_run.task(tuned), text_kind="gemma2"), Launch(), log=lambda line: None).step == 1
    )


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    settings = tiny_run.config(tmp_path / "run")
    tree = settings.model_dump()
    tree["model"] = {"weights": {"id": str(tmp_path / "nothing")}, "arch": None}
    with pytest.raises(UserError, match="nothing"):
        fit_tiny(Config.model_validate(tree))


def test_a_journal_that_a_kill_tore_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = {
        "loss": 1.0,
        "grad_norm": 1.0,
        "lr": 1.0,
        "images_per_s": 1.0,
        "data_wait": 0.0,
        "bucket": [8, 8],
        "memory_gib": None,
    }
    with closing(metrics.Metrics(path, lambda line: None)) as journal:
        journal.start(step=0)
        for step in (1, 2, 3):
            journal.row(9, {"step": step, **values})
    path.write_bytes(path.read_bytes()[:-20])
    with closing(metrics.Metrics(path, lambda line: None)) as journal:
        journal.start(step=1)
        journal.row(9, {"step": 2, **values, "loss": 7.0})
    rows = metrics.read(path)
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 7.0)]


def test_the_time_left_is_at_the_speed_since_the_last_line(tmp_path: Path) -> None:
    values = {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "images_per_s": 1.0, "data_wait": 0.0, "bucket": [8, 8]}
    printed: list[str] = []
    with closing(metrics.Metrics(tmp_path / "metrics.jsonl", printed.append, epoch_steps=2.5)) as journal:
        journal.start(step=2)
        for step, seconds in ((4, 100.0), (6, 120.0), (10, 130.0)):
            journal.row(10, {"step": step, **values, "seconds": seconds, "parts": {"flow": 0.75, "preserve": 0.5}})
    assert all("loss 1.0000  flow 0.7500  preserve 0.5000" in line for line in printed), "a loss and its parts"
    assert [line.rpartition("  ")[2] for line in printed] == ["5m00s left", "40s left", "2m10s elapsed"]
    assert printed[1].startswith("step  6/10 (60%, epoch 2.4)  ") and "  2m00s elapsed  40s left" in printed[1]


def test_a_row_is_printed_tracked_and_compared_once(tmp_path: Path) -> None:
    printed: list[str] = []
    tracked: list[tuple[Any, ...]] = []
    service = SimpleNamespace(log=lambda *given: tracked.append(given), close=lambda: tracked.append(("closed",)))
    expected = Expectation(6 * 2**30, 4 * 2**30, 1000, 2e12, None, {"processes": 2})
    journal = metrics.Metrics(tmp_path / "metrics.jsonl", printed.append, service, expected)  # type: ignore[arg-type]
    journal.start(step=8)
    speed = {"images_per_s": 8.0, "data_wait": 0.75, "mfu": 0.6, "model_tflops": 1.6, "forward_tokens": 500}
    memory = {"memory_gib": 8.0, "memory_rank": 1, "reserved_gib": 9.0, "rss_gib": 3.0}
    row = {"step": 9, "loss": 0.5, "grad_norm": 1.5, "lr": 1e-4, "bucket": [64, 32], "seconds": 20.0, **speed, **memory}
    journal.row(100, {**row, "skipped_steps": 2, "quarantined": 1})
    journal.row(100, {**row, "step": 10, "grad_norm": None, "mfu": None, "seconds": 30.0})
    journal.row(100, {**row, "step": 11, "quarantined": 0, "skipped_steps": 0, "memory_gib": None, "seconds": 30.0})
    by_sigma = {"loss": 0.25, "ema_loss": None, "by_sigma": {"0.5": 0.25}, "by_age": {"old": 0.2, "new": None}}
    values = {"step": 11, **by_sigma, "ema_by_sigma": {}, "samples": 5, "seconds": 1.0, "snapshot": None}
    journal.validation(100, values)
    journal.validation(100, {**values, "loss": None, "ema_by_sigma": None, "by_age": None})
    journal.close()
    assert printed == [
        "step   9/100 (9%)  loss 0.5000  grad 1.500  lr 1.00e-04  8.0 images/s  MFU 60%  data 75%  64x32  2 skipped  "
        "1 quarantined  8.0 GiB on process 1, 9.0 reserved  20s elapsed  30m20s left",
        "step  10/100 (10%)  loss 0.5000  grad overflow  lr 1.00e-04  8.0 images/s  data 75%  64x32  "
        "8.0 GiB on process 1, 9.0 reserved  30s elapsed  15m00s left",
        "predicted and measured until step 10: memory 8 and 8 GiB (+0%), speed 10 and 8 images/s (-20%)",
        "warning: the speed is 20% below the prediction",
        "step  11/100 (11%)  loss 0.5000  grad 1.500  lr 1.00e-04  8.0 images/s  MFU 60%  data 75%  64x32  "
        "3.0 GiB of main memory  30s elapsed",
        "validation after step 11/100  loss 0.2500  EMA is not a finite number  old samples 0.2000  5 samples  1.0 s",
        "validation after step 11/100  loss is not a finite number  5 samples  1.0 s",
    ]
    assert [given[0] for given in tracked] == [9, 10, 11, 11, 11, "closed"]
    assert tracked[0][1]["quarantined"] == 1 and tracked[0][2] == "train"
    assert tracked[3][1] == {**values, "sigma_0.5": 0.25, "old": 0.2, "new": None} and tracked[3][2] == "validation"
    document = json.loads((tmp_path / "prediction.json").read_text())
    assert document["measured"] == {
        "memory_gib_predicted": 8,
        "memory_gib": 8,
        "images_per_s_predicted": 10,
        "images_per_s": 8,
    }
    assert (document["until_step"], document["processes"]) == (10, 2)


def test_the_journal_is_read_by_events_and_attempts(tmp_path: Path) -> None:
    path, printed, shown = tmp_path / "metrics.jsonl", list[str](), list[str]()
    line: Any = SimpleNamespace(live=True, show=lambda *texts: shown.append(texts[0]), end=lambda: shown.append("end"))
    row = {"grad_norm": 1.0, "lr": 1.0, "images_per_s": 2.0, "data_wait": 0.0, "bucket": [8, 8]}
    check = {"ema_loss": 0.5, "by_sigma": {}, "ema_by_sigma": {}, "samples": 5, "seconds": 1.0}
    picture = {"count": 3, "prompt_set": "p", "file": "pictures/x", "seconds": 2.0}
    path.write_bytes(b'[1]\n{"step": "1"}\nno row\n{"step": 1, "loss": 1.0}')
    with closing(metrics.Metrics(path, printed.append, line=line)) as journal:
        journal.start(step=0, device="cpu")
        assert b'1.0}\n{"event": "start"' in path.read_bytes(), "what a kill tore off is a line of its own"
        for step in range(1, 5):
            journal.row(9, {"step": step, "loss": 1.0 / step, **row, "seconds": 10.0 * step})
        journal.validation(9, {"step": 2, "loss": 0.75, "snapshot": "a", **check})
        journal.validation(9, {"step": 2, "loss": 9.0, "snapshot": "b", **check})
        journal.pictures(9, {"step": 2, **picture})
        journal.pictures(9, {"step": 4, **picture})
        assert journal.has_pictures(4)
        journal.row(9, {"step": 4, "loss": 0.125, **row, "seconds": 60.0})
    with closing(metrics.Metrics(path, printed.append, line=line)) as journal:
        assert not journal.has_pictures(2) and not journal.has_validation(2, "b")
        journal.start(step=2, device="cpu")
        assert [journal.has_pictures(step) for step in (1, 2, 4)] == [False, True, False]
        assert journal.has_validation(2, "b") and not journal.has_validation(2, "a")
        assert not journal.has_validation(3, "b"), "the last of a step"
        journal.row(9, {"step": 3, "loss": 0.5, **row})
        journal.validation(9, {"step": 3, "loss": 8.5, "snapshot": "b", **check, "ema_loss": 0.25})
        journal.validation(9, {"step": 3, "loss": None, "snapshot": "c", **check, "ema_loss": None})
        with pytest.raises(ValueError):
            journal.row(9, {"step": 3, "loss": math.nan, **row})
    assert shown == [
        "step 1/9 (11%)  loss 1.0000  1m20s left  2.0 images/s  10s elapsed",
        "step 2/9 (22%)  loss 0.5000 (-0.5000)  1m10s left  2.0 images/s  20s elapsed",
        "step 3/9 (33%)  loss 0.3333 (-0.6667)  1m00s left  2.0 images/s  30s elapsed",
        "step 4/9 (44%)  loss 0.2500 (-0.4583)  50s left  2.0 images/s  40s elapsed",
        "step 4/9 (44%)  loss 0.1250 (-0.5625)  validation 9.0000  2.0 images/s  1m00s elapsed",
        "end",
        "step 3/9 (33%)  loss 0.5000  validation 9.0000  2.0 images/s",
        "end",
    ]
    place = tmp_path / "pictures/x"
    assert printed == [
        "validation after step 2/9  loss 0.7500  EMA 0.5000  5 samples  1.0 s",
        "validation after step 2/9  loss 9.0000  EMA 0.5000  5 samples  1.0 s",
        f"pictures after step 2/9  3 prompts  2.0 s  {place}",
        f"pictures after step 4/9  3 prompts  2.0 s  {place}",
        "validation after step 3/9  loss 8.5000 (-0.5000)  EMA 0.2500 (-0.2500)  5 samples  1.0 s",
        "validation after step 3/9  loss is not a finite number  EMA is not a finite number  5 samples  1.0 s",
    ]
    events = metrics.read_events(path)
    assert b"\n\n" not in path.read_bytes()
    assert [(start["step"], start["seconds"], start["device"]) for start in events["start"]] == [
        (0, 60.0, "cpu"),
        (2, 0.0, "cpu"),
    ]
    assert [row["loss"] for row in events[None]] == [1.0, 0.5, 0.5] and metrics.read(path) == events[None]
    assert [(row["step"], row["snapshot"]) for row in events["validation"]] == [(2, "b"), (3, "c")]
    assert [row["step"] for row in events["pictures"]] == [2]
    times = {row["time"][-6:] for rows in events.values() for row in rows}
    assert times == {"+00:00"}, "of every row, in UTC"
    (tmp_path / "empty.jsonl").touch()
    metrics.Metrics(tmp_path / "empty.jsonl", print).close()
    assert metrics.read(tmp_path / "empty.jsonl") == [] and not (tmp_path / "empty.jsonl").stat().st_size
    with pytest.raises(UserError):
        metrics.read(tmp_path / "none.jsonl")


@pytest.mark.parametrize("differing", [1, 2])
def test_processes_that_differ_are_refused(differing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(value: Any) -> list[Any]:
        return [value if rank < differing else f"of process {rank}" for rank in range(3)]

    collectives.require_equal("own", "they differ", "fix")
    monkeypatch.setattr(collectives, "all_gather_objects", answers)
    with pytest.raises(UserError, match="they differ") as caught:
        collectives.require_equal("own", "they differ", "fix")
    assert caught.value.everywhere
    assert caught.value.found == f"process {differing}: of process {differing}; process 0: own"
    options = {"train.steps": 6, "train.seed": 0}
    monkeypatch.setattr(collectives, "all_gather_objects", lambda given: [given, {**given, "train.steps": 5}])
    with pytest.raises(UserError) as caught:
        collectives.require_equal(options, "they differ", "fix")
    assert caught.value.found == "process 1: {'train.steps': 5}; process 0: {'train.steps': 6}"


@pytest.mark.parametrize("other", [{"steps": 5}, {"optim": {"lr": 1e-9}}, {"ema": {}}, {"snapshot": "0ther"}])
def test_no_option_that_decides_the_run_may_differ_between_processes(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one process that another does not take wait for it in vain; another rate goes unnoticed."""
    compared: list[Any] = []
    monkeypatch.setattr(checks, "require_equal", lambda value, *_: compared.append(value))
    for number, options in enumerate(({}, dict(other), {"trackers": ["tensorboard"]})):
        snapshot, given = options.pop("snapshot", "5eed"), {"steps": 1, "layers": 1, **options}
        settings = tiny_run.config(tmp_path / str(number), **given)
        fit(settings.train, tiny_run.task(settings, snapshot=snapshot), Launch(), log=lambda line: None)
    assert compared[0] != compared[1] and compared[0] == compared[2]


def test_a_run_says_what_wrote_it_and_processes_of_other_versions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and checkpoints: versions, GPU, host, command without credentials."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/sana-pipe", "train", "--set", "cache=s3://key:secret@bucket/a b"])
    settings = tiny_run.config(tmp_path / "run", steps=1, layers=1)
    report = fit_tiny(settings)
    [start] = metrics.read_events(tmp_path / "run" / "metrics.jsonl")["start"]
    assert report.checkpoint is not None
    written = checkpoint.read_document(report.checkpoint).written_by
    assert written == {name: start[name] for name in ("versions", "gpu", "host", "command")}
    assert written["versions"]["sana-pipe"] == __version__ and written["versions"]["torch"].startswith("2.")
    assert written["gpu"] == "cpu" and written["host"] == platform.node()
    assert written["command"] == "sana-pipe train --set 'cache=s3://bucket/a b'"
    real = collectives.all_gather_objects

    def other_torch(value: Any, *group: Any) -> list[Any]:
        if isinstance(value, dict) and set(value) == {"sana-pipe", "torch"}:
            return [value, value, {**value, "torch": "1.0"}]
        return real(value, *group)

    monkeypatch.setattr(collectives, "all_gather_objects", other_torch)
    with pytest.raises(UserError, match=naming("process 2: {'torch': '1.0'}")) as caught:
        fit_tiny(tiny_run.config(tmp_path / "other", steps=1, layers=1))
    assert caught.value.everywhere


@pytest.mark.parametrize("what", [mesh, build, checks, drawings], ids=["sizes", "weights", "options", "prompts"])
def test_a_start_asks_whether_the_processes_agree(what: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On what each process finds for itself: sizes, start weights, options that are auto, prompts."""

    def differ(*given: Any) -> None:
        raise UserError("the processes differ")

    monkeypatch.setattr(what, "require_equal", differ)
    with pytest.raises(UserError, match="the processes differ"):
        fit_tiny(tiny_run.config(tmp_path / "run", steps=1, layers=1, pictures={}))


def test_the_stage_on_a_cache(small_cache_copy: Path, make_config: Any, tmp_path: Path) -> None:
    """From a real snapshot; a run that is resumed keeps its snapshot though the cache has a newer one."""
    import sana_pipe.stages.bucket
    import sana_pipe.stages.train

    few = ["train.save_every=2", "train.log_every=1", "train.optim.warmup_steps=0"]
    printed: list[str] = []
    first = make_config(tmp_path, *few, "train.steps=2")
    report = sana_pipe.stages.train.run(first, log=printed.append)
    assert report.step == 2
    assert "12 samples" in printed[0]
    mine = checkpoint.read_document(report.checkpoint).state.snapshot  # type: ignore[arg-type]
    sana_pipe.stages.bucket.run(make_config(tmp_path, "bucket.batch=6"))
    longer = make_config(tmp_path, *few, "train.steps=3")
    newest = Cache(longer.cache).open_snapshot(None).id
    assert newest != mine
    with pytest.raises(checkpoint.CheckpointError, match=f"(?s)snapshot.*{mine}.*{newest}"):
        sana_pipe.stages.train.run(longer, snapshot=newest, resume="auto", log=printed.append)
    report = sana_pipe.stages.train.run(longer, resume="auto", log=printed.append)
    assert report.step == 3
    assert checkpoint.read_document(report.checkpoint).state.snapshot == mine  # type: ignore[arg-type]


def test_the_loaders_get_every_option(small_cache: Path, make_config: Any, tmp_path: Path) -> None:
    """Held-out samples are read without drops, and none takes the place of an unreadable one."""

    options: dict[str, Any] = {
        "seed": 3,
        "microbatch": 5,
        "caption_drop": 0.3,
        "text": "packed",
        "length_window": 6,
    }
    given = ["train.device=cpu", "train.validation={samples: 2}"]
    config = make_config(tmp_path, *given, *(f"train.{name}={value}" for name, value in options.items()))
    snapshot, file = Cache(small_cache, patience_s=40).open_snapshot(), tmp_path / "quarantine.jsonl"
    task = training_task(
        config, Inputs(snapshot, config.data.resolution, snapshot, phase=2), Launch(rank=1, world=2), file
    )
    layout = mesh.Layout(1, 2, 1, 1)
    whole = LoaderSettings(
        **options,
        phase=2,
        rank=1,
        world=2,
        prefetch=None,
        threads=2,
        start_step=10,
        stop_step=20,
        pin=False,
        timeout_s=40 + 2 * retrying.TIMEOUT_S,
        quarantine=file,
    )
    fixed: dict[str, Any] = {"seed": 0, "phase": 0, "caption_drop": 0.0, "length_window": 0, "quarantine": None}
    assert task.validation is not None
    training: Any = task.loader(layout, 10, 20)
    validation: Any = task.validation(layout)
    assert training.settings == whole
    assert validation.settings == replace(whole, start_step=0, stop_step=0, **fixed)


def test_packed_text_and_quarantine_on_a_cache(small_cache_copy: Path, make_config: Any, tmp_path: Path) -> None:
    """Packed text trains as padded text does; a quarantined record is replaced, counted and written down."""
    import sana_pipe.stages.train

    few = [
        f"cache={small_cache_copy}",
        "train.log_every=1",
        "train.save_every=9",
        "train.steps=3",
        "train.caption_drop=0",
        "train.optim.warmup_steps=0",
        "train.device=cpu",
        "train.precision=fp32",
    ]

    def losses(name: str, *more: str, **options: Any) -> list[dict[str, Any]]:
        output = tmp_path / name
        sana_pipe.stages.train.run(
            make_config(tmp_path, *few, f"train.output={output}", *more), log=lambda line: None, **options
        )
        return metrics.read(output / "metrics.jsonl")

    padded = losses("padded")
    packed = losses("packed", "train.text=packed", "train.length_window=1")
    assert [row["loss"] for row in packed] == pytest.approx([row["loss"] for row in padded], rel=1e-5)
    assert [row["quarantined"] for row in padded] == [0, 0, 0]

    snapshot = Cache(small_cache_copy).open_snapshot()
    sample = snapshot.sample(5)
    place = sample.pictures["latent"]
    path = next(small_cache_copy.glob(f"shards/latent-*/*/{place.shard}.tar"))
    data = bytearray(path.read_bytes())
    data[place.offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=f"record {place.key.hex()}"):
        losses("stopped")
    file = tmp_path / "quarantine.jsonl"
    rows = losses("quarantined", quarantine=file)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["record"] for line in lines} == {place.key.hex()}
    assert {line["sample"] for line in lines} == {f"{sample.sample_id:016x}"}
    assert rows[-1]["quarantined"] == len(lines)

    shared = make_config(tmp_path, *few, "train.parallel.tp_size=2")
    layout = mesh.check_sizes(shared.train.parallel, 2)
    training_task(shared, Inputs(snapshot, shared.data.resolution), Launch(world=2)).check(layout)
    with pytest.raises(ConfigError, match=naming("--quarantine", "train.parallel.tp_size = 2")):
        training_task(shared, Inputs(snapshot, shared.data.resolution), Launch(world=2), file).check(layout)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_the_losses_are_those_of_the_cpu(precision: str, finished: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(tmp_path / "run", steps=6, precision=precision, device="cuda")
    fit_tiny(settings)
    rows = metrics.read(tmp_path / "run/metrics.jsonl")
    expected = [row["loss"] for row in metrics.read(finished / "metrics.jsonl")]
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-3 if precision == "fp32" else 2e-2)
    assert all(row["memory_gib"] > 0 for row in rows)


@pytest.mark.gpu
def test_on_a_gpu_a_bad_number_is_named_though_it_is_read_later(tmp_path: Path) -> None:
    """No row between, so that the verdict of step 3 is read during step 4; the message is about step 3."""

    def touch(step: int) -> Batch | None:
        batch = tiny_run.global_batch(step)
        return replace(batch, noise=batch.noise * float("nan")) if step == 2 else None

    settings = tiny_run.config(tmp_path / "run", steps=6, save_every=2, log_every=100, device="cuda")
    with pytest.raises(NonFiniteError, match="step 3"):
        fit_tiny(settings, touch=touch)
    assert [path.name for path in checkpoint.complete(tmp_path / "run/checkpoints")] == ["step-00000002"]


# --------------------------------------------------------------------------------------------------------- faults


def _doomed(run: Path, point: str) -> Forked:
    return Forked(str(run), point, worker="killed_while_saving")


@pytest.mark.fault
@pytest.mark.parametrize(
    ("point", "left"), [("writing", 2), ("written", 2), ("renaming", 2), ("renamed", 4), ("removing", 4)]
)
def test_killed_while_saving(point: str, left: int, finished: Path, tmp_path: Path) -> None:
    """SIGKILL at each stage of publishing the second checkpoint: the reader sees the old one or the new one, and the
    resumed run ends as if nothing had happened."""
    run = tmp_path / "run"
    assert _doomed(run, point).wait(120) == -signal.SIGKILL
    newest = checkpoint.newest(run / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{left:08d}"
    assert checkpoint.leftovers(run / "checkpoints") or point == "renamed"
    assert fit_tiny(tiny_run.config(run, steps=6, save_every=2), resume="auto").step == 6
    assert same_checkpoints(finished / "checkpoints/step-00000006", run / "checkpoints/step-00000006")
    assert not checkpoint.leftovers(run / "checkpoints")


@pytest.mark.fault
def test_killed_at_any_time(fault_seed: int, finished: Path, tmp_path: Path) -> None:
    """SIGKILL after a random time, again and again, saving after every step: the end is always the same."""
    import random

    run = tmp_path / "run"
    chance = random.Random(fault_seed)
    kills = 0
    for _ in range(6):
        process = _doomed(run, "never")
        started = process.says("^training")
        try:
            process.wait(timeout=chance.uniform(0.0, 0.6) if started else 60)
        except subprocess.TimeoutExpired:
            process.kill()
            kills += 1
        if process.wait() == 0:
            break
    assert kills > 0
    fit_tiny(tiny_run.config(run, steps=6, save_every=1), resume="auto")
    assert same_checkpoints(finished / "checkpoints/step-00000006", run / "checkpoints/step-00000006")


def test_reading_ahead_ends_while_the_error_is_still_referenced() -> None:
    closed: list[bool] = []

    def steps() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    try:
        with closing(closable(steps())) as stream:
            next(stream)
            raise ValueError("a step failed")
    except ValueError as error:
        assert error.__traceback__ is not None and closed == [True]
