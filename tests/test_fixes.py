"""Fixes of errors, and all other texts: the commands, options and settings that they name exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from sana_pipe.cli import cli
from sana_pipe.config import option_fields, reads

ROOT = Path(__file__).resolve().parent.parent
PLACE = "PLACE"
PROSE = {"once", "reads", "than", "that", "with", "cache", "checkpoint", "lists", "wrote"}
"""Words that may follow the name of the program in a sentence."""
SETTINGS = {name for name, _ in option_fields()}
SECTIONS = "|".join(sorted({name.partition(".")[0] for name in SETTINGS if "." in name}))
OTHERS = {"--nproc-per-node", "--no-python", "--standalone", "--head", "--master-port", "--repo-type"}
"""Options of other programs."""


def text_of(node: ast.AST) -> str | None:
    """A string of the source; what an f-string inserts is `PLACE`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else PLACE for part in node.values)
    return None


def strings(tree: ast.AST) -> Iterator[str]:
    """All but docstrings."""
    queue = [tree]
    while queue:
        node = queue.pop()
        text = text_of(node)
        if text is not None:
            yield text
        if not isinstance(node, ast.JoinedStr) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            queue += ast.iter_child_nodes(node)


def fixes(tree: ast.AST) -> Iterator[str]:
    """What is given as `fix=`, and what is assigned to a name with `fix` in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "fix":
            yield from strings(node.value)
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any("fix" in ast.unparse(target).lower() for target in targets):
                yield from strings(node.value)


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Every file of the packages, parsed."""
    paths = [path for folder in ("pipeline", "stages") for path in ROOT.glob(f"{folder}/**/*.py")]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def commands_in(trees: dict[str, ast.Module]) -> list[tuple[str, str]]:
    """(file, command line) for every command that a text names."""
    command = re.compile(r"sana-pipe ((?:'[^'\n]*'|(?!, |: |\. | #| > | \()[^;)`\n])+)")
    lines = {(path, line) for path, tree in trees.items() for text in strings(tree) for line in command.findall(text)}
    return sorted(lines)


def fixes_in(trees: dict[str, ast.Module]) -> list[tuple[str, str]]:
    return sorted({(path, text) for path, tree in trees.items() for text in fixes(tree)})


def options_of(command: click.Command) -> dict[str, click.Option]:
    return {name: param for param in command.params if isinstance(param, click.Option) for name in param.opts}


def check_command(line: str) -> None:
    """Parse a command line as click does, as far as it is one: prose may follow it.

    Raises:
        click.UsageError: no such command or option, a wrong or missing value.
    """
    try:
        words = [word for word in shlex.split(line) if word != "..."]
    except ValueError:  # an apostrophe of the prose
        words = line.replace("...", "").split()
    if words[0] in PROSE | {PLACE}:
        return
    command, path, given = cli.get_command(click.Context(cli), words[0]), [words.pop(0)], []
    if command is None:
        raise click.UsageError(f"no command {path[0]}")
    if isinstance(command, click.Group) and words and not words[0].startswith("--") and words[0] not in PROSE:
        path.append(words.pop(0))
        command = command.commands.get(path[1])
        if command is None:
            raise click.UsageError(f"no command {' '.join(path)}")
    free = [param.required for param in command.params if isinstance(param, click.Argument)]
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            option = options_of(command).get(word.partition("=")[0])
            given.append(word)
            if option is not None and not option.is_flag and "=" not in word and words:
                given.append("1" if words[0] in (PLACE, "N", "I") else words[0])
                check_setting(" ".join(path), word, words.pop(0))
        elif free and (free[0] or word.isupper()):
            given.append(word)
            free.pop(0)
        else:
            break
    command.make_context(path[-1], given)


def check_setting(command: str, option: str, value: str) -> None:
    name = value.partition("=")[0]
    if option != "--set" or PLACE in name or name.isupper():
        return
    if name not in SETTINGS or not (reads(command, name) or command == "init"):  # which writes it into the file
        raise click.UsageError(f"sana-pipe {command} reads no {name}")


def check_names(text: str) -> None:
    """All options and settings that a fix names exist.

    Raises:
        click.UsageError: one does not.
    """
    everything = [cli, *cli.commands.values()]
    everything += [
        below for group in everything[1:] if isinstance(group, click.Group) for below in group.commands.values()
    ]
    known = OTHERS | {"--help"}.union(*map(options_of, everything))
    missing = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) - known
    named = re.findall(rf"(?<![\w./])((?:{SECTIONS})(?:\.[a-z_][a-z0-9_]*)+)(?![\w(/]|\.[a-z])", text)
    missing |= set(named) - SETTINGS
    if missing:
        raise click.UsageError(f"{sorted(missing)} does not exist")


def refused(check: Callable[[str], None], texts: list[tuple[str, str]]) -> list[str]:
    """The texts that `check` refuses, as `file: text: why`."""
    wrong = []
    for path, text in texts:
        try:
            check(text)
        except click.UsageError as error:
            wrong.append(f"{path}: {text!r}: {error.message}")
    return wrong


def test_a_command_that_a_text_names_is_accepted(trees: dict[str, ast.Module]) -> None:
    commands = commands_in(trees)
    assert len(commands) > 80
    assert {n for n, c in cli.commands.items() if not c.hidden} <= {line.split()[0] for _, line in commands}
    assert refused(check_command, commands) == []


def test_every_option_and_setting_of_a_fix_exists(trees: dict[str, ast.Module]) -> None:
    texts = fixes_in(trees)
    assert len(texts) > 200
    assert refused(check_names, texts) == []


def test_no_fix_is_a_pipe_when_it_is_pasted(trees: dict[str, ast.Module]) -> None:
    assert [(path, text) for path, text in fixes_in(trees) if "|" in re.sub("'[^']*'", "", text)] == []


MENDED = {"pipeline/data/cache/files.py", "pipeline/data/encoding/last_scan.py", "pipeline/data/work/disk_space.py"}
"""Their messages say what the program does about the error."""


def test_an_error_that_is_printed_is_printed_with_its_fix(trees: dict[str, ast.Module]) -> None:
    """`UserError.line` in other messages, `print_error` alone; `what` is for errors made of others."""
    bare, lines = [], 0
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and re.search(r"(echo|log|print)$", ast.unparse(node.func)):
                read = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
                lines += "line" in read
                if "what" in read and "fix" not in read and path not in MENDED:
                    bare.append(f"{path}:{node.lineno}")
    assert bare == [] and lines >= 4


@pytest.mark.parametrize(
    "line",
    [
        "buckets",
        "encode --dta DIR",
        "snapshots nam A B",
        "snapshots name A",
        "bucket --set bucket.heldot=0.01",
        "train --set bucket.batch=4",
        "encode --task-index",
        "verify --repair=yes",
    ],
)
def test_a_wrong_command_is_noticed(line: str) -> None:
    assert len(refused(check_command, [("file.py", line)])) == 1


@pytest.mark.parametrize("text", ["lower train.microbach", "--max-shrink", "raise encode.max_reject_rate.x"])
def test_a_wrong_name_is_noticed(text: str) -> None:
    assert len(refused(check_names, [("file.py", text)])) == 1
