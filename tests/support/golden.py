"""A cache as fc02fdf wrote it."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden-fc02fdf.tar.xz"
