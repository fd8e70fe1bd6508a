"""How one sana-pipe process starts another.

Why: decoding runs apart from sampling so that the VAE and the transformer never share a process, and the demo runs
the commands that a person would type. Both must reach this very package, installed or not, from any directory.
Price: the child's command line is not the one to copy by hand; `shown` gives that one.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from pipeline.cli import main; main()"


def command(*arguments: str) -> list[str]:
    """The argument vector that runs `sana-pipe ARGUMENTS` with this interpreter and this package."""
    return [sys.executable, "-c", _START, str(_ROOT), *arguments]


def shown(*arguments: str) -> str:
    """The same command as a person would type it."""
    return shlex.join(["sana-pipe", *arguments])
