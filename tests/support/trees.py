"""Cache folders as the tests unpack and compare them."""

from __future__ import annotations

import tarfile
from pathlib import Path


def files(root: Path) -> dict[str, bytes]:
    """Name -> bytes of every file that means something to readers. What processes of a launch told each other about
    options, planning and verification stays until the next launch, or `gc`."""
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.relative_to(root).parts[0] not in ("tmp", "reports", "rounds")
        if not p.name.startswith(("planned-", "launch-"))
    }


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4; later versions warn without it
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(folder)
