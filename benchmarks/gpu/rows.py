"""The rows of the kit in order of value, and the loop that runs them. Standard library only: the loop needs no GPU."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TAIL = 3000
"""Characters of a failed row's output that are shown."""
LEAST_S = 30.0
"""A row that takes longer is not begun with less time left."""


@dataclass(frozen=True)
class Row:
    """What a process measures.

    Attributes:
        name: group/case. call: `module:function`, called with `Sizes` and `given`; returns the figures; `"ok": False`
            among them makes the row a failure. seconds: limit. yields: figures that must be there. may_exceed: memory
            may be too small, which is a result (`fits`).
    """

    name: str
    call: str
    seconds: float
    yields: tuple[str, ...]
    given: Mapping[str, Any] = field(default_factory=dict)
    may_exceed: bool = False


SPEED = ("images_per_s", "mfu", "step_ms", "peak_gib", "reserved_gib")
PREDICTED = (
    *("predicted_gib", "memory_error", "predicted_reserved_gib", "reserved_error"),
    *("predicted_images_per_s", "time_error"),
)
_STEPS, _ENCODERS, _RUNS = (f"benchmarks.gpu.{name}:" for name in ("steps", "encoders", "runs"))
_NONE, _SELECTIVE, _FULL = ({"activation_checkpointing": name} for name in ("none", "selective", "full"))
_BLOCK = {"compile": "block"}
CAME = {"optim": {"name": "came", "betas": None, "eps": None, "weight_decay": 0.0}}
EIGHT_BIT = {"optim": {"name": "adamw8bit"}}
LORA: dict[str, Any] = {"adapter": {"rank": 16}}
FRUGAL = {"parallel": {"reshard_after_forward": True}}
CAPS = {"24gb": 22.5, "48gb": 44.0}
"""GiB that such a card leaves in addition to the CUDA context."""


def _step(name: str, batch: int, train: Mapping[str, Any], *, seconds: float = 150, **more: Any) -> Row:
    given = {"batch": batch, "train": dict(train), **more}
    return Row(name, _STEPS + "step", seconds, (*SPEED, *PREDICTED), given, may_exceed=True)


def _peer(name: str, batch: int, checkpointing: bool, **more: Any) -> Row:
    online = tuple(f"online_{key}" for key in SPEED) if more.get("resident") else ()
    given = {"batch": batch, "checkpointing": checkpointing, **more}
    return Row(name, _STEPS + "peer", 240, SPEED + online, given, may_exceed=True)


def _profile(name: str, train: Mapping[str, Any]) -> Row:
    yields = ("step_ms", "busy_ms", "idle_share", "launches", "ms_by_class", "launches_by_class", "slowest")
    return Row(name, _STEPS + "profile_step", 150, (*yields, "generator_copies"), {"batch": 16, "train": dict(train)})


def _optimizer(name: str, train: Mapping[str, Any]) -> Row:
    return Row(name, _STEPS + "optimizer", 240, ("step_ms", "state_gib", "peak_gib", "reserved_gib"), {"train": train})


def _buckets(name: str, train: Mapping[str, Any]) -> Row:
    yields = ("buckets", "first_s", "second_s", "images_per_s", "graphs", "expandable_segments", "reserved_gib")
    return Row(name, _STEPS + "buckets", 240, yields, {"batch": 8, "train": dict(train)})


def _tests(name: str, **given: Any) -> Row:
    return Row(name, _RUNS + "gpu_tests", 400, ("collected", "passed", "failed", "skipped"), given)


_ARITHMETIC = ("fp32", "tf32", "bf16")
_KERNELS = ["test_kernels.py", "test_sana_model.py"]
_PADDED = {"text": "padded"}

