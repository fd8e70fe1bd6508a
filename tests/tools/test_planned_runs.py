"""Runs and their predictions: the comparison, and the options that are `auto`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import sana_pipe.stages.encode
import sana_pipe.stages.plan
import sana_pipe.stages.train
from benchmarks.real_step import RealStep
from sana_pipe.base import gpus
from sana_pipe.base.errors import ConfigError, UserError
from sana_pipe.base.hub import ModelError
from sana_pipe.base.launch import Launch
from sana_pipe.base.options import flat
from sana_pipe.cli import main
from sana_pipe.config import Config, load
from sana_pipe.tools.planning import auto, expectation, predict, search
from sana_pipe.tools.planning.expectation import Expectation
from sana_pipe.tools.planning.predict import Data, Machine
from sana_pipe.tools.planning.recorder import Recorder
from sana_pipe.tools.planning.trace import CUSTOM, trace, watch_updates
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.parallel.config import ParallelConfig
from sana_pipe.train.parallel.mesh import open_mesh
from sana_pipe.train.training import checkpoint, metrics
from tests.support.messages import naming
from tests.support.narrow import ALONE, COMPUTE, NARROW, SHAPE, decide
from tests.support.workers import tiny_run

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
FEW = ("model.arch.num_layers=2", "train.log_every=1", "train.steps=3", "train.save_every=100")


@pytest.fixture
def words(small_cache_copy: Path, tmp_path: Path) -> list[str]:
    """Options of a command on a small cache."""
    paths = [f"cache={small_cache_copy}", f"train.output={tmp_path / 'run'}"]
    settings = [*FEW, *paths]
    return ["--config", "tiny", *(part for setting in settings for part in ("--set", setting))]


def settings(words: list[str], *more: str) -> Config:
    return load("tiny", [*words[3::2], *more])


def train(config: Config, **options: Any) -> list[str]:
    printed: list[str] = []
    sana_pipe.stages.train.run(config, log=printed.append, **options)
    return printed


def plan(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


# --------------------------------------------------------------------------------------------- predicted and measured


def test_a_small_run_on_a_cpu_predicts_nothing(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expectation, "predict", lambda *args, **options: pytest.fail("predicted"))
    printed = train(settings(words))
    assert not any("predict" in line for line in printed)


@pytest.fixture
def all_memory_means_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small runs are compared, too."""
    monkeypatch.setattr(expectation, "MEANINGFUL", 0)


