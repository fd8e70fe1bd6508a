"""Variables of launchers, contradictions of accelerate, and the device of a process."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from sana_pipe.base import launch
from sana_pipe.base.errors import ConfigError, UserError, printed_first, was_printed
from sana_pipe.base.launch import (
    Launch,
    check_accelerate,
    check_restart,
    detect,
    first_host,
    ray_address,
    resolve_device,
    share_of_work,
)
from sana_pipe.config import load
from sana_pipe.data.encoding import unit_encoder
from sana_pipe.stages import sample
from sana_pipe.tools.planning import auto
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.parallel import collectives, mesh
from sana_pipe.train.parallel.config import ParallelConfig
from sana_pipe.train.training import metrics
from sana_pipe.train.training.checks import check_inputs
from sana_pipe.train.training.trainer import fit
from tests.support.messages import naming
from tests.support.workers import mortal_run, tiny_run

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_alone() -> None:
    assert detect({}) == Launch(0, 1, 0, 1, "single", None)
    assert detect({}).is_main


def test_torchrun() -> None:
    said = ("WORLD_SIZE=8", "RANK=5")
    assert detect(TORCHRUN) == Launch(5, 8, 1, 4, "torchrun", "env://", place="a:1", said_by=said)
    assert not detect(TORCHRUN).is_main


def test_accelerate_uses_the_same_variables() -> None:
    assert detect({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}).kind == "accelerate"


def test_slurm() -> None:
    launch = detect(SLURM)
    assert (launch.rank, launch.world, launch.local_rank, launch.local_world, launch.kind) == (5, 7, 1, 3, "slurm")
    assert launch.rendezvous is not None
    assert launch.rendezvous.startswith("tcp://gpu07:")
    others = detect({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert others.rendezvous == launch.rendezvous, "the tasks of a step must meet at one place"
    for other in ({"SLURM_JOB_ID": "78"}, {"SLURM_STEP_ID": "1"}):
        assert detect({**SLURM, **other}).rendezvous != launch.rendezvous
    assert detect({**SLURM, "MASTER_ADDR": "x", "MASTER_PORT": "9"}).rendezvous == "tcp://x:9"


def test_torchrun_inside_a_slurm_step_wins() -> None:
    assert detect({**SLURM, **TORCHRUN}).kind == "torchrun"


def test_a_slurm_batch_script_without_srun_is_one_process_with_advice() -> None:
    launch = detect({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    assert launch.world == 1
    assert "srun" in launch.advice[0]


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu07", "gpu07"), ("gpu[07-08]", "gpu07"), ("a-b[1,3-4]-x,c", "a-b1-x"), ("n1,n2", "n1"), ("r[01-02]n", "r01n")],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of 8"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({**TORCHRUN, "RANK": "one"}, "'one'"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, "SLURM_STEP_NODELIST"),
        ({**SLURM, "SLURM_STEP_NODELIST": "[07-08]"}, r"SLURM_STEP_NODELIST.*found: *\[07-08\].*MASTER_ADDR"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "four"}, "tasks per node.*found: *four"),
        ({**SLURM, "SLURM_NODEID": "2"}, "tasks per node.*found: *4,3"),
    ],
)
def test_contradictions_are_refused_by_name(environ: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match="(?s)" + named):
        detect(environ)


def test_restarts_on_a_shared_store_are_warned_of() -> None:
    environ = {**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in detect(environ).advice[0]
    fixed = {**environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # a main address is shared in spite of it
    assert "--rdzv-backend c10d instead" in detect(fixed).advice[0]
    assert detect({**environ, "TORCHELASTIC_USE_AGENT_STORE": "False"}).advice == ()


def test_a_restart_on_a_shared_store_is_refused_at_once() -> None:
    environ = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(UserError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        check_restart(environ)
    check_restart({**environ, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    check_restart({**environ, "TORCHELASTIC_RESTART_COUNT": "0"})


def test_accelerate_on_the_cpu_starts_one_process_with_advice() -> None:
    launch = detect({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True", "MASTER_PORT": "29500"})
    assert launch.world == 1
    assert "torchrun --standalone" in launch.advice[0]
    assert detect({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True"}).advice == ()


AGREEING = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_USE_CPU": "False",
    "ACCELERATE_USE_FSDP": "false",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def asked(train: TrainConfig) -> dict[str, str]:
    """What `check_accelerate` compares."""
    return {"precision": train.precision, "compiled": train.compile, "chosen": train.device}


def test_settings_of_accelerate_that_agree_are_accepted() -> None:
    train = tiny_run.config(precision="bf16").train
    for environ in (AGREEING, {}):
        check_accelerate(CUDA, **asked(train), environ=environ)
    check_accelerate(CPU, **asked(train), environ={**AGREEING, "ACCELERATE_USE_CPU": "True"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_MIXED_PRECISION", "no"),
        ("ACCELERATE_MIXED_PRECISION", "fp16"),
        ("ACCELERATE_USE_FSDP", "true"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true"),
        ("ACCELERATE_USE_DEEPSPEED", "true"),
        ("ACCELERATE_USE_MEGATRON_LM", "true"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
        ("ACCELERATE_CPU_AFFINITY", "1"),
        ("ACCELERATE_USE_CPU", "True"),
    ],
)
def test_settings_of_accelerate_that_contradict_are_named(name: str, value: str) -> None:
    train = tiny_run.config(precision="bf16").train
    with pytest.raises(UserError) as caught:
        check_accelerate(CUDA, **asked(train), environ={**AGREEING, name: value})
    assert f"{name}={value}" in str(caught.value)
    assert str(caught.value).count(", but ") == 1, "only the contradiction is named"


@pytest.mark.parametrize(
    ("precision", "accelerate_name"), [("fp32", "no"), ("bf16", "bf16"), ("fp16", "fp16"), ("bf16_pure", "no")]
)
def test_a_precision_has_one_name_with_accelerate(precision: str, accelerate_name: str) -> None:
    train = tiny_run.config(precision=precision).train
    check_accelerate(CPU, **asked(train), environ={"ACCELERATE_MIXED_PRECISION": accelerate_name})
    for other in {"no", "bf16", "fp16", "fp8"} - {accelerate_name}:
        with pytest.raises(UserError, match=f"train.precision is {precision} "):
            check_accelerate(CPU, **asked(train), environ={"ACCELERATE_MIXED_PRECISION": other})


def test_a_training_asks_both_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny_run.config(tmp_path / "run", parallel={"dp_replicate": 2, "dp_shard": 1})
    task, two = tiny_run.task(settings), Launch(world=2, local_world=2)
    check_inputs(settings.train, task, two, print)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="USE_FSDP=true, but train"):
        check_inputs(settings.train, task, two, print)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(UserError, match="--resume auto"):
        check_inputs(settings.train, task, two, print)


def test_devices() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(UserError, match=naming("'gpu'", "cuda:N")):
        resolve_device("gpu")
    with pytest.raises(UserError, match="GPU 999"):
        resolve_device("cuda:999")
    with pytest.raises(UserError, match=naming("'cuda:0'", "2 processes")):
        resolve_device("cuda:0", Launch(local_world=2, world=2))


def test_a_resolved_gpu_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert resolve_device("auto", Launch(world=2, local_world=2, rank=1, local_rank=1)) == torch.device("cuda", 1)
    assert resolve_device("auto") == torch.device("cuda", 0)
    assert resolve_device("cpu") == torch.device("cpu")
    assert current == [1, 1, 0]

    def busy(index: int) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore")

    monkeypatch.setattr(torch.cuda, "set_device", busy)
    with pytest.raises(UserError, match="GPU 1 cannot be used") as error:
        resolve_device("cuda:1")
    assert "busy" in str(error.value.found) and "more" not in str(error.value.found)


TOO_OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 12040). Please update."


def _no_gpu(monkeypatch: pytest.MonkeyPatch, warning: str | None, reason: str, card: Path | None = None) -> None:
    """Torch finds no GPU, warns, and says why when it is asked; card: a folder as of the PCI bus."""

    def available() -> bool:
        if warning:
            warnings.warn(warning, stacklevel=1)
        return False

    def init() -> None:
        raise RuntimeError(reason)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(launch, "PCI", card or Path("/nonexistent"))


@pytest.fixture
def nvidia_card(tmp_path: Path) -> Path:
    """The PCI bus of a machine with a card of NVIDIA."""
    for name, vendor, kind in (("0", "0x8086", "0x060000"), ("1", "0x10de", "0x030000")):
        (tmp_path / "pci" / name).mkdir(parents=True)
        (tmp_path / "pci" / name / "vendor").write_text(vendor + "\n")
        (tmp_path / "pci" / name / "class").write_text(kind + "\n")
    return tmp_path / "pci"


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_a_gpu_whose_driver_is_too_old_is_an_error_with_torchs_reason(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for warning, reason in ((TOO_OLD, "unused"), (None, TOO_OLD.partition(": ")[2])):  # torch warns only once
        _no_gpu(monkeypatch, warning, reason)
        with pytest.raises(UserError, match=naming("too old", "580", "whl/cu", "encode.device=cpu")):
            resolve_device(name, option="encode.device")
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("reason", "way_out"),
    [
        ("No CUDA GPUs are available", "--gpus all"),  # a container that was not given them
        ("Found no NVIDIA driver on your system.", "driver"),
        ("Torch not compiled with CUDA enabled", "pip install"),
    ],
)
def test_a_gpu_that_is_there_is_not_passed_over_and_a_machine_without_any_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, nvidia_card: Path, reason: str, way_out: str
) -> None:
    _no_gpu(monkeypatch, None, reason, nvidia_card)
    with pytest.raises(UserError, match=naming(reason, way_out, "train.device=cpu")):
        resolve_device("auto")
    lines: list[str] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # they are hidden: this is meant
    assert resolve_device("auto", log=lines.append) == torch.device("cpu")
    _no_gpu(monkeypatch, None, reason)
    assert resolve_device("auto", log=lines.append) == torch.device("cpu")
    assert len(lines) == 2 and all("train.device=cpu" in line for line in lines)
    assert resolve_device("cpu", log=lines.append) == torch.device("cpu")
    assert len(lines) == 2


def test_kernels_are_refused_before_a_run_where_nothing_compiles_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run would end in its first step, with Triton's traceback."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: name)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    launch.missing_compiler.cache_clear()
    launch.check_compiler(gpu)
    empty = {"posix_prefix": {"include": str(tmp_path)}}
    for change in (
        lambda patch: patch.setenv("PATH", str(tmp_path)),
        lambda patch: patch.setattr(launch.sysconfig, "get_paths", lambda scheme: empty["posix_prefix"]),
        lambda patch: patch.setenv("CC", "/nonexistent/cc"),
    ):
        launch.missing_compiler.cache_clear()
        with monkeypatch.context() as patch:
            change(patch)
            with pytest.raises(UserError, match=naming("gcc", python)):
                auto.decide_compile(load("tiny", []).train, gpu)
            launch.check_compiler(torch.device("cpu"))
            patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
            launch.check_compiler(gpu)
    launch.missing_compiler.cache_clear()


_ONE_OF_TWO = """
import sys
import torch
from sana_pipe.train.parallel.config import ParallelConfig
from sana_pipe.base.errors import UserError
from sana_pipe.base.launch import detect
from sana_pipe.train.parallel import mesh

