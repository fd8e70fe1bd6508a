"""Makes mutmut's mutants of the sources in the current folder: `python -m tests.support.mutant_making [statements]`.

With `statements` a mutant lacks a call, a `continue`, `break` or early `return`, or takes a condition as false or true.
mutmut edits expressions only, so it does not show that a guard may be removed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import libcst
from mutmut.__main__ import copy_also_copy_files, copy_src_dir, create_mutants
from mutmut.mutation.mutators import mutation_operators


def without_call(node: libcst.Expr) -> Iterator[libcst.CSTNode]:
    if isinstance(node.value, libcst.Call):
        yield node.with_changes(value=libcst.Name("None"))


def without_leaving(node: libcst.CSTNode) -> Iterator[libcst.CSTNode]:
    if not (isinstance(node, libcst.Return) and node.value is not None):
        yield libcst.Pass()


def decided(node: libcst.If) -> Iterator[libcst.CSTNode]:
    for value in ("False", "True"):
        operator = libcst.And() if value == "False" else libcst.Or()
        test = node.test.with_changes(lpar=[libcst.LeftParen()], rpar=[libcst.RightParen()])
        yield node.with_changes(test=libcst.BooleanOperation(test, operator, libcst.Name(value)))


if __name__ == "__main__":
    if "statements" in sys.argv[1:]:
        mutation_operators[:] = [
            (libcst.Expr, without_call),
            (libcst.Return, without_leaving),
            (libcst.Continue, without_leaving),
            (libcst.Break, without_leaving),
            (libcst.If, decided),
        ]
    Path("mutants").mkdir()
    copy_src_dir()
    copy_also_copy_files()
    create_mutants(1)
