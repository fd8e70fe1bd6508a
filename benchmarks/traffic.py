"""Bytes that a block moves in a forward and a backward pass, kernels that it launches, and graphs that it needs.

One block of Sana in bf16 with fp32 tokens between the blocks, forward and backward, in three forms: the earlier code
(convolutions of (B, C, H, W), linear attention in float32 products), the present code, and the present code compiled.
Narrower than Sana 1.6B (256 for 2240), with tokens in proportion to its weights as at 1024 px and a microbatch of 8.
The real code runs on the CPU. Eager operations are seen by a TorchDispatchMode: inputs and outputs count, views and
empty memory do not. Compiled code is counted in inductor's schedule for a GPU (its Triton rules): the bytes that each
node reads and writes, and each node, fused or another kernel's call, as a launch. Operations of `kernels`
count their inputs and outputs; `with inside` adds what their Triton kernels move between themselves, although the twins
run here. Launches of a step: both passes of 20 blocks and of the model's ends (`of the passes`), then the norm of the
gradient, clipping and fused AdamW for Sana 1.6B. Casts by FSDP2 are left out: they are the same in all forms. Of the
ends, text and timestep (`conditions`) are compiled, too.
Not seen: reductions that inductor splits in two for want of rows, kernels within torch's attention, copies that cuDNN
makes of the earlier convolutions' tensors.
Graphs: over 40 buckets and 3 text lengths, padded and packed.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx
from torch._inductor.exc import InductorError
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import NopKernelSchedulerNode, Scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.memory import shape
from benchmarks.report import finish, table
from sana_pipe.base.launch import Launch
from sana_pipe.base.processes import run_and_exit
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.kernels import linear_attention as attention
from sana_pipe.train.models import sana_layers
from sana_pipe.train.models.config import FlowConfig
from sana_pipe.train.models.sana import SanaTransformer
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.sana_shape import Numerics
from sana_pipe.train.parallel import mesh
from sana_pipe.train.parallel.compile import compile_blocks, compile_conditions
from sana_pipe.train.parallel.parallelize import ParallelModel, adjoining, parallelize
from sana_pipe.train.parallel.shards import local
from sana_pipe.train.training.objectives.flow import Flow
from sana_pipe.train.training.step import TrainStep

BLOCKS = 20
LAUNCHES = {  # kernels of an operation: Triton's, or a copy of three matrices and its products
    "linear_attention": 2,
    "linear_attention_backward": 2,
    "gated_convolution": 1,
    "gated_convolution_backward": 3,
    "joined_linear": 2,
    "joined_linear_backward": 3,
}


class Counter(TorchDispatchMode):
    """Bytes of inputs and outputs, and number, of the operations that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.launches = 0
        self.named: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        name = func._schema.name.partition("::")[2]
        if not view and not name.startswith(("empty", "new_empty", "_unsafe_view", "detach", "sym_")):
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
            self.bytes += sum(moved(x) for x in tensors)
            self.launches += LAUNCHES.get(name, 1)
            self.named[name] += 1
        return result


def moved(x: Tensor) -> int:
    """Bytes of a tensor, an expanded dimension counted once."""
    return x.itemsize * math.prod(n for n, s in zip(x.shape, x.stride(), strict=True) if s or n == 0)


# ----------------------------------------------------------------------------------------------------- earlier code


class EarlierConvolution(nn.Module):
    """GLUMBConv as it was, on the parameters of the present one."""

    def __init__(self, present: Any):
        super().__init__()
        self.layers = present

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        layers: Any = self.layers
        first, depth, last = layers.conv_inverted, layers.conv_depth, layers.conv_point
        x = F.conv2d(x.unflatten(1, (height, width)).permute(0, 3, 1, 2), first.weight, first.bias)
        x = F.conv2d(F.silu(x), depth.weight, depth.bias, padding=1, groups=len(depth.bias))
        value, gate = x.unflatten(1, (-1, 2)).unbind(2)
        return F.conv2d(value * F.silu(gate), last.weight).flatten(2).transpose(1, 2)


class EarlierLinear(nn.Linear):
    """A product of its own."""