@pytest.mark.usefixtures("all_memory_means_something")
def test_predicted_and_measured_memory_are_in_the_run(words: list[str], tmp_path: Path) -> None:
    printed = train(settings(words))
    (line,) = [line for line in printed if line.startswith("predicted and measured until step 2: memory")]
    measured = json.loads((tmp_path / "run" / "prediction.json").read_text())["measured"]
    assert measured["memory_gib_predicted"] > 0
    assert "images_per_s" not in measured, "a CPU's speed is in no table"
    deviation = measured["memory_gib"] / measured["memory_gib_predicted"] - 1
    assert f"({deviation:+.0%})" in line
    assert (abs(deviation) > 0.1) == any(line.startswith("warning: the memory") for line in printed)
    assert [row["step"] for row in metrics.read(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.usefixtures("all_memory_means_something")
@pytest.mark.parametrize("where", ["predict", "compare"])
def test_a_prediction_that_fails_ends_no_run(words: list[str], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(*((expectation, "predict", fail) if where == "predict" else (Expectation, "compare", fail)))
    printed = train(settings(words))
    assert len([line for line in printed if line.startswith("note: ") and "broken" in line]) == 1
    assert any("step 3/3" in line for line in printed)


EXPECTED = Expectation(6 * 2**30, 4 * 2**30, 1000, 2e12, None, {})
ROW = {"forward_tokens": 500, "memory_gib": 8.0, "rss_gib": 1.0, "model_tflops": 1.6, "images_per_s": 8.0}


def test_a_large_deviation_is_a_warning() -> None:
    compared = EXPECTED.compare(ROW)
    assert compared["memory_gib_predicted"] == 8.0, "a smaller bucket needs less"
    assert compared["images_per_s_predicted"] == pytest.approx(10.0)
    first, *warnings = EXPECTED.lines(compared, 20)
    assert first == ("predicted and measured until step 20: memory 8 and 8 GiB (+0%), speed 10 and 8 images/s (-20%)")
    assert warnings == ["warning: the speed is 20% below the prediction"]
    above = EXPECTED.lines(EXPECTED.compare({**ROW, "memory_gib": 9.0, "model_tflops": 2.1}), 20)[1:]
    assert above == ["warning: the memory is 12% above the prediction"]


def test_main_memory_is_compared_where_it_means_something() -> None:
    on_cpu = replace(EXPECTED, before=2.0**29, flops_per_s=None)
    assert on_cpu.compare({**ROW, "rss_gib": 9.0}) == {"memory_gib_predicted": 8.0, "memory_gib": 8.5}
    small = replace(on_cpu, lasting=2.0**28, brief=2.0**28)
    assert small.compare(ROW) == {} and small.lines({}, 2) == []
    assert replace(on_cpu, lasting=2.0**31, brief=0.0).compare(ROW)["memory_gib_predicted"] == 2.0, "from 2 GiB on"
    assert EXPECTED.compare({**ROW, "forward_tokens": 2000})["memory_gib_predicted"] == 10.0, "no more than the worst"
    slow = {"images_per_s_predicted": 10.0, "images_per_s": 8.0}
    assert len(EXPECTED.lines(slow, 2)) == 2
    assert len(replace(EXPECTED, is_bound=True).lines(slow, 2)) == 1, "less than a bound is no deviation"


# -------------------------------------------------------------------------------------------------------- trace


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "fp32"},
        pytest.param({"ema": {}, "activation_checkpointing": "selective"}, marks=pytest.mark.slow),
    ],
)
def test_a_real_step_has_the_operations_that_the_trace_counts(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = TrainConfig.model_validate({**COMPUTE, **change})
    traced = trace(NARROW, train, ALONE, SHAPE, on_gpu=False).work
    with open_mesh(Launch(), ParallelConfig(), CPU) as mesh:
        step = RealStep(NARROW, train, SHAPE, CPU, mesh)
        watch = Recorder(inside=CUSTOM)
        watch.phase = "forward"
        if step.ema is not None:
            update = step.ema.update

            def averaged(number: int) -> None:
                watch.phase = "optimizer"
                update(number)

            monkeypatch.setattr(step.ema, "update", averaged)
        with watch_updates(step.optimizer, watch), watch:
            step()
    for kind in ("matmul", "attention", "depthwise"):
        assert watch.work[kind].flops == traced[kind].flops > 0
    for kind in ("elementwise", "optimizer"):
        assert watch.work[kind].bytes == pytest.approx(traced[kind].bytes, rel=0.02)


def test_no_card_has_more_memory_than_pytorch_finds() -> None:
    """What fits into the table's size fits into the card. Sizes in GiB, of messages of PyTorch."""
    for name, printed in (("a10g", 22.06), ("pro-6000", 94.97), ("gh200", 94.50), ("b300", 267.69), ("gb200", 184.31)):
        assert printed * 0.995 < gpus.card(name).memory_gib <= printed


def test_devices_are_cards_by_name_and_memory() -> None:
    assert gpus.of_name("NVIDIA A100-SXM4-40GB", 42_300_000_000).name == "a100-40"  # type: ignore[union-attr]
    assert gpus.of_name("NVIDIA A100-SXM4-80GB", 85_000_000_000).name == "a100-80"  # type: ignore[union-attr]
    pcie = gpus.of_name("NVIDIA H100 PCIe", 85_000_000_000)
    assert pcie is not None and (pcie.name, pcie.bf16_tflops) == ("h100-pcie", 756.0)
    assert gpus.of_name("NVIDIA GeForce GTX 1080", 1 << 33) is None
    geforce = {"3060": 12, "3060 Ti": 8, "4070 Ti SUPER": 16, "4070 SUPER": 12, "4060 Ti": 16, "5070 Ti": 16}
    for name, gib in geforce.items():
        found = gpus.of_name(f"NVIDIA GeForce RTX {name}", int(gib * 0.97 * 2**30))
        assert found is not None and found.name == name.lower().replace(" ", "-")
    sizes = {gpus.of_name("NVIDIA GeForce RTX 3080", gib << 30).name for gib in (10, 12)}  # type: ignore[union-attr]
    assert sizes == {"3080", "3080-12"}
    assert gpus.of_name("NVIDIA GeForce RTX 4090 Laptop GPU", 16 << 30) is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("3060", "3060"),
        ("RTX 3060 12GB", "3060"),
        ("4070ti", "4070-ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "4070-ti-super"),
        ("4060 Ti 16GB", "4060-ti"),
        ("3080 12GB", "3080-12"),
        ("3080 10GB", "3080"),
        ("A100 80GB", "a100-80"),
        ("a100_40", "a100-40"),
        ("Tesla T4", "t4"),
        ("h100 pcie", "h100-pcie"),
        ("RTX A4000", "a4000"),
        ("RTX A2000 12GB", "a2000"),
        ("Tesla V100 32GB", "v100-32"),
        ("v100 16gb", "v100-16"),
        ("RTX 2080 Ti 11GB", "2080-ti"),
        ("P100", "p100"),
        ("RTX A4500", "a4500"),
        ("A2", "a2"),
    ],
)
def test_cards_are_known_by_the_names_that_people_write(name: str, meant: str) -> None:
    assert gpus.card(name).name == meant


