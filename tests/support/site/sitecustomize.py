"""Set the constants of tests/support/constants.py in a new interpreter, when their modules are imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Setter(importlib.abc.MetaPathFinder):
    def __init__(self, values: dict[str, dict[str, Any]]):
        self._values = values

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        values = self._values.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if values else None
        if values is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for constant, value in values.items():
                assert hasattr(module, constant), f"{name}.{constant}"
                setattr(module, constant, value)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _by_module() -> dict[str, dict[str, Any]]:
    modules: dict[str, dict[str, Any]] = {}
    for name, value in json.loads(os.environ.get("SANA_PIPE_TEST_CONSTANTS", "{}")).items():
        module, _, constant = name.rpartition(".")
        modules.setdefault(module, {})[constant] = value
    return modules


if values := _by_module():
    sys.meta_path.insert(0, _Setter(values))
