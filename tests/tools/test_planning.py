"""The planner: its prediction equals a real step's peak, sabotage shows, every technique is covered or refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.real_step import made_up_batch
from sana_pipe.base import gpus
from sana_pipe.base.amounts import figure
from sana_pipe.base.errors import UserError
from sana_pipe.cli import main
from sana_pipe.config import SHIPPED, load
from sana_pipe.data.encoders.config import VaeConfig
from sana_pipe.data.encoders.latent_shape import latent_shape
from sana_pipe.stages import plan
from sana_pipe.tools.planning import auto, extent, predict, search
from sana_pipe.tools.planning.cost import LINK, Time
from sana_pipe.tools.planning.predict import Data, Machine
from sana_pipe.tools.planning.prediction_lines import time_lines
from sana_pipe.tools.planning.recorder import Recorder
from sana_pipe.tools.planning.trace import Shape, Traced, block_numbers, trace
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.kernels.backend import SCRATCH
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.parallel import activation_checkpoint
from sana_pipe.train.parallel.mesh import Layout
from tests.support.forked import Forked, succeed
from tests.support.narrow import ALONE, COMPUTE, NARROW, SHAPE, data_of, decide
from tests.support.sana_shapes import SHAPES


def traced(train: dict[str, Any], layout: Layout = ALONE, shape: Shape = SHAPE, **options: Any) -> Traced:
    settings = TrainConfig.model_validate({**COMPUTE, **train})
    return Traced.of(NARROW, settings, layout, shape, **{"rank": 0, "on_gpu": True, **options})


def real_peak(train: TrainConfig, architecture: SanaConfig, shape: Shape) -> int:
    """Peak bytes of real CPU steps after the first: allocations and frees as torch's profiler records them, and what
    lasts."""
    from sana_pipe.base.launch import detect
    from sana_pipe.train.models.adapters import adapter_of
    from sana_pipe.train.models.sana import SanaTransformer
    from sana_pipe.train.models.sana_config import numerics
    from sana_pipe.train.parallel.mesh import open_mesh
    from sana_pipe.train.parallel.parallelize import parallelize
    from sana_pipe.train.training import optimizers
    from sana_pipe.train.training.assemble import objective_of
    from sana_pipe.train.training.step import TrainStep

    device, objective = torch.device("cpu"), objective_of(train)
    with open_mesh(detect(), train.parallel, device) as mesh:
        module = SanaTransformer.from_scratch(architecture, 0, numerics=numerics(train))
        if (adapter := adapter_of(train, architecture)) is not None:
            adapter.apply(module)
        model = parallelize(module, mesh, train)
        optimizer = optimizers.build(model.module, train.optim, device)
        step = TrainStep(model, objective, optimizer, train, device)
        batch = made_up_batch(architecture, shape, 0)
        batches = [replace(batch, pictures=dict.fromkeys(objective.pictures, batch.latents.clone()))]
        step(batches, 1)
        states = [value for state in optimizer.state.values() for value in state.values()]
        lasting = sum(t.numel() * t.itemsize for t in (*model.module.parameters(), *states))
        tensors = *vars(batches[0]).values(), *batches[0].pictures.values()
        inputs = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step(batches, 2)
    current = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            most = max(most, current)
    return lasting + inputs + most


@cache
def of_fp32() -> float:
    """Bytes of the prediction that three tests compare with."""
    return trace(NARROW, TrainConfig.model_validate({**COMPUTE, "precision": "fp32"}), ALONE, SHAPE, on_gpu=False).total


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [
        {"precision": "bf16_pure", "optim": {"name": "came", "betas": None, "eps": None}},
        {"optim": {"name": "adamw8bit", "betas": None, "eps": None}},
        {"activation_compression": "int8", "activation_checkpointing": "none"},
    ],
    ids=["came-bf16_pure", "adamw8bit", "int8"],
)
def test_a_prediction_changes_nothing_in_the_run_after_it(train: dict[str, Any]) -> None:
    """In new processes: libraries make tables at first use and keep them, and fake tensors have no values."""
    if train.get("optim", {}).get("name") == "adamw8bit":
        pytest.importorskip("torchao")
    runs = [Forked(json.dumps(train), predicted, worker="predicted_run") for predicted in "01"]
    succeed(runs, timeout=300)
    digests = [re.findall("^digest (.*)$", run.output(), re.MULTILINE) for run in runs]
    assert digests[0] == digests[1] and len(digests[0]) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "fp32"},
        pytest.param({"activation_checkpointing": "none"}, marks=pytest.mark.slow),
        pytest.param({"activation_checkpointing": "selective"}, marks=pytest.mark.slow),
        pytest.param({"activation_checkpointing": "none", "activation_compression": "int8"}, marks=pytest.mark.slow),
        pytest.param({"optim": {"name": "came", "betas": None, "eps": None}}, marks=pytest.mark.slow),
        {"controlnet": {}},
        pytest.param({"controlnet": {"layers": 1}, "activation_checkpointing": "none"}, marks=pytest.mark.slow),
    ],
    ids=["fp32", "none", "selective", "int8", "came", "controlnet", "controlnet-none"],
)
def test_a_prediction_is_a_real_steps_peak(change: dict[str, Any]) -> None:
    train = TrainConfig.model_validate({**COMPUTE, **change})
    in_fp32 = change == {"precision": "fp32"}
    predicted = of_fp32() if in_fp32 else trace(NARROW, train, ALONE, SHAPE, on_gpu=False).total
    assert predicted == pytest.approx(real_peak(train, NARROW, SHAPE), rel=0.03)


def test_checkpointing_that_is_claimed_but_not_applied_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    train = TrainConfig.model_validate({**COMPUTE, "precision": "fp32"})
    honest = of_fp32()
    monkeypatch.setattr(activation_checkpoint, "checkpoint", lambda function, *args, **_: function(*args))
    real = real_peak(train, NARROW, SHAPE)
    assert honest < 0.97 * real


def test_a_forgotten_buffer_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    train = TrainConfig.model_validate({**COMPUTE, "precision": "fp32"})
    from sana_pipe.train.training.step import TrainStep

    before = of_fp32()
    prepare = TrainStep.prepare

    def wasteful(self: TrainStep, batch: Any) -> Any:
        self.forgotten = torch.ones(4 << 20)  # type: ignore[attr-defined]
        return prepare(self, batch)

    monkeypatch.setattr(TrainStep, "prepare", wasteful)
    assert trace(NARROW, train, ALONE, SHAPE, on_gpu=False).total == pytest.approx(before + (16 << 20), rel=0.001)
    assert real_peak(train, NARROW, SHAPE) > 1.03 * before


@pytest.mark.slow
def test_few_blocks_extrapolate_exactly() -> None:
    train = TrainConfig.model_validate(COMPUTE)
    deep = SanaConfig(**{**NARROW.__dict__, "num_layers": 6})
    layout = Layout(1, 1, 4, 1)
    whole = trace(deep, train, layout, SHAPE)
    few = Traced.of(deep, train, layout, SHAPE, rank=0, on_gpu=True)
    assert few.total == pytest.approx(whole.total, rel=0.002)
    assert few.work["matmul"].flops == whole.work["matmul"].flops


@pytest.mark.parametrize(
    ("mode", "compression", "count"),
    [
        pytest.param("none", "none", 2, marks=pytest.mark.slow),
        pytest.param("selective", "none", 1, marks=pytest.mark.slow),
        pytest.param("full", "none", 2, marks=pytest.mark.slow),
        pytest.param("none", "int8", 1, marks=pytest.mark.slow),
    ],
)
def test_two_and_three_blocks_of_one_process_say_what_more_would(mode: str, compression: str, count: int) -> None:
    options = {"activation_checkpointing": mode, "activation_compression": compression}
    train = TrainConfig.model_validate({**COMPUTE, **options})
    deep = SanaConfig(**{**NARROW.__dict__, "num_layers": 5})
    shape = Shape(SHAPE.height, SHAPE.width, SHAPE.rows, SHAPE.microbatch, count)
    whole = trace(deep, train, ALONE, shape)
    few = Traced.of(deep, train, ALONE, shape, rank=0, on_gpu=True)
    assert block_numbers(5, train, ALONE) == (2, 3)
    assert (few.peak, few.phase, few.host, few.work) == (whole.peak, whole.phase, whole.host, whole.work)
    other = TrainConfig.model_validate({**COMPUTE, "optim": {"name": "came"}})  # its stacks span blocks
    assert block_numbers(7, other, ALONE) == block_numbers(7, train, Layout(1, 1, 2, 1)) == (3, 5)


TECHNIQUES: dict[str, tuple[dict[str, Any], Layout, int]] = {
    "hsdp": ({}, Layout(1, 2, 2, 1), 1),
    "ddp": ({}, Layout(1, 4, 1, 1), 1),
    "tp": ({}, Layout(1, 1, 2, 2), 1),
    "pp": ({"parallel": {"pp_size": 2}}, Layout(2, 1, 2, 1), 2),
    "offload": ({"parallel": {"offload": "all"}}, Layout(1, 1, 2, 1), 1),
    "in_backward": ({"optim": {"clip": None, "in_backward": True}}, Layout(1, 1, 2, 1), 1),
    "ema on the host": ({"ema": {"device": "cpu"}}, Layout(1, 1, 2, 1), 1),
    "accumulation": ({}, Layout(1, 1, 2, 1), 2),
    "prefer": ({"prefer": {"stop": None}}, Layout(1, 1, 2, 1), 1),
}


QUICK = ("tp", "pp", "offload", "prefer")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TECHNIQUES])
def test_every_technique_is_covered(name: str) -> None:
    change, layout, count = TECHNIQUES[name]
    result = traced(change, layout, Shape(12, 12, 32, 2, count))
    assert result.total > 0
    if name == "offload":
        assert result.peak["parameters"] == result.peak["optimizer"] == 0 < result.host
    if name.endswith("on the host"):
        assert result.host > 0
        assert result.peak["ema"] == 0
    if name == "in_backward":
        assert result.total < traced({}, layout).total
    if name == "tp":
        assert result.sent["all_reduce", 2][1] > 0, "the size of a functional collective's group is known"
    if name == "cp":  # rank 0: one neighbour; forward, recomputed and backward
        passes, width = 3 * NARROW.num_layers, NARROW.inner_dim
        losses = 2 * 2 * 4
        state = 2 * width * (NARROW.attention_head_dim + 1) * 4
        assert result.sent["all_reduce", 3] == [passes * state + losses, passes + 2]
        assert result.sent["all_to_all_single", 3] == [passes * 2 * 12 * width * 2, passes]
        whole = traced(change | {"parallel": {}}, Layout(1, 1, 3, 1), Shape(12, 12, 32, 2, count))
        assert result.peak["parameters"] == whole.peak["parameters"]
        assert result.work["kernels"].flops * 3 == pytest.approx(whole.work["kernels"].flops)
        assert result.peak["activations"] < 0.6 * whole.peak["activations"]
    if name == "ddp":
        assert result.peak["parameters"] == 4 * result.parameters
    if name == "prefer":
        assert result.peak["parameters"] == (4 + 2) * result.parameters, "and the reference in bf16"
        plain = traced({}, layout, Shape(12, 12, 32, 4, count))  # of both pictures
        assert result.peak["optimizer"] == plain.peak["optimizer"] and result.peak["ema"] == 0


def test_a_compiled_run_is_planned_without_the_compiler() -> None:
    machine, data = Machine(gpus.card("h100"), 80 << 30, 1), Data({(384, 384): 2}, None, 32)
    none, block = (
        predict.predict(TrainConfig.model_validate({**COMPUTE, "compile": kind}), NARROW, data, machine).as_dict()
        for kind in ("none", "block")
    )
    assert none == block


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("sana*.yaml")), ids=lambda path: path.stem)
def test_released_shapes_need_no_network(path: Any) -> None:
    config = load(path)
    shape = predict.architecture(config.model, config.data.resolution, data_of(config))
    known = SHAPES[re.sub("_(lora|prefer|scratch)$", "", path.stem)]
    assert SanaConfig(**{**shape.__dict__, "sample_size": known.sample_size}) == known


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


SHALLOW = ("--config", "tiny", "--set", "model.arch.num_layers=2")


@pytest.mark.slow
def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["plan", *SHALLOW, "--gpu", "h100", "--json", "--price", "2"], capsys)
    report = json.loads(out)
    assert code == 0
    assert report["prediction"]["fits"]
    assert report["prediction"]["total"] == pytest.approx(sum(report["prediction"]["kinds"].values()), rel=1e-6)


def test_a_run_that_does_not_fit_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *SHALLOW, "--gpu-memory", "100MiB"], capsys)[0] == 1
    auto = ("--set", "train.microbatch=auto", "--set", "train.activation_checkpointing=auto")
    code, out, _ = run(["plan", *SHALLOW, "--gpu-memory", "100MiB", *auto, "--json"], capsys)
    assert code == 1 and json.loads(out)["decided"] == {"microbatch": 1, "activation_checkpointing": "full"}


def write_vae(folder: Path, name: str, channels: int, blocks: int) -> Path:
    """The `config.json` of a VAE with a latent pixel per 2^(blocks - 1) pixels."""
    sides = {"AutoencoderDC": "encoder_block_out_channels", "AutoencoderKL": "block_out_channels"}
    folder.mkdir()
    settings = {"_class_name": name, "latent_channels": channels, sides[name]: [8] * blocks, "scaling_factor": 0.4}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_the_shape_of_latents_is_that_of_the_configured_vae(tmp_path: Path) -> None:
    folder = write_vae(tmp_path / "deep", "AutoencoderDC", 128, 7)
    ids = {
        str(folder): (64, 128),
        str(write_vae(tmp_path / "flux", "AutoencoderKL", 16, 4)): (8, 16),
        str(tmp_path / "none"): None,
        "Efficient-Large-Model/Sana_600M_512px_diffusers": (32, 32),
        "Tongyi-MAI/Z-Image": (8, 16),
        "Photoroom/prx-512-t2i-dc-ae": (32, 32),
    }
    assert {name: latent_shape(VaeConfig(id=name)) for name in ids} == ids


def test_plan_before_a_snapshot_takes_the_vaes_shape_or_says_what_it_assumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Data] = []

    class Opened(Exception): ...

    def opened(shape: Any, data: Data, *others: Any) -> None:
        seen.append(data)
        raise Opened

    monkeypatch.setattr(plan, "Search", opened)
    folder = write_vae(tmp_path / "vae", "AutoencoderDC", 16, 5)
    machine = plan.Options(gpu="4090")
    with pytest.raises(Opened):
        plan.run(load("tiny", [f"vae.id={folder}", "data.buckets=[[64, 64]]"]), machine)
    assert "assumed" not in capsys.readouterr().err
    with pytest.raises(Opened):
        plan.run(load("tiny", [f"vae.id={tmp_path / 'none'}"]), machine)
    assert "8 pixels per latent side are assumed" in capsys.readouterr().err
    assert [data.compression for data in seen] == [16, 8]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--gpu", "3091"], "3090"),
        ([], "--gpu-memory"),
        (["--gpu-memory", "much"], "24GiB"),
        (["--gpu", "a40", "--gpus", "7"], "1, 2, 3, 4"),
        (["--gpu", "a40", "--gpus", "4", "--nodes", "3"], "1, 2, 4"),
        (
            ["--gpu", "a40", "--gpus", "3", "--set", "train.parallel.tp_size=3", "--set", "train.parallel.dp_shard=1"],
            "[1, 2",
        ),
    ],
)
def test_bad_input_names_the_valid_choices(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(["plan", "--config", "tiny", *words], capsys)
    assert code == 2
    assert named in error


def test_no_snapshot_names_those_that_exist(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config", "tiny", "--gpu", "a40", "--snapshot", "round9", "--set", f"cache={tmp_path / 'none'}"]
    code, _, _ = run(words, capsys)
    assert code in (2, 3)


def test_cost_is_that_of_all_gpus() -> None:
    """A step of a second on 8 GPUs, at 2 an hour each."""
    time = Time({"matmul": 0.5, "kernels": 0.1}, {}, 0.1, 0.3, 64, 8e14, 8e15, 8, 6400)
    assert (time.step, time.images_per_s, time.mfu) == pytest.approx((1.0, 64.0, 0.1))
    values = time.as_dict(2.0)
    hours = 100 / 3600
    assert [values[f"epoch_{name}"] for name in ("hours", "gpu_hours", "cost")] == pytest.approx(
        [hours, 8 * hours, 16 * hours]
    )
    prediction: Any = SimpleNamespace(machine=Machine(gpus.card("h100"), 80 << 30, 8))
    assert time_lines(time, prediction, 2.0)[-1].endswith("1m40s, 0.2222 GPU-hours, cost 0.4444")
    assert time_lines(replace(time, epoch_samples=None), prediction, 2.0)[-1].endswith("GPU-hours, cost 69.44")


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (8, 1), (12, 2), (16, 2), (64, 8), (11, 11)])
def test_nodes_have_eight_gpus_unless_said(gpus: int, nodes: int) -> None:
    assert auto.named("h100", None, gpus).nodes == nodes
    assert auto.named("h100", None, gpus, 1).per_node == gpus
    assert auto.named("cpu", None, gpus).nodes == 1


def test_figures_have_no_exponents() -> None:
    values = (0.0312, 5.994, 170.4, 999.4, 999.6, 1310.2)
    assert [figure(value) for value in values] == ["0.0312", "5.99", "170", "999", "1,000", "1,310"]


def test_a_run_is_shown_with_its_epochs_hours_and_checkpoints() -> None:
    train = TrainConfig.model_validate({"ema": {}, "keep_every": 5000})
    (line,) = extent.lines(train, SanaConfig(), BATCH, 2.0)
    assert "10,000 steps" in line and "640,000" in line and "5h33m" in line and "epochs" not in line
    size = 16 * sum(p.numel() for p in SanaTransformer.on_meta(SanaConfig()).parameters())
    assert predict.checkpoint_bytes(SanaConfig(), train) == size
    assert f"{4 * size / 2**30:.1f} GiB for the 4" in line, "the last one is of both kinds"
    few = replace(BATCH, samples=40)
    line, warning = extent.lines(train, SanaConfig(), few)
    assert "16,000 epochs of 40" in line and "train.epochs=20" in warning
    assert len(extent.lines(train, SanaConfig(), replace(BATCH, samples=100_000))) == 1
    by_epochs = TrainConfig.model_validate({"steps": None, "epochs": 4})
    (line,) = extent.lines(by_epochs, SanaConfig(), replace(BATCH, samples=4000))
    assert "250 steps" in line
    assert extent.lines(by_epochs, SanaConfig(), BATCH) == []


def test_processes_of_a_node_share_half_of_its_main_memory() -> None:
    machine = auto.named("cpu", None, 4, 2)
    assert machine.memory == gpus.processor().memory // 4
    assert auto.named("h100", None, 4, 2).memory == gpus.card("h100").memory


def test_the_worst_bucket_has_the_most_tokens_of_a_forward_pass() -> None:
    data = Data({(64, 64): 64, (128, 128): 8}, None, 32)
    assert data.worst(1, 4) == ((128, 128), 8)
    assert data.worst(1, 64) == ((64, 64), 64)


def test_several_processes_have_buffers_to_communicate() -> None:
    alone, two = (predict.with_overheads({"parameters": 1e9, "activations": 1e8}, Layout(1, 1, n, 1)) for n in (1, 2))
    assert alone["context"] == predict.CONTEXT and two["context"] == predict.CONTEXT + predict.NCCL
    assert alone["fragmentation"] == two["fragmentation"] == pytest.approx(predict.FRAGMENTATION * 1e8)


def test_a_pipeline_waits_for_its_first_and_last_microbatches() -> None:
    train = TrainConfig.model_validate({**COMPUTE, "microbatch": 1})
    data, machine = Data({(384, 384): 8}, None, 32, text_width=64), Machine(gpus.card("h100"), 80 << 30, 1)
    prediction = predict.predict(train, NARROW, data, machine)
    alone, piped = (Time.of(replace(prediction, layout=Layout(pp, 1, 1, 1)), data) for pp in (1, 4))
    assert alone.bubble == 0 and piped.bubble == pytest.approx(sum(piped.kernels.values()) * 3 / 8)


def test_what_the_search_has_chosen_can_be_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing else changes."""
    config = load("tiny", ["train.parallel=auto", "train.optim.betas=[0.8, 0.9]"])
    tree = config.train.model_dump() | {"microbatch": 3, "parallel": {"dp_shard": 2}}
    prediction: Any = SimpleNamespace(layout=Layout(1, 1, 2, 1), total=1e9, share=4)
    best = search.Candidate(TrainConfig.model_validate(tree), prediction, SimpleNamespace(images_per_s=8.0))  # type: ignore[arg-type]
    monkeypatch.setattr(search.Search, "ranked", lambda *_: [best])
    assert plan.run(config, plan.Options(gpus=2, gpu="3090", search=True)) == 0
    *_, row, command = capsys.readouterr().out.splitlines()
    assert "microbatch 3" in row
    chosen = load("tiny", [word for word in command.split() if "=" in word]).train
    assert (chosen.microbatch, chosen.parallel.dp_shard) == (3, 2)


