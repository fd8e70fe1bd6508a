"""Reads of whole cache files that are noted in a file, and take a while."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

from sana_pipe.data.cache.files import Files


def note_reads(log: str, seconds: float) -> None:
    """Write a line with the name of each file to `log` before it is read, which takes `seconds` longer."""
    real = Files.digest

    def digest(files: Files, name: str) -> str:
        line = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(line, f"{name}\n".encode())
        os.close(line)
        time.sleep(seconds)
        return real(files, name)

    Files.digest = digest  # type: ignore[method-assign,assignment]


def reads(log: Path) -> Counter[str]:
    """How often each shard was read."""
    names = log.read_text().splitlines() if log.exists() else []
    return Counter(name for name in names if name.startswith("shards/"))
