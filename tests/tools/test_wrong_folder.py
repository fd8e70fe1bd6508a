"""Errors of commands that run in another folder than that of their configuration."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sana_pipe import cli
from sana_pipe.config import DEFAULT_NAME, SHIPPED
from sana_pipe.tools.reporting.plots import LABEL, LETTER, WIDTH, bar_plot


def failed(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert ended.value.code not in (0, None)


@pytest.mark.parametrize("command", [["status"], ["sample", "--prompt", "a dog"], ["verify"], ["bucket"]])
def test_an_error_names_the_folder_that_has_the_configuration(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sana-pipe.yaml").write_text((SHIPPED / DEFAULT_NAME).read_text())
    (tmp_path / "cache").mkdir()
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    failed(*command)
    printed = capsys.readouterr().err
    assert f"cd {tmp_path}" in printed and "sana_1600m_1024" in printed
    failed(*command, "--config", "../sana-pipe.yaml")
    printed = capsys.readouterr().err
    assert f"cd {tmp_path}" in printed and str(tmp_path / "below") in printed
    assert "sana-pipe cd" not in printed


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        ("bucket", True),
        ("snapshots name a b", True),
        ("run pictures", True),
        ("--quiet bucket", False),
        ("bucket --json", False),
        ("config --json", False),
        ("bucket --config sana_1600m_1024", False),
    ],
)
@pytest.mark.parametrize("here", [False, True])
def test_a_command_that_succeeds_with_the_shipped_default_says_so_once(
    words: str,
    noted: bool,
    here: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (below := tmp_path / "a b/below").mkdir(parents=True)
    (below.parent / "sana-pipe.yaml").write_text((SHIPPED / DEFAULT_NAME).read_text())
    monkeypatch.chdir(below.parent if here else below)
    for stage in ("bucket", "snapshots", "run"):
        module = ModuleType(f"sana_pipe.stages.{stage}")
        vars(module).update(run=lambda *given, **named: print("{}"), name=lambda *given, **named: print("{}"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(f"sana_pipe.stages.{stage}", module, raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(words))
    assert not ended.value.code
    printed = capsys.readouterr()
    assert "config" in words or printed.out == "{}\n", "stdout is what it was"
    lines = printed.err.splitlines()
    assert len(lines) == (noted and not here)
    for line in lines:
        assert "sana_1600m_1024" in line and str(below) in line
        assert shlex.split(line.partition(" cd ")[2]) == [str(below.parent)], "ready to paste"


def test_the_number_of_the_longest_bar_fits() -> None:
    import re

    series = {name: [1234.5, 0.0312] for name in ("attention", "cross", "feed-forward")}
    texts = re.findall(r'<text x="([\d.]+)"[^>]*>([^<]*)</text>', str(bar_plot("t", ["0", "1"], series)))
    numbers = [(float(x), text) for x, text in texts if float(x) > LABEL]
    assert len(numbers) == 2 and all(x + LETTER * len(text) <= WIDTH for x, text in numbers)