launch = mesh.reopening(detect(), 0)
def lacking(): raise UserError("the GPU of this machine cannot be used", found="a driver that is too old")
first = launch.is_main
mesh.dist.init_process_group = lambda *args, **more: sys.exit("a group was made")
mesh.torch.cuda.set_device = lambda device: None
def agree(kind): mesh.agreed_device(launch, 0, lambda: torch.device(kind))
def open(kind):
    with mesh.open_mesh(launch, ParallelConfig(dp_shard=2), torch.device(kind)): pass
for act in (
    lambda: agree("cuda" if first else "cpu"),
    lambda: open("cpu" if first else "cuda"),
    lambda: mesh.agreed_device(launch, 0, (lambda: torch.device("cuda")) if first else lacking),
):
    try:
        act()
    except UserError as error:
        print(error.everywhere, str(error).replace(chr(10), " "))
"""


@pytest.mark.dist
def test_one_process_without_a_gpu_ends_all_with_its_rank_and_host() -> None:
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
    environ = {**tiny_run.environ(), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", _ONE_OF_TWO],
            env={**environ, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
            cwd=tiny_run.ROOT,
        )
        for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=120)[0].splitlines() for process in both]
    assert said[0] == said[1] and len(said[0]) == 3
    for line, named in zip(said[0], ("process 1 on", "process 0 on", "too old"), strict=True):
        assert line.startswith("True") and named in line and socket.gethostname() in line


def test_a_launch_is_told_from_others() -> None:
    """What its processes share names it; with the ids of SLURM, or one agent, no earlier launch had the name."""
    node = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    one, two = ({**node, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": local} for local in ("8", "4"))
    alone, (agent, unique) = launch.identity({}), launch.identity(one) or ("", False)
    assert alone is None and unique and str(os.getppid()) in agent
    assert launch.identity({**two, "RANK": "1"}) == launch.identity({**two, "RANK": "5"})
    assert (launch.identity(two) or ("", True))[1] is False
    assert launch.identity({**two, "SLURM_JOB_ID": "7"}) != launch.identity({**two, "SLURM_JOB_ID": "8"})
    array = {"SLURM_ARRAY_JOB_ID": "7"}
    tasks = [launch.identity({**array, "SLURM_JOB_ID": job, "MASTER_ADDR": job}) for job in ("8", "9")]
    assert tasks[0] == tasks[1] and not (tasks[0] or ("", True))[1], "the next command of its script is called so, too"
    step = launch.identity({**array, "SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0"})
    assert (step or ("", False))[1]


@pytest.fixture
def tf32() -> Iterator[Callable[[], tuple[bool, bool]]]:
    """Reads whether TF32 is allowed in matrix products and in convolutions."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_training_in_fp32_is_fp32_unless_tf32_is_allowed(tmp_path: Path, tf32: Callable[[], tuple[bool, bool]]) -> None:
    """Torch's default is mixed: convolutions in TF32, matrix products in fp32."""
    for allowed in (True, False):
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = not allowed, not allowed
        settings = tiny_run.config(tmp_path / str(allowed), steps=1, tf32=allowed)
        fit(settings.train, tiny_run.task(settings), Launch(), log=lambda line: None)
        assert tf32() == (allowed, allowed)
        (start, *_) = (tmp_path / str(allowed) / "metrics.jsonl").read_text().splitlines()
        assert json.loads(start)["tf32"] is allowed
        assert f"tf32: {str(allowed).lower()}" in (tmp_path / str(allowed) / "config.yaml").read_text()


