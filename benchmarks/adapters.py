"""A LoRA against full training: readers of its file, bytes of a checkpoint, time of a step, memory.

reader_difference_max: the largest difference (fp32) between the adapted model's output and that of three readers of its
exports: diffusers with peft, ComfyUI's rule W + alpha / rank * B A under NVlabs' names, merged weights in diffusers.
checkpoint_bytes_ratio: of a training's checkpoint to its adapter and the two moments. step_ratio: an adapted step to a
full one, two blocks (`--quick`: one) of Sana 1.6B, fp32 on the CPU, alternating, CPU time of one thread, the median of
the ratios of neighbours. plan_gib_1600m_1024: `plan` for Sana 1.6B at 1024 px, batch 1, full checkpointing.
saved_bytes_ratio: what a block of it saves for the backward pass, adapted to full, bf16, without checkpointing.

    python -m benchmarks.adapters [--quick]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import sana_pipe.stages.train
from benchmarks.loader import build
from benchmarks.memory import count, shape
from benchmarks.report import finish, median, table
from benchmarks.train_step import CPU, TINY, batch_of
from sana_pipe.base.gpus import card
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import load
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.tools.planning.predict import Data, Machine, predict
from sana_pipe.train.config import TrainConfig
from sana_pipe.train.models.adapters import Merged, adapter_of
from sana_pipe.train.models.sana_config import SanaConfig
from sana_pipe.train.models.spec import ModelSpec, reset_buffers
from sana_pipe.train.parallel.parallelize import ParallelModel
from sana_pipe.train.training import optimizers
from sana_pipe.train.training.assemble import Trainable
from sana_pipe.train.training.objectives.flow import Flow
from sana_pipe.train.training.step import TrainStep

RANK = 16
SMALL = SanaConfig(
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=8,
    num_layers=2,
    num_cross_attention_heads=2,
    cross_attention_head_dim=8,
    cross_attention_dim=16,
    caption_channels=12,
    sample_size=4,
    qk_norm="rms_norm_across_heads",
)


def settings(adapter: dict[str, Any] | None = None, **train: Any) -> TrainConfig:
    given = {"precision": "fp32", "activation_checkpointing": "none", "compile": "none", "text": "padded", **train}
    return TrainConfig.model_validate({**given, "microbatch": given.get("microbatch", 1), "adapter": adapter})


def made(spec: SanaConfig, train: TrainConfig) -> nn.Module:
    """A module with the start values of a run, on the CPU."""
    trainable = Trainable(spec, Flow(train.flow), adapter_of(train, spec))
    module = trainable.module(train)
    values = trainable.values(spec.initial(0), module, 0)
    module.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values.read(name, [0] * parameter.ndim, parameter.shape))
    reset_buffers(module)
    return module


# ----------------------------------------------------------------------------------------------------------- readers


@torch.no_grad()
def output(model: nn.Module, theirs: bool = True) -> Tensor:
    torch.manual_seed(1)
    latents, captions, timesteps = torch.randn(2, 4, 4, 6), torch.randn(2, 5, 12), torch.tensor([3.0, 700.0])
    mask = torch.ones(2, 5)
    if not theirs:
        return model(latents, captions, mask.bool(), timesteps)
    return model(latents, captions, timesteps, encoder_attention_mask=mask, return_dict=False)[0]


def readers(folder: Path, kind: str, rank: int) -> dict[str, float]:
    """Largest difference to the adapted model by reader."""
    from diffusers import SanaPipeline, SanaTransformer2DModel

    train = settings({"kind": kind, "rank": rank, "alpha": 2.5 * rank, "targets": "all"})
    adapter, module = adapter_of(train, SMALL), made(SMALL, train)
    assert adapter is not None
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(0, 0.2)
    base = SMALL.initial(0)
    trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    weights = Merged(SMALL, adapter, base, trained)
    SMALL.save(weights.at(0), folder / "base", torch.float32)
    SMALL.save(weights, folder / "merged", torch.float32)
    for form in adapter.formats:
        (folder / form).mkdir()
        adapter.save(form, weights, folder / form, torch.float32)
    models = {name: SanaTransformer2DModel.from_pretrained(folder / "base").eval() for name in ("diffusers", "comfyui")}
    pipe = SanaPipeline(tokenizer=None, text_encoder=None, vae=None, transformer=models["diffusers"], scheduler=None)
    pipe.load_lora_weights(folder / "diffusers")
    models["comfyui"].load_state_dict(
        patched(SMALL, models["comfyui"].state_dict(), next((folder / "comfyui").glob("*.safe*")))
    )
    models["merged"] = SanaTransformer2DModel.from_pretrained(folder / "merged").eval()
    expected = output(module, theirs=False)
    if (output(SanaTransformer2DModel.from_pretrained(folder / "base")) - expected).abs().max() < 0.01:
        raise SystemExit("the adapter changes nothing")
    return {name: float((output(model) - expected).abs().max()) for name, model in models.items()}


def patched(spec: ModelSpec, base: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """diffusers' weights with a file of ComfyUI in them, by the rules of its LoraLoader on the names of its model: W +
    alpha / rank * B A, and W + diff.

    Raises:
        KeyError: keys that ComfyUI does not know.
    """
    joined = spec.joined_parts()
    theirs = {name: torch.cat([base[part] for part in parts]) for name, parts in joined.items()}
    patches = load_file(path)
    for name, weight in theirs.items():
        stem, _, kind = f"diffusion_model.{name}".rpartition(".")
        if kind == "weight" and f"{stem}.lora_A.weight" in patches:
            a, b, alpha = (patches.pop(f"{stem}.{part}") for part in ("lora_A.weight", "lora_B.weight", "alpha"))
            weight += (alpha / b.shape[1] * b.flatten(1) @ a.flatten(1)).reshape(weight.shape)
        for ending, of in (("diff", "weight"), ("diff_b", "bias")):
            if kind == of and f"{stem}.{ending}" in patches:
                weight += patches.pop(f"{stem}.{ending}")
    if patches:
        raise KeyError(", ".join(sorted(patches)))
    return {part: rows for name, parts in joined.items() for part, rows in _split(theirs[name], parts, base)}


def _split(whole: Tensor, parts: Sequence[str], base: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The rows of a joined tensor by parameter."""
    return zip(parts, whole.split([len(base[part]) for part in parts]), strict=True)