@pytest.mark.parametrize(
    ("torchs", "gib", "name"),
    [
        ("Tesla V100-SXM2-32GB", 31.7, "v100-32"),
        ("Tesla V100-PCIE-16GB", 15.8, "v100-16"),
        ("Tesla P100-PCIE-16GB", 15.9, "p100"),
        ("NVIDIA GeForce RTX 2080 Ti", 10.7, "2080-ti"),
        ("NVIDIA RTX A4500", 19.7, "a4500"),
        ("NVIDIA A2", 14.5, "a2"),
    ],
)
def test_torch_names_a_card(torchs: str, gib: float, name: str) -> None:
    found = gpus.of_name(torchs, round(gib * 2**30))
    assert found is not None and found.name == name


@pytest.mark.parametrize("card", ["t4", "v100-16", "p100", "2080-ti"])
@pytest.mark.parametrize(("runs_in", "fix"), [("[bf16,fp32]", "precision=fp32"), ("null", "precision=fp16")])
def test_plan_predicts_no_bf16_for_a_card_without_it(card: str, runs_in: str, fix: str) -> None:
    sets = ["train.precision=bf16", "model.weights.id=./none", "model.arch=null", f"model.weights.runs_in={runs_in}"]
    config = load("sana_1600m_1024", sets)
    with pytest.raises(UserError, match=fix):
        sana_pipe.stages.plan.run(config, sana_pipe.stages.plan.Options(gpu=card))
    predict.check_precision("fp32", config.supports, auto.named(card, None, 1))


@pytest.mark.parametrize("name", ["4060", "3060 8GB", "4060 ti 8GB", "a100 60GB", "rtx", ""])
def test_a_card_that_is_not_in_the_table_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=naming("--gpu-memory")):
        gpus.card(name)


@pytest.mark.parametrize(
    ("memory", "assumed"), [("8GB", "3060-ti"), ("12GiB", "3060"), ("24GiB", "3090"), ("80GB", "a100-80")]
)
def test_of_a_card_with_a_memory_size_alone_the_speed_is_that_of_such_cards(memory: str, assumed: str) -> None:
    machine = auto.named(None, memory, 1)
    assert (machine.card.name, machine.memory, machine.assumed) == (assumed, gpus.memory_of(memory), True)


# --------------------------------------------------------------------------------------------------------------- auto

