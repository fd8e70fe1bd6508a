"""Settings and shell commands that make pictures the masks, control pictures or rejected pictures of others.

On a disk a command works when pasted; in a store the text says what is to be done.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable, Sequence

from sana_pipe.base.errors import escaped
from sana_pipe.data.sources.filenames import extension, stem
from sana_pipe.data.sources.name_patterns import CONTROL, MASK, REJECTED, Pattern
from sana_pipe.data.sources.source import Source

ALL_PICTURES = "data.pictures={}"
"""The setting that says that all pictures are pictures of their own."""


def settings_of(pattern: Pattern) -> list[str]:
    """The settings of the readings of a pattern."""
    if pattern.pair is not None:
        return [f"data.pictures.{pattern.kind}.folder={pattern.folder}"]
    kinds = [pattern.kind] if pattern.kind else [MASK, CONTROL]
    return [f"data.pictures.{kind}.{pattern.way}={pattern.value}" for kind in kinds]


def option(text: str) -> str:
    return f"--set {shlex.quote(text)}"


def commands(patterns: Sequence[Pattern], source: Source, command: Callable[[Sequence[str]], str]) -> list[str]:
    """A command for each choice of one mask and one control picture, and one for preference pairs."""
    masks: list[Pattern | None] = [each for each in patterns if each.kind == MASK]
    controls: list[Pattern | None] = [each for each in patterns if each.kind == CONTROL]
    lines = []
    for mask in masks or [None]:
        for control in controls or [None]:
            chosen = [each for each in (mask, control) if each is not None]
            if chosen:
                names = " and ".join(name for name, each in ((MASK, mask), (CONTROL, control)) if each is not None)
                steps = [renaming(each, source) for each in chosen if each.pair is not None]
                made = command([settings_of(each)[0] for each in chosen])
                joint = " && " if made.startswith("sana-pipe ") and not source.is_remote else ", then "
                lines.append(f"as {names}: {joint.join([*steps, made])}")
    for pattern in patterns:
        if pattern.kind == REJECTED:
            lines.append(f"as rejected pictures of preference pairs: {command(settings_of(pattern))}")
        if not pattern.kind:
            lines += [
                f"as {kind}: {command([each])}"
                for kind, each in zip((MASK, CONTROL), settings_of(pattern), strict=True)
            ]
    return lines


def renaming(pattern: Pattern, source: Source) -> str:
    """Say how control pictures and masks get the names that `data.pictures` needs, on a disk as a shell command."""
    pair = pattern.pair
    assert pair is not None
    into = "" if pair.folder else pattern.folder
    if source.is_remote or source.format != Source.format:
        folder = posixpath.join(posixpath.dirname(pair.file), into)
        name = f"{posixpath.join(folder, stem(posixpath.basename(pair.picture)))}.{extension(pair.file)}"
        return f"name {escaped(pair.file)} {escaped(name)}, and the others like it"
    return pair.command(source.location, into)
