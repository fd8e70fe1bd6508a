"""Start values, saves and resumed runs on several processes: python -m tests.support.workers.checkpoints FOLDER.

Imports once, then forks the processes of each launch. Every check writes what it found to FOLDER/NAME.json, and the
tests judge.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from sana_pipe.base.errors import UserError
from sana_pipe.base.launch import Launch
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config
from sana_pipe.data.loader.loader import Batch
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.sana_files import WeightFiles, save_weights
from sana_pipe.train.models.spec import Values
from sana_pipe.train.parallel import collectives, mesh
from sana_pipe.train.parallel.load_sharded import load_sharded
from sana_pipe.train.parallel.parallelize import parallelize
from sana_pipe.train.training import checkpoint, metrics
from sana_pipe.train.training.trainer import fit
from tests.support.tiny_sana import load_weights
from tests.support.workers import strategies, tiny_run
from tests.support.workers.strategies import DDP, FSDP2, TP

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
CHAIN: list[tuple[str, int, dict[str, Any]]] = [
    ("one process", 1, {}),
    ("FSDP2", 2, FSDP2),
    ("TP", 2, TP),
    ("PP x FSDP2", 4, {"pp_size": 2}),
    ("FSDP2 x TP", 4, {"tp_size": 2}),
    ("FSDP2 over 4", 4, {}),
    ("DDP", 2, DDP),
    ("one process again", 1, {}),
]
"""Name, processes and `train.parallel` of the legs of a run; each does two steps and hands over a checkpoint."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP2": (2, FSDP2),
    "FSDP2 over 3": (3, {}),
    "TP": (2, TP),
    "FSDP2 x TP": (4, {"tp_size": 2}),
    "DDP": (2, DDP),
    "PP": (2, {"pp_size": 2}),
}
LARGE = SanaConfig.from_arch(
    {
        "in_channels": 4,
        "num_layers": 4,
        "num_attention_heads": 24,
        "attention_head_dim": 32,
        "num_cross_attention_heads": 12,
        "cross_attention_head_dim": 64,
        "caption_channels": 64,
    },
    8,
)
"""41 M parameters, 165 MB in fp32."""


def launch(name: str, world: int, function: Callable[[Launch], Any]) -> None:
    """Fork a launch; what its first process returns is written to FOLDER/name.json."""

    def process(own: Launch) -> None:
        result = function(own)
        if own.is_main:
            (FOLDER / f"{name}.json").write_text(json.dumps(result))

    where = FOLDER / f"meet-{name.replace(' ', '-')}"
    where.mkdir()
    strategies.launches(world, where, process)


def run(own: Launch, settings: Config, begin: Path | None = None, **options: Any) -> str:
    """`fit` with made-up batches; what it refused."""
    try:
        layout = mesh.check_sizes(settings.train.parallel, own.world)
        task = tiny_run.task(settings, layout.data_rank(own.rank), layout.data_world, **options)
        fit(settings.train, task, own, resume="auto", origin=begin, log=lambda line: None)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ----------------------------------------------------------------------------------------------------------- checks


def chain() -> None:
    """A run that changes its strategy every two steps, and one that does not."""
    steps = 2 * len(CHAIN)
    common: dict[str, Any] = {"ema": {"decay": 0.9}, "keep_checkpoints": 99}
    whole = tiny_run.config(FOLDER / "whole run", steps=steps, save_every=2, **common)
    launch("whole", 1, lambda own: run(own, whole))
    for number, (name, world, parallel) in enumerate(CHAIN, start=1):
        settings = tiny_run.config(FOLDER / "chain run", steps=2 * number, parallel=parallel, microbatch=2, **common)
        launch(f"leg {name}", world, lambda own, settings=settings: run(own, settings))  # type: ignore[misc]
    runs = [FOLDER / name for name in ("whole run", "chain run")]
    expected, actual = (metrics.read(folder / "metrics.jsonl") for folder in runs)

    def distances(ema: bool) -> list[float]:
        """From the uninterrupted run, of the weights that each leg hands over, as `export` reads them."""
        legs = []
        for step in range(2, steps + 1, 2):
            ends = [checkpoint.folder_of(folder / "checkpoints", step) for folder in runs]
            ours, theirs = (dict(checkpoint.ModelTensors(end, ema=ema)) for end in ends)
            legs.append(tiny_run.distance(theirs, ours))
        return legs

    last = [dict(checkpoint.ModelTensors(checkpoint.newest(runs[1] / "checkpoints"), ema=ema)) for ema in (False, True)]  # type: ignore[arg-type]
    result = {
        "losses": [abs(a["loss"] - b["loss"]) for a, b in zip(expected, actual, strict=True)],
        "weights": distances(ema=False),
        "averages": distances(ema=True),
        "averages from weights": tiny_run.distance(last[1], last[0]),
        "legs": [json.loads((FOLDER / f"leg {name}.json").read_text()) for name, _, _ in CHAIN],
        "processes": [row["processes"] for row in starts(FOLDER / "chain run/metrics.jsonl")],
    }
    (FOLDER / "chain.json").write_text(json.dumps(result))