AUTO = ("train.parallel=auto", "train.microbatch=auto", "train.activation_checkpointing=auto")


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is `auto` is searched for a card with 80 GB for each process."""
    monkeypatch.setattr(auto, "present", lambda device, launch: Machine(gpus.card("h100"), 80 << 30, launch.world))


@pytest.mark.slow
@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_auto_is_decided_once_and_kept(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = train(settings(words, *AUTO))
    before, line = [line for line in printed if line.startswith("auto: ")]
    assert "to choose train.parallel, train.microbatch" in before
    chosen = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["train"]
    assert chosen["microbatch"] == 12, "the whole batch fits"
    assert (chosen["parallel"]["sizes"], chosen["parallel"]["dp_shard"]) == ("given", 1)
    assert chosen["activation_checkpointing"] == "none", "nothing is faster than not to recompute"
    assert "train.microbatch: 12" in line and "one process" in line
    stored, _ = checkpoint.choose(tmp_path / "run", "auto")
    assert stored is not None and stored.document.config["train"] == chosen

    monkeypatch.setattr(search.Search, "choose", lambda *args: pytest.fail("searched again"))
    printed = train(settings(words, *AUTO, "train.steps=4"), resume="auto")
    assert any("train.microbatch: 12" in line and "checkpoint" in line for line in printed)
    assert not any(line.startswith("changed since the checkpoint: train.m") for line in printed)


def test_a_resume_on_other_processes_decides_anew() -> None:
    train = tiny_run.config(microbatch="auto").train
    stored = {"microbatch": 3, "activation_checkpointing": "full"}
    sizes = {"dp_replicate": 1, "dp_shard": 1, "tp_size": 1, "pp_size": 1}
    of_one = {**sizes, "offload": "none", "reduce_each_microbatch": None}
    earlier = {**stored, "parallel": of_one}
    assert auto.as_it_began(train, auto.Begun(earlier), 1) == dict(flat(earlier))
    assert auto.as_it_began(train, auto.Begun(earlier), 2) is None
    rest = {**stored, "parallel": {**of_one, "dp_shard": -1}}
    assert auto.as_it_began(train, auto.Begun(rest), 2) == dict(flat(rest)), (
        "explicit values, on whatever number of processes"
    )
    searched = tiny_run.config(microbatch="auto", parallel="auto").train
    assert auto.as_it_began(searched, auto.Begun(rest), 2) is None
    assert auto.as_it_began(train, None, 1) is None
    assert auto.as_it_began(train, auto.Begun(rest, 2), 2) == dict(flat(rest))
    assert auto.as_it_began(train, auto.Begun(rest, 4), 2) is None


@pytest.mark.parametrize("change", [{"microbatch": "auto"}, {"activation_checkpointing": "auto"}, {"compile": "auto"}])
def test_auto_on_a_cpu_is_a_fixed_choice(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is searched, and the rest of the section stays as it is."""
    monkeypatch.setattr(search.Search, "choose", lambda *args: pytest.fail("searched"))
    config, machine = tiny_run.config(**change), Machine(gpus.card("cpu"), 1 << 34, 2)
    decided, lines = auto.decide(config.train, machine, lambda: pytest.fail("asked"))
    decided, more = auto.decide_compile(decided, CPU)
    (name,) = change
    fixed = {"microbatch": 8, "activation_checkpointing": "full", "compile": "none"}
    assert decided.model_dump() == {**config.train.model_dump(), name: fixed[name]}
    assert [*lines, *more] == ([] if name == "compile" else [f"auto: train.{name}: {fixed[name]} (on a CPU)"])


@pytest.mark.slow
def test_parallel_auto_on_a_cpu_is_searched_alone() -> None:
    config = tiny_run.config(parallel="auto", microbatch="auto", activation_checkpointing="auto")
    machine = Machine(gpus.card("cpu"), 1 << 34, 2, assumed=True)
    decided, lines = decide(config, NARROW, Data({(64, 64): 16}, None, 16), machine)
    assert (decided.microbatch, decided.activation_checkpointing) == (8, "full")
    assert decided.parallel.sizes == "given" and len(lines) == 2


def test_another_error_than_of_memory_is_shown_as_it_is() -> None:
    def opened() -> Any:
        raise ModelError("no such model", fix="--set model.weights=DIR")

    config, machine = tiny_run.config(microbatch="auto"), Machine(gpus.card("h100"), 1 << 36, 7)
    with pytest.raises(ModelError) as caught:
        auto.decide(config.train, machine, opened)
    assert caught.value.fix == "--set model.weights=DIR"
    with pytest.raises(ConfigError) as refused:
        decide(config, NARROW, Data({(64, 64): 16}, None, 16), machine)
    assert "prediction" not in str(refused.value.fix)


