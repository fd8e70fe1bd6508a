"""The launcher's variables: this process's rank, its device, and accelerate's settings.

`detect()` turns the variables of torchrun, `accelerate launch` (the same names) or SLURM's `srun` into a `Launch`. A
wrong rank would train on the wrong slice, and a precision or FSDP option that is accepted but not obeyed would be
another run than its owner believes: so `check_accelerate()` refuses these, and `mpirun` is refused, not guessed.
`resolve_device()` turns `auto` into a device, `set_tf32()` and `prefer_expandable_segments()` set up the process for
it, `check_compiler()` refuses a machine that cannot compile kernels. Only this module reads or writes the environment.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sana_pipe.base.errors import UserError

if TYPE_CHECKING:
    import torch

Kind = Literal["single", "torchrun", "accelerate", "slurm"]


@dataclass(frozen=True)
class Launch:
    """One process of a launch.

    Attributes:
        rank, world: this process and the number of processes, over all nodes.
        local_rank, local_world: the same within this node.
        rendezvous: init method of `torch.distributed`; None for a single process, which needs no port.
        place: host and port of the rendezvous, for messages.
        said_by: the variables that say how many processes there are, as NAME=VALUE.
        advice: remarks about the environment for the user; they change nothing.
        stores: of the process groups that this process opens one after the other (`mesh.reopening`); None: it opens
            one.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    kind: Kind = "single"
    rendezvous: str | None = None
    place: str | None = None
    said_by: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    stores: Iterator[Any] | None = None

    @property
    def is_main(self) -> bool:
        """Rank 0, which prints and writes what the launch writes once."""
        return self.rank == 0


