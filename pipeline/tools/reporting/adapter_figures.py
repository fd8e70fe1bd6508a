"""Measure how much an adapter changes each block of its model: figures of the newest checkpoint of a run."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from sana_pipe.base.errors import UserError


@dataclass(frozen=True)
class AdapterFigures:
    """The changes by an adapter. adapter: in words. blocks: for each block, by the first part of its modules' names,
    the norm (Frobenius) of their changes."""

    adapter: str
    step: int
    blocks: dict[str, dict[str, float]]


@dataclass(frozen=True)
class AdapterProblem:
    """The reason why a checkpoint cannot be read."""

    problem: str


def adapter_figures(run: Path) -> AdapterFigures | AdapterProblem | None:
    """Compute the figures of a run directory; None: no checkpoint, or no adapter."""
    if not (run / "checkpoints").is_dir():
        return None
    from sana_pipe.train.models.adapters import adapter_from  # torch and its checkpoints: two seconds
    from sana_pipe.train.training import checkpoint

    folders = checkpoint.complete(run / "checkpoints")
    if not folders:
        return None
    try:
        document = checkpoint.read_document(folders[-1])
        adapter = adapter_from(document.adapter)
        if adapter is None:
            return None
        changes = adapter.change_norms(checkpoint.ModelTensors(folders[-1]))
    except UserError as error:
        return AdapterProblem(error.what)
    squares: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for module, norm in changes.items():
        if (found := re.search(r"\.(\d+)\.(\w+)", module)) is not None:
            squares[int(found[1])][found[2]] += norm**2
    blocks = {str(block): {part: square**0.5 for part, square in parts.items()} for block, parts in squares.items()}
    return AdapterFigures(str(adapter), document.state.step, blocks) if blocks else None
