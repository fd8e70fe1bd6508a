"""Decoding speed and fidelity: our decoder against Pillow's full decode and Lanczos resize, on the very same JPEGs.

The photographs of scikit-image, enlarged to a camera's size, with sensor noise and 4:2:0 JPEG compression. Each picture
is covered to a bucket around 1024 px by both sides in turn, on one thread, CPU time. The bucket is once of the
picture's own shape (the timed case), once of another (a crop, where a shift of a fraction of a pixel would show).

Our side resizes as the encoding says: bicubic at this size, which is Sana's rule; `psnr_db`, the worst picture against
Lanczos, is therefore mostly the difference of the two filters. `psnr_same_filter_db` is against Pillow with our filter.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import skimage.data
from PIL import Image

from benchmarks.report import finish, median, table
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.images import decoding, resize

SIZES = {"12mp": (4000, 3000), "2mp": (1632, 1224)}
OWN, CROPPED = (864, 1152), (896, 1152)
PHOTOGRAPHS = ("astronaut", "coffee", "chelsea", "rocket")


def photograph(name: str, size: tuple[int, int]) -> bytes:
    """A JPEG of `size` (width, height) as a camera would write it."""
    small = Image.fromarray(getattr(skimage.data, name)()).convert("RGB")
    box = resize.cover_box(*small.size, (size[1], size[0]))
    large = np.asarray(small.resize(size, Image.Resampling.LANCZOS, box)).astype(np.float32)
    large += np.random.default_rng(len(name)).normal(0, 4, large.shape).astype(np.float32)
    out = io.BytesIO()
    Image.fromarray(np.clip(np.rint(large), 0, 255).astype(np.uint8)).save(out, "JPEG", quality=92)
    return out.getvalue()


def reference(data: bytes, size: tuple[int, int], kernel: Image.Resampling) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as opened:
        full = opened.convert("RGB")
    box = resize.cover_box(*full.size, size)
    return np.asarray(full.resize((size[1], size[0]), kernel, box))


def psnr(first: np.ndarray, second: np.ndarray) -> float:
    error = float(np.mean((first.astype(np.float32) - second) ** 2))
    return 99.0 if error == 0 else 10 * float(np.log10(255**2 / error))


def cpu(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return (time.process_time() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--decoder", choices=["auto", *decoding.DECODERS], default="auto")
    options = parser.parse_args()
    decoder = decoding.choose(options.decoder)
    names = PHOTOGRAPHS[:2] if options.quick else PHOTOGRAPHS
    rounds = 5 if options.quick else 15
    lanczos, own = Image.Resampling.LANCZOS, resize.resample_filter(OWN)

    rows, figures, worst, worst_own = [], {}, 99.0, 99.0
    for label, size in SIZES.items():
        files = [photograph(name, size) for name in names]
        for shape in (OWN, CROPPED):
            for name, data in zip(names, files, strict=True):
                ours = decoding.load(data, shape, decoder=decoder)
                against = [psnr(ours, reference(data, shape, kernel)) for kernel in (lanczos, own)]
                worst, worst_own = min(worst, against[0]), min(worst_own, against[1])
                rows.append([label, name, f"{shape[0]}x{shape[1]}", len(data) / 1e6, *against])
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        for turn in range(rounds):
            data = files[turn % len(files)]
            times["theirs"].append(cpu(partial(reference, data, OWN, lanczos)))
            times["ours"].append(cpu(partial(decoding.load, data, OWN, decoder=decoder)))
        figures[label] = median(times["theirs"]), median(times["ours"])

    table(["source", "photograph", "bucket", "MB", "dB vs Lanczos", "dB vs same filter"], rows)
    print()
    table(
        ["source", "Pillow full + Lanczos, CPU ms", f"{decoder}, CPU ms", "speed-up"],
        [[label, theirs, ours, theirs / ours] for label, (theirs, ours) in figures.items()],
    )
    finish(
        {
            **{f"speedup_{label}": theirs / ours for label, (theirs, ours) in figures.items()},
            "psnr_db": worst,
            "psnr_same_filter_db": worst_own,
        }
    )


if __name__ == "__main__":
    run_and_exit(main)