def detect(environ: Mapping[str, str] | None = None) -> Launch:
    """Read the launcher's variables. torchrun's take precedence over SLURM's, because it may run inside a SLURM step.

    Raises:
        UserError: variables that are incomplete, not numbers, or contradict each other.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env or "WORLD_SIZE" in env:
        return _torchrun(env)
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        return _slurm(env)
    if _number(env, "OMPI_COMM_WORLD_SIZE", 1) > 1:
        raise UserError(
            "this process was started by mpirun, which does not give the address where the processes meet",
            expected="torchrun, accelerate launch or srun",
            found=f"OMPI_COMM_WORLD_SIZE={env['OMPI_COMM_WORLD_SIZE']}",
            fix="torchrun --nproc-per-node N --no-python sana-pipe train ...",
        )
    advice: tuple[str, ...] = ()
    if "ACCELERATE_MIXED_PRECISION" in env and "MASTER_PORT" in env:
        advice = (
            "accelerate launch --cpu starts one process, whatever --num_processes is, and leaves the others to mpirun; "
            "this runs as a single process. For several on the CPU: torchrun --standalone --nproc-per-node N",
        )
    if "SLURM_JOB_ID" in env and _number(env, "SLURM_NTASKS", 1) > 1:
        advice = (
            f"this SLURM job has {env['SLURM_NTASKS']} tasks, but the command was not started by srun or torchrun: "
            "it runs as a single process",
        )
    return Launch(advice=advice)


def share_of_work(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """(index, count): this process's share of work that needs no communication: rank and world, times the SLURM array
    if there is one. The ids of an array without a common step (`--array=1,5,7`) count as `0..max`.

    Raises:
        UserError: as `detect`.
    """
    env = os.environ if environ is None else environ
    launch = detect(env)
    if "SLURM_ARRAY_TASK_ID" not in env:
        return launch.rank, launch.world
    task = _number(env, "SLURM_ARRAY_TASK_ID")
    first, last = _number(env, "SLURM_ARRAY_TASK_MIN", 0), _number(env, "SLURM_ARRAY_TASK_MAX", task)
    count, step = _number(env, "SLURM_ARRAY_TASK_COUNT", 0), _number(env, "SLURM_ARRAY_TASK_STEP", 1)
    if step > 0 and last - first == step * (count - 1) and (task - first) % step == 0:
        index = (task - first) // step
    else:
        index, count = task, max(task, last) + 1
    if not 0 <= index < count:
        raise UserError(
            "SLURM's array variables contradict each other",
            found=f"task {task} of {first}..{last}, {count} tasks",
            fix="sana-pipe encode --task-index I --task-count N",
        )
    return index * launch.world + launch.rank, count * launch.world


def identity(environ: Mapping[str, str] | None = None) -> tuple[str, bool] | None:
    """Return what the processes of this launch share, and whether no earlier launch can have had it; None without a
    launcher that says it (RANK set by hand, `--task-index`)."""
    env = os.environ if environ is None else environ
    slurm, torchrun = "SLURM_JOB_ID" in env, "TORCHELASTIC_RUN_ID" in env
    if not slurm and not torchrun:
        return None
    array = "SLURM_ARRAY_JOB_ID" in env
    names = ["SLURM_CLUSTER_NAME", "SLURM_ARRAY_JOB_ID" if array else "SLURM_JOB_ID", "SLURM_STEP_ID"]
    names += ["SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]
    if not array:  # each task of an array has its own address
        names += ["MASTER_ADDR", "MASTER_PORT"]
    words = [f"{name}={env[name]}" for name in names if name in env]
    one_node = torchrun and env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE")
    if one_node and not array:
        words.append(f"agent {os.getppid()}")
    alone = slurm and (not array or "SLURM_STEP_ID" in env)  # commands of one array script have no other name
    return " ".join(words), alone or one_node


def chosen_share(index: int | None, count: int | None) -> tuple[int, int]:
    """(index, count): this process's share by `--task-index` and `--task-count`; without them `share_of_work`.

    Raises:
        UserError: one without the other, or an index that is not below the count.
    """
    if (index is None) != (count is None):
        raise UserError("--task-index and --task-count go together", fix="--task-index 0 --task-count 4")
    if index is None or count is None:
        index, count = share_of_work()
    if not 0 <= index < count:
        raise UserError("--task-index must be from 0 to --task-count - 1", found=f"index {index} of {count} tasks")
    return index, count


def scheduled_attempt(environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Return this process's SLURM job and how often SLURM has requeued it; None outside of SLURM."""
    env = os.environ if environ is None else environ
    if "SLURM_JOB_ID" not in env:
        return None
    return f"{env.get('SLURM_CLUSTER_NAME', '')} {env['SLURM_JOB_ID']}", _number(env, "SLURM_RESTART_COUNT", 0)


