"""Command lines of pages and help texts, run as far as the stage: parsed, configured, checked, with no stage behind."""

from __future__ import annotations

import shlex
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from sana_pipe.cli import main

STAGES = (
    *("bucket", "check", "demo", "encode", "export", "forget", "gc", "pack", "pull", "push", "sample", "snapshots"),
    *("status", "init", "inspect", "plan", "report", "run", "train", "verify", "view"),
)


def words_of(line: str) -> list[str]:
    """The words after `sana-pipe` of a shell line, which a launcher may precede and a remark or `>` follow."""
    words = shlex.split(line, comments=True)
    words = words[words.index("sana-pipe") + 1 :]
    return words[: words.index(">")] if ">" in words else words


def dry_run(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> tuple[int, list[tuple[str, dict[str, Any]]]]:
    """Run `sana-pipe WORDS` with empty stages.

    Returns:
        The exit code, and (stage.function, its keyword arguments) of every call.
    """
    import sana_pipe.stages

    calls: list[tuple[str, dict[str, Any]]] = []

    def function(name: str) -> Callable[..., int]:
        return lambda *args, **kwargs: calls.append((name, kwargs)) or 0  # type: ignore[func-returns-value]

    with monkeypatch.context() as patch:
        for stage in STAGES:
            empty = types.ModuleType(f"sana_pipe.stages.{stage}")
            for name in (
                "run",
                "again",
                "dry_run",
                "encode",
                "diff",
                "name",
                "show",
                "write_list",
                "run_prompts",
                "run_pairs",
                "watch",
            ):
                setattr(empty, name, function(f"{stage}.{name}"))
            empty.check_name = lambda name: None  # type: ignore[attr-defined]
            empty.Options = dict  # type: ignore[attr-defined]
            patch.setitem(sys.modules, empty.__name__, empty)
            patch.setattr(sana_pipe.stages, stage, empty, raising=False)
        with pytest.raises(SystemExit) as ended:
            main(words)
    return int(ended.value.code or 0), calls
