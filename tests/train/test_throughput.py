"""What a run says it uses: FLOPs, tokens, memory; advice before memory is full and instead of a traceback; trackers."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sana_pipe.base import gpus
from sana_pipe.base.errors import ConfigError, ResourceError, UserError
from sana_pipe.base.launch import Launch
from sana_pipe.base.metrics import trackers
from sana_pipe.base.metrics.textfile import store_counts
from sana_pipe.cli import plan
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.parallel.config import ParallelConfig
from sana_pipe.train.parallel.mesh import Layout, open_mesh
from sana_pipe.train.training import build, checks, memory, metrics, remedies, throughput
from sana_pipe.train.training.config import EmaConfig, OptimConfig
from sana_pipe.train.training.step import Outcome
from sana_pipe.train.training.trainer import fit
from tests.support.messages import naming
from tests.support.tiny_sana import TINY, inputs, make
from tests.support.workers import tiny_run

CPU = torch.device("cpu")
NO_GPU = ("memory_gib", "memory_rank", "reserved_gib", "reserved_rank", "alloc_retries")


# ---------------------------------------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize("patch", [1, 2])
def test_flops_from_shapes_are_those_that_the_counter_sees(patch: int) -> None:
    config = replace(TINY, patch_size=patch, qk_norm="rms_norm_across_heads")
    model, given = make(config), inputs((6, 12))
    tokens = 6 * 12 // patch**2
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        out = model(*given)
    assert forward.get_total_flops() == config.forward_flops(3, tokens, 30)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() + backward.get_total_flops() == config.training_flops(3, tokens, 30)


def test_peaks_are_found_by_the_names_that_torch_gives() -> None:
    for name, bf16, fp32 in (
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA H100 80GB HBM3", 989.0, 67.0),
        ("NVIDIA H100 PCIe", 756.0, 51.0),
        ("NVIDIA GeForce RTX 3090", 71.0, 35.6),
        ("NVIDIA GeForce RTX 3090 Ti", 80.0, 40.0),
        ("NVIDIA L40S", 362.0, 91.6),
        ("NVIDIA L4", 121.0, 30.3),
        ("NVIDIA A10", 125.0, 31.2),
        ("NVIDIA A10G", 70.0, 35.0),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8, 126.0),
        ("NVIDIA B300 SXM6 AC", 2250.0, 75.0),
        ("NVIDIA GB200", 2500.0, 80.0),
        ("NVIDIA GH200 480GB", 989.0, 67.0),
        ("AMD Instinct MI300X", 1307.4, 163.4),
    ):
        found = gpus.of_name(name, 1 << 35)
        assert found is not None and (found.tflops("bf16"), found.tflops("fp32")) == (bf16, fp32)
        assert found.memory == 1 << 35
    for name in ("NVIDIA RTX A2500", "NVIDIA A1000", "Tesla K80"):
        assert gpus.of_name(name, 1 << 35) is None


# ------------------------------------------------------------------------------------------------------------ rows


def with_peak(monkeypatch: pytest.MonkeyPatch, tflops: float) -> None:
    """Let the device of a run have this peak."""
    start = throughput.Throughput.__init__

    def known(self: throughput.Throughput, *given: Any) -> None:
        start(self, *given)
        self.peak = tflops

    monkeypatch.setattr(throughput.Throughput, "__init__", known)


def test_a_row_counts_tokens_flops_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_peak(monkeypatch, 0.001)
    printed: list[str] = []
    settings = tiny_run.config(tmp_path / "run", steps=2, log_every=2)
    fit(settings.train, tiny_run.task(settings), Launch(), log=printed.append)
    (row,) = metrics.read(tmp_path / "run/metrics.jsonl")
    model = tiny_run.model(settings)
    batches = [tiny_run.global_batch(step) for step in (0, 1)]
    shown = sum(int(batch.mask.sum()) for batch in batches)
    tokens = shown + sum(8 * batch.latents[0, 0].numel() for batch in batches)
    flops = sum(model.config.training_flops(8, b.latents[0, 0].numel(), b.mask.numel()) for b in batches)
    elapsed = 16 / row["images_per_s"]
    assert row["tokens_per_s"] * elapsed == pytest.approx(tokens)
    assert row["mfu"] * elapsed * 1e9 == pytest.approx(flops)
    assert row["memory_gib"] is row["memory_rank"] is row["reserved_gib"] is None
    assert 0.05 < row["rss_gib"] * 2**30 / memory.peak_rss() <= 1
    assert row["rss_rank"] == 0
    assert "MFU" in printed[-2]
    assert "GiB of main memory" in printed[-2]


def _counts(printed: list[str], **train: Any) -> throughput.Throughput:
    settings = tiny_run.config(**train)
    shape = tiny_run.model(settings).config
    return throughput.Throughput(settings.train, shape, Layout(1, 1, 1, 1), CPU, printed.append)


def _add(counts: throughput.Throughput) -> None:
    batch = tiny_run.global_batch(0)
    outcome = Outcome(1, torch.tensor(1.0), torch.tensor(2.0), 8, batch.bucket)
    counts.add(outcome, [batch], 0.0)


def test_without_a_known_peak_there_is_no_utilisation() -> None:
    with open_mesh(Launch(), tiny_run.config().train.parallel, CPU):
        counts = _counts([])
        _add(counts)
        values = counts.row(0)
    assert values["mfu"] is None
    assert values["loss"] == 1.0
    assert values["grad_norm"] == 2.0


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_is_of_all_processes_since_the_last_row(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that share a model; the second has twice the counts of this one."""
    clock = [100.0]
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(throughput, "all_gather_objects", lambda numbers: [numbers, [2 * n for n in numbers]])
    monkeypatch.setattr(memory.MemoryMonitor, "peaks", lambda self: (2.0**30, 1.0, 1.0, 0.0, 0.0))
    with_peak(monkeypatch, 0.5)
    settings = tiny_run.config().train.model_copy(update={"text": "packed" if packed else "padded"})
    shape = replace(tiny_run.model(tiny_run.config()).config, patch_size=2)
    counts = throughput.Throughput(settings, shape, Layout(1, 1, 1, 2), CPU, print)
    clock[0] += 4
    pieces: list[Any] = [
        SimpleNamespace(latents=torch.zeros(n, 4, 8, 4), mask=(torch.arange(5 * n) < shown).view(n, 5))
        for n, shown in ((3, 9), (1, 2))
    ]
    counts.add(Outcome(1, torch.tensor(1.0), torch.tensor(3.0), 8, (8, 4)), pieces, 0.5)
    counts.add(Outcome(2, torch.tensor(2.0), torch.tensor(9.0), 8, (8, 4), skipped=True), pieces[1:], 0.25)
    row = counts.row(3)
    computed = (9, 2, 2) if packed else (15, 5, 5)
    flops = sum(shape.training_flops(n, 8, rows) for n, rows in zip((3, 1, 1), computed))
    expected = {"loss": 1.5, "grad_norm": 3.0, "images_per_s": 4.0, "data_wait": 0.375, "forward_tokens": 24}
    expected |= {"tokens_per_s": (5 * 8 + 9 + 2 + 2) * 1.5 / 4, "padded_tokens": 18, "quarantined": 4}
    expected |= {"model_tflops": flops * 1.5 / 4 / 1e12, "mfu": flops * 1.5 / 4 / 0.5e12 / 2}
    expected |= {"samples": 16, "data_wait_s": 2.25, "bytes": 0}
    expected |= {name: 3 * count for name, count in store_counts().items()}
    assert row == pytest.approx({**expected, "rss_gib": 2.0, "rss_rank": 1} | dict.fromkeys(NO_GPU))
    assert counts.of_process == {"data_wait_s": 0.75, "bytes": 0, **store_counts()}
    clock[0] += 4
    counts.add(Outcome(3, torch.tensor(4.0), torch.tensor(9.0), 4, (8, 4), skipped=True), [], 0.0)
    later = counts.row(0)
    assert (later["loss"], later["grad_norm"], later["images_per_s"], later["quarantined"]) == (4.0, None, 1.0, 0)
    assert later["tokens_per_s"] == later["forward_tokens"] == later["padded_tokens"] == 0


