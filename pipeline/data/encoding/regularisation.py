"""Regularisation pictures: the sources and folders that are called like them, and captions without the trigger word."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sana_pipe.base.config import setting
from sana_pipe.base.errors import UserError, escaped
from sana_pipe.data.encoding.picture_commands import ALL_PICTURES
from sana_pipe.data.encoding.reading import Reading, settles
from sana_pipe.data.encoding.understood import Understood
from sana_pipe.data.sources import name_patterns
from sana_pipe.data.sources.config import DataGiven


def without_trigger(reading: Reading, name: str, scan: dict[str, Any] | None) -> Reading:
    """Say how a source is read, without the prefix of the configuration where it is called like regularisation
    pictures, unless `--set` gives it now or gave it at an earlier scan.

    Args:
        name: of the source. scan: its last scan document.
    """
    prefix = reading.data.caption_prefix
    used = (scan or {}).get("read", {}).get("used", {}).get("caption_prefix", "")
    given = "caption_prefix" in reading.given.overridden or used.strip()
    if not prefix.strip() or given or not name_patterns.is_regularisation(name):
        return reading
    data = reading.data.model_copy(update={"caption_prefix": ""})
    note = (
        f"the name of source {name!r} says that it has regularisation pictures: its captions are made without "
        f"data.caption_prefix ({setting('data.caption_prefix', prefix)} adds it to them, too)"
    )
    notes = [each for each in reading.notes if "data.caption_prefix" not in each]
    return replace(reading, data=data, notes=(*notes, note))


def places_of(understood: Understood) -> tuple[str, str]:
    """Return where the pictures of the subject and the regularisation pictures are, if two folders have them."""
    root, [first, *_] = understood.source.location.rstrip("/"), understood.regularisation
    return f"{root}/{first.of}".rstrip("/"), f"{root}/{first.value}"


def class_of(trigger: str) -> str:
    """A caption for regularisation pictures: the trigger word without its first word."""
    words = trigger.strip().rstrip(",;:. ").split()
    return " ".join(words[1:]) or "a picture"


def refuse(understood: Understood, given: DataGiven, command: Callable[[Sequence[str]], str]) -> None:
    """Refuse regularisation pictures whose captions would have the trigger word.

    Args:
        given: the origin of the settings.
        command: settings -> the command that uses them.

    Raises:
        UserError: with both readings as commands.
    """
    data, source = understood.data, understood.source
    option = "caption_prefix" if data.caption_prefix.strip() else "caption"
    word = getattr(data, option) or ""
    reached = understood.usable - (understood.captioned if option == "caption" else 0)
    if not reached or word in ("", "none", "filename", "folder"):
        return
    if name_patterns.is_regularisation(source.name):
        if option == "caption" and option not in given.overridden:
            raise UserError(
                f"the name of source {source.name!r} says that it has regularisation pictures, but its captions would "
                f"be {word!r} (data.caption) like those of the subject",
                expected="captions without the trigger word for regularisation pictures",
                fix=f"without the word: {command([f'data.caption={class_of(word)}'])}; with the word: "
                f"{command([f'data.caption={word}'])}",
            )
    elif understood.regularisation and not settles(given, "pictures"):
        raise UserError(
            f"the folder {understood.regularisation[0].value!r} of source {source.name!r} is named like "
            f"regularisation pictures, but its captions would get {word!r} (data.{option}) like those of the subject",
            expected="a source for the subject, and another for the regularisation pictures",
            found="; ".join(f"{each.count} such as {escaped(each.example)}" for each in understood.regularisation),
            fix=f"run the command twice, with --data {shlex.quote(places_of(understood)[0])} and with --data "
            f"{shlex.quote(places_of(understood)[1])}; if all are of the subject: {command([ALL_PICTURES])}",
        )
