"""Versions, machine and command: what rows and checkpoints say of the process that wrote them."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import sys
from contextlib import suppress
from typing import Any

from sana_pipe import __version__
from sana_pipe.base.urls import strip_credentials

LIBRARIES = ("torch", "triton", "numpy", "pyarrow", "safetensors", "accelerate", "diffusers")
"""Libraries that a run's numbers may depend on, as far as they are installed."""


def versions() -> dict[str, str]:
    """Name -> version: of the product, of Python and of `LIBRARIES`."""
    found = {"sana-pipe": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def written_by(gpu: str) -> dict[str, Any]:
    """The versions, the GPU, the host and the command of this process, as JSON values; without credentials in URLs.

    Args:
        gpu: the name of its GPU, `cpu` without one.
    """
    words = [sys.argv[0].rpartition("/")[2], *sys.argv[1:]] if sys.argv else []
    command = strip_credentials(" ".join(map(shlex.quote, words)))
    return {"versions": versions(), "gpu": gpu, "host": platform.node(), "command": command}
