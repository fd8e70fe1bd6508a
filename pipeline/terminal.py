"""One line on standard error that a terminal overwrites.

Lines that are printed meanwhile go through `above`, which takes the line away first and draws it again afterwards.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable


class LiveLine:
    """Attributes:
    live: there is a terminal, so that `show` shows something.
    """

    def __init__(self, live: bool):
        self.live = live
        self._shown = ""

    def show(self, text: str) -> None:
        """Replace the last text."""
        if self.live:
            fitting = text[: shutil.get_terminal_size().columns - 1]
            sys.stderr.write("\r" + fitting.ljust(len(self._shown)))
            sys.stderr.flush()
            self._shown = fitting

    def end(self) -> None:
        """Leave the text and begin a new line."""
        if self._shown:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._shown = ""

    def above(self, log: Callable[[str], None]) -> Callable[[str], None]:
        """`log`, for lines that appear above the live line."""

        def log_above(line: str) -> None:
            shown = self._shown
            self.show("")
            if shown:
                sys.stderr.write("\r")
                sys.stderr.flush()
            log(line)
            if shown:
                self.show(shown)

        return log_above