def test_memory_sizes() -> None:
    assert gpus.memory_of("24GiB") == gpus.memory_of("24") == 24 * 2**30
    assert gpus.memory_of("80GB") == 80 * 10**9
    with pytest.raises(UserError):
        gpus.memory_of("0")


@pytest.mark.nightly
def test_train_accepts_what_the_search_names(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config", "tiny", "--gpu", "3090", "--gpus", "2", "--search", "--json"]
    code, out, _ = run(words, capsys)
    rows = json.loads(out)["candidates"]
    assert code == 0
    assert all(row["total"] <= gpus.card("3090").memory for row in rows)
    first = {name: value for name, value in rows[0].items() if name.startswith("train.")}
    config = load("tiny", [f"{name}={json.dumps(value)}" for name, value in first.items()])
    data = data_of(config)
    assert (
        predict.check(config.train, predict.architecture(config.model, config.data.resolution, data), data, 2).world
        == 2
    )


# -------------------------------------------------------------------------------------------------------------- search

PER_SAMPLE = {"none": 3.7, "selective": 1.3, "full": 0.3}
STATES = {"adamw": 12.0, "adamw8bit": 3.0, "came": 6.0}
BATCH = Data({(1024, 1024): 64}, None, 300)
DECIDED = {"microbatch", "activation_checkpointing", "reduce"}
"""What `auto` decides by default."""


class MadeUp:
    """Predictions of about Sana 1.6B's GiB without a trace, and how many there were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.asked: list[TrainConfig] = []
        monkeypatch.setattr(search.predicting, "predict", self.predict)
        monkeypatch.setattr(search.Time, "of", self.time)

    def time(self, prediction: Any, data: Data) -> Any:
        step = self.step(prediction.train)
        images_per_s = prediction.share * prediction.layout.data_world / step
        return SimpleNamespace(step=step, images_per_s=images_per_s, mfu=0.02)

    def predict(self, train: TrainConfig, shape: Any, data: Data, machine: Machine, *, layout: Layout) -> Any:
        self.asked.append(train)
        bucket, share = data.worst(layout.data_world, train.microbatch)
        several = share > train.microbatch and not train.parallel.reduce_each_microbatch
        whole = 4.0 if several and (layout.dp_shard > 1 or train.precision != "fp32") else 0.0
        halves = 2 if train.precision == "bf16_pure" else 1
        kinds = {
            "parameters": 6.0 / halves / layout.dp_shard,
            "optimizer": STATES[train.optim.name] / halves / layout.dp_shard,
            "gradients": 0.0 if train.optim.in_backward else 6.0 / halves / layout.dp_shard,
            "buffers": (0.3 if train.parallel.reshards(layout.dp_shard) else 3.0) + whole,
            "activations": PER_SAMPLE[train.activation_checkpointing] * train.microbatch,
            "context": 0.8,
        }
        if train.parallel.offload == "all":
            kinds |= {"parameters": 0.0, "optimizer": 0.0, "gradients": 0.0}
        given = {kind: size * 2**30 for kind, size in kinds.items()}
        shape_of_step = Shape(32, 32, 300, train.microbatch)
        traced: Any = None
        return predict.Prediction(
            train, layout, shape, machine, given, "backward", 0.0, bucket, shape_of_step, share, 0, traced
        )

    def step(self, train: TrainConfig) -> float:
        slower = {"none": 1.0, "selective": 1.1, "full": 1.3}[train.activation_checkpointing]
        return slower + 1.0 / train.microbatch + (9.0 if train.parallel.offload == "all" else 0.0)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    return MadeUp(monkeypatch)


def searched(gib: float, count: int = 1, *, nodes: int = 1, data: Data = BATCH) -> search.Search:
    return search.Search(SanaConfig(), data, Machine(gpus.card("4090"), round(gib * 2**30), count, nodes))


def given(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({"precision": "bf16", "optim": {"clip": None}, **changes})


def test_the_fastest_that_leaves_a_tenth_free_is_chosen(made_up: MadeUp) -> None:
    eight = given(optim={"name": "adamw8bit"})
    best = searched(26.5).choose(eight, search.AXES)
    assert best.prediction.total <= 0.9 * 26.5 * 2**30
    fits = {
        (kind, size): made_up.step(search.changed(eight, {"activation_checkpointing": kind, "microbatch": size}))
        for kind, per in PER_SAMPLE.items()
        for size in (64, 32, 22, 16, 13, 11, 10, 8, 7, 6, 5, 4, 3, 2, 1)
        if 18.8 + per * size <= 0.9 * 26.5
    }
    assert (best.train.activation_checkpointing, best.train.microbatch) == min(fits, key=lambda key: fits[key])
    assert len(made_up.asked) < 14


def test_what_fits_at_all_is_taken(made_up: MadeUp) -> None:
    """Less than a tenth stays free: still better than to refuse."""
    best = searched(19.5).choose(given(optim={"name": "adamw8bit"}), DECIDED)
    assert (best.train.microbatch, best.train.activation_checkpointing) == (1, "full")
    assert best.prediction.fits


def test_a_large_gpu_needs_two_predictions(made_up: MadeUp) -> None:
    best = searched(500).choose(given(), search.AXES)
    assert (best.train.microbatch, best.train.activation_checkpointing) == (64, "none")
    assert len(made_up.asked) == 2


def test_what_does_not_fit_alone_is_sharded_and_offloaded_last(made_up: MadeUp) -> None:
    best = searched(24, 4).choose(given(), search.AXES)
    assert best.prediction.layout == Layout(1, 1, 4, 1) and best.train.parallel.offload == "none"
    alone = searched(12).choose(given(), search.AXES)
    assert alone.train.parallel.offload == "all"
    layouts = {c.prediction.layout for c in searched(80, 16, nodes=2).ranked(given())}
    assert layouts == {Layout(1, 1, 16, 1), Layout(1, 2, 8, 1), Layout(1, 16, 1, 1)}


def test_one_microbatch_may_fit_where_several_do_not(made_up: MadeUp) -> None:
    """Several keep a whole gradient on every process."""
    best = searched(11, 4, data=Data({(1024, 1024): 16}, None, 300)).choose(given(), search.AXES)
    assert (best.train.microbatch, best.train.activation_checkpointing) == (4, "full")


def test_gradients_are_reduced_after_each_microbatch_where_nothing_fits_without(made_up: MadeUp) -> None:
    data = Data({(1024, 1024): 128}, None, 300)  # 32 a GPU
    best = searched(9, 4, data=data).choose(given(), search.AXES)
    assert best.changes["parallel.reduce_each_microbatch"] and best.train.parallel.offload == "none"
    assert 1 < best.train.microbatch < 32 and best.train.activation_checkpointing == "full"
    roomy = searched(24, 4, data=data).choose(given(), search.AXES)
    assert not roomy.train.parallel.reduce_each_microbatch
    fixed = given(microbatch=1, activation_checkpointing="full")
    planner = searched(9, 4, data=data)
    (line,) = planner.cures(fixed, planner.candidate(fixed, Layout(1, 1, 4, 1)))
    assert "--set train.parallel.reduce_each_microbatch=true" in line and "the same result" in line


@pytest.mark.parametrize("given_each", [None, False])
def test_auto_decides_on_the_reduction_unless_told(given_each: bool | None, made_up: MadeUp) -> None:
    config = load("tiny", [*AUTO_TWO, "train.precision=bf16"])
    parallel = {"dp_shard": 4, "reduce_each_microbatch": given_each}
    config = config.with_train(parallel=type(config.train.parallel)(**parallel))
    data = Data({(1024, 1024): 128}, None, 300)
    machine = Machine(gpus.card("4090"), 9 << 30, 4)
    if given_each is False:
        with pytest.raises(search.NothingFitsError, match="fit") as caught:
            decide(config, SanaConfig(), data, machine)
        assert "reduce_each_microbatch=true" in str(caught.value.fix)
        return
    decided, lines = decide(config, SanaConfig(), data, machine)
    assert decided.parallel.reduce_each_microbatch
    assert "train.parallel.reduce_each_microbatch: true" in lines[0]
    begun = auto.Begun(decided.model_dump())
    assert decide(config, SanaConfig(), data, machine, begun)[0] == decided


def test_one_card_reduces_after_each_microbatch_where_that_makes_room(made_up: MadeUp) -> None:
    """In fp32 FSDP2 does not manage its parameters, and nothing is reduced."""
    eight = given(optim={"name": "adamw8bit"})
    best = searched(24).choose(eight, search.AXES)
    assert best.changes["parallel.reduce_each_microbatch"] and best.train.microbatch > 1
    assert not searched(500).choose(eight, search.AXES).train.parallel.reduce_each_microbatch
    whole = given(precision="fp32", optim={"name": "adamw8bit"})
    assert not any(c.train.parallel.reduce_each_microbatch for c in searched(24).ranked(whole))


def test_what_is_said_to_fit_names_all_that_it_needs(made_up: MadeUp) -> None:
    """Also what costs time alone, where the configuration gives it values. Edit: `_rungs` without `_given`."""
    fixed = given(microbatch=8, activation_checkpointing="none")
    planner = searched(24)
    lines = planner.cures(fixed, planner.candidate(fixed, ALONE))
    assert len(lines) > 1
    for line in lines:
        sets = [word for word in line.partition("   (")[0].split() if "=" in word]
        train = load(
            "tiny", ["train.precision=bf16", "train.microbatch=8", "train.activation_checkpointing=none", *sets]
        )
        assert planner.candidate(train.train, ALONE).prediction.fits, line


def test_the_reduction_lowers_the_traced_peak_and_sends_more() -> None:
    """Of two microbatches over two processes."""
    shape = replace(SHAPE, count=2)
    once, each = (
        trace(
            NARROW,
            TrainConfig.model_validate({**COMPUTE, "parallel": {"dp_shard": 2, "reduce_each_microbatch": value}}),
            Layout(1, 1, 2, 1),
            shape,
        )
        for value in (False, True)
    )
    whole = 4 * sum(p.numel() for p in NARROW.module().parameters())
    assert each.total < once.total - whole / 3
    scattered = [sum(v[0] for k, v in t.sent.items() if "scatter" in k[0]) for t in (once, each)]
    assert scattered[1] == pytest.approx(2 * scattered[0])


def test_a_refusal_names_settings_that_are_predicted_to_fit(made_up: MadeUp) -> None:
    train = given(microbatch="auto", activation_checkpointing="auto")
    planner = searched(24)
    with pytest.raises(search.NothingFitsError) as caught:
        planner.choose(train, DECIDED)
    lines = [line.strip().partition("   ")[0] for line in str(caught.value.fix).splitlines()[1:]]
    assert lines == [
        "--set train.optim.name=adamw8bit",
        "--set train.optim.name=came --set train.optim.betas=null --set train.optim.eps=null",
        "--set train.precision=bf16_pure",
        "--set train.parallel.offload=all",
    ]
    for line in lines:
        sets = [word for word in line.split() if "=" in word]
        tree = load("tiny", ["train.precision=bf16", *AUTO_TWO, *sets]).train
        assert planner.choose(tree, DECIDED).prediction.fits


AUTO_TWO = ("train.microbatch=auto", "train.activation_checkpointing=auto")


def test_several_rungs_are_combined_where_one_is_not_enough(made_up: MadeUp) -> None:
    planner = searched(12.5)
    smallest = planner.candidate(given(microbatch=1, activation_checkpointing="full"), ALONE)
    first, *_ = planner.cures(smallest.train, smallest)
    assert first.count("--set") >= 2
    assert searched(0.5).cures(smallest.train, smallest) == []


def test_what_costs_time_alone_comes_before_what_changes_the_result(made_up: MadeUp) -> None:
    planner = searched(24, 4)
    train = given(microbatch=4, activation_checkpointing="none", parallel={"dp_replicate": 4, "dp_shard": 1})
    error = planner.refusal(train, planner.candidate(train, Layout(1, 4, 1, 1)))
    _, line = str(error.fix).splitlines()
    assert "dp_shard=4" in line and "optim" not in line and "precision" not in line


def test_weights_that_fail_in_bf16_are_not_advised_to(made_up: MadeUp) -> None:
    planner = search.Search(SanaConfig(), BATCH, Machine(gpus.card("4090"), 24 << 30, 1), lambda name: name == "fp32")
    smallest = planner.candidate(given(precision="fp32", microbatch=1, activation_checkpointing="full"), ALONE)
    assert not any("precision" in line for line in planner.cures(smallest.train, smallest))


@pytest.mark.slow
def test_what_plan_says_fits_auto_takes() -> None:
    """Real traces, at about the size that the smallest needs."""
    data, config = Data({(384, 384): 6}, None, 32), load("tiny", AUTO_TWO)
    machine = Machine(gpus.card("4090"), 1 << 40, 1)
    least = config.train.model_copy(update={"microbatch": 1, "activation_checkpointing": "full", "compile": "none"})
    needed = predict.predict(least, NARROW, data, machine).total
    decided, _ = decide(config, NARROW, data, replace(machine, memory=round(needed * 1.02)))
    assert decided.microbatch == 1


@pytest.mark.slow
def test_replicas_on_several_nodes_sum_over_the_network() -> None:
    """A group of 8 replicas, each of 8 GPUs of a node, crosses nodes although it is no larger than a node."""

    def seconds(replicas: int, nodes: int) -> float:
        layout = {"dp_replicate": replicas, "dp_shard": 8}
        train = TrainConfig.model_validate({**COMPUTE, "microbatch": 1, "parallel": layout})
        data = Data({(384, 384): 8 * replicas}, None, 32, text_width=64)
        machine = Machine(gpus.card("h100"), gpus.card("h100").memory, 8 * replicas, nodes, network_gbs=50.0)
        prediction = predict.predict(train, NARROW, data, machine)
        assert {size for name, size in prediction.traced.sent if "gather" in name or "scatter" in name} == {8}
        return sum(s for name, s in Time.of(prediction, data).traffic.items() if name == "allreduce")

    gradients = 4 * sum(p.numel() for p in SanaTransformer.on_meta(NARROW).parameters())
    assert seconds(8, 8) == pytest.approx(2 * 7 / 8 * gradients / 8 / (50e9 / 8 * LINK), rel=0.02)
    assert seconds(1, 1) < seconds(8, 8) / 1000


def test_pools_of_streams_lend_each_other_nothing() -> None:
    with FakeTensorMode(), Recorder() as recorder:
        recorder.phase = "forward"
        first = torch.empty(1000, dtype=torch.uint8)
        del first
        with torch.cpu.stream(torch.cpu.Stream()):
            apart = torch.empty(600, dtype=torch.uint8)
        again = torch.empty(100, dtype=torch.uint8)
        del apart, again
    peak, _ = recorder.peak()
    assert (peak.total, peak.apart) == (1000, 600)


def test_what_a_kernel_allocates_besides_its_results_counts() -> None:
    """Edit: a recorder without `SCRATCH` in `trace`."""
    with FakeTensorMode(), Recorder((), SCRATCH) as recorder:
        u, weight, bias = torch.empty(2, 8, 6, 64), torch.empty(64, 1, 3, 3), torch.empty(64)
        gradient = torch.empty(2, 8, 6, 32)
        recorder.phase = "backward"
        torch.ops.sana_pipe.gated_convolution_backward(gradient, u, weight, bias)
    peak, _ = recorder.peak()
    parts = 2 * 2 * 10 * 64
    assert peak.total == 4 * (2 * u.numel() + weight.numel() + bias.numel() + parts)


# Sana 1.6B at 1024 px: samples, microbatch, options, and GiB that torch's allocator reserves on a pretended H100
RESERVED: dict[str, tuple[int, int, dict[str, Any], float]] = {
    "full-32": (32, 32, {}, 38.07),  # a real H100, which still copied the gradient: 38.2
    "full-8": (8, 8, {}, 29.87),
    "full-8-of-64": (64, 8, {}, 36.33),
    "full-16": (16, 16, {}, 32.61),
    "every-2-16": (16, 16, {"activation_checkpointing": "every-2"}, 49.67),
    "bf16-pure-8": (8, 8, {"precision": "bf16_pure"}, 18.18),
    "in-backward-8": (8, 8, {"optim": {"clip": None, "in_backward": True}}, 24.54),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESERVED)
def test_reserved_memory_is_predicted(name: str) -> None:
    samples, microbatch, options, reserved = RESERVED[name]
    usual = {"text": "packed", "precision": "bf16", "activation_checkpointing": "full", "compile": "none"}
    train = TrainConfig.model_validate({**usual, "microbatch": microbatch, **options})
    data, h100 = Data({(1024, 1024): samples}, None, 300), gpus.card("h100")
    predicted = predict.predict(train, SanaConfig(), data, Machine(h100, h100.memory, 1))
    assert (predicted.total - predict.CONTEXT) / 2**30 == pytest.approx(reserved, rel=0.03)
