"""What the launcher says about this process, read in one place.

What: `detect()` turns the variables of torchrun, `accelerate launch` (the same ones) or SLURM's `srun` into one
`Launch`; `check_accelerate()` refuses settings that arrive through accelerate's variables and contradict the
configuration; `resolve_device()` turns `auto` into a device. This is the only module that reads the environment.
Why: a process that misreads its rank trains on the wrong slice or overwrites a neighbour's files, and a precision
or FSDP option that the launcher accepted and nobody obeys is a run of another kind than its owner believes.
Price: variables of launchers that are not listed here have no effect; `mpirun` alone is refused, not guessed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.config import TrainConfig
from pipeline.errors import UserError

if TYPE_CHECKING:
    import torch

Kind = Literal["single", "torchrun", "accelerate", "slurm"]


@dataclass(frozen=True)
class Launch:
    """One process among those of a launch.

    rank and world count over all nodes, local_rank and local_world within this node. `rendezvous` is where the
    processes meet, as an init method of `torch.distributed` (None for a single process, which needs no port).
    `advice` holds remarks about the environment that a person should see; they change nothing.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    kind: Kind = "single"
    rendezvous: str | None = None
    advice: tuple[str, ...] = ()

    @property
    def is_main(self) -> bool:
        """True on the one process that prints and writes what is written once."""
        return self.rank == 0


def detect(environ: Mapping[str, str] | None = None) -> Launch:
    """Read the launcher's variables. torchrun's win over SLURM's, because torchrun may run inside a SLURM step.

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
            "this process was started by mpirun, which does not say where the processes meet",
            expected="torchrun, accelerate launch or srun",
            found=f"OMPI_COMM_WORLD_SIZE={env['OMPI_COMM_WORLD_SIZE']}",
            fix="torchrun --nproc-per-node N --no-python sana-pipe train ...",
        )
    advice: tuple[str, ...] = ()
    if "ACCELERATE_MIXED_PRECISION" in env and "MASTER_PORT" in env:
        advice = (
            "accelerate launch --cpu starts one process and leaves the others to mpirun, whatever --num_processes is: "
            "this runs as a single process; for several on the CPU use torchrun --standalone --nproc-per-node N",
        )
    if "SLURM_JOB_ID" in env and _number(env, "SLURM_NTASKS", 1) > 1:
        advice = (
            f"this SLURM job has {env['SLURM_NTASKS']} tasks, but the command was not started by srun or torchrun: "
            "it runs as a single process",
        )
    return Launch(advice=advice)


def share_of_work(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """(index, count): this process's share where work is shared without communication: rank and world, times the
    SLURM array if there is one. The ids of an array without a common step (`--array=1,5,7`) count as `0..max`.

    Raises:
        UserError: as `detect`.
    """
    env = os.environ if environ is None else environ
    here = detect(env)
    if "SLURM_ARRAY_TASK_ID" not in env:
        return here.rank, here.world
    own = _number(env, "SLURM_ARRAY_TASK_ID")
    first, last = _number(env, "SLURM_ARRAY_TASK_MIN", 0), _number(env, "SLURM_ARRAY_TASK_MAX", own)
    count, step = _number(env, "SLURM_ARRAY_TASK_COUNT", 0), _number(env, "SLURM_ARRAY_TASK_STEP", 1)
    if step > 0 and last - first == step * (count - 1) and (own - first) % step == 0:
        index = (own - first) // step
    else:
        index, count = own, max(own, last) + 1
    if not 0 <= index < count:
        raise UserError(
            "SLURM's array variables contradict each other",
            found=f"task {own} of {first}..{last}, {count} tasks",
            fix="sana-pipe encode --task-index I --task-count N",
        )
    return index * here.world + here.rank, count * here.world


def scheduled_attempt(environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """The SLURM job that this process belongs to, and how often SLURM has put it back into the queue; None outside."""
    env = os.environ if environ is None else environ
    if "SLURM_JOB_ID" not in env:
        return None
    return f"{env.get('SLURM_CLUSTER_NAME', '')} {env['SLURM_JOB_ID']}", _number(env, "SLURM_RESTART_COUNT", 0)


def ray_address(environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Host and port of the Ray cluster that RAY_ADDRESS names; None if it names none, or in another way (`auto`)."""
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
    # A torchrun of one process per node may leave the local ones out; several per node need them.
    local_rank, local_world = _number(env, "LOCAL_RANK", 0), _number(env, "LOCAL_WORLD_SIZE", 1)
    if "LOCAL_WORLD_SIZE" not in env and "LOCAL_RANK" in env:
        local_world = max(local_rank + 1, 1)
    advice: tuple[str, ...] = ()
    if _number(env, "TORCHELASTIC_MAX_RESTARTS", 0) > 0 and _shares_store(env):
        advice = (f"--max-restarts will not help a training run: {_STALE}; {_restart_fix(env)}",)
    kind: Kind = "accelerate" if "ACCELERATE_MIXED_PRECISION" in env else "torchrun"
    return _checked(Launch(rank, world, local_rank, local_world, kind, "env://" if world > 1 else None, advice))