class EarlierAttention(torch.autograd.Function):
    """The products that are the twin now, each an operation; the state is computed twice."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, head_dim: int, eps: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.more = head_dim, eps
        return attention.forward(query, key, value, head_dim, eps)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value = ctx.saved_tensors
        head_dim, eps = ctx.more
        q, k, v = attention._parts(query, key, value, head_dim)
        moments = torch.matmul(v.transpose(2, 3), k)
        out = torch.matmul(q, moments.transpose(2, 3))
        scale = out[..., -1:] + eps
        of_result = attention._by_head(gradient, head_dim)
        of_scale = -(of_result * (out[..., :-1] / scale / scale)).sum(-1, keepdim=True)
        of_out = torch.cat([of_result / scale, of_scale], dim=-1)
        of_moments = torch.matmul(of_out.transpose(2, 3), q)
        of_query = attention._joined(torch.matmul(of_out, moments), query.dtype)
        of_key = attention._joined(torch.matmul(v, of_moments), key.dtype)
        of_value = attention._joined(torch.matmul(k, of_moments[:, :, :-1].transpose(2, 3)), value.dtype)
        relu = torch.ops.aten.threshold_backward
        return relu(of_query, query, 0).contiguous(), relu(of_key, key, 0).contiguous(), of_value, None, None


# ---------------------------------------------------------------------------------------------------------- counting


def block_inputs(
    config: SanaConfig, samples: int, side: tuple[int, int], rows: int, modulation: torch.dtype = torch.float32
) -> list[Any]:
    """The earlier code gave each block `modulation` in bf16."""
    dim = config.inner_dim
    hidden = torch.randn(samples, side[0] * side[1], dim, requires_grad=True)
    captions = torch.randn(samples, rows, dim, dtype=torch.bfloat16, requires_grad=True)
    bias = sana_layers.mask_bias(torch.ones(samples, rows, dtype=torch.bool), torch.bfloat16)
    vectors = torch.randn(samples, 6, dim, dtype=modulation, requires_grad=True)
    return [hidden, captions, bias, vectors, *side]


def model(config: SanaConfig) -> SanaTransformer:
    return SanaTransformer.from_scratch(config, 0, dtype=torch.bfloat16, numerics=Numerics(fp32_residual=True))


def both_passes(block: nn.Module, given: list[Any]) -> Counter:
    """Both passes, the gradient given: no loss is counted."""
    gradient = torch.randn(given[0].shape)
    with Counter() as counter:
        block(*given).backward(gradient)
    return counter


def earlier(config: SanaConfig, run: Callable[[SanaTransformer], Counter]) -> Counter:
    made = model(config)
    block: Any
    for block in made.blocks:
        block.ff = EarlierConvolution(block.ff)
        for layer in (block.attn1.to_q, block.attn1.to_k, block.attn1.to_v):
            layer.__class__ = EarlierLinear
    with mock.patch.object(sana_layers, "linear_attention", lambda *given: EarlierAttention.apply(*given[:5])):
        return run(made)


class _Scheduled(Exception):
    """Raised where inductor would generate code."""


def compiled(run: Callable[[Callable[..., Any]], None]) -> tuple[int, int]:
    """Bytes and launches of the graphs that `run` compiles with the backend that it is given, forward and backward, as
    inductor schedules them for a GPU: with the rules of its Triton back end, on the CPU's tensors, without generating
    code. The graphs then run uncompiled."""
    moved_bytes, launches = 0, 0

    def count(scheduler: Scheduler) -> None:
        nonlocal moved_bytes, launches
        for node in scheduler.nodes:
            moved_bytes += node.get_read_write_buffers_sizes()
            if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, MultiOutput):
                continue  # memory alone
            operation = getattr(node.node, "op_overload", None)
            launches += LAUNCHES.get(operation._schema.name.partition("::")[2], 1) if operation else 1
        raise _Scheduled

    def count_graph(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        with mock.patch.object(Scheduler, "codegen", count):
            try:
                compile_fx.compile_fx_inner(graph, inputs, **options)
            except InductorError as error:
                if not isinstance(error.inner_exception, _Scheduled):
                    raise
        return make_boxed_func(graph.forward)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=count_graph)

    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True, cpu_backend="triton"):
        run(backend)
    return moved_bytes, launches


def compiled_block(config: SanaConfig, given: list[Any]) -> tuple[int, int]:
    def run(backend: Any) -> None:
        block = model(config).blocks[0]
        compile_blocks([block], backend)
        block(*given).backward(torch.randn(given[0].shape))

    return compiled(run)


def of_conditions(made: SanaTransformer, whole: tuple[Tensor, ...]) -> None:
    """Both passes of what a block is given in addition to the tokens, the gradients given."""
    _, captions, mask, timesteps = whole
    values = made.conditions(captions, mask, timesteps, torch.bfloat16)
    results = [x for x in values if x is not None and x.requires_grad]
    torch.autograd.backward(results, [torch.empty_like(x) for x in results])


def compiled_conditions(config: SanaConfig, whole: tuple[Tensor, ...]) -> int:
    """Launches."""

    def run(backend: Any) -> None:
        made = model(config)
        compile_conditions(made, backend)
        of_conditions(made, whole)

    return compiled(run)[1]


def multi_tensor_launches(sizes: list[int], lists: int) -> int:
    """Kernels that torch launches for an operation on `lists` lists of tensors of these sizes (`multi_tensor_apply`,
    ATen/native/cuda/MultiTensorApply.cuh: chunks of 65,536 values, at most 320 chunks and so many tensors a kernel)."""
    most_tensors = (110, 64, 48, 36, 30)[lists - 1]
    launches = tensors = chunks = 0
    for number, size in enumerate(sizes):
        tensors += 1
        parts = math.ceil(size / 65536)
        for part in range(parts):
            chunks += 1
            last = part == parts - 1
            if (last and tensors == most_tensors) or chunks == 320 or (last and number == len(sizes) - 1):
                launches += 1
                chunks, tensors = 0, 0 if last else 1
    return launches


def update_launches() -> tuple[int, int]:
    """(earlier, present) kernels from the gradients to the new parameters of Sana 1.6B: norm, clipping, fused AdamW.
    Earlier: norms of many tensors at a time, a product for each gradient. Present: norms of the runs of memory that
    FSDP2 leaves, and what the trainer's step does where AdamW is fused."""
    parameters = [p.numel() for p in SanaTransformer.on_meta(shape(BLOCKS)).parameters()]
    norm, update = multi_tensor_launches(parameters, 1), multi_tensor_launches(parameters, 4)
    small = nn.Linear(2, 2)
    fused = torch.optim.AdamW(small.parameters(), fused=True)
    step = TrainStep(
        ParallelModel(small),
        Flow(FlowConfig()),
        fused,
        TrainConfig(activation_checkpointing="full", microbatch=8),
        torch.device("cpu"),
    )
    small.weight.grad, small.bias.grad = torch.ones(2, 2), torch.ones(2)
    with Counter() as counter:
        step._update(torch.tensor(0.5))
    clipping = counter.named["_foreach_mul_"] + counter.named["mul_"]
    runs, single = adjoining(sharded_gradients())
    present = len(runs) + multi_tensor_launches([x.numel() for x in single], 1)
    return norm + update + len(parameters), present + update + (norm if clipping else 0)


