"""Rows for the tests of the kit's loop."""

from __future__ import annotations

import atexit
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.sizes import Sizes


def yields(sizes: Sizes, **figures: Any) -> dict[str, Any]:
    return figures


def chats(sizes: Sizes) -> dict[str, Any]:
    """Something is printed after the figures, as threads of libraries may do."""
    atexit.register(print, "good bye")
    return {"a": 1}


def breaks(sizes: Sizes) -> dict[str, Any]:
    raise ValueError("this row is broken")


def hangs(sizes: Sizes, pid: str) -> dict[str, Any]:
    """With a child that would outlive it."""
    Path(pid).write_text(str(subprocess.Popen(["sleep", "600"]).pid), encoding="utf-8")
    time.sleep(600)
    return {}
