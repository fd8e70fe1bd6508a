"""The bytes and kernels that are counted keep the limits that the pages promise."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.workers import tiny_run

LIMITS = {"bytes_ratio": 0.45, "launch_ratio": 0.40, "graphs": 2}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_compiled_block_moves_less_than_half_of_the_bytes_in_fewer_kernels() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.traffic", "--quick"],
        cwd=tiny_run.ROOT,
        env=tiny_run.environ(),
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])
    assert {name: counted[name] for name, limit in LIMITS.items() if not 0 < counted[name] <= limit} == {}
