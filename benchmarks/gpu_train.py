"""Sana 1.6B at 1024 px on one GPU: images/s, MFU and peak memory of a training step, against diffusers' model.

Every row is a separate process: random weights, 300 caption rows (100 shown on average), three steps to warm up
and then ten timed ones from tensors in page-locked memory. Ours is the trainer's `TrainStep` on a parallel model,
EMA off.
The other side is `SanaTransformer2DModel` with fp32 weights under autocast to bf16, torch's AdamW with its defaults,
clipping by `clip_grad_norm_`, gradient checkpointing on and off.

Rows: {none, selective, full} checkpointing x {AdamW, CAME, 8-bit AdamW} x batch sizes, packed text, compiled blocks.
Options that this version lacks are reported and skipped. Then full fine-tuning on cards of 24 and 48 GB: the
process may allocate 22.5 and 44 GiB (such a card's memory without the CUDA context), the largest batch that fits.

    python -m benchmarks.gpu_train [--quick] [--batches 1 4 8 16 32]

Without a GPU it says so and prints the keys with null. MFU needs a GPU whose peak pipeline/training/throughput.py
knows; it counts padded rows as work, also where packed text leaves them out.

Keys: images_per_s, mfu, peak_gib (full checkpointing, AdamW, the largest batch that both sides can do), vs_diffusers
(images/s there over those of diffusers' side), memory_vs_diffusers (peak there over its peak), batch_24gb, batch_48gb
(largest batch that fits, of 8, 16 and 32, 48; 0 if none).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from benchmarks.report import finish, table
from pipeline.config import TrainConfig
from pipeline.launch import Launch
from pipeline.loader.loader import Batch
from pipeline.models.objective import FlowMatching
from pipeline.models.sana import SanaTransformer
from pipeline.models.sana_config import SanaConfig
from pipeline.models.sana_flops import training_flops
from pipeline.parallel.mesh import open_mesh
from pipeline.parallel.parallelize import parallelize
from pipeline.processes import run_and_exit
from pipeline.training import optimizers
from pipeline.training.build import numerics
from pipeline.training.step import TrainStep
from pipeline.training.throughput import peak_tflops

SIDE, ROWS = 32, 300
WARM, TIMED = 3, 10
SMALL = {"24gb": (22.5, (8, 16)), "48gb": (44.0, (32, 48))}
FRUGAL = {"parallel": {"reshard_after_forward": True}}
LIGHT = ({"name": "came", "betas": None, "eps": None, "weight_decay": 0.0}, {"name": "adamw8bit"})


@dataclasses.dataclass(frozen=True)
class Row:
    """What to measure. train: overrides of the train section. cap_gib: what the process may allocate."""

    side: str
    batch: int
    train: dict[str, Any]
    cap_gib: float | None = None

    @property
    def name(self) -> str:
        checkpointing = self.train.get("activation_checkpointing", "full")
        name = self.train.get("optim", {}).get("name", "adamw")
        more = [key for key in ("packed_attention", "compile") if self.train.get(key)]
        return " ".join([self.side, checkpointing, name, *more])


def possible(train: dict[str, Any]) -> bool:
    """Whether this version's configuration takes these settings."""
    try:
        TrainConfig.model_validate(train)
    except ValidationError:
        return False
    return True


def lengths_of(samples: int, generator: torch.Generator) -> Tensor:
    """Rows of each caption of a batch, of which the longest is padded to by the others."""
    lengths = torch.randint(20, 181, (samples,), generator=generator)
    lengths[0] = ROWS
    return lengths


def step_flops(row: Row, config: SanaConfig) -> int:
    """Operations of the model in one step. Padding counts where it is computed, so not with `packed_attention`."""
    rows = row.batch * ROWS
    if row.train.get("packed_attention"):
        rows = int(lengths_of(row.batch, torch.Generator().manual_seed(0)).sum())
    return training_flops(config, row.batch, SIDE**2, rows)


def batch_of(config: SanaConfig, samples: int, packed: bool) -> Batch:
    """One microbatch in page-locked memory."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    lengths = lengths_of(samples, generator)
    mask = torch.arange(ROWS)[None] < lengths[:, None]
    captions = (normal(samples, ROWS, config.caption_channels) * mask[..., None]).bfloat16()
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int() if packed else None
    latents = (samples, config.in_channels, SIDE, SIDE)
    tensors = (normal(*latents).bfloat16(), captions[mask] if packed else captions, mask, normal(*latents))
    pinned = [t.pin_memory() if torch.cuda.is_available() else t for t in (*tensors, normal(samples))]
    return Batch(*pinned, sample_ids=tuple(range(samples)), bucket=(1024, 1024), cu_seqlens=bounds)


@torch.no_grad()
def _random(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.fill_(0.01) if name.endswith("caption_norm.weight") else parameter.normal_(std=0.02)


def ours(row: Row, config: SanaConfig, device: torch.device, ending: ExitStack) -> Callable[[], None]:
    """The trainer's step. `ending` closes the process group."""
    train = TrainConfig.model_validate({"microbatch": row.batch, "precision": "bf16", "residual": "fp32", **row.train})
    mesh = ending.enter_context(open_mesh(Launch(), train.parallel, device))
    model = parallelize(SanaTransformer.on_meta(config, numerics(train)), mesh, train)
    _random(model.module)
    model.module.train()
    optimizer = optimizers.build(model.module, train.optim, device)
    step = TrainStep(model, FlowMatching(train.flow), optimizer, train, device)
    batch = batch_of(config, row.batch, train.text == "packed")

    def run_step() -> None:
        step([batch], 1)

    return run_step


