"""The memory of commands over a million items, against its limits: `python -m benchmarks.encode_scale --quick`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import encode_scale, large_cache

LIMITS = {"scan_join_mib_1e6": 600, "bytes_per_item_exponent": 0.2}
QUIET_S = 900


def test_the_benchmark_measures_each_phase() -> None:
    assert set(encode_scale.measure(50)) == set(encode_scale.PHASES)


@pytest.mark.slow
def test_each_command_of_the_benchmark_runs_with_small_buffers(tmp_path: Path) -> None:
    large_cache.cost("build", tmp_path, 3000, encode_scale.QUICK_DIVISOR, 64)
    for name in dict.fromkeys((*large_cache.UNIT_COMMANDS, *large_cache.COMMANDS)):
        assert large_cache.cost(name, tmp_path, 3000, encode_scale.QUICK_DIVISOR, 64).cpu > 0


@pytest.mark.nightly
@pytest.mark.timeout(2 * QUIET_S)
def test_memory_does_not_grow_with_the_items() -> None:
    """On two quiet cores the command takes less than `QUIET_S` seconds; on a busy machine it may take twice as long."""
    argv = [sys.executable, "-m", "benchmarks.encode_scale", "--quick"]
    root = Path(__file__).parents[2]
    run = subprocess.run(argv, capture_output=True, text=True, cwd=root, timeout=2 * QUIET_S - 30, check=False)
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    too_large = {name: figures[name] for name, limit in LIMITS.items() if not figures[name] <= limit}
    assert not too_large, f"limits: {LIMITS}"
