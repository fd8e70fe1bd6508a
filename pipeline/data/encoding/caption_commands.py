"""Shell commands that put files of captions next to their pictures, where a source does not read them as they are.

On a disk a command works when pasted; in a store the text says what is to be done.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePosixPath

from sana_pipe.base.config import setting
from sana_pipe.base.errors import escaped
from sana_pipe.data.sources.filenames import extension, stem
from sana_pipe.data.sources.name_pairs import Pair
from sana_pipe.data.sources.name_patterns import Pattern
from sana_pipe.data.sources.source import Source
from sana_pipe.data.sources.unread_lists import UnreadList


def placing(source: Source, pattern: Pattern) -> str:
    """Say how files of captions come next to their pictures, on a disk as a shell command."""
    pair = pattern.pair
    assert pair is not None
    ending = "json" if extension(pair.file) == "json" else "txt"
    tars = _tars_of(source, pair)
    if source.is_remote or tars is None or tars[0] != tars[1]:
        return f"store {escaped(pair.file)} as {escaped(stem(pair.picture))}.{ending}, and the others like it"
    numbered = re.fullmatch("[-_. ][0-9]+", pair.after) is not None
    more = f" ({setting('data.caption_parts', 'captions')} with it)" if numbered else ""
    if not (tar := tars[0]):
        return _copying(source.location, pair, ending, numbered) + more
    inside = replace(pair, file=pair.file.removeprefix(f"{tar}/"), picture=pair.picture.removeprefix(f"{tar}/"))
    places = (posixpath.join(place, posixpath.dirname(tar)).rstrip("/") for place in (source.location, _copy(source)))
    old, new = map(shlex.quote, places)
    listed = f'find . -type f | LC_ALL=C sort | tar -cf {new}/"${{t##*/}}" -T -'
    return (
        f'mkdir -p {new} && for t in {old}/*.tar; do d=$(mktemp -d) && tar -xf "$t" -C "$d" && '
        f'(cd "$d" && {_copying(".", inside, ending, numbered)}; {listed}) && rm -r "$d"; done{more}'
    )


def then(source: Source, patterns: Iterable[Pattern]) -> str:
    """The command after those of `placing`."""
    every = [_tars_of(source, each.pair) for each in patterns if each.pair is not None]
    in_tars = not source.is_remote and all(tars is not None and tars[0] and tars[0] == tars[1] for tars in every)
    return "the same command" + (f" with --data {shlex.quote(_copy(source))}" if in_tars else "")


def unpacking(source: Source, first: UnreadList) -> str:
    """Say how tars become a folder with a list of its pictures, on a disk as a shell command."""
    if source.is_remote:
        return f"put the captions of X.jpg into members X.txt in place of {escaped(first.file)}"
    tars, new = shlex.quote(source.location), shlex.quote(f"{source.location.rstrip('/')}-unpacked")
    command = f'mkdir -p {new} && for t in {tars}/*.tar; do tar -xkf "$t" -C {new}; done'
    if not any(first.file.startswith(f"{tar}/") for tar in source.files):
        command += f" && cp -n {shlex.quote(posixpath.join(source.location, first.file))} {new}/"
    return f"{command}, and then the same command with --data {new}"


def _copying(location: str, pair: Pair, ending: str, numbered: bool) -> str:
    """A shell command that copies files of captions next to their pictures. numbered: they are joined."""
    file, picture = pair.file, pair.picture
    above, other = PurePosixPath(file).parent, PurePosixPath(picture).parent
    same = stem(posixpath.basename(file)) == stem(posixpath.basename(picture)) and extension(file) == ending
    if same:
        while above.name == other.name and above.name:
            above, other = above.parent, other.parent
    if above.name and same:
        places = (shlex.quote(f"{location}/{place}".removesuffix("/.")) for place in (above, other))
        return "cp -rn {}/. {}/".format(*places)
    into = posixpath.relpath(posixpath.dirname(picture) or ".", posixpath.dirname(file) or ".")
    return pair.command(location, "" if into == "." else into, ending, "" if numbered else "cp -n")


def _tars_of(source: Source, pair: Pair) -> tuple[str, str] | None:
    """The tars of a file and of its picture, "" of what is no member; None: the source is neither tars nor a folder."""
    if "suffix" not in source.paired_by:
        return None
    tars = [next((tar for tar in source.files if name.startswith(f"{tar}/")), "") for name in (pair.file, pair.picture)]
    return tars[0], tars[1]


def _copy(source: Source) -> str:
    """The folder for tars with captions next to their pictures."""
    return f"{source.location.rstrip('/')}-captions"