ROWS: tuple[Row, ...] = (
    Row("versions", _RUNS + "versions", 60, ("python", "torch", "cuda", "driver", "triton", "diffusers", "card")),
    Row("compiler", _RUNS + "compiler", 120, ("first_s", "error")),
    _tests("tests/kernels", only=_KERNELS),
    Row(
        "encode/gemma",
        _ENCODERS + "gemma",
        240,
        ("max_rel_error", "captions_per_s_80", "speedup_80", "captions_per_s_280", "speedup_280", "peak_gib"),
        {"captions": 32, "lengths": [80, 280]},
    ),
    Row(
        "encode/vae",
        _ENCODERS + "vae",
        240,
        tuple(f"{name}_{key}" for name in _ARITHMETIC for key in ("images_per_s", "error", "peak_gib")),
        {"batch": 8},
    ),
    Row(
        "trainer",
        _RUNS + "trainer",
        400,
        (
            *("images_per_s", "mfu", "data_wait", "save_slowdown", "save_pause_s", "save_s", "checkpoint_gib"),
            *("host_growth_gib", "profile_mib", "peak_gib"),
        ),
        {"steps": 24, "save_every": 8, "batch": 32},
    ),
    _step("step/fast", 16, {**_NONE, **_BLOCK}, seconds=240),
    _tests("tests/rest", without=_KERNELS),
    _profile("profile/fast", {**_NONE, **_BLOCK}),
    _step("24gb/came-8", 8, {**CAME, **FRUGAL}, cap_gib=CAPS["24gb"]),
    _step("24gb/came-16", 16, {**CAME, **FRUGAL}, cap_gib=CAPS["24gb"]),
    _step("24gb/adamw8bit-8", 8, {**EIGHT_BIT, **FRUGAL}, cap_gib=CAPS["24gb"], seconds=240),
    _step("24gb/adamw8bit-16", 16, {**EIGHT_BIT, **FRUGAL}, cap_gib=CAPS["24gb"], seconds=240),
    _buckets("buckets/fast", {**_NONE, **_BLOCK}),
    Row("device", _RUNS + "device", 150, ("matmul_tflops", "copy_gbs", "to_device_gbs", "to_host_gbs", "memory_gib")),
    _step("step/default", 64, {}, microbatch=8),
    _profile("profile/default", {}),
    _step("step/full-32", 32, _FULL),
    _peer("diffusers/full-32", 32, True),
    _peer("diffusers/encoders-16", 16, True, resident=True),
    _step("lora/12gb-1", 1, {**_FULL, **LORA}, cap_gib=10.5),
    _step("lora/24gb-4", 4, {**_FULL, **LORA}, cap_gib=CAPS["24gb"]),
    _step("lora/full-32", 32, {**_FULL, **LORA}),
    _step("lora/fast-16", 16, {**_NONE, **_BLOCK, **LORA}, seconds=240),
    _step("48gb/came-32", 32, {**CAME, **FRUGAL}, cap_gib=CAPS["48gb"]),
    _step("technique/none-16", 16, _NONE),
    _step("technique/selective-16", 16, _SELECTIVE),
    _step("technique/every-2-16", 16, {"activation_checkpointing": "every-2"}),
    _step("technique/full-16", 16, _FULL),
    _step("technique/compile-selective-16", 16, {**_SELECTIVE, **_BLOCK}, seconds=240),
    _step("technique/compile-full-16", 16, {**_FULL, **_BLOCK}, seconds=240),
    _step("technique/padded-16", 16, {**_NONE, **_PADDED}),
    _step("technique/compile-padded-16", 16, {**_NONE, **_PADDED, **_BLOCK}, seconds=240),
    _step("technique/came-16", 16, {**_NONE, **CAME}),
    _step("technique/adamw8bit-16", 16, {**_NONE, **EIGHT_BIT}, seconds=240),
    _step("technique/bf16-pure-16", 16, {**_NONE, "precision": "bf16_pure"}),
    _step("technique/in-backward-16", 16, {**_NONE, "optim": {"clip": None, "in_backward": True}}),
    _step("technique/int8-16", 16, {**_NONE, "activation_compression": "int8"}),
    _peer("diffusers/none-16", 16, False),
    *(_step(f"microbatch/{n}", n, {**_NONE, **_BLOCK}, seconds=240) for n in (4, 8, 24, 32, 48)),
    _step("microbatch/full-64", 64, {**_FULL, **_BLOCK}, seconds=240),
    *(_step(f"accumulate/1-of-8-reshard-{v}", 8, {"parallel": {"reshard_after_forward": v}}, microbatch=1)
      for v in (None, True)),
    _optimizer("optimizer/adamw", {}),
    _optimizer("optimizer/came", CAME),
    _optimizer("optimizer/adamw8bit", EIGHT_BIT),
    _optimizer("optimizer/adamw-bf16-pure", {"precision": "bf16_pure"}),
    _buckets("buckets/default", {}),
    Row(
        "arithmetic",
        _RUNS + "arithmetic",
        60,
        ("matmul_error", "matmul_error_tf32", "convolution_error", "convolution_error_tf32"),
    ),
    _step("48gb/came-48", 48, {**CAME, **FRUGAL}, cap_gib=CAPS["48gb"]),
    _step("48gb/adamw8bit-32", 32, {**EIGHT_BIT, **FRUGAL}, cap_gib=CAPS["48gb"], seconds=240),
    _step("48gb/adamw8bit-48", 48, {**EIGHT_BIT, **FRUGAL}, cap_gib=CAPS["48gb"], seconds=240),
)  # fmt: skip