def test_encoders_and_the_decoder_are_exact_and_sampling_follows_the_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tf32: Callable[[], tuple[bool, bool]]
) -> None:
    unit_encoder.device(tiny_run.config().encode.device)
    assert tf32() == (False, False)

    def missing(*args: object) -> None:
        raise ConfigError("no checkpoint")

    monkeypatch.setattr(sample.checkpoints, "find", missing)
    for allowed in (True, False):
        with pytest.raises(ConfigError):
            sample.run(tiny_run.config(tf32=allowed), "auto", None, tmp_path)
        assert tf32() == (allowed, allowed)
    launch.set_tf32(True)
    save_file({"a": torch.zeros(1)}, tmp_path / "latents.safetensors")
    with pytest.raises(UserError):
        sample.decode(tiny_run.config(), tmp_path / "latents.safetensors", tmp_path)
    assert tf32() == (False, False)


def test_blocks_of_the_allocator_grow_unless_the_user_has_set_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    launch.prefer_expandable_segments(environ)
    assert environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environ = {name: "max_split_size_mb:512"}
        launch.prefer_expandable_segments(environ)
        assert environ == {name: "max_split_size_mb:512"}


def test_the_allocator_is_set_up_before_torch_is_imported() -> None:
    code = (
        "import os, sys; from sana_pipe.base import launch; set_up = launch.prefer_expandable_segments\n"
        "def spy(): print('torch' in sys.modules); set_up(); print(os.environ['PYTORCH_ALLOC_CONF']); sys.exit()\n"
        "launch.prefer_expandable_segments = spy\n"
        "from sana_pipe.cli import main; main(['train', '--config', 'tiny', '--set', 'cache=/nowhere'])"
    )
    environ = {name: value for name, value in tiny_run.environ().items() if "ALLOC_CONF" not in name}
    ended = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["False", "expandable_segments:True"], ended.stderr


