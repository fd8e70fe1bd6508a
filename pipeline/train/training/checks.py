"""Everything that can refuse a run, before anything is built.

What: `check_inputs` needs no other process: it runs before the process group is opened and anything is written.
`check_start` compares model, data and checkpoint once the run directory is locked, and raises on all processes alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from sana_pipe.base import software
from sana_pipe.base.errors import ConfigError
from sana_pipe.base.launch import Launch, check_accelerate, check_compiler, check_restart, resolve_device
from sana_pipe.base.metrics import trackers
from sana_pipe.base.options import flat
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.spec import ModelSpec, text_kind_of_weights
from sana_pipe.train.parallel import pipeline_parallel, tensor_parallel
from sana_pipe.train.parallel.collectives import require_equal, run_on_all
from sana_pipe.train.parallel.mesh import Layout, check_sizes
from sana_pipe.train.training import checkpoint, drawings, optimizers
from sana_pipe.train.training.assemble import Trainable
from sana_pipe.train.training.build import architecture_of, has_packed_kernel
from sana_pipe.train.training.checkpoint import Resumed
from sana_pipe.train.training.optimizers import in_backward
from sana_pipe.train.training.task import Context, Log, TrainingTask

_OF_A_NODE = {"output", "device", "trackers"}
"""Options of `train` that may differ between nodes."""


def check_inputs(train: TrainConfig, task: TrainingTask, launch: Launch, log: Log) -> Context:
    """Refuse options that this launch, device, installation or data cannot carry out."""
    assert train.epochs is None and not train.undecided, "the stage decides them"
    layout = check_sizes(train.parallel, launch.world)
    device = resolve_device(train.device, launch)
    check_accelerate(device, precision=train.precision, compiled=train.compile, chosen=train.device)
    check_restart()
    check_compiler(device, train.compile != "none")
    optimizers.check(train.optim)
    trackers.check(train.trackers, "train.trackers")
    check_text(train, device)
    task.check(layout)
    shape = partial(architecture_of, task.model, task.sample_size)
    check_layout(train, shape, task.batches, layout)
    if task.pictures is not None:
        drawings.check(train.microbatch, task, shape())
    return Context(train, task, launch, layout, device, log)


def check_versions() -> None:
    """Refuse processes with different versions of the product or of torch, whose steps would differ. Collective."""
    ours = software.versions()
    require_equal(
        {name: ours[name] for name in ("sana-pipe", "torch")},
        "the processes have different versions",
        "install the same versions on every node",
    )


def check_start(context: Context, trainable: Trainable, resumed: Resumed | None) -> None:
    """Refuse a model that does not fit the data, or a checkpoint that this run cannot continue. Collective."""
    train, task, spec, adapter = context.train, context.task, trainable.spec, trainable.adapter
    if adapter is not None and (note := spec.adapter_note(adapter.formats)):
        context.log(f"note: {note}")
    options = dict(flat({"train": train.model_dump(mode="json", exclude=_OF_A_NODE)}))
    require_equal(
        {"snapshot": task.first_state.snapshot, **options},
        "the processes have different configurations",
        "give every node the same configuration, and numbers instead of auto where nodes have different GPUs; start "
        "again if a snapshot was published in between",
    )
    fix = "train on a snapshot made with this model's encoders, or change the model section"
    run_on_all(lambda: spec.check_widths("the snapshot", fix, channels=task.channels, text_width=task.text_width))
    if task.text_kind is not None and task.model.weights is not None:
        weights, found, of_text = task.model.weights, task.text_kind, f"{fix}; text.id names the encoder"
        run_on_all(lambda: spec.check_text_kind("the snapshot", of_text, found, text_kind_of_weights(weights, spec)))
    if task.vae_factors is not None and task.model.weights is not None:
        run_on_all(partial(spec.check_factors, "the snapshot", f"{fix}; vae.id names the VAE", *task.vae_factors))
    if task.text_rows is not None:
        run_on_all(partial(spec.check_rows, "the snapshot's text.max_length", task.text_rows))
    if task.compression is not None:
        run_on_all(partial(_check_buckets, spec, task.batches, task.compression))
    if resumed is None:
        return
    folder, document, begins = resumed
    if begins:
        run_on_all(lambda: checkpoint.check_begins(folder, document, spec, adapter))
        return
    known = task.first_state
    if task.earlier_id == document.state.snapshot:
        known = replace(known, snapshot=task.earlier_id)
    run_on_all(lambda: checkpoint.check_belongs(folder, document, known, spec, adapter))
    optimizers.check_resumable(document.config["train"], train)


def _check_buckets(spec: ModelSpec, batches: Mapping[str, int], compression: int) -> None:
    """Refuse buckets whose pictures the model cannot take, as where its patches do not divide the latents."""
    option = "encode with data.buckets that has [{height}, {width}] in its place, then sana-pipe bucket"
    for name in batches:
        height, width = map(int, name.split("x"))
        spec.check_sides(height, width, compression, option)


def check_layout(train: TrainConfig, spec: Callable[[], ModelSpec], batches: Mapping[str, int], layout: Layout) -> None:
    """Refuse a layout that a model or its batches cannot be divided for.

    Args:
        spec: gives the model's shape, where the layout divides it.
        batches: global batch by bucket name; the data-parallel size divides them.
    """
    if layout.model_parallel_size > 1:
        shape, shares = spec(), {bucket: batch // layout.data_world for bucket, batch in batches.items()}
        shape.check_parallel(layout.tp, layout.pp)
        tensor_parallel.check(shape.tensor_parallel_parts, layout.tp, shape.dropout)
        pipeline_parallel.check(shape.num_layers, shares, train.microbatch, layout.pp)
    in_backward.check(train, max(batches.values()), layout.data_world)


def check_text(train: TrainConfig, device: torch.device) -> None:
    if train.text == "packed" and device.type == "cuda" and not has_packed_kernel(train, device):
        raise ConfigError(
            "train.text: packed has no kernel on this machine",
            expected="train.precision: bf16 on a GPU of compute capability 8.0 or newer",
            found=f"train.precision: {train.precision} on {torch.cuda.get_device_name(device)}",
            fix="--set train.text=padded",
        )