def ray_address(environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Host and port in RAY_ADDRESS; None if it is missing or of another form (`auto`)."""
    env = os.environ if environ is None else environ
    match = re.fullmatch(r"\[?([^/\[\]]+?)\]?:(\d{1,5})", env.get("RAY_ADDRESS", "").strip())
    return (match[1], int(match[2])) if match else None


def _torchrun(env: Mapping[str, str]) -> Launch:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise UserError(
            "the launcher's variables are incomplete",
            expected="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT together",
            found="without " + ", ".join(missing),
            fix="start with torchrun, or unset " + ", ".join(n for n in ("RANK", "WORLD_SIZE") if n in env),
        )
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    # With one process per node the local variables may be missing.
    local_rank, local_world = _number(env, "LOCAL_RANK", 0), _number(env, "LOCAL_WORLD_SIZE", 1)
    if "LOCAL_WORLD_SIZE" not in env and "LOCAL_RANK" in env:
        local_world = max(local_rank + 1, 1)
    advice: tuple[str, ...] = ()
    if _number(env, "TORCHELASTIC_MAX_RESTARTS", 0) > 0 and _shares_store(env):
        advice = (f"--max-restarts will not help a training run: {_STALE}; {_restart_fix(env)}",)
    kind: Kind = "accelerate" if "ACCELERATE_MIXED_PRECISION" in env else "torchrun"
    place, said_by = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}", _given(env, "WORLD_SIZE", "RANK")
    rendezvous = "env://" if world > 1 else None
    return _checked(Launch(rank, world, local_rank, local_world, kind, rendezvous, place, said_by, advice))


_STALE = "restarted processes meet on a store that still holds the addresses of the lost processes"


def _shares_store(env: Mapping[str, str]) -> bool:
    return env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"


def _restart_fix(env: Mapping[str, str]) -> str:
    if env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":  # no effect on a fixed address
        return "start with torchrun --standalone or --rdzv-backend c10d instead of a main address and port"
    return (
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, with --standalone or --rdzv-backend c10d "
        "(see configs/launch/torchrun.sh)"
    )


def check_restart(environ: Mapping[str, str] | None = None) -> None:
    """Refuse a restart by torchrun whose processes would wait for the lost processes until the timeout.

    Raises:
        UserError: torchrun restarted this process and shares its store with it.
    """
    env = os.environ if environ is None else environ
    if _number(env, "TORCHELASTIC_RESTART_COUNT", 0) > 0 and _shares_store(env):
        raise UserError(f"torchrun's restart cannot work: {_STALE}", fix=_restart_fix(env) + "; then --resume auto")


def end_restarts(environ: Mapping[str, str] | None = None) -> None:
    """Ask torchrun to end this launch, for an error that each restart would have again: it starts processes that failed
    again whatever their exit code is, but not after a signal to itself. One process of a node asks."""
    env = os.environ if environ is None else environ
    left = _number(env, "TORCHELASTIC_MAX_RESTARTS", 0) - _number(env, "TORCHELASTIC_RESTART_COUNT", 0)
    if "TORCHELASTIC_RUN_ID" in env and left > 0 and env.get("LOCAL_RANK") == "0":
        parent = os.getppid()
        if parent > 0:  # 0: a process of another namespace
            with suppress(OSError):  # it has ended meanwhile
                os.kill(parent, signal.SIGTERM)


def _slurm(env: Mapping[str, str]) -> Launch:
    rank, world = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    local_rank = _number(env, "SLURM_LOCALID", 0)
    local_world = 1
    counts = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if counts:
        try:
            local_world = _expand_counts(counts)[_number(env, "SLURM_NODEID", 0)]
        except IndexError:
            raise UserError(
                "SLURM's tasks per node cannot be read, or are not those of this node", found=counts
            ) from None
    rendezvous = place = None
    if world > 1:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
        host = env.get("MASTER_ADDR") or (first_host(nodes) if nodes else None)
        if host is None:
            raise UserError(
                "SLURM does not say which nodes this step has, so the processes cannot meet",
                expected="SLURM_STEP_NODELIST or SLURM_JOB_NODELIST",
                found=nodes,
                fix="export MASTER_ADDR=<name of the first node> before srun",
            )
        # Equal on all tasks of a step; different for other jobs and steps on the same node.
        job, step = _number(env, "SLURM_JOB_ID", 0), _number(env, "SLURM_STEP_ID", 0)
        port = _number(env, "MASTER_PORT", 20000 + (job * 7 + step) % 20000)
        place = f"{host}:{port}"
        rendezvous = f"tcp://{place}"
    said_by = _given(env, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    return _checked(Launch(rank, world, local_rank, local_world, "slurm", rendezvous, place, said_by))


def _given(env: Mapping[str, str], *names: str) -> tuple[str, ...]:
    return tuple(f"{name}={env[name]}" for name in names)


def first_host(nodes: str) -> str | None:
    """The first host of a SLURM node list: `gpu[03-05,9],login1` is `gpu03`. None: it is no node list."""
    match = re.match(r"^([^\[\],]+)(?:\[([0-9]+)[^\]]*\]([^\[,]*))?", nodes.strip())
    if match is None:
        return None
    stem, number, tail = match.groups()
    return stem + (number or "") + (tail or "")


def _expand_counts(text: str) -> list[int]:
    """`4(x2),3` is [4, 4, 3]: SLURM's tasks per node."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"the variable {name} must be a whole number", found=repr(text)) from None


def _checked(launch: Launch) -> Launch:
    if not (0 <= launch.rank < launch.world) or not (0 <= launch.local_rank < launch.local_world <= launch.world):
        raise UserError(
            "the launcher's numbers contradict each other",
            expected="0 <= rank < world and 0 <= local rank < processes per node <= world",
            found=f"rank {launch.rank} of {launch.world}, local rank {launch.local_rank} of {launch.local_world}",
            fix="start with torchrun, accelerate launch or srun and set none of RANK, WORLD_SIZE, LOCAL_RANK by hand",
        )
    return launch


def check_accelerate(
    device: torch.device, *, precision: str, compiled: str, chosen: str, environ: Mapping[str, str] | None = None
) -> None:
    """Refuse what `accelerate launch` exports for `Accelerator.prepare`: a training would ignore it, since only the
    configuration decides.

    Args:
        precision, compiled, chosen: `train.precision`, `train.compile` and `train.device`.

    Raises:
        UserError: one line per variable, with the setting of the configuration.
    """
    env = os.environ if environ is None else environ
    off, theirs = {"", "0", "false", "no"}, {"fp32": "no", "bf16_pure": "no"}.get(precision, precision)
    accepted: dict[str, tuple[set[str], str]] = {
        "MIXED_PRECISION": ({theirs}, f"train.precision is {precision} (= {theirs!r} there)"),
        **dict.fromkeys(("USE_FSDP", "USE_PARALLELISM_CONFIG"), (off, "train.parallel decides")),
        **dict.fromkeys(("USE_DEEPSPEED", "USE_MEGATRON_LM"), (off, "train.parallel decides")),
        "DYNAMO_BACKEND": (off, f"train.compile is {compiled}"),
        "GRADIENT_ACCUMULATION_STEPS": ({"1"}, "bucket.batch and train.microbatch decide"),
        "CPU_AFFINITY": (off, "processes are not bound to cores here (torchrun has --numa-binding)"),
        "USE_CPU": ({*off, "true", "1", "yes"} if device.type == "cpu" else off, f"train.device is {chosen}"),
    }
    given = {name: env[f"ACCELERATE_{name}"] for name in accepted if f"ACCELERATE_{name}" in env}
    wrong = {name: value for name, value in given.items() if value.strip().lower() not in accepted[name][0]}
    if wrong:
        lines = [f"\n  ACCELERATE_{name}={value}, but {accepted[name][1]}" for name, value in wrong.items()]
        fix = "leave these answers out of `accelerate config` (or of `accelerate launch`), or start with torchrun"
        raise UserError("accelerate's environment contradicts the configuration:" + "".join(lines), fix=fix)


PCI, _DRIVER = Path("/sys/bus/pci/devices"), Path("/proc/driver/nvidia/version")
_DRIVERS = {"13": 580, "12": 525, "11": 450}
"""Oldest driver for each major version of CUDA (NVIDIA's release notes)."""
_OLDER = "https://download.pytorch.org/whl/cu126"
"""Wheels of torch for CUDA 12."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that torch can use here.

    Attributes:
        count: GPUs that torch can use.
        problem: why it can use none of those that are there, in torch's words; None: there are none, or they are
            hidden by CUDA_VISIBLE_DEVICES.
        fix: the way out of the problem.
    """

    count: int
    problem: str | None = None
    fix: str = ""


def gpus() -> Gpus:
    """The GPUs of this machine. Torch takes a driver that is too old, and a build without CUDA, for no GPU."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count or os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return Gpus(count)
    reasons = [str(each.message) for each in caught if "CUDA" in str(each.message)]
    if not reasons:  # the warning comes once for each process
        try:
            torch.cuda.init()
        except Exception as error:
            reasons = [str(error)]
    reason = (reasons or ["torch finds none"])[0].partition("\n")[0]
    reason = reason.partition(" Please ")[0].partition(" (Triggered internally")[0]
    absent = ("no cuda gpus", "no hip gpus", "no nvidia driver", "not compiled with cuda", "torch finds none")
    if any(each in reason.lower() for each in absent) and not _has_nvidia_card():
        return Gpus(0)
    return Gpus(0, reason, _way_out(reason.lower()))


def oldest_driver() -> int | None:
    """The oldest NVIDIA driver that this build of torch runs on; None: it is no build for CUDA."""
    import torch

    return _DRIVERS.get(str(torch.version.cuda).partition(".")[0])


def driver() -> str | None:
    """The version of the NVIDIA driver, as 580.65.06; None: there is none, or it does not say."""
    with suppress(OSError):
        match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", _DRIVER.read_text(encoding="utf-8", errors="replace"))
        return match and match[1]
    return None


def _has_nvidia_card() -> bool:
    """Return whether a graphics card of NVIDIA is on the PCI bus, also seen from a container that was not given it."""

    def says(device: Path, name: str, start: str) -> bool:
        try:
            return (device / name).read_text(encoding="ascii").startswith(start)
        except (OSError, ValueError):
            return False

    try:
        return any(says(each, "vendor", "0x10de") and says(each, "class", "0x03") for each in PCI.iterdir())
    except OSError:
        return False


def _way_out(reason: str) -> str:
    import torch

    version, oldest = torch.__version__.partition("+")[0], oldest_driver()
    install = f"{shlex.quote(sys.executable)} -m pip install --force-reinstall torch=={version}"
    wanted = f"the NVIDIA driver{f', version {oldest} or newer' if oldest else ''}"
    if "not compiled with cuda" in reason:
        return f"{install}   (the build for CUDA)"
    if "driver" in reason and "too old" in reason:
        return f"install {wanted}; or torch for an older CUDA: {install} --index-url {_OLDER}"
    if "no nvidia driver" in reason:
        return f"install {wanted}; start a container with its GPUs (docker run --gpus all)"
    return f"nvidia-smi shows the GPUs and the driver; this torch needs {wanted}; start a container with --gpus all"


def describe_gpus(there: Gpus) -> str:
    """The GPUs and their driver, in a line for people."""
    import torch

    wanted, version = oldest_driver(), driver()
    build = f"torch {torch.__version__}" + (f" needs driver {wanted} or newer" if wanted else " has no CUDA")
    if not there.count:
        return f"{there.problem or 'none'} ({build})"
    name = torch.cuda.get_device_name(0)
    return f"{there.count} x {name}, driver {version or 'of unknown version'} ({build})"


def unusable(there: Gpus, option: str) -> UserError:
    """The error for GPUs that are there and cannot be used."""
    version = driver()
    return UserError(
        "the GPU of this machine cannot be used",
        found=f"{there.problem}{f' (driver {version})' if version else ''}",
        fix=f"{there.fix}; or compute on the CPU: --set {option}=cpu",
    )


def resolve_device(
    name: str,
    launch: Launch | None = None,
    *,
    option: str = "train.device",
    log: Callable[[str], None] | None = None,
) -> torch.device:
    """The device of this process. A GPU becomes the current one, which Triton and NCCL go by.

    Args:
        name: `auto` (the process's GPU if there is one, else the CPU), `cpu`, `cuda` (the process's GPU) or `cuda:N`.
        launch: `local_rank` is the number of the process's GPU; None: GPU 0.
        option: where the name comes from, for messages.
        log: prints a line if `auto` takes the CPU, because there is no GPU.

    Raises:
        UserError: an unknown name, a GPU that this machine does not have, or one that is there and cannot be used.
    """
    import torch

    launch = launch or Launch()
    if name == "cpu":
        return torch.device("cpu")
    there = gpus()
    count = there.count
    if there.problem is not None and re.fullmatch(r"auto|cuda(?::\d+)?", name):
        raise unusable(there, option)
    if name == "auto" and not count:
        if log is not None:
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            why = "this machine has no GPU" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden!r} shows no GPU"
            log(f"{why}: the CPU is used ({option}=cpu, if that is intended)")
        return torch.device("cpu")
    name = "cuda" if name == "auto" else name
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise UserError("there is no such device", expected="auto, cpu, cuda or cuda:N", found=repr(name))
    if match[1] is not None and launch.local_world > 1:
        raise UserError(
            f"the device {name!r} is one GPU, and {launch.local_world} processes run on this node",
            fix="device: cuda (each process then takes the GPU of its local rank)",
        )
    index = int(match[1]) if match[1] is not None else launch.local_rank
    if index >= count:
        raise UserError(
            f"this process needs GPU {index} of this machine",
            expected=f"a GPU number below {count}" if count else "an NVIDIA GPU and a CUDA build of torch",
            found=f"{count} GPUs, {launch.local_world} processes on this node",
            fix=f"start no more processes per node than it has GPUs, or --set {option}=cpu",
        )
    try:
        torch.cuda.set_device(index)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"GPU {index} cannot be used", found=reason, fix="nvidia-smi shows what occupies it") from None
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each shape, tens of milliseconds each
    return torch.device("cuda", index)


def check_compiler(device: torch.device, compiled: bool = False) -> None:
    """Refuse a GPU for which kernels are compiled on a machine without a C compiler or Python's headers: Triton makes
    its kernels' launcher with them.

    Args:
        compiled: blocks are compiled, too, also for an older GPU.

    Raises:
        UserError: with the packages to install.
    """
    import torch

    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return
    if (compiled or torch.cuda.get_device_capability(device) >= (8, 0)) and (lacks := missing_compiler()) is not None:
        raise lacks


_C_FILE = "#include <Python.h>\nint probe(void) { return Py_IsInitialized(); }\n"


@functools.cache
def missing_compiler() -> UserError | None:
    """Say why no C file that includes Python's headers compiles here; None: it compiles."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = "neither gcc nor clang on PATH, and CC is not set"
    if compiler is not None:
        scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
        include = sysconfig.get_paths(scheme=scheme)["include"]
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(_C_FILE, encoding="ascii")
            command = [compiler, str(source), "-shared", "-fPIC", f"-I{include}", "-o", str(source.with_suffix(".so"))]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            except (OSError, subprocess.SubprocessError) as error:
                found = f"{compiler}: {error}"
            else:
                if done.returncode == 0:
                    return None
                said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
                found = said[0].replace(str(source), "a C file") if said else f"{compiler}: exit {done.returncode}"
    return UserError(
        "kernels for the GPU cannot be compiled on this machine",
        expected="a C compiler and Python's headers (Python.h)",
        found=found,
        fix=f"apt-get install gcc libc6-dev {python}-dev   (dnf install gcc {python}-devel; another compiler: "
        "export CC=...)",
    )


def set_tf32(allowed: bool) -> None:
    """Allow TF32 in fp32 matrix products and convolutions of this process on a GPU, or in neither.

    Torch allows it in convolutions and not in matrix products, so fp32 would be neither exact nor fast.
    """
    import torch

    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables with settings of torch's allocator, the current name first."""


def prefer_expandable_segments(environ: MutableMapping[str, str] | None = None) -> None:
    """Let torch's allocator on a GPU grow its blocks, which avoids fragmentation by batches of changing shape. Without
    effect if the user has set the allocator up, or once it has started."""
    env = os.environ if environ is None else environ
    if not any(name in env for name in _ALLOCATOR):
        env[_ALLOCATOR[0]] = "expandable_segments:True"
