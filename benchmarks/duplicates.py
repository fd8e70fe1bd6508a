"""Near-duplicates: which made copies of photographs are found at which distance, and what it costs to find them.

Of each photograph the copies of `COPIES` are made, as files; each file is decoded, resized and cropped to its bucket at
512 px as `encode` does it, and hashed. recall: copies that are in their photograph's group; precision: pairs of files
in one group that are of one photograph. Both count the kinds of `COUNTED`; the others stand beside, each as recall.
closest_other: the smallest distance between two photographs.

seconds_N, mib_N: CPU time of one core and memory to group N synthetic hashes (1e6; without --quick 1e7 too), of which
half are copies: groups of 2 to 1000, a hundredth of all equal to one. seconds_1e5, again_1e5, one_more_1e5, grown_1e5:
CPU time of 10^5, then of the same hashes again, of one more and of a hundredth more, with the groups that are stored,
which must be those of comparing all. What the hash costs in `encode`:
`benchmarks.duplicates_encode`. What copies cost a training: `benchmarks.duplicates_training`.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import skimage.data
from PIL import Image, ImageDraw, ImageFont, ImageOps

from benchmarks.duplicates_encode import hash_overhead, hash_share
from benchmarks.duplicates_training import subset_loss_ratio
from benchmarks.report import finish, reset_peak, resident, table
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.images import buckets, decoding
from sana_pipe.data.images.perceptual_hash import LENGTH, VIEW_WORDS, WORDS, flipped, hashes
from sana_pipe.data.snapshots import near
from sana_pipe.data.snapshots.group_memory import GroupMemory

PHOTOGRAPHS = (
    *("astronaut", "camera", "cell", "chelsea", "clock", "coffee", "coins", "grass", "gravel", "hubble_deep_field"),
    *("immunohistochemistry", "moon", "page", "retina", "rocket"),
)
DEFAULT = near.DISTANCE
DISTANCES = (0, 4, 8, 12, 14, 15, 16, 17, 18, 19, 20, 23)


def crop(picture: Image.Image, side: float, across: float = 0.5, down: float = 0.5) -> Image.Image:
    """A part with `side` of each side. across, down: where its middle is, of what is possible."""
    width, height = picture.size
    inner = round(width * side), round(height * side)
    left, top = round((width - inner[0]) * across), round((height - inner[1]) * down)
    return picture.crop((left, top, left + inner[0], top + inner[1]))


def line_of_text(picture: Image.Image) -> Image.Image:
    written, height = picture.copy(), picture.height
    font = ImageFont.load_default(size=max(10, height // 12))
    at = picture.width * 0.05, height * 0.8
    ImageDraw.Draw(written).text(at, "Photo: A. Name 2024", "white", font, stroke_width=2, stroke_fill="black")
    return written


def half(picture: Image.Image) -> Image.Image:
    return picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BICUBIC)


COPIES: dict[str, tuple[Callable[[Image.Image], Image.Image], int]] = {
    "resized to 50 %": (half, 90),
    "JPEG quality 50": (lambda picture: picture, 50),
    "cropped to 90 % of each side": (lambda picture: crop(picture, 0.9), 90),
    "mirrored": (ImageOps.mirror, 90),
    "a line of text": (line_of_text, 90),
    "cropped to 95 % of each side": (lambda picture: crop(picture, 0.95), 90),
    "cropped to 95 %, off centre": (lambda picture: crop(picture, 0.95, 0.2, 0.9), 90),
    "cropped to 95 %, from a corner": (lambda picture: crop(picture, 0.95, 0, 0), 90),
    "cropped to 80 % of each side": (lambda picture: crop(picture, 0.8), 90),
    "mirrored, 90 %, 50 %, quality 50": (lambda picture: half(crop(ImageOps.mirror(picture), 0.9)), 50),
}
"""Kind of copy -> how it is made, and its quality as a JPEG."""
COUNTED = 5
WANTED = {
    "recall": ">= 0.95",
    "precision": ">= 0.99",
    "again_1e5": "<= 0.5",
    "seconds_1e6": "<= 360",
    "mib_1e6": "<= 600",
    "seconds_1e7": "<= 3600",
    "mib_1e7": "<= 2048",
    "hash_overhead": "<= 1.03",
    "subset_loss_ratio": "<= 1.00",
}


def jpeg(picture: Image.Image, quality: int) -> bytes:
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=quality)
    return out.getvalue()


def photographs(folder: str | None) -> dict[str, Image.Image]:
    """The JPEGs of a folder, or those of scikit-image's wheel."""
    if folder is not None:
        return {str(path): Image.open(path).convert("RGB") for path in sorted(Path(folder).rglob("*.jpg"))}
    return {name: Image.fromarray(getattr(skimage.data, name)()).convert("RGB") for name in PHOTOGRAPHS}


