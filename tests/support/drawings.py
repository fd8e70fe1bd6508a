"""Files of drawn latents, as a training writes them, without a training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file

from sana_pipe.config import Config
from sana_pipe.data.cache.prompts import PromptSet
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.tools.reporting import draw_latents
from sana_pipe.tools.reporting.run_pictures import DECODED, Drawing
from sana_pipe.train.models.adapters import Adapter
from sana_pipe.train.models.sampler import Sampling
from sana_pipe.train.models.spec import ModelSpec

PROMPTS = ("a red cube", "a lighthouse at sea")


def draw(
    run: Path, step: int, encoding: LatentEncoding, prompts: Sequence[str] = PROMPTS, *, seed: int = 0, **facts: Any
) -> Path:
    """Write `run/pictures/step-XXXXXXXX.safetensors` with random latents of 32 x 48 pixels, and the journal's row."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    shape = encoding.channels, 32 // encoding.compression, 48 // encoding.compression
    tensors = {f"{number:04d}": torch.randn(shape, generator=generator) for number in range(len(prompts))}
    facts = {
        "step": step,
        "phase": 0,
        "snapshot": "0" * 32,
        "latent_encoding": encoding.id,
        "latent": encoding.values(),
        "prompt_set": "1" * 32,
        "prompts": list(prompts),
        "sampling_steps": 2,
        "guidance": 4.5,
        "seed": 0,
        "ema": True,
        "height": 32,
        "width": 48,
        **facts,
    }
    path = run / "pictures" / f"step-{step:08d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_suffix(".tmp")
    save_file(tensors, work, {"drawing": json.dumps(facts)})
    work.replace(path)
    row = {"event": "pictures", "step": step, "count": len(prompts), "file": f"pictures/{path.name}", "seconds": 1.0}
    with (run / "metrics.jsonl").open("a") as journal:
        journal.write(json.dumps({**row, "prompt_set": "1" * 32, "time": f"2026-01-01T00:00:{step % 60:02d}"}) + "\n")
    return path


def paint(path: Path, *, shade: int = 0, missing: Sequence[str] = ()) -> None:
    """What the watcher writes for a drawing, with plain pictures: red is `shade`, green the number of the prompt."""
    drawing = Drawing.read(path)
    drawing.folder.mkdir()
    names = [f"{number:04d}" for number in range(len(drawing.facts.prompts))]
    for number, name in enumerate(names):
        if name not in missing:
            Image.new("RGB", (48, 32), (shade, 40 * number, 200)).save(drawing.folder / f"{name}.png")
    made = {name: None if name in missing else f"{name}.png" for name in names}
    (drawing.folder / DECODED).write_text(json.dumps({"latents": drawing.digest, "files": made}))


def draw_for(
    config: Config, architecture: ModelSpec, weights: dict[str, torch.Tensor], snapshot: Snapshot, rows: list[int]
) -> list[draw_latents.DrawnLatent]:
    """`draw_latents.draw_for` on the CPU, as `sample` calls it."""
    model = draw_latents.open_model(config.train, architecture, weights, torch.device("cpu"))
    return draw_latents.draw_for(model, _sampling(config, architecture), config.sample.seed, snapshot, rows)


def draw_prompts(
    config: Config,
    architecture: ModelSpec,
    weights: dict[str, torch.Tensor],
    prompts: PromptSet,
    shape: tuple[int, int, int],
    adapter: Adapter | None = None,
    control: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """`draw_latents.draw_prompts` on the CPU, as `sample` calls it."""
    model = draw_latents.open_model(config.train, architecture, weights, torch.device("cpu"), adapter)
    sampling = _sampling(config, architecture)
    return draw_latents.draw_prompts(model, sampling, config.sample.seed, prompts, shape, control)


def _sampling(config: Config, architecture: ModelSpec) -> Sampling:
    shift, count = config.train.flow.shift, config.train.drawn_at_once
    return Sampling.of(config.sample, shift, count, architecture.scheduler, architecture.sigmas)
