"""The command line with every limit lowered: `python -m tests.support.workers.lowered WORD...`."""

from __future__ import annotations

import pytest

from sana_pipe.base.processes import run_and_exit
from sana_pipe.cli import console
from tests.support.lowered import lower_limits


def main() -> None:
    lower_limits(pytest.MonkeyPatch())
    console()


if __name__ == "__main__":
    run_and_exit(main)
