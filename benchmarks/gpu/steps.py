"""Rows of a training step of Sana 1.6B at 1024 px: ours, diffusers', its kernels, its shapes, its optimizer.

Random weights, 300 caption rows (100 shown on average), tensors in page-locked memory, three steps to warm up and ten
timed ones. Ours is the trainer's `TrainStep` on a parallel model, EMA off. The other side is `SanaTransformer2DModel`
with fp32 weights under autocast to bf16, torch's AdamW with its defaults, clipping by `clip_grad_norm_`.
MFU needs a GPU whose peak pipeline/train/training/throughput.py knows; it counts padded rows as work, but not where
packed attention leaves them out.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import encoders
from benchmarks.gpu.rows import PREDICTED
from benchmarks.gpu.sizes import GIB, Sizes
from sana_pipe.base.errors import UserError
from sana_pipe.base.gpus import CARDS, card, of_device
from sana_pipe.base.launch import Launch
from sana_pipe.data.images.buckets import table
from sana_pipe.data.loader.loader import Batch
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.tools.planning.cost import Time
from sana_pipe.tools.planning.predict import Data, Machine, Prediction, predict
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import adapter_of
from sana_pipe.train.models.flow_matching import FlowMatching
from sana_pipe.train.parallel.mesh import open_mesh
from sana_pipe.train.parallel.parallelize import parallelize
from sana_pipe.train.parallel.shards import local
from sana_pipe.train.training import optimizers
from sana_pipe.train.training.assemble import Trainable
from sana_pipe.train.training.host_copy import plain_parts
from sana_pipe.train.training.objectives.flow import Flow
from sana_pipe.train.training.optimizers import in_backward
from sana_pipe.train.training.step import TrainStep

COMPILED = {"compile": "block"}


def settings(sizes: Sizes, microbatch: int, train: Mapping[str, Any]) -> TrainConfig:
    """The configuration's defaults for Sana 1.6B, but for these options."""
    usual = {"precision": "bf16", "activation_checkpointing": "full", "compile": "none"}
    text = "padded" if train.get("precision") == "fp32" else "packed"  # whose kernel takes 16 bits
    given = {"microbatch": microbatch, "text": text, **usual, **train}
    if sizes.dry and train.get("compile") == "block":
        given |= {} if sizes.graphs else {"compile": "none"}
    return TrainConfig.model_validate(given)


def lengths_of(sizes: Sizes, samples: int) -> Tensor:
    """Rows of each caption of a batch, of which the longest is padded to by the others."""
    least, most = sizes.rows // 15 or 1, sizes.rows * 3 // 5
    lengths = torch.randint(least, most + 1, (samples,), generator=torch.Generator().manual_seed(0))
    lengths[0] = sizes.rows
    return lengths


def step_flops(sizes: Sizes, samples: int, packed: bool) -> int:
    """Operations of the model in one step. Padding counts where it is computed, so not in packed captions."""
    rows = int(lengths_of(sizes, samples).sum()) if packed else samples * sizes.rows
    return sizes.config.training_flops(samples, sizes.side**2, rows)