def test_memory_of_other_systems_and_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3))
    for platform, peak in (("linux", 3072), ("darwin", 3)):
        monkeypatch.setattr(memory, "sys", SimpleNamespace(platform=platform))
        assert memory.peak_rss() == peak
    replicas = configured(parallel=ParallelConfig(dp_replicate=2))
    assert remedies.sharing_processes(replicas) == 1
    for world in (2, 4):
        monkeypatch.setattr(
            remedies, "dist", SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda world=world: world)
        )
        assert remedies.sharing_processes(replicas) == world // 2
        assert remedies.sharing_processes(configured()) == world
        assert not any("reshard" in line for line in remedies.memory_advice(configured(precision="fp32")))
    unsharded = configured(parallel=ParallelConfig(reshard_after_forward=False), precision="fp32")
    assert any("reshard_after_forward=true" in line for line in remedies.memory_advice(unsharded))


def test_a_checkpoint_takes_no_time_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    with open_mesh(Launch(), tiny_run.config().train.parallel, CPU):
        counts = _counts([])
        _add(counts)
        clock[0] += 2
        with counts.paused():
            clock[0] += 50
        assert counts.row(0)["images_per_s"] == 8 / 2


def test_a_full_gpu_is_reported_once_with_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    share = 0.91
    monkeypatch.setattr(memory.MemoryMonitor, "peaks", lambda self: (0, 6 * 2**30, 7 * 2**30, share, 0))
    with open_mesh(Launch(), tiny_run.config().train.parallel, CPU):
        counts = _counts(printed)
        for share in (0.91, 0.93, 0.99):
            _add(counts)
            counts.row(0)
            assert len(printed) == (share > 0.92)
    assert "process 0 is nearly full: 7.0 GiB, 93 %" in printed[0]
    assert "--set train.activation_checkpointing=full" in printed[0]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.device]]:
    """Stands in for a GPU of 4 GiB; lists what is asked of it."""
    asked: list[tuple[str, torch.device]] = []
    answers = {
        "max_memory_reserved": 3 * 2**30,
        "max_memory_allocated": 2 * 2**30,
        "reset_peak_memory_stats": None,
        "memory_stats": {"num_alloc_retries": 37},
        "get_device_properties": SimpleNamespace(total_memory=4 * 2**30),
        "get_device_name": "NVIDIA L4",
        "get_device_capability": (7, 5),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(
            torch.cuda, name, lambda device, name=name, answer=answer: (asked.append((name, device)), answer)[1]
        )
    return asked


def test_on_a_gpu_peaks_are_those_since_the_last_row_and_the_peak_is_the_cards(
    card: list[tuple[str, torch.device]],
) -> None:
    device, settings, printed = torch.device("cuda", 1), tiny_run.config(precision="fp32"), []
    shape = tiny_run.model(settings).config
    counts = throughput.Throughput(settings.train, shape, Layout(1, 1, 1, 1), device, printed.append)
    assert counts.peak == 30.3
    assert sum(name == "reset_peak_memory_stats" for name, _ in card) == 1, "a run begins with fresh peaks"
    card.clear()
    assert counts.memory.peaks()[1:] == (2 * 2**30, 3 * 2**30, 0.75, 0), "retries are those since the last row"
    assert [name for name, _ in card[:3]][-1] == "reset_peak_memory_stats"
    assert {place for _, place in card} == {device}
    row = counts.memory.row([2**30, 2**31], [2**31, 2**30], [2.0**30, 2.0**32], [0.1, 0.93], [0, 0])
    assert row == {
        "memory_gib": 2.0,
        "memory_rank": 0,
        "reserved_gib": 4.0,
        "reserved_rank": 1,
        "rss_gib": 2.0,
        "rss_rank": 1,
        "alloc_retries": 0,
    }
    assert "process 1 is nearly full: 4.0 GiB, 93 %" in printed[0]


def test_an_allocator_that_tries_again_is_warned_of_once_and_stands_in_the_row(
    card: list[tuple[str, torch.device]],
) -> None:
    printed: list[str] = []
    monitor = memory.MemoryMonitor(tiny_run.config().train, torch.device("cuda", 1), printed.append)
    for again in ([0, 0], [0, 3], [5, 0]):
        row = monitor.row([1, 1], [1, 1], [2.0**30, 2.0**30], [0.7, 0.6], again)
        assert row["alloc_retries"] == max(again)
        assert len(printed) == any(again)
    assert "process 1" in printed[0] and " 3 times" in printed[0]


def test_packed_text_is_refused_where_it_has_no_kernel(
    card: list[tuple[str, torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = TrainConfig(text="packed", precision="bf16")
    device = torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=naming("train.text: packed", "NVIDIA L4")):
        checks.check_text(packed, device)
    assert {place for _, place in card} == {device}
    checks.check_text(packed, CPU)
    checks.check_text(TrainConfig(precision="bf16"), device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    checks.check_text(packed, device)
    with pytest.raises(ConfigError, match="fp32"):
        checks.check_text(packed.model_copy(update={"precision": "fp32"}), device)


@pytest.mark.parametrize(
    ("options", "capability", "expected"),
    [
        ({}, (8, 0), "packed"),
        ({}, (7, 5), "padded"),
        ({"precision": "fp32"}, (9, 0), "padded"),
        ({"parallel": {"pp_size": 2}}, (9, 0), "padded"),
        ({"text": "padded"}, (9, 0), "padded"),
    ],
)
def test_captions_are_packed_where_there_is_a_kernel(
    options: dict[str, Any],
    capability: tuple[int, int],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = tiny_run.config(**{"precision": "bf16", **options})
    assert build.text_layout(config.train, torch.device("cuda", 0)) == expected
    assert build.text_layout(config.train, CPU) == "padded"


def configured(**options: Any) -> TrainConfig:
    """As a run has it: with values for what is `auto`."""
    return TrainConfig(**{"microbatch": 8, "activation_checkpointing": "full", "compile": "none", **options})


def test_relief_names_only_what_helps_and_is_allowed() -> None:
    keys = [line.partition("=")[0].removeprefix("--set train.") for line in remedies.memory_advice(configured())]
    assert keys[:2] == ["parallel.reduce_each_microbatch", "microbatch"]  # blocks are recomputed by default
    plain = remedies.memory_advice(configured(activation_checkpointing="none", microbatch=6))
    assert not any("ema." in line or "dp_replicate" in line for line in plain), "what the run does not have"
    assert not any("precision=" in line for line in remedies.memory_advice(configured(precision="fp16")))
    sharded = remedies.memory_advice(configured(parallel=ParallelConfig(dp_shard=2)))
    assert not any("precision=bf16 " in line or "dp_replicate" in line for line in sharded)
    assert any("precision=bf16_pure" in line for line in sharded)
    assert plain[0].startswith("--set train.activation_checkpointing=selective ")
    assert plain[1].startswith("--set train.activation_checkpointing=full ")
    fused = configured(optim=OptimConfig(in_backward=True, clip=None))
    assert not any("microbatch=" in line for line in remedies.memory_advice(fused)), (
        "it needs a batch in one microbatch"
    )
    assert plain[3].startswith("--set train.microbatch=3 ")
    small = remedies.memory_advice(configured(microbatch=1))
    assert not any("train.microbatch=" in line or "precision=bf16 " in line for line in small)
    assert any("precision=bf16" in line for line in remedies.memory_advice(configured(precision="fp32")))
    compressed = remedies.memory_advice(configured(activation_compression="int8"))
    assert not any("compression=" in line for line in compressed), "int8 is no smaller"
    refusing = configured(
        compile="block", optim=OptimConfig(in_backward=True, clip=None, name="came", betas=None, eps=None)
    )
    assert [line.partition(" ")[2].partition("   ")[0] for line in remedies.memory_advice(refusing)] == [
        "train.parallel.reshard_after_forward=true",
        "train.activation_compression=int8 --set train.compile=none",
        "train.parallel.offload=all",
    ]
    alone = remedies.memory_advice(configured(precision="fp32"))
    assert not any("reshard" in line for line in alone), "in fp32 one process has nothing to gather or to cast"
    copies = remedies.memory_advice(
        configured(ema=EmaConfig(), parallel=ParallelConfig(dp_replicate=2, reshard_after_forward=False))
    )
    for flag in (
        "optim.in_backward=true --set train.optim.clip=null",
        "activation_compression=int8",
        "ema.device=cpu",
        "parallel.dp_replicate=1 --set train.parallel.dp_shard=-1",
        "reshard_after_forward=true",
    ):
        assert any(flag in line for line in copies), flag
    for line in remedies.memory_advice(configured(activation_checkpointing="none", precision="fp32")):
        words = line.partition("   (")[0].replace("--set train.", "").split()
        tree: dict[str, Any] = configured(activation_checkpointing="none", precision="fp32").model_dump()
        for word in words:
            name, _, value = word.partition("=")
            *sections, last = name.split(".")
            node = tree
            for section in sections:
                node = node[section]
            given: Any = {"null": None, "true": True}.get(value, value)
            node[last] = int(given) if isinstance(given, str) and given.lstrip("-").isdigit() else given
        TrainConfig.model_validate(tree)


def test_no_advice_makes_several_microbatches_keep_a_whole_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a microbatch may turn one into two, and each process then keeps a whole gradient between them."""

    def advice(microbatch: int = 8, precision: str = "bf16", **sizes: Any) -> list[str]:
        train = configured(microbatch=microbatch, precision=precision, parallel=ParallelConfig(**sizes))
        lines = remedies.memory_advice(train)
        return [flags for flags in (line.partition("   ")[0] for line in lines) if "microbatch" in flags]

    each = "--set train.parallel.reduce_each_microbatch=true"
    half = "--set train.microbatch=4"
    assert advice() == advice(offload="all") == [each, f"{half} {each}"]
    assert advice(precision="fp32") == [half], "without FSDP2 nothing is reduced"
    monkeypatch.setattr(remedies, "dist", SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 2))
    assert advice() == [each, f"{half} {each}"]
    assert advice(microbatch=1) == [each]
    assert advice(reduce_each_microbatch=True) == [half]
    assert advice(dp_replicate=2) == advice(precision="fp32") == [each, f"{half} {each}"]
    assert advice(pp_size=2) == [half]


def test_on_a_gpu_the_advice_ends_with_the_command_that_checks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(total_memory=24 << 30)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: card)
    monkeypatch.setattr(remedies, "dist", SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 8))
    *_, last = remedies.memory_advice(configured(output="/runs/my run"))
    command = last.partition(": ")[2]
    assert command == ("sana-pipe plan --search --config '/runs/my run/config.yaml' --gpus 8 --gpu-memory 22118MiB")
    assert plan.make_context("plan", shlex.split(command)[2:]).params["gpus"] == 8


def test_the_page_on_memory_lists_the_same_settings_in_the_same_order() -> None:
    plain = configured(activation_checkpointing="none", parallel=ParallelConfig(offload="all"))
    changes = [change for change, _ in (*remedies.searched(plain), *remedies.LADDER, remedies.OFFLOAD)]
    settings = [next(iter(change.items())) for change in changes]
    page = (tiny_run.ROOT / "docs/guides/training-big.md").read_text(encoding="utf-8")
    page = page.partition("\n## Memory: what to set when it runs out\n")[2]
    rows = re.findall(r"^\| `([\w.]+)(?:: ([\w-]+))?`", page, re.MULTILINE)
    expected = [(f"train.{key}", str(value).lower()) for key, value in settings]
    assert [key for key, _ in rows] == [key for key, _ in expected]
    expected.remove(("train.microbatch", "4"))  # its row says "smaller"
    assert [(key, value) for key, value in rows if value] == expected


def test_a_failed_allocation_is_an_error_for_people(tmp_path: Path) -> None:
    def touch(step: int) -> None:
        if step == 1:
            torch.empty(2**60, dtype=torch.uint8)

    settings = tiny_run.config(tmp_path / "run", microbatch=4)
    with pytest.raises(ResourceError) as caught:
        fit(settings.train, tiny_run.task(settings, touch=touch), Launch(), log=lambda line: None)
    assert "not enough memory" in str(caught.value)
    assert "--set train.activation_checkpointing=full" in str(caught.value)
    with pytest.raises(ResourceError, match="tried to allocate"), memory.memory_errors(settings.train):
        raise torch.OutOfMemoryError("CUDA out of memory: tried to allocate 2.00 GiB")
    with pytest.raises(RuntimeError, match="another") as other, memory.memory_errors(settings.train):
        raise RuntimeError("another mistake")
    assert not isinstance(other.value, UserError)


@pytest.mark.gpu
def test_on_a_gpu_rows_have_peaks_and_a_full_card_is_named(tmp_path: Path) -> None:
    settings = tiny_run.config(tmp_path / "run", steps=2, log_every=1, device="cuda", precision="bf16")
    fit(settings.train, tiny_run.task(settings), Launch(), log=lambda line: None)
    for row in metrics.read(tmp_path / "run/metrics.jsonl"):
        assert 0 < row["memory_gib"] <= row["reserved_gib"]
        assert row["memory_rank"] == row["reserved_rank"] == 0

    def touch(step: int) -> None:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")

    settings = tiny_run.config(tmp_path / "full", device="cuda")
    with pytest.raises(ResourceError):
        fit(settings.train, tiny_run.task(settings, touch=touch), Launch(), log=lambda line: None)


# -------------------------------------------------------------------------------------------------------- trackers


def test_tensorboard_gets_every_row_and_drops_repeated_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    for steps, resume in ((3, None), (5, "auto")):
        settings = tiny_run.config(run, steps=steps, save_every=2, trackers=["tensorboard"])
        fit(settings.train, tiny_run.task(settings), Launch(), resume=resume, log=lambda line: None)
        shutil.rmtree(run / "checkpoints/step-00000003", ignore_errors=True)  # so that step 3 is done again
        time.sleep(1.1)  # TensorBoard reads files of one second in the order of their names as text: .10 before .8
    rows = metrics.read(run / "metrics.jsonl")
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in ("loss", "grad_norm", "images_per_s", "tokens_per_s", "data_wait", "rss_gib"):
        seen = events.Scalars(f"train/{name}")
        assert [event.step for event in seen] == [1, 2, 3, 4, 5]
        assert [event.value for event in seen] == pytest.approx([row[name] for row in rows])
    assert "train/memory_gib" not in events.Tags()["scalars"]


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(tmp_path: Path) -> None:
    settings = tiny_run.config(tmp_path / "run", trackers=["tensorboard", "swanlab"])
    if "swanlab" in sys.modules or trackers.importlib.util.find_spec("swanlab"):
        pytest.skip("swanlab is installed here")
    with pytest.raises(UserError, match="swanlab") as caught:
        fit(settings.train, tiny_run.task(settings), Launch(), log=lambda line: None)
    assert "pip install swanlab" in str(caught.value)
    assert "train.trackers=[tensorboard]" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_cannot_be_opened_or_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.tracking import TensorBoardTracker

    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(UserError, match=naming("tensorboard")):
        with open_mesh(Launch(), tiny_run.config().train.parallel, CPU):
            trackers.Trackers(["tensorboard"], tmp_path / "run", 0, {}, lambda line: None)

    def broken(self: Any, values: Any, step: int) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(TensorBoardTracker, "log", broken)
    printed: list[str] = []
    settings = tiny_run.config(tmp_path / "other", steps=3, trackers=["tensorboard"])
    fit(settings.train, tiny_run.task(settings), Launch(), log=printed.append)
    assert len(metrics.read(tmp_path / "other/metrics.jsonl")) == 3
    assert [line for line in printed if "left out" in line] == [
        "warning: the tracker tensorboard failed and is left out: ConnectionError: no network"
    ]


def test_each_service_is_opened_under_its_names_and_left_out_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    calls: list[Any] = []

    class Service:
        requires_logging_directory = False

        def __init__(self, *given: Any, **named: Any) -> None:
            calls.append((given, named))

        def start(self) -> None:
            calls.append("start")

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            calls.append(values)

        def log(self, values: dict[str, Any], step: int) -> None:
            calls.append((step, values))

        def finish(self) -> None:
            calls.append("end")

    class WithFolder(Service):
        requires_logging_directory = True

        def log(self, values: dict[str, Any], step: int) -> None:
            if step > 3:
                raise OSError("no network")

    class Stuck(Service):
        def finish(self) -> None:
            raise OSError("no network")

    kinds = {"tensorboard": WithFolder, "wandb": Stuck, "comet_ml": Service, "aim": WithFolder}
    for name, kind in kinds.items():
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, kind)
    printed: list[str] = []
    services = trackers.Trackers(list(kinds), Path("runs/a"), 7, {"a": {"b": 1}}, printed.append)
    assert calls[::3] == [
        (("tensorboard",), {"logging_dir": "runs/a", "purge_step": 8}),
        ((trackers.PROJECT,), {"name": "a", "dir": "runs/a"}),
        ((trackers.PROJECT,), {}),
        ((trackers.PROJECT,), {"logging_dir": "runs/a"}),
    ]
    assert calls[1::3] == ["start"] * 4 and calls[2] == calls[-1] != {}
    calls.clear()
    services.log(3, {"step": 3, "loss": 0.5, "count": 2, "name": "x", "none": None}, "train")
    services.log(4, {"loss": 1.0}, "validation")
    assert calls == [(3, {"train/loss": 0.5, "train/count": 2})] * 2 + [(4, {"validation/loss": 1.0})] * 2
    assert ["left out" in line and "OSError: no network" in line for line in printed] == [True, True]
    calls.clear()
    services.close()
    services.close()
    assert calls == ["end"] and len(printed) == 3 and "wandb" in printed[2]
