"""Does a ControlNet follow its control, and what does it cost to read?

Crops of photographs with their edges (`data.pictures.control.made: canny`), small models of the demo's shapes, CPU. A
base is trained on the crops; next to it a ControlNet, and as many steps of another one on the same crops with the edges
of others (`shuffled`); all three draw for crops of other photographs. NAME_f1: F1 of the edges of the drawn pictures
against the control, a pixel off allowed. control_gain: control_f1 to shuffled_f1. NAME_vs_others: NAME_f1 to the F1 of
the same pictures against the controls of other samples, 1 for a model that ignores its control. read_only_asked: bytes
that a training without ControlNet reads of a snapshot with controls, to those of one without.
plan_gib_control_1600m: of `plan` for configuration `controlnet_24gb`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
from PIL import Image

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.export
import sana_pipe.stages.sample
import sana_pipe.stages.train
from benchmarks.report import finish, table
from sana_pipe import cli
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config, load
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.shard import ShardReader
from sana_pipe.data.loader.loader import Loader, LoaderSettings
from sana_pipe.tools.demo import small_models
from sana_pipe.tools.reporting import drawing_folder

SIDE = 64
NAMES = ("astronaut", "chelsea", "coffee", "rocket", "camera", "cat", "brick", "coins", "moon", "hubble_deep_field")
UNSEEN = ("coffee", "camera", "rocket")
"""Photographs whose crops are drawn and not learned."""
WANTED = {"control_gain": ">= 2.0", "read_only_asked": "== 1.0", "plan_gib_control_1600m": "<= 24"}


def crops(names: tuple[str, ...], count: int, seed: int) -> list[Image.Image]:
    """Square crops of photographs, some mirrored, at 64 px."""
    draws, made = np.random.default_rng(seed), list[Image.Image]()
    pictures = [Image.fromarray(getattr(skimage.data, name)()).convert("RGB") for name in names]
    while len(made) < count:
        picture = pictures[len(made) % len(pictures)]
        side = int(draws.uniform(0.35, 0.9) * min(picture.size))
        left, top = (int(draws.integers(0, whole - side)) for whole in picture.size)
        crop = picture.crop((left, top, left + side, top + side)).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        made.append(crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draws.random() < 0.5 else crop)
    return made


def write(folder: Path, pictures: list[Image.Image]) -> None:
    folder.mkdir(parents=True)
    for number, picture in enumerate(pictures):
        picture.save(folder / f"{number:04}.png")
        (folder / f"{number:04}.txt").write_text("a photograph")


def edges(picture: np.ndarray) -> np.ndarray:
    """Bool (h, w), as the control pictures."""
    import cv2

    return cv2.Canny(picture, 100, 200) > 0


def f1(drawn: np.ndarray, control: np.ndarray) -> float:
    """Of two masks of edges; one counts if the other has an edge at most a pixel away."""
    wide = [np.pad(mask, 1) for mask in (drawn, control)]
    near = [
        np.any([np.roll(mask, (y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1)], axis=0)[1:-1, 1:-1]
        for mask in wide
    ]
    precision = (drawn & near[1]).sum() / max(1, drawn.sum())
    recall = (control & near[0]).sum() / max(1, control.sum())
    return float(2 * precision * recall / max(1e-9, precision + recall))


def scores(name: str, out: Path, ending: str, originals: dict[str, np.ndarray]) -> dict[str, float]:
    """Figures of drawn pictures, each against its own control and the others'. ending: of their files' names."""
    rows = [json.loads(line) for line in (out / drawing_folder.TABLE).read_text().splitlines()]
    controls = [edges(originals[row["item"]]) for row in rows]
    drawn = [edges(np.asarray(Image.open(out / f"{number:04}{ending}.png"))) for number in range(len(rows))]
    own = float(np.mean([f1(*pair) for pair in zip(drawn, controls, strict=True)]))
    others = [f1(one, two) for i, one in enumerate(drawn) for j, two in enumerate(controls) if i != j]
    return {f"{name}_f1": own, f"{name}_vs_others": own / max(float(np.mean(others)), 1e-9)}


def bytes_read(config: Config, snapshot: str) -> int:
    """Of all records of a few steps."""
    read, real = [0], ShardReader.read_batch

    def counted(self: ShardReader, *given: Any, **more: Any) -> Any:
        read[0] += given[3].nbytes  # what the records fill
        return real(self, *given, **more)

    settings: dict[str, Any] = {"seed": 0, "phase": 0, "rank": 0, "world": 1, "microbatch": 12, "caption_drop": 0.0}
    reading: dict[str, Any] = {"prefetch": 0, "threads": 1, "stop_step": 4}
    ShardReader.read_batch = counted  # type: ignore
    try:
        for _ in Loader(Cache(config.cache).open_snapshot(snapshot), LoaderSettings(**settings, **reading)):
            pass
    finally:
        ShardReader.read_batch = real  # type: ignore
    return read[0]


def trained(folder: Path, count: int, steps: tuple[int, int]) -> dict[str, float]:
    """Train, draw and compare. steps: of the base and of each ControlNet."""
    known = tuple(name for name in NAMES if name not in UNSEEN)
    pictures, unseen = crops(known, count, 0), crops(UNSEEN, 24, 1)
    write(folder / "known", pictures)
    write(folder / "unseen", unseen)
    write(folder / "shuffled", pictures)
    (folder / "shuffled/edges").mkdir()
    for number in range(count):
        other = edges(np.asarray(pictures[(number + 1) % count]))
        Image.fromarray(other.astype(np.uint8) * 255).save(folder / f"shuffled/edges/{number:04}.png")
    images = [np.asarray(picture) for picture in pictures[:48]]
    small_models.make_all(folder / "models", images, ["a photograph"] * 48, steps=400, sizes=[(SIDE, SIDE)])

    def config(*options: str) -> Config:
        models = [f"vae.id={folder / 'models'}", f"text.id={folder / 'models'}", f"cache={folder / 'cache'}"]
        return load("tiny", [*models, f"data.buckets=[[{SIDE}, {SIDE}]]", *options])

    control = "data.pictures.control.made=canny"
    for source in ("known", "unseen"):
        sana_pipe.stages.encode.run(config(), str(folder / source))
    weight = {name: f"bucket.sources={{{name}: {{weight: 0}}}}" for name in ("known", "unseen")}
    sana_pipe.stages.bucket.run(config(weight["unseen"]), name="plain")
    for source in ("known", "unseen"):
        sana_pipe.stages.encode.run(config(control), str(folder / source))
    sana_pipe.stages.bucket.run(config(weight["known"]), name="unseen")
    sana_pipe.stages.bucket.run(config(weight["unseen"]), name="known")
    asked = bytes_read(config(), "known") / bytes_read(config(), "plain")
    shared = ["train.validation=null", "train.text=padded", "sample.steps=20"]
    base = config(*shared, f"train.output={folder / 'base'}", f"train.steps={steps[0]}")
    sana_pipe.stages.train.run(base, snapshot="known")
    sana_pipe.stages.export.run(base, "auto", folder / "exported")
    weights = f"model={{weights: {{id: {folder / 'exported'}}}}}"
    others = [f"cache={folder / 'others'}", "data.pictures.control.folder=edges"]
    sana_pipe.stages.encode.run(config(*others), str(folder / "shuffled"))
    sana_pipe.stages.bucket.run(config(*others), name="known")
    originals = {f"{number:04}.png": np.asarray(picture) for number, picture in enumerate(unseen)}
    figures = dict[str, float]()
    for name, data in (("control", [control]), ("shuffled", others)):
        own = [weights, "train.controlnet={}", f"train.output={folder / name}", f"train.steps={steps[1]}"]
        sana_pipe.stages.train.run(config(*shared, *own, *data), snapshot="known")
        sana_pipe.stages.sample.run(config(*shared, *own, control), "auto", "unseen", folder / f"drawn-{name}", 24)
        figures |= scores(name, folder / f"drawn-{name}", "", originals)
    figures |= scores("base", folder / "drawn-control", "-base", originals)
    gain = figures["control_f1"] / max(figures["shuffled_f1"], 1e-9)
    return {"control_gain": gain, **figures, "read_only_asked": asked}


def planned() -> float:
    """GiB of the configuration for a card of 24 GB, on that card."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        cli.cli.main(["plan", "--config", "controlnet_24gb", "--gpu", "4090", "--json"], standalone_mode=False)
    return float(json.loads(said.getvalue())["prediction"]["total"]) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    began = time.perf_counter()
    quiet: Callable[[], Any] = lambda: contextlib.redirect_stdout(io.StringIO())  # noqa: E731
    with tempfile.TemporaryDirectory() as folder, quiet(), contextlib.redirect_stderr(io.StringIO()):
        figures = trained(Path(folder), *((48, (40, 40)) if given.quick else (600, (800, 1500))))
    figures |= {"plan_gib_control_1600m": planned(), "seconds": time.perf_counter() - began}
    table(["figure", "value", "wanted"], [[name, value, WANTED.get(name, "")] for name, value in figures.items()])
    finish(figures)


if __name__ == "__main__":
    run_and_exit(main)