@pytest.mark.parametrize(("size", "world", "fits"), [(-1, 3, True), (3, 3, True), (2, 3, False), (4, 1, False)])
def test_sizes_are_checked_before_any_group_starts(size: int, world: int, fits: bool) -> None:
    parallel = ParallelConfig(dp_shard=size)
    if fits:
        assert mesh.check_sizes(parallel, world) == mesh.Layout(1, 1, world, 1)
        return
    launch = Launch(world=world, local_world=world, rendezvous="tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match=f"(?s)dp_shard = {size}.* {world} .*dp_shard = -1"):
        with mesh.open_mesh(launch, parallel, torch.device("cpu")):
            pass
    assert not dist.is_initialized()


def test_processes_with_different_sizes_end_before_they_wait_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "all_gather_objects", lambda layout: [layout, mesh.Layout(1, 2, 1, 1)])
    with pytest.raises(UserError, match=naming("process 1")):
        with mesh.open_mesh(Launch(), ParallelConfig(), torch.device("cpu")):
            pass
    assert not dist.is_initialized()


def test_one_process_needs_no_port() -> None:
    with mesh.open_mesh(Launch(), ParallelConfig(), torch.device("cpu")) as device_mesh:
        assert device_mesh.size() == 1
        assert device_mesh.mesh_dim_names == mesh.DIMS
        assert collectives.broadcast_from_rank_0(lambda: 3) == 3
        assert collectives.all_gather_objects("x") == ["x"]
        with pytest.raises(ConfigError, match="no"):
            collectives.run_on_all(lambda: _fail())
        with pytest.raises(UserError, match="already"), mesh.open_mesh(Launch(), ParallelConfig(), torch.device("cpu")):
            pass
    assert not dist.is_initialized()


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, ("WORLD_SIZE=2", "unset WORLD_SIZE RANK")),
        (
            {
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_STEP_TASKS_PER_NODE": "4",
                "MASTER_ADDR": "localhost",
            },
            ("SLURM_STEP_NUM_TASKS=4", "unset SLURM_STEP_NUM_TASKS"),
        ),
    ],
    ids=["torchrun", "slurm"],
)
def test_a_process_that_waits_for_others_says_where_and_by_which_variable(
    environ: dict[str, str],
    named: tuple[str, ...],
    reopened: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("", 0)) as server:
        environ = {**environ, "MASTER_PORT": str(server.getsockname()[1])}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mesh, "WAITING_S", 0.1)
    monkeypatch.setattr(mesh, "WAIT_S", 1)
    launch = detect(environ)
    if reopened:
        launch = mesh.reopening(launch, 0)
    place = f"localhost:{environ['MASTER_PORT']}"
    with pytest.raises(UserError, match=naming(place, *named)):
        with mesh.open_mesh(launch, ParallelConfig(dp_shard=-1), torch.device("cpu")):
            pass
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(naming(place, *named), line), line


