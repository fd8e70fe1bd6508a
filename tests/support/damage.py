"""Damage to files."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, at: int) -> None:
    """Flip a bit of byte `at` of the file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