def test_what_the_compiler_fuses_is_compared_with_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "present", lambda device, launch: Machine(gpus.card("h100"), 80 << 30, 1))
    config = tiny_run.config(microbatch=2, precision="bf16", compile="block")
    notes: list[str] = []
    expected = expectation.expect(
        config.train, lambda: NARROW, Data({(64, 64): 4}, None, 16), CPU, Launch(), notes.append
    )
    assert expected is not None and [note.split(":")[0] for note in notes] == ["the run"]
    assert expected.is_bound and expected.flops_per_s is None
    less = {"memory_gib_predicted": 2.0, "memory_gib": 1.0}
    assert len(expected.lines(less, 2)) == 1
    assert len(expected.lines({"memory_gib_predicted": 1.0, "memory_gib": 2.0}, 2)) == 2, "more is a warning"
    assert len(replace(expected, is_bound=False).lines(less, 2)) == 2


def test_defaults_are_auto() -> None:
    assert TrainConfig().undecided == ("microbatch", "activation_checkpointing", "compile")


@pytest.mark.parametrize(
    ("change", "capability", "earlier", "expected"),
    [
        ({}, (8, 0), None, "block"),
        ({}, (7, 5), None, "none"),
        ({"activation_compression": "int8"}, (9, 0), "block", "none"),
        ({}, (9, 0), "none", "none"),
        ({}, (9, 0), "block", "block"),
        ({}, (9, 0), "unknown", "none"),
    ],
)
def test_blocks_are_compiled_where_they_can_be(
    change: dict[str, Any],
    capability: tuple[int, int],
    earlier: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """earlier: of the checkpoint that is resumed; unknown: it is older than the option."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(auto.importlib.util, "find_spec", lambda name: name == "triton")
    config, gpu = tiny_run.config(compile="auto", **change), torch.device("cuda", 0)
    begun = None if earlier is None else auto.Begun({} if earlier == "unknown" else {"compile": earlier})
    decided, lines = auto.decide_compile(config.train, gpu, begun)
    assert decided.compile == expected and len(lines) == 1
    assert lines[0].startswith(f"auto: train.compile: {expected}") and (" (" in lines[0]) == (expected == "none")
    assert auto.decide_compile(config.train, CPU, begun)[0].compile == "none"
    monkeypatch.setattr(auto.importlib.util, "find_spec", lambda name: None)
    assert auto.decide_compile(config.train, gpu, begun)[0].compile == "none"


def test_a_resume_keeps_the_sizes_alone(tmp_path: Path) -> None:
    earlier = tiny_run.config()
    stored = earlier.train.model_dump()
    stored["parallel"] |= {"dp_shard": 1, "reduce_dtype": "fp32"}
    machine = Machine(gpus.card("h100"), 1 << 40, 1)
    config = tiny_run.config(parallel={"sizes": "auto", "reduce_dtype": "bf16"})
    decided, _ = decide(config, NARROW, Data({(64, 64): 6}, None, 32), machine, auto.Begun(stored))
    parallel = decided.parallel
    assert (parallel.reduce_dtype, parallel.dp_shard, parallel.sizes) == ("bf16", 1, "given")

    stored["activation_checkpointing"] = "selective"
    asked = tiny_run.config(activation_checkpointing="auto", activation_compression="int8")
    with pytest.raises(ConfigError, match=naming("train.activation_checkpointing: selective")):
        decide(asked, NARROW, Data({(64, 64): 6}, None, 32), machine, auto.Begun(stored))


def test_parallel_auto_leaves_the_rest_of_the_section(tmp_path: Path) -> None:
    for sets in (
        ["train.parallel.reduce_dtype=bf16", "train.parallel=auto"],
        ["train.parallel=auto", "train.parallel.reduce_dtype=bf16"],
    ):
        parallel = load("tiny", sets).train.parallel
        assert (parallel.sizes, parallel.reduce_dtype) == ("auto", "bf16")
    with pytest.raises(ConfigError, match=naming("tp_size", "offload")):
        load("tiny", ["train.parallel=auto", "train.parallel.tp_size=2", "train.parallel.offload=all"])


@pytest.mark.slow
def test_auto_leaves_a_tenth_free() -> None:
    narrow = replace(NARROW, num_layers=4)
    data = Data({(384, 384): 6}, None, 32)
    config = tiny_run.config(microbatch="auto", activation_checkpointing="none")
    machine = Machine(gpus.card("h100"), 1 << 40, 1)
    given = config.train.model_copy(update={"microbatch": 6})
    needed = predict.predict(given, narrow, data, machine).total
    tight = replace(machine, memory=round(needed * 1.05))
    decided, _ = decide(config, narrow, data, tight)
    assert decided.microbatch < 6
    assert predict.predict(decided, narrow, data, machine).total <= 0.9 * tight.memory
    decided, _ = decide(config, narrow, data, replace(machine, memory=round(needed * 1.25)))
    assert decided.microbatch == 6
    with pytest.raises(search.NothingFitsError):
        decide(config, narrow, data, replace(machine, memory=1 << 29))


def test_sampling_takes_eight_for_auto() -> None:
    assert tiny_run.config(microbatch="auto").train.drawn_at_once == 8
    assert tiny_run.config(microbatch=3).train.drawn_at_once == 3


@pytest.mark.parametrize("value", ["0", "1.5", "many", "true"])
def test_a_wrong_microbatch_names_what_is_right(value: str) -> None:
    with pytest.raises(ConfigError, match=naming("train.microbatch", "auto")):
        load("tiny", [f"train.microbatch={value}"])


@pytest.mark.slow
def test_plan_decides_what_is_auto(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sets = [part for setting in AUTO for part in ("--set", setting)]
    code, out, error = plan([*words, *sets, "--gpu", "3090", "--gpus", "2"], capsys)
    assert code == 0, error
    assert out.startswith("auto: train.parallel: 2 dp_")
    assert "checkpointing none" in out
    code, out, error = plan([*words, *sets, "--gpu", "3090", "--gpus", "2", "--json"], capsys)
    assert code == 0, error
    decided = json.loads(out)["decided"]
    assert (decided["activation_checkpointing"], decided["parallel"]["sizes"]) == ("none", "given")


@pytest.mark.dist
def test_two_processes_decide_alike(words: list[str], tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sets = [part for setting in AUTO for part in ("--set", setting)]
    done = subprocess.run(
        [*launch, "-m", "sana_pipe.cli", "train", *words, *sets],
        env=tiny_run.environ(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("auto: train.parallel: 2 dp_") == 1
    assert "step 3/3" in done.stdout


# --------------------------------------------------------------------------------------------------------- the page


def tables() -> list[tuple[list[str], list[str]]]:
    """Commands of docs/guides/training-big.md and the lines that the page shows for them."""
    text = (ROOT / "docs/guides/training-big.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n([^`]*)```\n\n```\n([^`]*)```", text)
    return [(re.sub(r"\\\n\s*", "", commands).splitlines(), shown.splitlines()) for commands, shown in blocks]


def test_the_page_has_tables() -> None:
    assert len(tables()) == 4


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(4))
def test_every_table_of_the_page_is_printed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    commands, shown = tables()[number]
    printed: list[str] = []
    for command in commands:
        _, out, error = plan(command.removeprefix("$ sana-pipe plan ").split(), capsys)
        printed += [*out.splitlines(), *error.splitlines()]
    assert [line for line in shown if line and line not in printed] == []


def test_what_other_programs_use_of_a_gpu_is_not_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    card, total = gpus.card("4090"), gpus.card("4090").memory
    used = {"others": 0, "reserved": 3 << 30}
    free = lambda device: (total - used["others"] - used["reserved"] - auto.BARE_CONTEXT, total)  # noqa: E731
    monkeypatch.setattr(auto, "of_device", lambda device: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: used["reserved"])
    device = torch.device("cuda", 0)
    assert auto.present(device, Launch()).memory == total
    used["others"] = 922 << 20
    assert auto.present(device, Launch()).memory == total - (922 << 20)