_STALE = "restarted processes meet on a store that still holds the addresses of the lost ones"


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
    """Refuse a restart by torchrun whose processes would wait for the lost ones until the time-out.

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
        local_world = _expand_counts(counts)[_number(env, "SLURM_NODEID", 0)]
    rendezvous = None
    if world > 1:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
        host = env.get("MASTER_ADDR") or (first_host(nodes) if nodes else None)
        if host is None:
            raise UserError(
                "SLURM does not say which nodes this step has, so the processes cannot meet",
                expected="SLURM_STEP_NODELIST or SLURM_JOB_NODELIST",
                fix="export MASTER_ADDR=<name of the first node> before srun",
            )
        # The same on all tasks of a step, another one for another job or step on the same node.
        job, step = _number(env, "SLURM_JOB_ID", 0), _number(env, "SLURM_STEP_ID", 0)
        port = _number(env, "MASTER_PORT", 20000 + (job * 7 + step) % 20000)
        rendezvous = f"tcp://{host}:{port}"
    return _checked(Launch(rank, world, local_rank, local_world, "slurm", rendezvous))


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: `gpu[03-05,9],login1` is `gpu03`.

    Raises:
        UserError: text that is not a node list.
    """
    match = re.match(r"^([^\[\],]+)(?:\[([0-9]+)[^\]]*\]([^\[,]*))?", nodes.strip())
    if match is None:
        raise UserError("SLURM's node list cannot be read", found=repr(nodes), fix="export MASTER_ADDR before srun")
    stem, number, tail = match.groups()
    return stem + (number or "") + (tail or "")


def _expand_counts(text: str) -> list[int]:
    """`4(x2),3` is [4, 4, 3]: SLURM's tasks per node."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UserError("SLURM's tasks per node cannot be read", found=repr(text))
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


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


# Options of accelerate's FSDP plugin that change neither memory nor numbers here: FSDP2 has no such switch (original
# parameters, prefetch), the start weights are equal on every process anyway, and checkpoints are always sharded.
_FSDP_WITHOUT_EFFECT = {
    "FSDP_MIN_NUM_PARAMS",
    "FSDP_BACKWARD_PREFETCH",
    "FSDP_FORWARD_PREFETCH",
    "FSDP_USE_ORIG_PARAMS",
    "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "FSDP_SYNC_MODULE_STATES",
    "FSDP_STATE_DICT_TYPE",
}
_BLOCK_CLASS = "SanaTransformerBlock"


def check_accelerate(
    train: TrainConfig,
    launch: Launch,
    environ: Mapping[str, str] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Refuse what accelerate's environment asks for and the configuration does not say.

    `accelerate launch` exports its answers (`ACCELERATE_*`, `FSDP_*`, `PARALLELISM_CONFIG_*`) and expects the script
    to hand the model to `Accelerator.prepare`. Here the configuration alone decides; a difference would be ignored
    in silence, so it stops the run, each one by name.

    Args:
        sizes: `dp_replicate`, `dp_shard` and `tp` as they follow from `train.parallel`; default: every process holds a
            shard.

    Raises:
        UserError: one line per contradiction, with the setting that ends it.
    """
    env = os.environ if environ is None else environ
    layout = sizes or {"dp_replicate": 1, "dp_shard": launch.world, "tp": 1}
    wrong: list[str] = []

    def need(name: str, allowed: set[str], here: str) -> None:
        value = env.get(name)
        if value is not None and value.strip().lower() not in allowed:
            wrong.append(f"{name}={value}, but {here}")

    precision = {"fp32": "no", "bf16_pure": "no"}.get(train.precision, train.precision)
    need("ACCELERATE_MIXED_PRECISION", {precision}, f"train.precision is {train.precision} (= {precision!r} there)")
    off = {"", "0", "false", "no"}
    need("ACCELERATE_USE_DEEPSPEED", off, "the model is spread with FSDP2, not DeepSpeed")
    need("ACCELERATE_USE_MEGATRON_LM", off, "the model is spread with FSDP2, not Megatron-LM")
    dynamo = off if train.compile == "none" else {train.compile_backend.lower()}
    need("ACCELERATE_DYNAMO_BACKEND", dynamo, f"train.compile is {train.compile} ({train.compile_backend})")
    need("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", {"1"}, "accumulation follows from bucket.batch and train.microbatch")
    need("ACCELERATE_CPU_AFFINITY", off, "processes are bound to no cores here (torchrun has --numa-binding)")
    kind = _kind_of_device(train.device)
    if kind == "cuda":
        need("ACCELERATE_USE_CPU", off, f"train.device is {train.device}")
    torch_device = env.get("ACCELERATE_TORCH_DEVICE", kind)
    if torch_device.partition(":")[0] != kind:
        wrong.append(f"ACCELERATE_TORCH_DEVICE={torch_device}, but train.device is {train.device}")
    _check_parallelism_config(env, layout, wrong)
    _check_fsdp(env, train, layout, need, wrong)
    if wrong:
        raise UserError(
            "accelerate's environment contradicts the configuration:\n  " + "\n  ".join(wrong),
            fix="make the answers in `accelerate config` (or the options of `accelerate launch`) equal to the "
            "configuration, or start with torchrun",
        )


