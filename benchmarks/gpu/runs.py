"""Rows of the machine itself, of the tests that need a GPU, and of the whole trainer."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import shutil
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import sana_pipe.stages.train
from benchmarks.gpu.sizes import GIB, Sizes
from benchmarks.loader import BUCKETS, build
from benchmarks.report import commit, resident
from benchmarks.train_step import TINY
from sana_pipe.base.launch import check_compiler, driver, set_tf32
from sana_pipe.config import load
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.train.training import metrics
from sana_pipe.train.training.checkpoint import Saver

ROOT = Path(__file__).resolve().parents[2]


def versions(sizes: Sizes) -> dict[str, Any]:
    """What the other rows run on."""

    def of(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "none"

    on_gpu = sizes.device.type == "cuda"
    return {
        "python": platform.python_version(),
        **{name: of(name) for name in ("torch", "triton", "diffusers", "transformers", "torchao", "pytest")},
        "cuda": torch.version.cuda or "none",
        "driver": driver() or "none",
        "card": torch.cuda.get_device_name(sizes.device) if on_gpu else "none",
        "commit": commit(),
    }


def compiler(sizes: Sizes) -> dict[str, Any]:
    """A function that inductor compiles, which needs Triton, `ptxas`, a C compiler and Python's headers: the seconds of
    its first call, and its difference from plain PyTorch. In a dry run it is traced."""
    check_compiler(sizes.device, compiled=True)

    def wave(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * x + 1

    x = torch.linspace(-1, 1, 4096, device=sizes.device)
    compiled = torch.compile(wave, backend="eager" if sizes.dry else "inductor")
    began = time.perf_counter()
    result = compiled(x)
    sizes.synchronize()
    seconds = time.perf_counter() - began
    error = float((result - wave(x)).abs().max())
    return {"first_s": seconds, "error": error, "ok": error <= 1e-5}


def device(sizes: Sizes) -> dict[str, Any]:
    """What the machine reaches at best: a bf16 product, a copy in its memory, copies to and from page-locked memory."""
    side, count = sizes.count(8192, 64), sizes.count(2**30, 2**16)
    a, b = (torch.randn(side, side, device=sizes.device, dtype=torch.bfloat16) for _ in range(2))
    source, target = (torch.empty(count, dtype=torch.uint8, device=sizes.device) for _ in range(2))
    host = torch.empty(count, dtype=torch.uint8, pin_memory=sizes.device.type == "cuda")
    product, copy = sizes.after_warming(lambda: a @ b), sizes.after_warming(lambda: target.copy_(source))
    up = sizes.after_warming(lambda: target.copy_(host, non_blocking=True))
    down = sizes.after_warming(lambda: host.copy_(source, non_blocking=True))
    on_gpu = sizes.device.type == "cuda"
    total = torch.cuda.get_device_properties(sizes.device).total_memory if on_gpu else 0
    return {
        "matmul_tflops": 2 * side**3 / product / 1e12,
        "copy_gbs": 2 * count / copy / 1e9,
        "to_device_gbs": count / up / 1e9,
        "to_host_gbs": count / down / 1e9,
        "memory_gib": total / GIB,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(sizes.device))) if on_gpu else "none",
    }


def arithmetic(sizes: Sizes) -> dict[str, Any]:
    """Relative errors of fp32 products and convolutions against fp64, with `train.tf32` off and on."""
    figures = {}
    x = torch.randn(sizes.count(8), 64, 32, 32, device=sizes.device)
    weight = torch.randn(64, 64, 3, 3, device=sizes.device)
    results = {
        "matmul": lambda a, w: torch.matmul(a.flatten(2), a.flatten(2).transpose(1, 2)),
        "convolution": lambda a, w: F.conv2d(a, w, padding=1),
    }
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        for tf32 in (False, True):
            set_tf32(tf32)
            for name, call in results.items():
                exact = call(x.double(), weight.double())
                error = (call(x, weight) - exact).norm() / exact.norm()
                figures[f"{name}_error{'_tf32' if tf32 else ''}"] = float(error)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    return figures


class _Outcomes:
    """A plugin of pytest that counts outcomes and keeps what failed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: dict[str, str] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        self.counts["collected"] = len(session.items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or report.skipped or report.when == "call":
            self.counts[report.outcome] += 1
        if report.failed:
            self.failures[report.nodeid] = str(report.longrepr)[-1500:]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.counts["failed"] += 1
            self.failures[report.nodeid] = str(report.longrepr)[-1500:]


def gpu_tests(sizes: Sizes, *, only: list[str] | None = None, without: list[str] | None = None) -> dict[str, Any]:
    """The tests that are marked `gpu`, but for those of the rows 24gb and 48gb; in a dry run they are collected only. A
    failed one fails the row.

    Args:
        only, without: names of files below tests/.
    """
    import pytest

    paths = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    marked = {name for name, path in paths.items() if "mark.gpu" in path.read_text("utf-8")}
    chosen = marked & set(only) if only is not None else marked - set(without or ())
    assert chosen, "no test file is marked gpu"
    outcomes = _Outcomes()
    more = ["--collect-only"] if sizes.dry else ["--timeout=100"]
    files = [str(paths[name]) for name in sorted(chosen)]
    arguments = [
        *files,
        "-m",
        "gpu",
        "-k",
        "not smaller_card",
        "-q",
        "--rootdir",
        str(ROOT),
        "-p",
        "no:cacheprovider",
        *more,
    ]
    code = int(pytest.main(arguments, plugins=[outcomes]))
    count = outcomes.counts
    figures = {name: count[name] for name in ("collected", "passed", "failed", "skipped")}
    return {**figures, "failures": outcomes.failures, "exit_code": code, "ok": code == 0}


def trainer(sizes: Sizes, *, steps: int, save_every: int, batch: int) -> dict[str, Any]:
    """`sana-pipe train` on a snapshot on disk: loader, steps, saves in the background, a profile of one step.

    Returns:
        images/s, MFU and share of waiting of the steps during which nothing is saved; save_slowdown: time of a step
        within a save over theirs; seconds of a pause, of a save; GiB that this process's host memory grows between the
        first save and the last.
    """
    seconds: dict[str, list[float]] = {"save": [], "_write": []}
    host: list[int] = []

    def timed(name: str) -> Any:
        plain = getattr(Saver, name)

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                seconds[name].append(time.perf_counter() - began)
                host.append(resident("VmRSS"))

        return mock.patch.object(Saver, name, call)

    place = Path(tempfile.mkdtemp())
    try:
        options = [f"cache={place / 'cache'}", f"train.output={place / 'run'}", f"train.steps={steps}"]
        options += [f"train.save_every={save_every}", "train.log_every=1", "train.trackers=[]"]
        options += ["train.keep_checkpoints=1", "train.profile=3"]
        if sizes.dry:
            encodings: dict[str, Any] = {"latent": LatentEncoding(compression=8, channels=16)}
            build(place / "cache", 60, buckets=TINY, batch=12, text=TextEncoding(width=128), **encodings)
            config = load("tiny", options)
        else:
            build(place / "cache", 8 * batch, buckets=BUCKETS[:2], batch=batch)
            arch = f"model.arch={{num_layers: {sizes.config.num_layers}}}"
            config = load("sana_1600m_1024", ["model.weights=null", arch, *options])
        with timed("save"), timed("_write"):
            sana_pipe.stages.train.run(config, log=lambda line: None)
        rows = metrics.read(place / "run/metrics.jsonl")
        files = sum(path.stat().st_size for path in (place / "run/profile").iterdir())
        size = sum(path.stat().st_size for path in (place / "run/checkpoints").rglob("*") if path.is_file())
    finally:
        shutil.rmtree(place, ignore_errors=True)
    first = next(i for i, row in enumerate(rows) if row["step"] == save_every)
    usual, beside = rows[first - 3 : first], rows[first + 1 : first + 4]  # after the profile; within the save

    def median(part: list[dict[str, Any]], key: str) -> Any:
        values = [row[key] for row in part]
        return None if None in values else statistics.median(values)

    return {
        **{key: median(usual, key) for key in ("images_per_s", "mfu", "data_wait")},
        "save_slowdown": median(usual, "images_per_s") / median(beside, "images_per_s"),
        "save_pause_s": seconds["save"][0],
        "save_s": statistics.median(seconds["_write"]),
        "checkpoint_gib": size / GIB,
        "host_growth_gib": (host[-1] - host[1]) / GIB,
        "profile_mib": files / 2**20,
        **sizes.memory(),
    }