def loaded(data: bytes, resolution: int) -> np.ndarray:
    """A file's pixels at its bucket, (H, W, 3)."""
    shapes = [(height * resolution // 16, width * resolution // 16) for height, width in buckets.SANA_UNITS]
    width, height = decoding.probe(data)
    return decoding.load(data, buckets.nearest(shapes, height, width), decoder=decoding.choose("auto"))


def quality(folder: str | None) -> dict[str, float]:
    """Recall and precision over distances."""
    found = photographs(folder)
    kinds = ["", *COPIES]
    hashed = np.empty((len(kinds), len(found), LENGTH), np.uint16)
    for number, picture in enumerate(found.values()):
        files = [jpeg(picture, 95), *(jpeg(make(picture), quality) for make, quality in COPIES.values())]
        hashed[:, number] = [hashes(loaded(file, 512)[None])[0] for file in files]
    rows, figures, origin = [], {}, np.tile(np.arange(len(found)), COUNTED + 1)
    for distance in DISTANCES:
        group = near.groups(hashed[: COUNTED + 1].reshape(-1, LENGTH), distance)
        together = np.triu(group[:, None] == group[None], 1)
        right = (together & (origin[:, None] == origin[None])).sum() / max(1, together.sum())
        recall = float(np.mean(group.reshape(COUNTED + 1, -1)[1:] == group[: len(found)]))
        beside = [
            float(np.mean(np.diff(near.groups(both.reshape(-1, LENGTH), distance).reshape(2, -1), axis=0) == 0))
            for both in (hashed[[0, kind]] for kind in range(1, len(kinds)))
        ]
        rows.append([distance, recall, float(right), *beside])
        if distance == DEFAULT:
            figures = {"recall": recall, "precision": float(right)}
            figures |= {f"recall: {kind}": share for kind, share in zip(COPIES, beside, strict=True)}
    print(f"{len(found)} photographs, distances in bits of {16 * VIEW_WORDS}")
    for number, kind in enumerate(COPIES, 1):
        print(f"  {number}: {kind}" + ("" if number <= COUNTED else " (not counted)"))
    table(["distance", "recall", "precision", *map(str, range(1, len(kinds)))], rows)
    closest = min(int(near.distances(one, hashed[0, number + 1 :]).min()) for number, one in enumerate(hashed[0, :-1]))
    below = int((hashed[0, :, WORDS] < near.MIN_QUALITY).sum())
    print(f"{below} photographs are below the least quality; {DEFAULT} is the default distance")
    return {"distance": DEFAULT, **figures, "closest_other": closest, "below_quality": below}


def synthetic(count: int) -> np.ndarray:
    """Hashes (count, 49): half of them new, the inner part about 21 bits from the whole; then copies."""
    rng = np.random.default_rng(0)
    made = np.full((count, LENGTH), 0x8080, np.uint16)
    new = count // 2
    made[:new, :WORDS] = rng.integers(0, 1 << 16, (new, WORDS), dtype=np.uint16)
    made[:new, VIEW_WORDS:WORDS] = made[:new, :VIEW_WORDS]
    _invert(made[:new, VIEW_WORDS:], rng, 24)
    size = np.minimum(rng.zipf(1.7, new), 1000)  # of groups, the original among them
    origin = np.repeat(np.arange(new), size - 1)
    origin = np.resize(np.append(np.zeros(count // 100, np.int64), origin), count - new)
    made[new:] = made[origin]
    many = count // 100
    for start in range(new + many, count, many):
        some = made[start : start + many]
        some[:] = np.where(rng.random((len(some), 1)) < 0.2, flipped(some), some)
        _invert(some, rng, 6)
    made[:, WORDS] = 100
    return made[rng.permutation(count)]


def _invert(words: np.ndarray, rng: np.random.Generator, bits: int) -> None:
    """Invert up to `bits` bits of 8 words of each row, in place."""
    for _ in range(bits):
        at = rng.integers(0, VIEW_WORDS, len(words))
        words[np.arange(len(words)), at] ^= (1 << rng.integers(0, 16, len(words))).astype(np.uint16)


def grouping(count: int) -> dict[str, float]:
    """What one process needs for `count` hashes. Prints nothing else."""
    hashed = synthetic(count)
    reset_peak()
    before, began = resident("VmRSS"), time.process_time()
    group = near.groups(hashed, DEFAULT)
    seconds, peak = time.process_time() - began, resident("VmHWM")
    own = hashed.nbytes + peak - before
    return {"seconds": seconds, "mib": own / 2**20, "groups": len(np.unique(group))}


def regrouping(count: int) -> dict[str, float]:
    """CPU seconds to group hashes, the same again, and more of them, with the groups of the time before."""
    hashed, memory, seconds = synthetic(count + count // 100), GroupMemory(DEFAULT), []
    for many in (count, count, count + 1, len(hashed)):
        began = time.process_time()
        group = near.groups(hashed[:many], DEFAULT, memory=memory)
        seconds.append(time.process_time() - began)
    assert np.array_equal(group, near.groups(hashed, DEFAULT))
    names = ("seconds_1e5", "again_1e5", "one_more_1e5", "grown_1e5")
    return dict(zip(names, seconds, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--photographs", metavar="DIR", help="a folder of JPEGs (default: those of scikit-image)")
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.group is not None:
        print(json.dumps(grouping(given.group)))
        return
    figures = {**quality(given.photographs), **regrouping(10**5)}
    rows = []
    for power in (6,) if given.quick else (6, 7):
        command = [sys.executable, "-m", "benchmarks.duplicates", "--group", str(10**power)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        taken = json.loads(done.stdout.splitlines()[-1])
        rows.append([f"10^{power}", taken["seconds"], taken["mib"], taken["groups"]])
        figures |= {f"seconds_1e{power}": taken["seconds"], f"mib_1e{power}": taken["mib"]}
    print()
    table(["hashes", "CPU s", "MiB", "groups"], rows)
    pictures = list(photographs(given.photographs).values())
    data = jpeg(pictures[0].resize((1632, 1632), Image.Resampling.LANCZOS), 92)
    figures |= hash_share(lambda: loaded(data, 1024), 5 if given.quick else 15)
    with tempfile.TemporaryDirectory() as folder:
        count, rounds = (6, 1) if given.quick else (48, 3)
        figures["hash_overhead"] = hash_overhead(Path(folder, "encode"), pictures, count, rounds)
        figures |= subset_loss_ratio(Path(folder), pictures, 60 if given.quick else 300)
    print()
    table(["figure", "value", "wanted"], [[name, value, WANTED.get(name, "")] for name, value in figures.items()])
    finish(figures)


if __name__ == "__main__":
    run_and_exit(main)