def batch_of(sizes: Sizes, samples: int, packed: bool, shape: tuple[int, int] | None = None) -> Batch:
    """One microbatch in page-locked memory. shape: height and width of the latents."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    height, width = shape or (sizes.side, sizes.side)
    lengths = lengths_of(sizes, samples)
    mask = torch.arange(sizes.rows)[None] < lengths[:, None]
    captions = (normal(samples, sizes.rows, sizes.config.caption_channels) * mask[..., None]).bfloat16()
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int() if packed else None
    latents = (samples, sizes.config.in_channels, height, width)
    tensors = (normal(*latents).bfloat16(), captions[mask] if packed else captions, mask, normal(*latents))
    pinned = (t.pin_memory() if torch.cuda.is_available() else t for t in (*tensors, normal(samples)))
    clean, rows, valid, noise, logit = pinned
    pixels = height * sizes.compression, width * sizes.compression
    return Batch(clean, rows, valid, noise, logit, tuple(range(samples)), pixels, bounds)


@torch.no_grad()
def _random(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        values = local(parameter)
        values.fill_(0.01) if name.endswith("caption_norm.weight") else values.normal_(std=0.02)


class Ours(NamedTuple):
    step: TrainStep
    optimizer: torch.optim.Optimizer
    train: TrainConfig


def ours(sizes: Sizes, train: TrainConfig, ending: ExitStack) -> Ours:
    """The trainer's step. `ending` closes the process group."""
    mesh = ending.enter_context(open_mesh(Launch(), train.parallel, sizes.device))
    trainable = Trainable(sizes.config, Flow(train.flow), adapter_of(train, sizes.config))
    model = parallelize(trainable.module(train), mesh, train)
    _random(model.module)
    model.module.train()
    optimizer = optimizers.build(model.module, train.optim, sizes.device)
    if train.optim.in_backward:
        in_backward.fuse(optimizer, model)
    return Ours(TrainStep(model, trainable.objective, optimizer, train, sizes.device), optimizer, train)


def diffusers(sizes: Sizes, microbatch: int, checkpointing: bool) -> Callable[[Batch], None]:
    """The same step with diffusers' model under autocast."""
    from diffusers import SanaTransformer2DModel

    with torch.device("meta"):
        model = SanaTransformer2DModel(**{k: v for k, v in sizes.config.to_dict().items() if not k.startswith("_")})
    model = model.to_empty(device=sizes.device).train()
    _random(model)
    if checkpointing:
        model.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    flow = FlowMatching(TrainConfig().flow)

    def step(batch: Batch) -> None:
        sigma, timesteps = (x.to(sizes.device) for x in flow.sigmas(batch.logit))
        latents, noise, captions, mask = (
            x.to(sizes.device, non_blocking=True) for x in (batch.latents, batch.noise, batch.captions, batch.mask)
        )
        noised, target = flow.noised(latents, noise, sigma), flow.target(latents, noise)
        with torch.autocast(sizes.device.type, torch.bfloat16):
            out = model(noised, encoder_hidden_states=captions, encoder_attention_mask=mask, timestep=timesteps).sample
        flow.loss(out, target).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def speed(sizes: Sizes, seconds: float, samples: int, precision: str = "bf16", packed: bool = False) -> dict[str, Any]:
    """images/s, MFU, milliseconds and memory of a step."""
    gpu = of_device(sizes.device) if sizes.device.type == "cuda" else None
    mfu = None if gpu is None else step_flops(sizes, samples, packed) / seconds / (gpu.tflops(precision) * 1e12)
    return {"images_per_s": samples / seconds, "mfu": mfu, "step_ms": 1e3 * seconds, **sizes.memory()}


def data_of(sizes: Sizes, samples: int) -> Data:
    """One bucket."""
    pixels = sizes.side * sizes.compression
    return Data({(pixels, pixels): samples}, None, sizes.rows, sizes.compression, sizes.config.in_channels)


@functools.cache
def _prediction(train: str, sizes: Sizes, samples: int, name: str) -> Prediction:
    """By the configuration as JSON; rows of a dry run are often alike."""
    machine = Machine(card(name), card(name).memory, 1)
    return predict(TrainConfig.model_validate_json(train), sizes.config, data_of(sizes, samples), machine)


