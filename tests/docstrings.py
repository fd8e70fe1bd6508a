"""Holds the form of docstrings: `python -m tests.docstrings` lists those that begin otherwise, and ends with 1.

A first line begins with a verb or a noun, or says "A X ..." or "The X ...". A word such as "Of" or "Whether" begins a
phrase that has no verb, which a reader at speed must read twice.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = frozenset(
    """as at beside by for from gone how if in it its of on that these this those to what when where whether which who
    why with""".split()  # noqa: SIM905
)
"""First words of a phrase without a verb."""
OF_VALUES = frozenset(("by", "how", "in", "of", "those", "what", "where", "whether"))
"""The same of what is said below a field or a constant."""
_KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def violations(root: Path) -> Iterator[str]:
    """Yield `file:line: first line` of each docstring below pipeline/ and stages/ that begins with one of the words."""
    for path in sorted([*root.glob("pipeline/**/*.py"), *root.glob("stages/*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for line, text, words in _docstrings(node):
                if text.split()[0].strip("`,.:;").lower() in words:
                    yield f"{path.relative_to(root)}:{line}: {text.strip().splitlines()[0]}"


def _docstrings(node: ast.AST) -> Iterator[tuple[int, str, frozenset[str]]]:
    """Yield line, text and refused words: of the node, and of the fields or constants in its body."""
    if isinstance(node, _KINDS) and (text := ast.get_docstring(node)):
        yield getattr(node, "lineno", 1), text, WORDS
    body = getattr(node, "body", None)
    for field, below in pairwise(body if isinstance(body, list) else ()):
        value = below.value if isinstance(below, ast.Expr) else None
        if isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(value, ast.Constant) and value.value:
            yield below.lineno, str(value.value), OF_VALUES


if __name__ == "__main__":
    found = list(violations(ROOT))
    print("\n".join(found))
    sys.exit(bool(found))
