"""What near copies cost a training: the held-out loss after equal steps on a set with copies and on the set without.

Tiles of photographs, half of the pictures copies (smaller, compressed again) of a sixth of the tiles; other tiles are
held out. Small models of the demo's shapes, CPU, the same steps and seeds. subset_loss_ratio: of the set after
`bucket.dedup: near` to the whole set, the mean over `SEEDS`.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.train
from sana_pipe.config import Config, load
from sana_pipe.tools.demo import small_models

TILES, REPEATED, COPIES, HELD_OUT = 48, 8, 6, 24
SEEDS = (0, 1, 2)
NARROW = ("model.arch.num_layers=2", "model.arch.num_attention_heads=4", "model.arch.num_cross_attention_heads=2")


def subset_loss_ratio(folder: Path, photographs: list[Image.Image], steps: int) -> dict[str, float]:
    """Figures of the two trainings. photographs: at least 10, of some size."""
    tiles = [tile for picture in photographs for tile in _tiles(picture)]
    order = np.random.default_rng(0).permutation(len(tiles))
    chosen = [tiles[at] for at in order[: TILES + HELD_OUT]]
    _write(folder / "train", chosen[:TILES], copies=True)
    _write(folder / "heldout", chosen[TILES:], copies=False)
    images = [np.asarray(tile.resize((64, 64))) for tile in chosen[:12]]
    captions = [f"tile {number}" for number in range(12)]
    small_models.make_all(folder / "models", images, captions, steps=150, sizes=[(64, 64)], flow_shift=3.0)

    def config(*options: str) -> Config:
        models = [f"vae.id={folder / 'models'}", f"text.id={folder / 'models'}", *NARROW]
        return load("tiny", [f"cache={folder / 'cache'}", "encode.signals=[phash]", *models, *options])

    losses: dict[str, list[float]] = {"whole": [], "subset": []}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for source in ("train", "heldout"):
            sana_pipe.stages.encode.run(config(), data=str(folder / source))
        only = {name: f"bucket.sources={{{name}: {{weight: 0}}}}" for name in ("train", "heldout")}
        sana_pipe.stages.bucket.run(config(only["train"]), name="unseen")
        sana_pipe.stages.bucket.run(config(only["heldout"]), name="whole")
        sana_pipe.stages.bucket.run(config(only["heldout"], "bucket.dedup=near"), name="subset")
        for seed in SEEDS:
            for name, values in losses.items():
                values.append(_trained(config, folder / f"{name}-{seed}", name, steps, seed))
    means = {name: float(np.mean(values)) for name, values in losses.items()}
    return {"subset_loss_ratio": means["subset"] / means["whole"], "loss_whole": means["whole"], "steps": steps}


def _trained(config: object, out: Path, snapshot: str, steps: int, seed: int) -> float:
    """The held-out loss after a training."""
    assert callable(config)
    validation = f"train.validation={{snapshot: unseen, every: {steps}, samples: {HELD_OUT}}}"
    options = [f"train.output={out}", f"train.steps={steps}", f"train.seed={seed}", "train.text=padded", validation]
    sana_pipe.stages.train.run(config(*options), snapshot=snapshot)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return float([row["loss"] for row in rows if row.get("event") == "validation" and row["step"] == steps][-1])


def _tiles(picture: Image.Image) -> list[Image.Image]:
    """Nine parts of a picture, three by three."""
    width, height = picture.width // 3, picture.height // 3
    corners = [(width * x, height * y) for y in range(3) for x in range(3)]
    return [picture.crop((x, y, x + width, y + height)) for x, y in corners]


def _write(folder: Path, tiles: list[Image.Image], copies: bool) -> None:
    folder.mkdir(parents=True)
    for number, tile in enumerate(tiles):
        made = [tile]
        if copies and number < REPEATED:
            smaller = tile.resize((tile.width * 3 // 4, tile.height * 3 // 4))
            made += [smaller if copy % 2 else tile for copy in range(COPIES)]
        for copy, image in enumerate(made):
            image.save(folder / f"{number:03}-{copy}.jpg", quality=92 - 5 * copy)
            (folder / f"{number:03}-{copy}.txt").write_text(f"tile {number}")
