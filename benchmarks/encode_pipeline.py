"""What decoding, writing and committing cost in addition to the encoder.

`orchestration_efficiency`: images/s of `encode`'s worker (decode threads, encoder, writer thread, commit) over those of
a bare loop of the same real encoder (an `AutoencoderDC` on one thread, slower than decoding) on pictures that are
already in memory; the other core is free for decoding. `two_process_scaling`: two processes over one, of the local
engine (its share of the units, then what nobody is at) with an encoder that sleeps, so that only what sana-pipe does
itself can be in the way.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.report import finish, median, table
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.cache.cache import Cache, Unit, WorkList
from sana_pipe.data.cache.index import Commit
from sana_pipe.data.encoding import plan as planning
from sana_pipe.data.encoding import scan as scanning
from sana_pipe.data.encoding import unit_records
from sana_pipe.data.encoding.config import EncodeConfig
from sana_pipe.data.images import decoding
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.sources.folder import FolderSource
from sana_pipe.data.sources.source import Place
from sana_pipe.data.work import engine
from sana_pipe.data.work.claims import Claims
from sana_pipe.data.work.progress import Progress
from sana_pipe.data.work.stop import Stop

SIDE, BATCH = 256, 4
UNIT, PICTURE_S = 16, 0.05
"""Pictures of a unit, and seconds that the sleeping encoder takes for one."""

ENCODING = LatentEncoding(weights="benchmark", compression=8, channels=16, decoder=decoding.choose("auto"))


class Real:
    """A random DC-AE encoder, large enough to be slower than decoding."""

    def __init__(self) -> None:
        from diffusers import AutoencoderDC

        torch.manual_seed(0)
        blocks = ("ResBlock",) * 4
        self.model = AutoencoderDC(
            latent_channels=16,
            encoder_block_types=blocks,
            decoder_block_types=blocks,
            encoder_block_out_channels=(48, 48, 96, 96),
            decoder_block_out_channels=(16, 16, 16, 16),
            encoder_layers_per_block=(2, 2, 2, 2),
            decoder_layers_per_block=(1, 1, 1, 1),
            encoder_qkv_multiscales=((), (), (), ()),
            decoder_qkv_multiscales=((), (), (), ()),
            downsample_block_type="conv",
            upsample_block_type="interpolate",
        ).eval()

    @torch.inference_mode()
    def encode(self, images: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
        return self.model.encode(x).latent.bfloat16().view(torch.int16).numpy().view(np.uint16)


class Sleeping:
    """Takes its time without using a core."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def encode(self, images: np.ndarray) -> np.ndarray:
        time.sleep(self.seconds * len(images))
        return np.zeros((len(images), 16, SIDE // 8, SIDE // 8), np.uint16)


def pictures(folder: Path, count: int) -> FolderSource:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(count):
        rough = Image.fromarray(rng.integers(0, 255, (12, 12, 3), np.uint8))
        rough.resize((512, 512), Image.Resampling.BICUBIC).save(folder / f"{i:05d}.jpg", quality=92)
        (folder / f"{i:05d}.txt").write_text(f"picture {i}")
    return FolderSource(folder, "text", "pictures")


def prepare(root: Path, source: FolderSource) -> tuple[Cache, list[WorkList]]:
    cache = Cache(root, create=True)
    scan = scanning.scan(
        source, "pictures", cache, max_pixels=10**8, workers=2, rehash=False, progress=lambda done, total: None
    )
    work = planning.image_work(scan, "pictures", ENCODING, [(SIDE, SIDE)])
    config = EncodeConfig(image_batch=BATCH)
    planning.UNIT_IMAGES = UNIT
    return cache, planning.plan_images(cache, ENCODING, work, config)


def encode(cache: Cache, plans: list[WorkList], source: FolderSource, encoder: Real) -> int:
    done = 0
    for plan, unit in engine.missing_units(cache, plans):
        rows = cache.unit_rows(plan, unit)
        made = unit_records.image_records(
            ENCODING, unit, rows, {"pictures": source}, encoder, max_pixels=10**8, workers=2
        )
        done += unit_records.write_unit(cache, ENCODING, plan, unit, made, lambda good, bad: None).records
    return done


class Runner:
    """A unit maker with an encoder that sleeps."""

    def __init__(self, cache: Cache, source: FolderSource, seconds: float):
        self.cache, self.source, self.encoder = cache, source, Sleeping(seconds)

    def make(self, plan: WorkList, unit: Unit, progress: Callable[[int, int], None]) -> Commit:
        rows = self.cache.unit_rows(plan, unit)
        made = unit_records.image_records(
            ENCODING, unit, rows, {"pictures": self.source}, self.encoder, max_pixels=10**8, workers=2
        )
        return unit_records.write_unit(self.cache, ENCODING, plan, unit, made, progress)


def child(root: str, folder: str, seconds: str, task: str, tasks: str) -> None:
    """One of the processes of `two_process_scaling`: waits for a line, then works."""
    source = FolderSource(Path(folder), "text", "pictures")
    cache = Cache(root)
    todo = engine.missing_units(cache, cache.plans(ENCODING.name))
    runner: Any = Runner(cache, source, float(seconds))
    print("ready", flush=True)
    sys.stdin.readline()
    bar, own = Progress("pictures", 0), Claims(cache.files, 2.0)
    engine.make_units(runner, todo, engine.Worker(own, Stop(0.0), int(task), int(tasks)), bar)
    print("done", flush=True)


def processes(work: Path, source: FolderSource, seconds: float, tasks: int) -> float:
    """Seconds that `tasks` processes take, without starting and ending them."""
    with tempfile.TemporaryDirectory(dir=work) as root:
        cache, _ = prepare(Path(root) / "cache", source)
        command = [sys.executable, "-m", "benchmarks.encode_pipeline", "--child", str(cache.root), source.location]
        started = [
            subprocess.Popen(
                [*command, str(seconds), str(task), str(tasks)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for task in range(tasks)
        ]
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        began = time.perf_counter()
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        took = time.perf_counter() - began
        ended = [process.wait() for process in started]
        if any(ended):
            raise RuntimeError("a benchmark process failed")
        return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return child(*given.child)
    count, many, rounds, turns = (16, 96, 3, 2) if given.quick else (160, 256, 5, 5)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        source, longer = pictures(work / "pictures", count), pictures(work / "longer", many)
        ready = [
            decoding.load(source.read(Place(f"{i:05d}.jpg")), (SIDE, SIDE), decoder=ENCODING.decoder)
            for i in range(count)
        ]
        encoder = Real()
        encoder.encode(np.stack(ready[:BATCH]))
        bare, piped = [], []
        for _ in range(rounds):
            began = time.perf_counter()
            for start in range(0, count, BATCH):
                encoder.encode(np.stack(ready[start : start + BATCH]))
            bare.append(count / (time.perf_counter() - began))
            with tempfile.TemporaryDirectory(dir=work) as root:
                cache, plans = prepare(Path(root) / "cache", source)
                began = time.perf_counter()
                done = encode(cache, plans, source, encoder)
                piped.append(done / (time.perf_counter() - began))
        one, two = [], []
        for _ in range(turns):
            one.append(processes(work, longer, PICTURE_S, 1))
            two.append(processes(work, longer, PICTURE_S, 2))
    efficiency = median([p / b for p, b in zip(piped, bare, strict=True)])
    scaling = median([a / b for a, b in zip(one, two, strict=True)])
    table(
        ["what", "images/s"],
        [
            ["bare encoder loop", median(bare)],
            ["worker", median(piped)],
            ["1 process, sleeping encoder", many / median(one)],
            ["2 processes", many / median(two)],
        ],
    )
    finish({"orchestration_efficiency": efficiency, "two_process_scaling": scaling})
    return None


if __name__ == "__main__":
    run_and_exit(main)
