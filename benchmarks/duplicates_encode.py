"""What the hash of a picture costs in `encode`, in CPU time; medians.

hash_overhead: the whole command `sana-pipe encode` with `encode.signals: [phash]` against without, each in a process,
in turns; pictures at 512 px, the demo's small VAE. hash_share: the hash of a picture at 1024
px against decoding it. hash_share_real: against decoding it and encoding it by a random DC-AE of Sana's size, which
is run at 256 px; operations grow with pixels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.report import median
from sana_pipe.data.images.perceptual_hash import hashes
from sana_pipe.tools.demo import small_models


def hash_overhead(folder: Path, pictures: list[Image.Image], count: int, rounds: int) -> float:
    """Whole commands, with hashes to without."""
    data = folder / "pictures"
    data.mkdir(parents=True)
    for number in range(count):
        large = pictures[number % len(pictures)].resize((768, 768), Image.Resampling.LANCZOS)
        large.rotate(number // len(pictures) * 7).save(data / f"{number:04}.jpg", quality=92)
        (data / f"{number:04}.txt").write_text("a picture")
    small_models.make_all(folder / "models", [], ["a picture"], steps=0, sizes=[(64, 64)])
    ratios = []
    for number in range(rounds):
        plain, hashed = (_encode(folder, f"{number}-{signals}", signals) for signals in ("[]", "[phash]"))
        ratios.append(hashed / plain)
    return median(ratios)


def _encode(folder: Path, name: str, signals: str) -> float:
    """CPU seconds of one `encode` into a new cache."""
    options = {
        "cache": folder / name,
        "encode.signals": signals,
        "vae.id": folder / "models",
        "text.id": folder / "models",
        "data.resolution": 512,
        "data.buckets": "sana",
    }
    command = [sys.executable, "-m", "sana_pipe.cli", "encode", "--config", "tiny", "--data", str(folder / "pictures")]
    command += [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, code, used = os.wait4(process.pid, 0)
    if code:
        raise RuntimeError(said.decode())
    return used.ru_utime + used.ru_stime


def hash_share(decode: Callable[[], np.ndarray], rounds: int) -> dict[str, float]:
    """The hash at 1024 px against what else a picture takes. decode: a call that gives the pixels, (H, W, 3)."""
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        began = time.process_time()
        pixels = decode()[None]
        decoded = time.process_time()
        hashes(pixels)
        times.append((decoded - began, time.process_time() - decoded))
    decode_s, hash_s = (median(some) for some in zip(*times, strict=True))
    encode_s = _real_encoder()
    return {
        "decode_ms": decode_s * 1e3,
        "hash_ms": hash_s * 1e3,
        "encode_real_s": encode_s,
        "hash_share": hash_s / decode_s,
        "hash_share_real": hash_s / (decode_s + encode_s),
    }


@torch.inference_mode()
def _real_encoder() -> float:
    """CPU seconds of a picture at 1024 px, from one at 256 px."""
    from diffusers import AutoencoderDC

    from benchmarks.gpu.encoders import VAE

    torch.manual_seed(0)
    encoder = AutoencoderDC(**VAE).encoder.eval()
    pixels = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 3, 256, 256), np.float32))
    encoder(pixels)
    began = time.process_time()
    encoder(pixels)
    return 16 * (time.process_time() - began)
