"""The installed layout as links: build/links/sana_pipe, for programs that read sources and know no editable install.

mypy reads it, and copies of the checkout run from it. `python -m tests.support.package_links` makes it anew.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("stages", "configs")
"""Folders at the top of the repository that are subpackages of sana_pipe; its other modules are those of pipeline/."""


def link(root: Path = ROOT) -> Path:
    """Make the links of the checkout `root`, and return the folder to put on PYTHONPATH. Links that are right stay as
    they are: other processes import from them."""
    package = root / "build" / "links" / "sana_pipe"
    package.mkdir(parents=True, exist_ok=True)
    every = [*(root / "pipeline").iterdir(), *(root / name for name in FOLDERS)]
    wanted = {path.name: path for path in every if path.name != "__pycache__"}
    for name, path in wanted.items():
        made = package / name
        if not made.is_symlink() or made.readlink() != path:
            work = package / f".{name}.{os.getpid()}"
            work.symlink_to(path)
            work.replace(made)
    for made in package.iterdir():
        if made.is_symlink() and made.name not in wanted and not made.name.startswith("."):
            made.unlink()
    return package.parent


if __name__ == "__main__":
    print(link())