def _kind_of_device(name: str) -> str:
    if name != "auto":
        return name.partition(":")[0]
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_fsdp(
    env: Mapping[str, str],
    train: TrainConfig,
    sizes: Mapping[str, int],
    need: Callable[[str, set[str], str], None],
    wrong: list[str],
) -> None:
    parallel = train.parallel
    strategy = {"1", "full_shard"}
    what = "every process holds its own shard (FULL_SHARD)"
    if sizes["dp_replicate"] > 1 and env.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() not in {"1", "true"}:
        both = sizes["dp_shard"] > 1
        strategy = {"4", "hybrid_shard"} if both else {"3", "no_shard"}
        what = f"train.parallel.dp_replicate is {sizes['dp_replicate']} ({'HYBRID_SHARD' if both else 'NO_SHARD'})"
    known = {
        "FSDP_VERSION": ({"2"}, "only FSDP2 is used (fsdp_version: 2)"),
        "FSDP_SHARDING_STRATEGY": (strategy, what),
        "FSDP_RESHARD_AFTER_FORWARD": (
            {"true", "full_shard"} if parallel.reshards else {"false", "shard_grad_op"},
            f"train.parallel.reshard_after_forward is {str(parallel.reshards).lower()}",
        ),
        "FSDP_OFFLOAD_PARAMS": (
            {str(parallel.offload == "all").lower()},
            f"train.parallel.offload is {parallel.offload}",
        ),
        "FSDP_AUTO_WRAP_POLICY": ({"transformer_based_wrap"}, "each transformer block is wrapped"),
        "FSDP_TRANSFORMER_CLS_TO_WRAP": ({_BLOCK_CLASS.lower()}, f"the wrapped block is {_BLOCK_CLASS}"),
        "FSDP_ACTIVATION_CHECKPOINTING": (
            {"false"} if train.activation_checkpointing == "none" else {"true"},
            f"train.activation_checkpointing is {train.activation_checkpointing}",
        ),
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (
            {str(train.activation_offload).lower()},
            f"train.activation_offload is {str(train.activation_offload).lower()}",
        ),
        "FSDP_IGNORED_MODULES": ({"", "none"}, "no module is left out of the sharding"),
    }
    for name, (allowed, here) in known.items():
        need(name, allowed, here)
    if env.get("ACCELERATE_USE_FSDP", "").lower() in {"1", "true"}:
        unknown = sorted(n for n in env if n.startswith("FSDP_") and n not in known and n not in _FSDP_WITHOUT_EFFECT)
        wrong.extend(f"{name}={env[name]}, but there is no such setting here" for name in unknown)


def _check_parallelism_config(env: Mapping[str, str], sizes: Mapping[str, int], wrong: list[str]) -> None:
    if env.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() not in {"1", "true"}:
        return
    here = {**{name.upper(): size for name, size in sizes.items()}, "CP": 1, "SP": 1}
    for name, size in here.items():
        value = env.get(f"PARALLELISM_CONFIG_{name}_SIZE", str(size))
        if value != str(size):
            wrong.append(f"PARALLELISM_CONFIG_{name}_SIZE={value}, but here it is {size}")


def resolve_device(name: str, launch: Launch | None = None) -> torch.device:
    """`auto` is this process's GPU if there is one, else the CPU; `cuda` is this process's GPU.

    Args:
        name: `auto`, `cpu`, `cuda` or `cuda:N`.
        launch: chooses the GPU by `local_rank`; without it, GPU 0.

    Raises:
        UserError: a name that is no device, or a GPU that this machine does not have.
    """
    import torch

    here = launch or Launch()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise UserError("there is no such device", expected="auto, cpu, cuda or cuda:N", found=repr(name))
    if match[1] is not None and here.local_world > 1:
        raise UserError(
            f"the device {name!r} is one GPU, and {here.local_world} processes run on this node",
            fix="device: cuda (each process then takes the GPU of its local rank)",
        )
    index = int(match[1]) if match[1] is not None else here.local_rank
    if index >= count:
        raise UserError(
            f"this process needs GPU {index} of this machine",
            expected=f"a GPU number below {count}" if count else "an NVIDIA GPU and a CUDA build of torch",
            found=f"{count} GPUs, {here.local_world} processes on this node",
            fix="start no more processes per node than it has GPUs, or set device: cpu",
        )
    return torch.device("cuda", index)
