"""Other values for named constants of the product, in this process and in those that it starts.

A test that needs a small unit calls `set_constants(monkeypatch, {"sana_pipe.data.work.claims.GRACE_S": 1})`.
Children read the values from their environment: `forked.Forked` after its fork, other interpreters in
`site/sitecustomize.py`, as soon as the module is imported. In this process only the module itself reads the new value:
a module that has imported the constant by name keeps the old one.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "SANA_PIPE_TEST_CONSTANTS"
SITE = Path(__file__).resolve().parent / "site"


def set_constants(monkeypatch: pytest.MonkeyPatch, values: Mapping[str, Any]) -> None:
    """Set `MODULE.NAME` to a value of JSON until the end of the test. Further calls add to it."""
    for name, value in values.items():
        module, _, constant = name.rpartition(".")
        monkeypatch.setattr(importlib.import_module(module), constant, value)
    monkeypatch.setenv(VARIABLE, json.dumps({**json.loads(os.environ.get(VARIABLE, "{}")), **values}))
    monkeypatch.setenv("PYTHONPATH", with_site(os.environ.get("PYTHONPATH", "")))


@contextmanager
def constants(values: Mapping[str, Any]) -> Iterator[None]:
    """`set_constants` inside a block, for fixtures of a module."""
    with pytest.MonkeyPatch.context() as patch:
        set_constants(patch, values)
        yield


def unit_sizes(images: int, captions: int, **others: Any) -> dict[str, Any]:
    """The constants of `encode` for units of so many records. others: of `encoding.plan`."""
    sizes = {"UNIT_IMAGES": images, "UNIT_CAPTIONS": captions, **others}
    return {f"sana_pipe.data.encoding.plan.{name}": value for name, value in sizes.items()}


def with_site(path: str) -> str:
    """A PYTHONPATH with which a new interpreter reads `VARIABLE`."""
    folders = [folder for folder in path.split(os.pathsep) if folder and folder != str(SITE)]
    return os.pathsep.join([str(SITE), *folders])


def apply(environ: Mapping[str, str]) -> None:
    """Set what `VARIABLE` says in a process that has imported its modules already."""
    for name, value in json.loads(environ.get(VARIABLE, "{}")).items():
        module, _, constant = name.rpartition(".")
        loaded = importlib.import_module(module)
        assert hasattr(loaded, constant), name
        setattr(loaded, constant, value)
