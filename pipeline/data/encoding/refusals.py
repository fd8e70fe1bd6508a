"""Refusals: pictures and files that are likely something else than they would be taken for.

Where a default caption or a trigger word would reach pictures that are likely something else, `check` refuses with both
readings; `data.pictures: {}` says that all are pictures of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.config import setting
from sana_pipe.base.errors import UserError, escaped
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.encoding import regularisation
from sana_pipe.data.encoding.caption_commands import placing, then, unpacking
from sana_pipe.data.encoding.default_captions import has_caption
from sana_pipe.data.encoding.picture_commands import ALL_PICTURES, commands, option
from sana_pipe.data.encoding.reading import settles
from sana_pipe.data.encoding.understood import Understood
from sana_pipe.data.sources import name_patterns
from sana_pipe.data.sources.config import DataGiven
from sana_pipe.data.sources.name_pairs import Pair
from sana_pipe.data.sources.name_patterns import Pattern
from sana_pipe.data.sources.source import Source


def refuse(understood: Understood, given: DataGiven, scan: pa.Table, cache: Cache | None) -> None:
    """Refuse for `encode` what `check`, `check_loose`, `check_lists` and `regularisation.refuse` refuse, as far as the
    user did not settle it and no earlier scan accepted it.

    Args:
        given: the origin of the settings. cache: which knows what an earlier scan accepted.
    """
    data, source = understood.data, understood.source

    def command(settings: Sequence[str]) -> str:
        return f"the same command with {' '.join(map(option, settings))}"

    document = None if cache is None else cache.last_scan(source.name)
    if document is None:
        check_loose(understood)
        if not settles(given, "caption"):
            check_lists(understood)
    has_controls_or_masks = any(each is not None for _, each in data.pictures)
    if understood.patterns and (has_controls_or_masks or (data.caption is not None and not settles(given, "pictures"))):
        accepted: list[Pattern] = []
        if cache is not None and document is not None:
            before = cache.table(document["table"], ["item", "captions", "reject"])
            if data.caption is not None:
                before = before.filter(pc.is_null(before.column("reject")))
            accepted = name_patterns.controls_and_masks(before.column("item"), has_caption(before, data, source.name))
        if not has_controls_or_masks:
            check(understood, command, accepted)
        elif "caption" not in given.overridden and (document or not settles(given, "caption")):
            check_rest(understood, command, data.caption is not None, accepted)
    if document is None:
        regularisation.refuse(understood, given, command)


def check(understood: Understood, command: Callable[[Sequence[str]], str], accepted: Iterable[Pattern] = ()) -> None:
    """Refuse pictures that are likely something else.

    Args:
        command: settings -> the command that uses them.
        accepted: patterns of pictures that an earlier scan took for pictures of their own.

    Raises:
        UserError: with both readings as commands.
    """
    old = {(pattern.way, pattern.value) for pattern in accepted}
    new = [pattern for pattern in understood.patterns if (pattern.way, pattern.value) not in old]
    if new:
        own = f"to train on all of them as pictures: {command([ALL_PICTURES])}"
        what = "rejected pictures of preference pairs" if _are_pairs(new) else "masks or control pictures of the others"
        raise UserError(
            f"{sum(pattern.count for pattern in new)} pictures of source {understood.source.name!r} without a caption "
            f"look like {what}",
            expected="pictures to train on, or the setting that says what the others are",
            found="; ".join(f"{pattern.count} such as {escaped(pattern.example)}" for pattern in new),
            fix="; ".join([*commands(new, understood.source, command), own]),
        )


def _are_pairs(patterns: Iterable[Pattern]) -> bool:
    return all(pattern.kind == name_patterns.REJECTED for pattern in patterns)


def check_rest(
    understood: Understood, command: Callable[[Sequence[str]], str], reached: bool, seen: Sequence[Pattern]
) -> None:
    """Refuse pictures that are likely masks or control pictures next to those that `data.pictures` finds.

    Args:
        command: as of `check`. reached: whether they get a default caption. seen: patterns of an earlier scan.

    Raises:
        UserError: they would be trained as pictures, or samples without one get a blank one.
    """
    old, rest = {(pattern.way, pattern.value) for pattern in seen}, list[Pattern]()
    for pattern in understood.patterns:
        given = dict(understood.data.pictures).get(pattern.kind)
        is_blank = (
            given is not None and not getattr(given, "required", True) and bool(understood.lacking.get(pattern.kind))
        )
        if pattern.kind and (pattern.way, pattern.value) not in old and (reached or is_blank):
            rest.append(pattern)
    if not rest:
        return
    ways = [way for each in rest if (way := _joining(each, understood)) is not None]
    ways += [
        f"move {escaped(each.example)} and the others like it out of the data, and then the same command"
        for each in rest
    ]
    if reached:
        ways.append(f"as pictures with a caption: {command(['data.caption=a picture'])}")
    raise UserError(
        f"{sum(each.count for each in rest)} pictures of source {understood.source.name!r} without a caption look like "
        "masks or control pictures, and data.pictures does not find them",
        expected="masks and control pictures where data.pictures finds them, and no others",
        found="; ".join(f"{each.count} such as {escaped(each.example)} of {escaped(each.of)}" for each in rest),
        fix="; ".join(ways),
    )


def _joining(pattern: Pattern, understood: Understood) -> str | None:
    """The shell command that gives control pictures and masks the suffix that is configured for their kind; None: there
    is none, or their pictures have one."""
    given, source = dict(understood.data.pictures).get(pattern.kind), understood.source
    is_named = given is not None and given.suffix and pattern.way == "suffix" and understood.lacking.get(pattern.kind)
    if not is_named or source.is_remote or source.format != Source.format:
        return None
    assert given is not None and given.suffix is not None
    pair = Pair(pattern.example, pattern.of, "", pattern.value, "", given.suffix)
    return f"as {pattern.kind}: {pair.command(source.location, '')}, and then the same command"


def check_loose(understood: Understood) -> None:
    """Refuse files that are likely captions of pictures without one.

    Raises:
        UserError: with the command that puts them next to their pictures.
    """
    source, loose = understood.source, understood.loose
    if loose:
        raise UserError(
            f"pictures of source {source.name!r} have no caption, and files that look like captions are not read",
            expected="captions next to their pictures: X.txt for X.jpg",
            found="; ".join(f"{each.count} such as {escaped(each.example)} for {escaped(each.of)}" for each in loose),
            fix="; ".join(dict.fromkeys(placing(source, each) for each in loose))
            + f", and then {then(source, loose)}; or move them out of the data if they are not captions",
        )


def check_lists(understood: Understood) -> None:
    """Refuse files that name pictures without a caption and are not read.

    Raises:
        UserError: with how to make them be read.
    """
    source, lists = understood.source, understood.lists
    if lists:
        first = lists[0]
        fix = first.fix(source.location) if source.format == Source.format else unpacking(source, first)
        raise UserError(
            f"pictures of source {source.name!r} have no caption, but {escaped(first.file)}, which is not used, has "
            "words next to their names",
            expected="captions in a file that is read: docs/encoding.md has a table of them",
            found="; ".join(f"{escaped(each.file)}: {escaped(each.name)}" for each in lists),
            fix=f"{fix}; if it holds no captions, the same command with " + setting("data.caption", "a picture"),
        )
