"""The report shows how much an adapter changes each block."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sana_pipe.base.launch import Launch
from sana_pipe.tools.reporting.adapter_figures import AdapterFigures, AdapterProblem, adapter_figures
from sana_pipe.tools.reporting.figures import Figures
from sana_pipe.tools.reporting.run_figures import run_figures
from sana_pipe.tools.reporting.sections import SECTIONS
from sana_pipe.train.models.adapters import Merged, adapter_from
from sana_pipe.train.training import checkpoint
from sana_pipe.train.training.trainer import fit
from tests.support.workers import tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted") / "run"
    settings = tiny_run.config(folder, steps=2, save_every=2, adapter={"rank": 2, "alpha": 3.0, "targets": "all"})
    fit(settings.train, tiny_run.task(settings), Launch(), log=lambda line: None)
    return folder


def test_norms_of_the_changes_are_those_of_the_merged_weights(run: Path) -> None:
    stored = checkpoint.ModelTensors(checkpoint.complete(run / "checkpoints")[-1])
    adapter, figures = adapter_from(stored.document.adapter), adapter_figures(run)
    assert adapter is not None and isinstance(figures, AdapterFigures)
    base = stored.architecture.initial(0)
    merged = Merged(stored.architecture, adapter, base, stored)
    squares = {
        part: sum(
            float((merged[name] - merged.at(0)[name]).square().sum())
            for name in base.shapes
            if name.startswith(f"transformer_blocks.1.{part}.")
        )
        for part in ("attn1", "attn2", "ff")
    }
    expected = {part: square**0.5 for part, square in squares.items()}
    assert figures.step == 2 and figures.adapter == "a LoRA of rank 2"
    assert figures.blocks["1"] == pytest.approx(expected, rel=1e-3) and min(expected.values()) > 0


def test_the_report_has_a_bar_for_each_block(run: Path) -> None:
    [section] = [section for section in SECTIONS if section.id == "adapter"]
    figures = Figures(None, None, run_figures(run), None, {})
    [plot] = section.blocks_of(figures)
    assert "run, step 2: norm of the change by a LoRA of rank 2, by block" in str(plot)
    assert figures.run is not None
    figures.run.parts[0] = replace(figures.run.parts[0], adapter=None)
    assert list(section.blocks_of(figures)) == []


def test_a_damaged_checkpoint_is_named_and_a_whole_model_has_no_such_figures(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoints/step-00000002"
    folder.mkdir(parents=True)
    assert adapter_figures(tmp_path) is None
    (folder / "checkpoint.json").write_text("{")
    figures = adapter_figures(tmp_path / "run")
    assert isinstance(figures, AdapterProblem) and str(folder) in figures.problem
