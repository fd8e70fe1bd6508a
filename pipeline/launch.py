"""The launcher's variables: this process's rank, its device, and accelerate's settings.

`detect()` turns the variables of torchrun, `accelerate launch` (the same names) or SLURM's `srun` into a `Launch`. A
wrong rank would train on the wrong slice, and a precision or FSDP option that is accepted but not obeyed would be
another run than its owner believes: so `check_accelerate()` refuses these, and `mpirun` is refused, not guessed.
`resolve_device()` turns `auto` into a device, `set_tf32()` and `prefer_expandable_segments()` set up the process for
it. Only this module reads or writes the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pipeline.config import TrainConfig
from pipeline.errors import UserError

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


def scheduled_attempt(environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """This process's SLURM job and how often SLURM has requeued it; None outside of SLURM."""
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


def check_accelerate(train: TrainConfig, device: torch.device, environ: Mapping[str, str] | None = None) -> None:
    """Refuse what `accelerate launch` exports for `Accelerator.prepare`: a training would ignore it, since only the
    configuration decides.

    Raises:
        UserError: one line per variable, with the setting of the configuration.
    """
    env = os.environ if environ is None else environ
    off, precision = {"", "0", "false", "no"}, {"fp32": "no", "bf16_pure": "no"}.get(train.precision, train.precision)
    accepted: dict[str, tuple[set[str], str]] = {
        "MIXED_PRECISION": ({precision}, f"train.precision is {train.precision} (= {precision!r} there)"),
        **dict.fromkeys(("USE_FSDP", "USE_PARALLELISM_CONFIG"), (off, "train.parallel decides")),
        **dict.fromkeys(("USE_DEEPSPEED", "USE_MEGATRON_LM"), (off, "train.parallel decides")),
        "DYNAMO_BACKEND": (off, f"train.compile is {train.compile}"),
        "GRADIENT_ACCUMULATION_STEPS": ({"1"}, "bucket.batch and train.microbatch decide"),
        "CPU_AFFINITY": (off, "processes are not bound to cores here (torchrun has --numa-binding)"),
        "USE_CPU": ({*off, "true", "1", "yes"} if device.type == "cpu" else off, f"train.device is {train.device}"),
    }
    given = {name: env[f"ACCELERATE_{name}"] for name in accepted if f"ACCELERATE_{name}" in env}
    wrong = {name: value for name, value in given.items() if value.strip().lower() not in accepted[name][0]}
    if wrong:
        lines = [f"\n  ACCELERATE_{name}={value}, but {accepted[name][1]}" for name, value in wrong.items()]
        fix = "leave these answers out of `accelerate config` (or of `accelerate launch`), or start with torchrun"
        raise UserError("accelerate's environment contradicts the configuration:" + "".join(lines), fix=fix)


def resolve_device(name: str, launch: Launch | None = None) -> torch.device:
    """The device of this process. A GPU becomes the current one, which Triton and NCCL go by.

    Args:
        name: `auto` (the process's GPU if there is one, else the CPU), `cpu`, `cuda` (the process's GPU) or `cuda:N`.
        launch: `local_rank` is the number of the process's GPU; None: GPU 0.

    Raises:
        UserError: an unknown name, or a GPU that this machine does not have.
    """
    import torch

    launch = launch or Launch()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name == "cpu":
        return torch.device("cpu")
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
            fix="start no more processes per node than it has GPUs, or set device: cpu",
        )
    try:
        torch.cuda.set_device(index)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"GPU {index} cannot be used", found=reason, fix="nvidia-smi shows what occupies it") from None
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each shape, tens of milliseconds each
    return torch.device("cuda", index)


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
