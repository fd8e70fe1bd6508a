"""Files that belong to a picture by its name, but not in a way that is read: `mask_1.png` or `masks/mask_1.png` of
`img_1.jpg`, `captions/1.txt` or `1_caption.txt` of `1.jpg`. And the command that renames them.

Two names fit if they are equal without words at the beginning or the end of either, in one folder or in folders that
differ in one part of the path. Price: for a sample of files a few passes of Arrow over the names of all pictures.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.data.sources.filenames import composed, extension, stem

PLACES = 3
"""Words at either end of a name that are tried."""
NEIGHBOURS = 50
"""Folders next to or below a folder that are tried."""

_WORD = re.compile(r"[A-Za-z]+[-_. ]*")
_END = re.compile(r"[-_. ](?=\w)")
_NUMBER = re.compile(r"[-_. ][0-9]+")
_FORMS = (
    (r"^$", ""),
    (r"^((?:.*/)?)[a-z]+[-_. ]+([^/]+)$", r"\1\2"),
    (r"^((?:.*/)?)[a-z][-a-z_. ]*([0-9][^/]*)$", r"\1\2"),
    (r"^(.*[^/])[-_. ][a-z]+$", r"\1"),
)
"""The parts that are removed from the names of pictures, one after the other: nothing, a word at the beginning, all
letters before a digit, a word at the end."""


@dataclass(frozen=True)
class Pair:
    """A file and the picture that it belongs to.

    before, after: what the file's name has around that of the picture, or around what both have in common.
    picture_before, picture_after: the same of the picture's name.
    """

    file: str
    picture: str
    before: str
    after: str
    picture_before: str
    picture_after: str

    @property
    def folder(self) -> str:
        """The part of the file's path that differs from the picture's; "" in the same folder."""
        parts, others = (posixpath.dirname(name).split("/") for name in (self.file, self.picture))
        return next((part for place, part in enumerate(parts) if part != "".join(others[place : place + 1])), "")

    def command(self, location: str, into: str, ending: str = "", verb: str = "mv -n") -> str:
        """A shell command that gives all files of this kind in the file's folder the names of their pictures. Names are
        quoted: a data set's file may be called `$(rm -r x)`.

        Args:
            location: of the source. into: the folder for them, relative to the file's; "": that folder.
            ending: of the new names; "": they keep theirs. verb: "" appends each file to that of its picture.
        """
        folder = posixpath.join(location, posixpath.dirname(self.file)).rstrip("/")
        before, after = (shlex.quote(part) if part else "" for part in (self.before, self.after))
        if _NUMBER.fullmatch(self.after):
            after = f"{self.after[0]}[0-9]*"
        name = f"n=${{f#{before}}}; n=${{n%{after}.*}}; " if before else f"n=${{f%{after}.*}}; "
        first, last = (shlex.quote(part) if part else "" for part in (self.picture_before, self.picture_after))
        target = f'{shlex.quote(into + "/") if into else "./"}{first}"$n"{last}.' + (ending or '"${f##*.}"')
        made = f'{verb} "./$f" {target}' if verb else f'cat "./$f" >> {target}; echo >> {target}'
        files = f"./{before}*{after}.{shlex.quote(extension(self.file)) if ending else '*'}"
        make = f"mkdir -p {shlex.quote(into)} && " if into and "/" not in into else ""
        return f"(cd {shlex.quote(folder)} && {make}for f in {files}; do f=${{f#./}}; {name}{made}; done)"


def pairs(
    files: Iterable[str],
    pictures: Iterable[pa.ChunkedArray],
    folders: Mapping[str, list[str]],
    usable: Callable[[str, str, str], bool],
) -> dict[str, Pair]:
    """The picture of each file that has one.

    Args:
        pictures: their names, some at a time. folders: the names of the folders in each folder.
        usable: (file, picture, what the file's name has more) -> whether they may be a pair.
    """
    wanted = defaultdict[str, list[tuple[int, str, str]]](list)
    for file in files:
        for rank, (key, core) in enumerate(_keys(file, folders)):
            wanted[key].append((rank, file, core))
    best, keys = dict[str, tuple[int, Pair]](), pa.array(wanted, pa.string())
    for names, form, some in _named(pictures):
        matches = pc.is_in(names, value_set=keys)
        for key, picture in zip(names.filter(matches).to_pylist(), some.filter(matches).to_pylist(), strict=True):
            for rank, file, core in wanted[key]:
                before, _, after = posixpath.basename(stem(file)).partition(core)
                rank += form * 1000
                is_better = file not in best or rank < best[file][0]
                if not is_better or not usable(file, picture, before + after):
                    continue
                name = posixpath.basename(stem(picture))
                if (place := name.lower().rfind(core.lower())) < 0:  # of another Unicode form
                    continue
                best[file] = rank, Pair(file, picture, before, after, name[:place], name[place + len(core) :])
    return {file: pair for file, (_, pair) in best.items()}


def _named(pictures: Iterable[pa.ChunkedArray]) -> Iterator[tuple[pa.ChunkedArray, int, pa.ChunkedArray]]:
    """Yield (names, form, pictures) for some pictures at a time: what a file may be called after, in each form."""
    for some in pictures:
        lower = pc.utf8_lower(pc.utf8_normalize(pc.replace_substring_regex(some, r"\.[^./]*$", ""), form="NFC"))
        for form, (pattern, kept) in enumerate(_FORMS):
            yield pc.replace_substring_regex(lower, pattern, kept) if form else lower, form, some


def _keys(file: str, folders: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    """(lower-case stem of a picture, what both names have in common) for a file, the likeliest first."""
    folder, _, name = stem(file).rpartition("/")
    for core in _cores(name):
        for place in _near(folder, folders):
            yield composed(posixpath.join(place, core)).lower(), core


def _cores(name: str) -> Iterator[str]:
    """Yield what a name may have in common with that of its picture, the likeliest first."""
    yield name
    end = 0
    for _ in range(PLACES):
        word = _WORD.match(name, end)
        if word is None or (end := word.end()) == len(name):
            break
        if name[end - 1] in "-_. " or name[end].isdigit():
            yield name[end:]
    for match in list(_END.finditer(name, 1))[-PLACES:]:
        yield name[: match.start()]


def _near(folder: str, folders: Mapping[str, list[str]]) -> Iterator[str]:
    """The folder, and those whose path differs in one part."""
    yield folder
    parts = folder.split("/") if folder else []
    for place in range(len(parts)):
        above, below = parts[:place], parts[place + 1 :]
        yield "/".join([*above, *below])
        for sibling in folders.get("/".join(above), ())[:NEIGHBOURS]:
            if sibling != parts[place]:
                yield "/".join([*above, sibling, *below])
    for inner in folders.get(folder, ())[:NEIGHBOURS]:
        yield posixpath.join(folder, inner)
