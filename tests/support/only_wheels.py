"""`python -m tests.support.only_wheels ARGUMENTS`: the kit (`benchmarks.gpu`) where nothing is installed but torch,
transformers, triton, pytest, what these depend on, and the wheels of `benchmarks/gpu/wheels.txt`."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import re
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WHEELS = Path(__file__).resolve().parents[2] / "benchmarks/gpu/wheels.txt"
THERE = ("torch", "transformers", "triton", "pytest", "pip", "setuptools")
PLUGINS = ("pytest-xdist",)
"""Loaded by pytest wherever they are installed; hiding modules does not hide that."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wheels() -> list[str]:
    lines = WHEELS.read_text(encoding="utf-8").splitlines()
    return [normal(line) for line in lines if line and not line.startswith("#")]


def with_dependencies(names: Iterable[str]) -> set[str]:
    """These distributions and what they require on this machine, extras left out."""
    from packaging.requirements import Requirement

    known: set[str] = set()
    todo = list(names)
    while todo:
        name = normal(todo.pop())
        if name in known:
            continue
        known.add(name)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        needed = map(Requirement, lines)
        todo += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return known


class Only(importlib.machinery.PathFinder):
    """Finds no module of another distribution."""

    hidden: frozenset[str] = frozenset()

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        return None if fullname.partition(".")[0] in cls.hidden else super().find_spec(fullname, path, target)


if __name__ == "__main__":
    allowed = with_dependencies((*THERE, *PLUGINS)) | set(wheels()) | {"sana-pipe"}
    modules = importlib.metadata.packages_distributions()
    Only.hidden = frozenset(top for top, names in modules.items() if not allowed & {normal(name) for name in names})
    place = sys.meta_path.index(importlib.machinery.PathFinder)
    sys.meta_path[place] = Only
    sys.argv[0] = "benchmarks.gpu"
    runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