def chosen(names: Sequence[str] | None) -> list[Row]:
    """The rows of these names or groups in the order given, each once; those of a group, and all, in order of value.

    Raises:
        KeyError: one that is neither.
    """
    if names is None:
        return list(ROWS)
    by_name: dict[str, list[Row]] = {}
    for row in ROWS:
        for name in {row.name, row.name.partition("/")[0]}:
            by_name.setdefault(name, []).append(row)
    if unknown := [name for name in names if name not in by_name]:
        raise KeyError(", ".join(unknown))
    return list({row.name: row for name in names for row in by_name[name]}.values())


def measure(row: Row, dry: bool) -> dict[str, Any]:
    """The figures of a row, in this process.

    Raises:
        Exception: whatever the row raises; RuntimeError if a figure is missing.
    """
    import torch

    from benchmarks.gpu.sizes import Sizes

    module, _, name = row.call.partition(":")
    try:
        figures = getattr(importlib.import_module(module), name)(Sizes.of(dry), **row.given)
    except torch.OutOfMemoryError:
        if not row.may_exceed:
            raise
        return {**dict.fromkeys(row.yields), "fits": False}
    if row.may_exceed:
        figures["fits"] = True
    if missing := [key for key in row.yields if key not in figures]:
        raise RuntimeError(f"{row.name} does not yield {', '.join(missing)}")
    return figures


def here(row: Row, dry: bool, seconds: float) -> dict[str, Any]:
    """A row in this process, without a limit."""
    try:
        return _judged(measure(row, dry))
    except Exception:
        return {"ok": False, "error": traceback.format_exc()[-_TAIL:]}


def in_a_process(row: Row, dry: bool, seconds: float) -> dict[str, Any]:
    """A row in a new process, which is ended with all of its children after this many seconds, or with this process.
    Its figures are the last line of its output that is a JSON object: threads of libraries may print after it."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--child", json.dumps(asdict(row)), *(["--dry"] if dry else [])]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,  # of this session, so that what ends the session ends the row
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return {"ok": False, "error": f"ended after {seconds:.0f} s\n{output[-_TAIL:]}", "late": True}
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode == 0 and (figures := _last_object(output)) is not None:
        return _judged(figures)
    return {"ok": False, "error": f"exit code {process.returncode}\n{output[-_TAIL:]}"}


def _last_object(output: str) -> dict[str, Any] | None:
    for line in reversed(output.splitlines()):
        with suppress(ValueError):
            if isinstance(value := json.loads(line), dict):
                return value
    return None


def _judged(figures: dict[str, Any]) -> dict[str, Any]:
    return {"ok": figures.pop("ok", True), "figures": figures}


def run(
    rows: Sequence[Row], minutes: float, dry: bool, call: Callable[[Row, bool, float], dict[str, Any]] = in_a_process
) -> Iterator[dict[str, Any]]:
    """Run the rows until the time is up, one after the other; each result as soon as it is there.

    Returns:
        {row, seconds, ok, figures or error}; ok is null for rows that no time was left for, or that were ended before
        their limit because the time was up.
    """
    began = time.monotonic()
    for row in rows:
        left = 60 * minutes - (time.monotonic() - began)
        if left < (0 if dry else min(LEAST_S, row.seconds)):
            yield {"row": row.name, "seconds": 0.0, "ok": None, "error": "no time was left"}
            continue
        start = time.monotonic()
        result = call(row, dry, min(left, row.seconds))
        if result.pop("late", False) and left < row.seconds:
            result["ok"] = None
        yield {"row": row.name, "seconds": round(time.monotonic() - start, 1), **result}
