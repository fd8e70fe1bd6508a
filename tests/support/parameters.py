"""Parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest


def first_quick(*values: Any) -> list[Any]:
    """All values of one parameter; the first is for the default tests, the others are for `make slow`."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.slow) for value in others)]
