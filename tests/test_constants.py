"""tests/support/constants.py: other values reach every kind of process that a test starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sana_pipe.base import retrying
from tests.support.constants import set_constants
from tests.support.workers import tiny_run

NAME = next(name for name, value in vars(retrying).items() if name.isupper() and isinstance(value, int | float))


def test_a_new_interpreter_has_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, {f"sana_pipe.base.retrying.{NAME}": 12345})
    assert getattr(retrying, NAME) == 12345
    program = f"from sana_pipe.base import retrying; print(retrying.{NAME})"
    said = subprocess.run([sys.executable, "-c", program], env=tiny_run.environ(), capture_output=True, text=True)
    assert said.stdout.split() == ["12345"], said.stderr


def test_a_name_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError):
        set_constants(monkeypatch, {"sana_pipe.base.retrying.NOT_THERE": 1})