def predicted(sizes: Sizes, train: TrainConfig, samples: int, measured: Mapping[str, Any]) -> dict[str, Any]:
    """What `sana-pipe plan` says of this step, and its errors (predicted / measured - 1); null where it refuses.

    Times of a card that it does not know are those of an H200. If it breaks, the row fails and keeps its other figures.
    """
    name = torch.cuda.get_device_name(sizes.device).lower() if sizes.device.type == "cuda" else ""
    known = next((key for key in sorted(CARDS, key=len, reverse=True) if key.lower() in name), "h200")
    empty: dict[str, Any] = dict.fromkeys(PREDICTED)
    try:
        prediction = _prediction(train.model_dump_json(), sizes, samples, known)
    except UserError as refusal:
        return {**empty, "not_predicted": str(refusal).splitlines()[0]}
    except Exception:
        return {**empty, "not_predicted": traceback.format_exc()[-2000:], "ok": False}
    gib, rate = prediction.traced.total / GIB, Time.of(prediction, data_of(sizes, samples)).images_per_s
    reserved = (prediction.total - prediction.kinds["context"]) / GIB
    return {
        "predicted_gib": gib,
        "memory_error": gib / measured["peak_gib"] - 1,
        "predicted_reserved_gib": reserved,
        "reserved_error": reserved / measured["reserved_gib"] - 1,
        "predicted_images_per_s": rate,
        "time_error": measured["images_per_s"] / rate - 1,  # of seconds
    }


# ------------------------------------------------------------------------------------------------------------- rows