def sharded_gradients() -> list[Tensor]:
    """As a step of the trainer leaves them, of a narrow model with as many blocks, in one process."""
    config, train = shape(BLOCKS, heads=2, cross=2), TrainConfig(activation_checkpointing="none")
    with mesh.open_mesh(Launch(), train.parallel, torch.device("cpu")) as device_mesh:
        made = parallelize(SanaTransformer.from_scratch(config, 0), device_mesh, train)
        latents, captions = torch.randn(1, 32, 2, 2), torch.randn(1, 2, config.caption_channels)
        mask, times = torch.ones(1, 2, dtype=torch.bool), torch.tensor([10.0])
        made.module(latents.bfloat16(), captions.bfloat16(), mask, times).sum().backward()
        return [local(gradient) for gradient in made.gradients()]


def inside(config: SanaConfig, samples: int, height: int, width: int) -> int:
    """Bytes that the Triton kernels of one block move beyond inputs and outputs of their operations."""
    tokens, channels, head = height * width, 2 * config.glu_channels, config.attention_head_dim
    state = samples * config.num_attention_heads * math.ceil(tokens / 512) * (head + 1) * head * 4
    parts = samples * math.ceil(height / 4) * 10 * channels * 4
    wide, token = samples * tokens * channels * 2, samples * tokens * config.inner_dim * 2
    matrices = 3 * config.inner_dim**2 * 2
    # attention: the parts of the state and of its gradient are written and read; products: the joined matrices are
    # written and read in both passes, the gradient is read by two; convolution: the gradient of its result is written
    # and read, its input read twice, the weight's gradient in parts
    return 2 * 2 * state + 2 * 2 * matrices + 3 * token + 3 * wide + 2 * parts


