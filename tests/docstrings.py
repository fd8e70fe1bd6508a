"""Holds the form of docstrings: `python -m tests.docstrings` lists those that begin otherwise, and ends with 1.

A first line begins with a verb or a noun, or says "A X ..." or "The X ...". A word such as "Of" or "Whether" begins a
phrase that has no verb, which a reader at speed must read twice.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = frozenset(
    """as at beside by for from gone how if in it its of on that these this those to what when where whether which who
    why with""".split()  # noqa: SIM905
)
"""First words of a phrase without a verb."""
_KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def violations(root: Path) -> Iterator[str]:
    """Yield `file:line: first line` of each docstring below pipeline/ and stages/ that begins with one of `WORDS`."""
    for path in sorted([*root.glob("pipeline/**/*.py"), *root.glob("stages/*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, _KINDS) else None
            if text and text.split()[0].strip("`,.:;").lower() in WORDS:
                yield f"{path.relative_to(root)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"


if __name__ == "__main__":
    found = list(violations(ROOT))
    print("\n".join(found))
    sys.exit(bool(found))