def diffusers(row: Row, config: SanaConfig, device: torch.device) -> Callable[[], None]:
    """The same step with diffusers' model under autocast."""
    from diffusers import SanaTransformer2DModel

    with torch.device("meta"):
        model = SanaTransformer2DModel(**{k: v for k, v in config.to_dict().items() if not k.startswith("_")})
    model = model.to_empty(device=device).train()
    _random(model)
    if row.train["activation_checkpointing"] == "full":
        model.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = batch_of(config, row.batch, packed=False)
    objective = FlowMatching(TrainConfig().flow)

    def step() -> None:
        sigma, timesteps = (x.to(device) for x in objective.sigmas(batch.logit))
        latents, noise, captions, mask = (
            x.to(device, non_blocking=True) for x in (batch.latents, batch.noise, batch.captions, batch.mask)
        )
        noised, target = objective.noised(latents, noise, sigma), objective.target(latents, noise)
        with torch.autocast(device.type, torch.bfloat16):
            out = model(noised, encoder_hidden_states=captions, encoder_attention_mask=mask, timestep=timesteps).sample
        objective.loss(out, target).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(row: Row) -> dict[str, float | None]:
    """images/s, MFU, peaks in GiB. Call it in a separate process.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    device = torch.device("cuda", 0)
    if row.cap_gib is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, row.cap_gib * 2**30 / total), device)
    config = SanaConfig()
    with ExitStack() as ending:
        step = ours(row, config, device, ending) if row.side == "ours" else diffusers(row, config, device)
        for _ in range(WARM):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(TIMED):
            step()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / TIMED
    peak = peak_tflops(torch.cuda.get_device_name(device), "bf16")
    flops = step_flops(row, config)
    return {
        "images_per_s": row.batch / seconds,
        "mfu": None if peak is None else flops / seconds / (peak * 1e12),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def in_a_process(row: Row) -> dict[str, float | None] | None:
    """`measure` in a separate process; None if it does not fit.

    Raises:
        RuntimeError: it failed for another reason.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_train", "--row", json.dumps(dataclasses.asdict(row))]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if "out of memory" in done.stderr.lower():
        return None
    raise RuntimeError(f"{row.name}, batch {row.batch}: {done.stderr[-3000:]}")


def grid(batches: list[int], quick: bool) -> list[Row]:
    """The rows, without those of the small cards."""
    rows = []
    kinds = ("full",) if quick else ("none", "selective", "full")
    for checkpointing in kinds:
        for optimizer in ({"name": "adamw"}, *(() if quick else LIGHT)):
            rows += [Row("ours", b, {"activation_checkpointing": checkpointing, "optim": optimizer}) for b in batches]
        if checkpointing != "selective":
            rows += [Row("diffusers", b, {"activation_checkpointing": checkpointing}) for b in batches]
    largest = batches[-1]
    rows.append(Row("ours", largest, {"text": "packed", "packed_attention": True}))
    if not quick:
        rows.append(Row("ours", largest, {"compile": "block"}))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="full checkpointing, AdamW, one batch size")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row is not None:
        print(json.dumps(measure(Row(**json.loads(given.row)))))
        return
    names = ("images_per_s", "mfu", "peak_gib", "vs_diffusers", "memory_vs_diffusers", "batch_24gb", "batch_48gb")
    figures: dict[str, Any] = dict.fromkeys(names)
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        finish(figures)
        return
    results: dict[tuple[str, int], dict[str, float | None]] = {}
    cells = []
    for row in grid([8] if given.quick else sorted(given.batches), given.quick):
        if row.side == "ours" and not possible(row.train):
            print(f"left out, this version has no such option: {row.name}")
            continue
        result = in_a_process(row)
        if result is not None:
            results[row.name, row.batch] = result
        shown = list(result.values()) if result is not None else ["does not fit", "", "", ""]
        cells.append([row.name, row.batch, *("?" if value is None else value for value in shown)])
        print(*cells[-1], flush=True)
    for card, (cap, sizes) in SMALL.items():
        fits = 0
        for optimizer in (o for o in LIGHT if possible({"optim": o})):
            for batch in sizes[:1] if given.quick else sizes:
                row = Row("ours", batch, {"optim": optimizer, **FRUGAL}, cap)
                result = in_a_process(row)
                shown = list(result.values()) if result is not None else ["does not fit", "", "", ""]
                cells.append([f"{card}: {row.name}", batch, *("?" if value is None else value for value in shown)])
                print(*cells[-1], flush=True)
                fits = max(fits, batch if result is not None else 0)
        figures[f"batch_{card}"] = fits
    table(["row", "batch", "images/s", "MFU", "peak GiB", "reserved GiB"], cells)
    both = [b for name, b in results if name == "ours full adamw" and ("diffusers full adamw", b) in results]
    if both:
        ours_best, theirs = results["ours full adamw", max(both)], results["diffusers full adamw", max(both)]
        figures.update({key: ours_best[key] for key in ("images_per_s", "mfu", "peak_gib")})
        for key, of in (("vs_diffusers", "images_per_s"), ("memory_vs_diffusers", "peak_gib")):
            figures[key] = (ours_best[of] or 0.0) / (theirs[of] or 1.0)
    finish(figures)


if __name__ == "__main__":
    run_and_exit(main)