def graphs(packed: bool) -> int:
    """Compiled for 40 buckets and 3 text lengths, two blocks and what they are given, both passes."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 200
    made, counter = SanaTransformer.from_scratch(shape(2, heads=2, cross=2), 0), CompileCounterWithBackend("aot_eager")
    compile_blocks(made.blocks, counter)  # type: ignore[arg-type]
    compile_conditions(made, counter)  # type: ignore[arg-type]
    for height, width in itertools.product((2, 3, 4, 5, 6, 8, 9, 11), (2, 4, 5, 7, 12)):
        for rows in (5, 7, 16):
            mask = torch.arange(rows)[None] < torch.tensor([[rows], [3]])
            captions = torch.randn(2, rows, made.config.caption_channels)
            latents, times = torch.randn(2, made.config.in_channels, height, width), torch.tensor([10.0, 900.0])
            made(latents, captions[mask] if packed else captions, mask, times).sum().backward()
    return counter.frame_count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a smaller block")
    heads, side = (4, (16, 15)) if parser.parse_args().quick else (8, (24, 20))
    config, samples, rows = shape(1, heads=heads, cross=2), 2, 140
    given = block_inputs(config, samples, side, rows)
    unit = samples * side[0] * side[1] * config.inner_dim * 2

    latents, mask = torch.randn(samples, 32, *side, dtype=torch.bfloat16), torch.ones(samples, rows, dtype=torch.bool)
    whole = latents, torch.randn(samples, rows, 2304, dtype=torch.bfloat16), mask, torch.tensor([10.0, 900.0])

    def of_model(made: SanaTransformer) -> Counter:
        with Counter() as counter:
            made(*whole).sum().backward()
        return counter

    cast = block_inputs(config, samples, side, rows, torch.bfloat16)
    before = earlier(config, lambda made: both_passes(made.blocks[0], cast))
    ends = of_model(model(config)).launches - both_passes(model(config).blocks[0], given).launches
    present, more = both_passes(model(config).blocks[0], given), inside(config, samples, *side)
    bytes_compiled, launches_compiled = compiled_block(config, given)
    made = model(config)
    with Counter() as conditions:
        of_conditions(made, whole)
    ends_compiled = ends - conditions.launches + compiled_conditions(config, whole)
    forms = {  # bytes, those inside of operations, launches, those of the ends
        "earlier": (before.bytes, 0, before.launches, ends),
        "present": (present.bytes, more, present.launches, ends),
        "present, compiled": (bytes_compiled, more, launches_compiled, ends_compiled),
    }
    head = ["a block, forward and backward", "MB", "token matrices", "ratio", "with inside", "launches"]
    head += ["of the ends", "of the passes", "of a step"]
    updates = update_launches()
    rows_of_table, passes_of, step_of = [], {}, {}
    for name, (total, between, launches, of_ends) in forms.items():
        ratios = total / before.bytes, (total + between) / before.bytes
        passes_of[name] = BLOCKS * launches + of_ends
        step_of[name] = passes_of[name] + updates[name != "earlier"]
        rows_of_table.append(
            [name, total / 1e6, total / unit, *ratios, launches, of_ends, passes_of[name], step_of[name]]
        )
    table(head, rows_of_table)
    counts = {"padded": graphs(False), "packed": graphs(True)}
    print(f"graphs for 40 buckets and 3 text lengths: {counts}")
    finish(
        {
            "bytes_ratio": bytes_compiled / before.bytes,
            "bytes_ratio_with_inside": (bytes_compiled + more) / before.bytes,
            "launch_ratio": step_of["present, compiled"] / step_of["earlier"],
            "launch_ratio_of_passes": passes_of["present, compiled"] / passes_of["earlier"],
            "graphs": max(counts.values()),
        }
    )


if __name__ == "__main__":
    run_and_exit(main)
