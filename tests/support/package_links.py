"""The installed layout as links: build/links/sana_pipe, for programs that read sources and know no editable install.

mypy reads it, and copies of the checkout run from it. `python -m tests.support.package_links` makes it anew.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("stages", "configs")
"""Folders at the top of the repository that are subpackages of sana_pipe; its other modules are those of pipeline/."""


def link(root: Path = ROOT) -> Path:
    """Make the links of the checkout `root`, and return the folder to put on PYTHONPATH."""
    links = root / "build" / "links"
    shutil.rmtree(links, ignore_errors=True)
    package = links / "sana_pipe"
    package.mkdir(parents=True)
    for path in [*(root / "pipeline").iterdir(), *(root / name for name in FOLDERS)]:
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    return links


if __name__ == "__main__":
    print(link())