def test_a_port_in_use_is_named_with_the_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(mesh, "WAIT_S", 5)
        with pytest.raises(UserError, match=naming(f"localhost:{port}", "--master-port", "MASTER_PORT")):
            with mesh.open_mesh(detect(environ), ParallelConfig(), torch.device("cpu")):
                pass


@pytest.mark.parametrize("everywhere", [False, True])
def test_after_an_error_of_one_process_the_group_is_aborted_and_the_error_printed_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], everywhere: bool
) -> None:
    """NCCL's ordinary end would wait for the other processes, which wait for this one."""
    calls: list[tuple[str, str]] = []

    def spy(name: str) -> Callable[[], None]:
        return lambda: calls.append((name, capsys.readouterr().err))

    monkeypatch.setattr(mesh.dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(mesh.dist, "destroy_process_group", spy("destroy"))
    monkeypatch.setattr(mesh.dist.distributed_c10d, "_abort_process_group", spy("abort"))
    monkeypatch.setattr(mesh, "_mesh", lambda *args: None)
    monkeypatch.setattr(mesh, "compare_devices", lambda *args: None)
    error = UserError("the disk is full")
    error.everywhere = everywhere
    launch = Launch(1, 2, 1, 2, "torchrun", "env://", stores=iter([dist.HashStore()]))
    with pytest.raises(UserError), mesh.open_mesh(launch, ParallelConfig(), torch.device("cpu")):
        raise error
    assert calls == ([("destroy", "")] if everywhere else [("abort", "sana-pipe: process 1: the disk is full\n")])


def test_a_failed_collective_is_not_printed_before_the_error_of_the_process_that_ended() -> None:
    for error in (RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer"), dist.DistError("x")):
        with pytest.raises(RuntimeError), printed_first(0, 2):
            raise error
        assert not was_printed(error)
    with pytest.raises(RuntimeError) as caught, printed_first(0, 2):
        raise RuntimeError("a defect")
    assert was_printed(caught.value)


def _fail() -> None:
    raise ConfigError("no")


@pytest.mark.dist
def test_accelerate_launch_sets_the_variables_that_are_read(tmp_path: Path) -> None:
    """The real `accelerate launch`, so that a rename of its variables is noticed."""
    script = tmp_path / "ask.py"
    script.write_text(
        "import torch\n"
        "from sana_pipe.base.launch import check_accelerate, detect\n"
        "launch = detect()\n"
        "print(launch)\n"
        "check_accelerate(torch.device('cpu'), precision='bf16', compiled='auto', chosen='auto')\n"
    )
    root = Path(__file__).resolve().parent.parent
    environ = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    runs = {}
    for precision in ("bf16", "no"):
        command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
        command += ["--mixed_precision", precision, str(script)]
        runs[precision] = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert runs["bf16"].returncode == 0, runs["bf16"].stderr
    assert runs["no"].returncode != 0
    assert "ACCELERATE_MIXED_PRECISION=no" in runs["no"].stderr


@pytest.mark.dist
def test_two_processes_of_accelerate_launch_train_as_one(tmp_path: Path) -> None:
    """With the precision of the configuration; then with another."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += ["--num_machines", "1", "--num_processes", "2", "--main_process_port", "0", "--dynamo_backend", "no"]
    runs = {}
    for precision in ("no", "bf16"):
        words = [
            "--mixed_precision",
            precision,
            "-m",
            "tests.support.workers.mortal_run",
            str(tmp_path / precision),
            "[]",
        ]
        runs[precision] = subprocess.run(
            [*command, *words], env=tiny_run.environ(), cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=200
        )
    assert runs["no"].returncode == 0, runs["no"].stdout + runs["no"].stderr
    assert "2 x cpu (2 dp_shard)" in runs["no"].stdout
    settings = tiny_run.config()
    expected = tiny_run.train_losses(tiny_run.model(settings), settings, mortal_run.STEPS)
    losses = [row["loss"] for row in metrics.read(tmp_path / "no" / "metrics.jsonl")]
    assert losses == pytest.approx(expected, abs=1e-5)
    assert runs["bf16"].returncode != 0
    assert "ACCELERATE_MIXED_PRECISION=bf16, but train.precision is fp32" in runs["bf16"].stderr
    assert not (tmp_path / "bf16").exists()


# ---------------------------------------------------------------- shares of work


def array(task: int, first: int, last: int, count: int, step: int = 1) -> dict[str, str]:
    names = {"ID": task, "MIN": first, "MAX": last, "COUNT": count, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in names.items()}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1)),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "1",
                "LOCAL_WORLD_SIZE": "4",
                "LOCAL_RANK": "3",
            },
            (3, 4),
        ),
        (array(0, 0, 31, 32), (0, 32)),
        (array(31, 0, 31, 32), (31, 32)),
        (array(3, 1, 4, 4), (2, 4)),
        (array(9, 1, 13, 4, step=4), (2, 4)),
        (array(7, 1, 9, 3), (7, 10)),  # --array=1,7,9
        ({"SLURM_ARRAY_TASK_ID": "5"}, (5, 6)),
        (
            {
                **array(2, 1, 4, 4),
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NODELIST": "n[1-2]",
                "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
                "SLURM_NODEID": "1",
            },
            (3, 8),
        ),
    ],
)
def test_the_share_of_work(environ: dict[str, str], expected: tuple[int, int]) -> None:
    assert share_of_work(environ) == expected


@pytest.mark.parametrize("kind", [(0, 31, 1), (3, 9, 2)])
def test_the_shares_of_an_array_are_all_different_and_cover_it(kind: tuple[int, int, int]) -> None:
    first, last, step = kind
    ids = range(first, last + 1, step)
    shares = [share_of_work(array(task, first, last, len(ids), step)) for task in ids]
    assert shares == [(i, len(ids)) for i in range(len(ids))]


def test_an_array_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(UserError, match="SLURM_ARRAY_TASK_ID"):
        share_of_work({"SLURM_ARRAY_TASK_ID": "x"})
    with pytest.raises(UserError, match="contradict"):
        share_of_work(array(9, 0, 3, 4))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("", None),
        ("auto", None),
        ("ray://h:10001", None),
        ("h:6379", ("h", 6379)),
        ("[fe80::1]:6379", ("fe80::1", 6379)),
    ],
)
def test_the_address_of_ray(value: str | None, expected: tuple[str, int] | None) -> None:
    assert ray_address({} if value is None else {"RAY_ADDRESS": value}) == expected


@pytest.mark.dist
def test_torchrun_does_not_restart_a_wrong_option() -> None:
    """The real torchrun, which would start it a hundred times."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "100"]
    ended = subprocess.run(
        [sys.executable, *launcher, "--module", "sana_pipe.cli", "train", "--set", "train.stepps=3"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tiny_run.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count("did you mean 'train.steps'?") == 1, ended.stderr