def begun() -> None:
    """Runs that begin from a checkpoint of one process, with the batches of its further steps, on other processes."""
    common: dict[str, Any] = {"ema": {"decay": 0.9}}
    origin = FOLDER / "origin run"
    launch("origin", 1, lambda own: run(own, tiny_run.config(origin, steps=5, save_every=2, **common)))
    expected = [row["loss"] for row in metrics.read(origin / "metrics.jsonl")][2:]
    whole = [
        dict(checkpoint.ModelTensors(checkpoint.folder_of(origin / "checkpoints", 5), ema=ema)) for ema in (False, True)
    ]
    since, result = checkpoint.folder_of(origin / "checkpoints", 2), {}

    def touch(step: int) -> Batch:
        return tiny_run.global_batch(step + 2)

    for name, world, parallel in CHAIN[:4]:
        settings = tiny_run.config(FOLDER / f"begun {name}", steps=3, parallel=parallel, microbatch=2, **common)
        launch(f"begun {name}", world, lambda own, s=settings: run(own, s, since, touch=touch))  # type: ignore[misc]
        losses = [row["loss"] for row in metrics.read(FOLDER / f"begun {name}/metrics.jsonl")]
        end = checkpoint.folder_of(FOLDER / f"begun {name}/checkpoints", 3)
        result[name] = {
            "refused": json.loads((FOLDER / f"begun {name}.json").read_text()),
            "losses": [abs(a - b) for a, b in zip(expected, losses, strict=True)],
            "weights": [
                tiny_run.distance(dict(checkpoint.ModelTensors(end, ema=ema)), whole[ema]) for ema in (False, True)
            ],
        }
    (FOLDER / "begun.json").write_text(json.dumps(result))


def starts(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row.get("event") == "start"]


def filled(name: str, world: int, parallel: dict[str, Any]) -> None:
    """Start values read and drawn in slices, put together again and compared with those of one process."""
    settings = tiny_run.config(parallel=parallel)
    assert settings.model.arch is not None
    config = SanaConfig.from_arch(settings.model.arch, 8)

    def compare(own: Launch) -> dict[str, Any]:
        result: dict[str, Any] = {}
        with mesh.open_mesh(own, settings.train.parallel, torch.device("cpu")) as group:
            sources: dict[str, tuple[Values, dict[str, Tensor]]] = {
                "drawn": (config.initial(3), dict(SanaTransformer.from_scratch(config, 3).named_parameters())),
                "stored": (WeightFiles(FOLDER / "stored"), load_weights(FOLDER / "stored")[1]),
            }
            for kind, (source, expected) in sources.items():
                module = parallelize(SanaTransformer.on_meta(config), group, settings.train).module
                load_sharded(module, source)
                actual = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in module.named_parameters()}
                right = all(torch.equal(value.detach(), expected[name].float()) for name, value in actual.items())
                there = {name for names in collectives.all_gather_objects(list(actual)) for name in names}
                result[kind] = all(collectives.all_gather_objects(right)) and there == set(expected)
                result[f"{kind}, dtypes"] = sorted({str(p.dtype) for p in actual.values()})
        return result

    launch(f"filled {name}", world, compare)


