"""One line on standard error that a terminal overwrites.

Lines that are printed meanwhile go through `above`, which takes the line away first and draws it again afterwards.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence


def shorter(parts: Sequence[str], least: int, between: str) -> Iterator[str]:
    """All parts as a text, then fewer and fewer, without the last ones, down to the first `least`."""
    return (between.join(parts[:count]) for count in range(len(parts), min(least, len(parts)) - 1, -1))


class LiveLine:
    """Attributes:
    live: there is a terminal, so that `show` shows something.
    """

    def __init__(self, live: bool):
        self.live = live
        self._shown = ""
        self._texts: tuple[str, ...] = ("",)

    def show(self, *texts: str) -> None:
        """Replace the last text by the first of these that fits, else by the beginning of the last of these."""
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            fitting = next((text for text in texts if len(text) <= width), texts[-1][:width])
            sys.stderr.write("\r" + fitting.ljust(len(self._shown)))
            sys.stderr.flush()
            self._shown, self._texts = fitting, texts

    def end(self) -> None:
        """Leave the text and begin a new line."""
        if self._shown:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._shown = ""

    def above(self, log: Callable[[str], None]) -> Callable[[str], None]:
        """`log`, for lines that appear above the live line."""

        def log_above(line: str) -> None:
            shown, texts = self._shown, self._texts
            self.show("")
            if shown:
                sys.stderr.write("\r")
                sys.stderr.flush()
            log(line)
            if shown:
                self.show(*texts)

        return log_above