# ------------------------------------------------------------------------------------------------------------ figures


def checkpoint_bytes(folder: Path) -> tuple[int, int]:
    """Of a training's checkpoint, and of its adapter and the two moments; one block of Sana 0.6B's width."""
    latent = LatentEncoding(compression=8, channels=16)
    build(folder / "cache", 24, buckets=TINY, batch=12, latent=latent, text=TextEncoding(width=128))
    wide = {"num_layers": 1, "num_attention_heads": 36, "attention_head_dim": 32}
    wide |= {"num_cross_attention_heads": 16, "cross_attention_head_dim": 72}
    given = [f"cache={folder / 'cache'}", f"train.output={folder / 'run'}", "train.steps=2", "train.ema=null"]
    given += [f"model.arch.{name}={value}" for name, value in wide.items()]
    config = load("tiny", [*given, f"train.adapter={json.dumps({'rank': RANK})}"])
    sana_pipe.stages.train.run(config, log=lambda line: None)
    assert config.model.arch is not None
    spec, train = SanaConfig.from_arch(config.model.arch, 8), settings({"rank": RANK})
    module = Trainable(spec, Flow(train.flow), adapter_of(train, spec)).module(train)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    stored = sum(path.stat().st_size for path in (folder / "run/checkpoints").rglob("*") if path.is_file())
    return stored, 3 * 4 * trained


def step_seconds(blocks: int, rounds: int) -> tuple[list[float], list[float]]:
    """CPU seconds of a step, (adapted, full), in neighbouring pairs."""
    spec = shape(blocks)
    batch = batch_of(spec, 1, 16, 96)
    steps = []
    for train in (settings({"rank": RANK}), settings()):
        model = made(spec, train)
        optimizer = optimizers.build(model, train.optim, CPU)
        steps.append(TrainStep(ParallelModel(model), Flow(train.flow), optimizer, train, CPU))
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for side in (0, 1) if turn % 2 else (1, 0):
            began = time.process_time()
            steps[side]([batch], 1)
            if turn:
                seconds[side].append(time.process_time() - began)
    return seconds


def plan_gib() -> float:
    """Predicted peak of Sana 1.6B at 1024 px, batch 1."""
    train = settings({"rank": RANK}, precision="bf16", activation_checkpointing="full")
    gpu = card("4090")
    prediction = predict(train, SanaConfig(), Data({(1024, 1024): 1}, None, 300, 32, 32), Machine(gpu, gpu.memory, 1))
    return prediction.traced.total / 2**30


def saved_mb(train: TrainConfig) -> float:
    """MB that a block of Sana 1.6B saves at 1024 px. Two lengths suffice: blocks are alike."""
    totals = []
    for layers in (2, 4):
        spec = shape(layers)
        module = Trainable(spec, Flow(train.flow), adapter_of(train, spec)).module(train)
        with FakeTensorMode():
            for part in module.modules():
                for name, p in list(part.named_parameters(recurse=False)):
                    empty = torch.empty(p.shape, dtype=torch.bfloat16, device="cpu")
                    part.register_parameter(name, nn.Parameter(empty, requires_grad=p.requires_grad))
            totals.append(count(module, torch.bfloat16, 32, 300))  # type: ignore[arg-type]
    return (totals[1] - totals[0]) / 2 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rows: list[list[object]] = []
    for kind, rank in (("lora", 4), ("lora", 3), ("dora", 3)):
        with tempfile.TemporaryDirectory() as folder:
            differences = readers(Path(folder), kind, rank)
        rows += [[kind, rank, name, f"{value:.1e}"] for name, value in differences.items()]
    table(["adapter", "rank", "reader", "largest difference"], rows)
    with tempfile.TemporaryDirectory() as folder:
        stored, least = checkpoint_bytes(Path(folder))
    adapted, full = step_seconds(1 if quick else 2, 2 if quick else 9)
    ratio = median([a / b for a, b in zip(adapted, full, strict=True)])
    saved = saved_mb(settings({"rank": RANK}, precision="bf16")), saved_mb(settings(precision="bf16"))
    gib = plan_gib()
    table(
        ["LoRA of rank 16", "adapted", "full", "ratio"],
        [
            ["step, CPU ms", 1e3 * median(adapted), 1e3 * median(full), ratio],
            ["saved by a block, MB", *saved, saved[0] / saved[1]],
            ["checkpoint, KB (beside adapter and moments)", stored / 1e3, least / 1e3, stored / least],
            ["plan at 1024 px, GiB", gib, "", ""],
        ],
    )
    finish(
        {
            "reader_difference_max": max(float(str(row[-1])) for row in rows),
            "checkpoint_bytes_ratio": stored / least,
            "step_ratio": ratio,
            "plan_gib_1600m_1024": gib,
            "saved_bytes_ratio": saved[0] / saved[1],
        }
    )


if __name__ == "__main__":
    run_and_exit(main)