def memory() -> None:
    """What each of two processes reads, and what its memory grows by at most."""
    settings = tiny_run.config(parallel=FSDP2)

    def write(own: Launch) -> None:  # in a process of its own: what it frees is not there to be used again
        weights = SanaTransformer.from_scratch(LARGE, 1).state_dict()
        save_weights(weights, LARGE, FOLDER / "large", torch.float32)

    def measure(own: Launch) -> dict[str, Any]:
        handed, seen = [0], [0]

        def counted(source: Values) -> Values:
            read = source.read

            def call(*box: Any, **named: Any) -> Tensor:
                value = read(*box, **named)
                handed[0] += value.numel() * value.itemsize
                seen[0] = max(seen[0], resident())
                return value

            source.read = call  # type: ignore[method-assign]
            return source

        with mesh.open_mesh(own, settings.train.parallel, torch.device("cpu")) as group:
            result: dict[str, Any] = {}
            for kind, source in (("drawn", LARGE.initial(0)), ("stored", WeightFiles(FOLDER / "large"))):
                handed[0], seen[0], before = 0, 0, resident()
                module = parallelize(SanaTransformer.on_meta(LARGE), group, settings.train).module
                load_sharded(module, counted(source))
                result[kind] = {"grown": max(seen[0], resident()) - before, "read": handed[0]}
                del module
            everyone = collectives.all_gather_objects(result)
        elements = sum(torch.Size(shape).numel() for shape in LARGE.initial(0).shapes.values())
        return {"processes": everyone, "model": 4 * elements, "file": file_size()}

    def file_size() -> int:
        return sum(path.stat().st_size for path in (FOLDER / "large").glob("*.safetensors"))

    launch("large", 1, write)
    launch("memory", 2, measure)


def resident() -> int:
    """Bytes of this process's own memory, without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def aside() -> None:
    """Saves after every step whose thread is late on the first process, while the training goes on."""
    prepare = checkpoint.Saver.prepare

    def late(*where: Any, **named: Any) -> None:
        time.sleep(0.3)
        prepare(*where, **named)

    def slowed(own: Launch) -> str:
        checkpoint.Saver.prepare = late  # type: ignore[method-assign]
        return run(own, tiny_run.config(FOLDER / "aside run", steps=9, save_every=3, parallel=FSDP2), delay=0.05)

    launch("aside", 2, slowed)

    def waited(own: Launch) -> str:
        checkpoint.IN_BACKGROUND = False
        return run(own, tiny_run.config(FOLDER / "waited run", steps=9, save_every=3, parallel=FSDP2))

    launch("waited", 2, waited)
    files = [
        checkpoint.read_document(FOLDER / name / "checkpoints/step-00000006").files
        for name in ("aside run", "waited run")
    ]
    (FOLDER / "aside files.json").write_text(json.dumps(files))


def failing() -> None:
    """The second process cannot write its part of the second checkpoint."""
    write = FileSystemWriter.write_data

    def full(writer: Any, *rest: Any, **named: Any) -> Any:
        if "00000004" in str(writer.path):
            raise OSError(28, "No space left on device")
        return write(writer, *rest, **named)

    def refused(own: Launch) -> list[str]:
        if own.rank == 1:
            FileSystemWriter.write_data = full  # type: ignore[assignment, method-assign]
        said = run(own, tiny_run.config(FOLDER / "failing run", steps=500, save_every=2, parallel=FSDP2), delay=0.05)
        with mesh.open_mesh(own_again(own), tiny_run.config().train.parallel, torch.device("cpu")):
            return collectives.all_gather_objects(said)

    launch("failing", 2, refused)


def own_again(own: Launch) -> Launch:
    return replace(own, rendezvous=f"{own.rendezvous}-again")


def main() -> None:
    torch.set_num_threads(1)
    config = tiny_run.config()
    assert config.model.arch is not None
    small = SanaConfig.from_arch(config.model.arch, 8)
    stored = SanaTransformer.from_scratch(small, 7).state_dict()
    save_weights(stored, small, FOLDER / "stored", torch.bfloat16, max_shard_bytes=20_000)
    for name, (world, parallel) in LAYOUTS.items():
        filled(name, world, parallel)
    memory()
    aside()
    failing()
    chain()
    begun()


if __name__ == "__main__":
    run_and_exit(main)
