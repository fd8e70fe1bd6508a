"""Does a LoRA learn from preference pairs, and does it stay near its base?

Crops of photographs, small models of the demo's shapes, CPU. The base learns each crop with a warm and a cool tint; a
pair is a crop with the warm one (chosen) and the cool one (rejected). A quarter of the pairs is held out. Next to the
run there is one without anchor and stop. best_NAME: at the checkpoint of the lowest held-out loss; end_NAME: at the
end; runaway_NAME: at the end of the other run. accuracy: of the held-out pairs. chosen_ratio: loss of the held-out
chosen pictures, to the base's. shift: mean of red minus blue of pictures that the best checkpoint draws, less that of
the base's with the same noise, in standard errors.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.export
import sana_pipe.stages.sample
import sana_pipe.stages.train
from benchmarks.control import NAMES, SIDE, crops, write
from benchmarks.report import finish, table
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config, load
from sana_pipe.tools.demo import small_models
from sana_pipe.train.training import checkpoint, metrics

WANTED = {
    "best_accuracy": ">= 0.9",
    "end_chosen_ratio": "<= 1.05",
    "runaway_chosen_ratio": "> 1.05",
    "shift": ">= 3",
    "seconds": "<= 180",
}
PAIRS, DRAWN = 32, 12
TINT = 30
"""Added to red and taken from blue, of 255."""
BETA = 200
"""With the default, ten times as much, the run without anchor and stop stays near its base, too."""


def tinted(picture: Image.Image, strength: int) -> Image.Image:
    """The picture with more red and less blue; a negative strength is the reverse."""
    return Image.fromarray((np.asarray(picture) + np.array([strength, 0, -strength])).clip(0, 255).astype(np.uint8))


def write_pairs(folder: Path, pictures: list[Image.Image]) -> None:
    folder.mkdir(parents=True)
    for number, picture in enumerate(pictures):
        tinted(picture, TINT).save(folder / f"{number:04}_w.png")
        tinted(picture, -TINT).save(folder / f"{number:04}_l.png")
        (folder / f"{number:04}_w.txt").write_text("a photograph")


def warmth(folder: Path, ending: str) -> np.ndarray:
    """Mean of red minus blue of each drawn picture, (n,). ending: of their files' names."""
    drawn = (np.asarray(Image.open(folder / f"{number:04}{ending}.png")).astype(float) for number in range(DRAWN))
    return np.array([picture[..., 0].mean() - picture[..., 2].mean() for picture in drawn])


def held_out(run: Path, name: str, step: int | None = None) -> dict[str, float]:
    """Figures of the validation after a step of a run; None: of the last one. name: is put before theirs."""
    rows = metrics.read_events(run / "metrics.jsonl", events_only=True)["validation"]
    row = rows[-1] if step is None else next(row for row in rows if row["step"] == step)
    parts = row["parts"]
    ratio = parts["chosen"] / parts["chosen_reference"]
    figures = {"step": row["step"], "accuracy": parts["accuracy"], "chosen_ratio": ratio}
    return {f"{name}_{figure}": value for figure, value in figures.items()}


def trained(folder: Path, steps: tuple[int, int, int], seed: int) -> dict[str, float]:
    """Train and draw. steps: of the VAE, of the base, of each LoRA at most. seed: of the LoRAs."""
    pictures = crops(NAMES, PAIRS, 0)
    both = [tinted(picture, tint) for picture in pictures for tint in (TINT, -TINT)]
    write(folder / "known", both)
    write_pairs(folder / "pairs", pictures)
    images = [np.asarray(picture) for picture in both]
    small_models.make_all(folder / "models", images, ["a photograph"] * len(both), steps=steps[0], sizes=[(SIDE, SIDE)])

    def config(*options: str) -> Config:
        models = [f"vae.id={folder / 'models'}", f"text.id={folder / 'models'}"]
        shared = [f"data.buckets=[[{SIDE}, {SIDE}]]", "train.text=padded", "train.validation=null"]
        return load("tiny", [*models, *shared, *options])

    base = config(f"cache={folder / 'cache'}", f"train.output={folder / 'base'}", f"train.steps={steps[1]}")
    sana_pipe.stages.encode.run(base, str(folder / "known"))
    sana_pipe.stages.bucket.run(base, name="known")
    sana_pipe.stages.train.run(base, snapshot="known")
    sana_pipe.stages.export.run(base, "auto", folder / "exported")
    of_pairs = [
        f"cache={folder / 'cache-of-pairs'}",
        f"model={{weights: {{id: {folder / 'exported'}}}}}",
        "data.pictures.rejected.suffix=_w/_l",
        "bucket.heldout=0.25",
        "train.adapter={rank: 8}",
        "train.validation={every: 10}",
        "train.save_every=10",
        "train.optim.lr=0.002",
        "train.optim.warmup_steps=10",
        f"train.steps={steps[2]}",
        f"train.seed={seed}",
        "sample.steps=20",
    ]
    sana_pipe.stages.encode.run(config(*of_pairs), str(folder / "pairs"))
    sana_pipe.stages.bucket.run(config(*of_pairs), name="pairs")
    pairs, runaway = (
        config(*of_pairs, f"train.prefer={{beta: {BETA}{more}}}", f"train.output={folder / name}")
        for name, more in (("pairs-run", ""), ("runaway", ", anchor: 0, stop: null"))
    )
    sana_pipe.stages.train.run(pairs, snapshot="pairs")
    sana_pipe.stages.train.run(runaway, snapshot="pairs")
    best, _ = checkpoint.find_best(pairs.train.output, "auto")
    sana_pipe.stages.sample.run(pairs, str(best), "pairs", folder / "drawn", DRAWN)
    change = warmth(folder / "drawn", "") - warmth(folder / "drawn", "-base")
    return {
        **held_out(folder / "pairs-run", "best", checkpoint.step_of(best)),
        **held_out(folder / "pairs-run", "end"),
        **held_out(folder / "runaway", "runaway"),
        "shift": float(change.mean() / (change.std(ddof=1) / DRAWN**0.5)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of the LoRAs")
    given = parser.parse_args()
    began = time.perf_counter()
    quiet: Any = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, quiet[0], quiet[1]:
        figures = trained(Path(folder), (20, 20, 20) if given.quick else (150, 600, 60), given.seed)
    figures |= {"seconds": time.perf_counter() - began}
    table(["figure", "value", "wanted"], [[name, value, WANTED.get(name, "")] for name, value in figures.items()])
    finish(figures)


if __name__ == "__main__":
    run_and_exit(main)