def step(
    sizes: Sizes, *, batch: int, train: dict[str, Any], microbatch: int | None = None, cap_gib: float | None = None
) -> dict[str, Any]:
    """Our step on `batch` samples. cap_gib: what the process may allocate."""
    sizes.cap(cap_gib)
    samples = sizes.count(batch)
    each = samples if microbatch is None else max(1, samples * microbatch // batch)
    given = settings(sizes, each, train)
    with ExitStack() as ending:
        run = ours(sizes, given, ending).step
        part = batch_of(sizes, each, given.text == "packed")
        parts = [part] * (samples // each)
        seconds = sizes.after_warming(lambda: run(parts, 1))
        run.await_verdict()
        figures = speed(sizes, seconds, samples, given.precision, given.text == "packed")
        if given.adapter is not None:
            figures["mfu"] = None  # of a whole training's operations
    return figures | predicted(sizes, given, samples, figures)


def peer(sizes: Sizes, *, batch: int, checkpointing: bool, resident: bool = False) -> dict[str, Any]:
    """diffusers' step. resident: with both encoders on the GPU, first from cached records, then with the encoders in
    the loop, as who has no cache must train."""
    samples = sizes.count(batch)
    run, cached = diffusers(sizes, samples, checkpointing), batch_of(sizes, samples, packed=False)
    online = encoders.online(sizes, samples) if resident else None
    figures = speed(sizes, sizes.after_warming(lambda: run(cached)), samples)
    if online is None:
        return figures

    def encoded() -> None:
        latents, captions, mask = online()
        run(replace(cached, latents=latents, captions=captions, mask=mask))

    in_loop = speed(sizes, sizes.after_warming(encoded), samples)
    return figures | {f"online_{key}": value for key, value in in_loop.items()}


CLASSES = (
    ("linear attention", r"^_moments$|^_query_forward$|^_query_backward$|^_key_value_backward$|linear_attention"),
    ("gated convolution", r"^_gate_forward$|^_gate_backward$|^_input_backward$|^_sum_parts$|gated_convolution"),
    ("optimizer", r"multi_tensor|fused_?adam|_foreach_|optimizer|Optimizer"),
    ("softmax attention", r"flash|fmha|attention"),
    ("matrix product", r"gemm|nvjet|cublas|cutlass|sm\d+_xmma|addmm|::mm|::bmm|::linear"),
    ("compiled", r"^triton_"),
    ("convolution", r"conv|cudnn|winograd|dgrad|wgrad"),
    ("norm", r"norm"),
    ("copy", r"memcpy|memset|copy|::_?to|cat|clone|contiguous|fill|zero"),
    ("reduction", r"reduce|::sum|::mean"),
    ("elementwise", r"elementwise|vectorized|::"),
)


def kernel_class(name: str) -> str:
    """Class of a kernel by its name: the first that matches."""
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")


@contextmanager
def generator_reads() -> Iterator[list[str]]:
    """The states of generators that are read inside, which on a GPU waits for it: one name each."""
    reads: list[str] = []

    def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            reads.append(plain.__module__)
            return plain(*given, **more)

        return call

    with (
        mock.patch.object(torch, "get_rng_state", counted(torch.get_rng_state)),
        mock.patch.object(torch.cuda, "get_rng_state", counted(torch.cuda.get_rng_state)),
    ):
        yield reads


def profile_step(sizes: Sizes, *, batch: int, train: dict[str, Any]) -> dict[str, Any]:
    """One step by class of kernel: milliseconds and launches. Busy time is the sum over kernels; what is missing to
    the step's time, measured without the profiler, is idle. In a dry run operations stand for kernels."""
    samples = sizes.count(batch)
    given = settings(sizes, samples, train)
    on_gpu = sizes.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with ExitStack() as ending:
        run, part = ours(sizes, given, ending).step, batch_of(sizes, samples, given.text == "packed")
        seconds = sizes.after_warming(lambda: run([part], 1))
        with profile(activities=activities) as trace, generator_reads() as reads:
            run([part], 1)
            run.await_verdict()
            sizes.synchronize()
    spent: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for event in trace.events() or []:
        if on_gpu and (event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation):
            continue  # the host's side, and named ranges of kernels
        microseconds = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        kind = kernel_class(event.name)
        spent[kind] += microseconds / 1e3
        launches[kind] += 1
        names[event.name[:100]] += microseconds / 1e3
    busy = sum(spent.values())
    return {
        "step_ms": 1e3 * seconds,
        "busy_ms": busy,
        "idle_share": max(0.0, 1 - busy / (1e3 * seconds)),
        "launches": sum(launches.values()),
        "ms_by_class": dict(spent.most_common()),
        "launches_by_class": dict(launches.most_common()),
        "slowest": dict(names.most_common(15)),
        "generator_copies": len(reads),
    }


def buckets(sizes: Sizes, *, batch: int, train: dict[str, Any]) -> dict[str, Any]:
    """A step of every bucket twice: what first uses cost, what is reserved in the end, graphs that were compiled."""
    samples = sizes.count(batch)
    given = settings(sizes, samples, train)
    shapes = [(2, 3), (4, 2)] if sizes.dry else [(h // 32, w // 32) for h, w in table(DataConfig(resolution=1024), 32)]
    with ExitStack() as ending:
        run = ours(sizes, given, ending).step
        parts = [batch_of(sizes, samples, given.text == "packed", shape) for shape in shapes]

        def every() -> None:
            for part in parts:
                run([part], 1)

        torch._dynamo.utils.counters.clear()
        first, second = sizes.seconds(every, 1), sizes.seconds(every, 1)
        run.await_verdict()
        segments = torch.cuda.memory_snapshot() if sizes.device.type == "cuda" else []
    return {
        "buckets": len(shapes),
        "first_s": first,
        "second_s": second,
        "images_per_s": samples * len(shapes) / second,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "expandable_segments": sum(bool(segment.get("is_expandable")) for segment in segments),
        **sizes.memory(),
    }


def optimizer(sizes: Sizes, *, train: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's step alone on gradients of 1.6B parameters: milliseconds, peak and bytes of its state."""
    given = settings(sizes, 1, train)
    with ExitStack() as ending:
        made = ours(sizes, given, ending)
        parameters = [p for group in made.optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        seconds = sizes.after_warming(made.optimizer.step)
        states = [
            local(x) for s in made.optimizer.state.values() for x in s.values() if isinstance(x, Tensor) and x.ndim
        ]
        size = sum(part.nbytes for x in states for part in plain_parts(x))
    return {"step_ms": 1e3 * seconds, "state_gib": size / GIB, **sizes.memory()}
