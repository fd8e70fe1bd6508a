"""Which modules a file imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.package_links import FOLDERS


def module_name(path: Path, root: Path) -> str:
    """The name under which a file of the checkout `root` is imported: pipeline/ is the package sana_pipe."""
    parts = path.relative_to(root).with_suffix("").parts
    if parts[0] == "pipeline":
        parts = ("sana_pipe", *parts[1:])
    elif parts[0] in FOLDERS:
        parts = ("sana_pipe", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def nodes(text: str) -> list[ast.AST]:
    """The nodes of a file, the module first. All files take 200 MiB: call `nodes.cache_clear()` after the last use."""
    return list(ast.walk(ast.parse(text)))


def imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file names in an import, absolute, relative or through importlib with a literal."""
    here = module_name(path, root)
    package = here.split(".") if path.name == "__init__.py" else here.split(".")[:-1]
    for node in nodes(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value
