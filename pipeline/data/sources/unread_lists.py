"""Files that are not read although they name pictures without a caption, with words next to the names: a CSV without a
header, `captions.txt`, `captions.json` next to caption files, `metadata.jsonl` in another folder than its pictures.

Price: of the files of text that no picture uses the first `FILES` are read, `BYTES` of each.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sana_pipe.base.errors import escaped
from sana_pipe.data.sources.filenames import composed, extension, split
from sana_pipe.data.sources.filesystem import Unreadable

ENDINGS = {"txt", "csv", "tsv", "json", "jsonl", "md"}
FILES, BYTES = 20, 1 << 16
PICTURES = 200
"""Pictures whose names are looked for."""

_ROW = re.compile(r"^(.*):\d+$")
"""The name of a rejected row of a metadata file."""
_TOKEN = re.compile(r"[^\s\"',;#=]+")
_WORD = re.compile(r"[^\W\d_]{2,}")


@dataclass(frozen=True)
class UnreadList:
    """A file that is not read and names pictures. picture: one of them, name: as the file names it."""

    file: str
    count: int
    picture: str
    name: str

    @property
    def home(self) -> str | None:
        """The folder, relative to the source's, from which the file's names are the pictures'; None: there is none."""
        path = composed(self.picture)
        if not path.endswith(f"/{self.name}") and path != self.name:
            return None
        return path.removesuffix(self.name).rstrip("/")

    def fix(self, location: str) -> str:
        """Says how the file will be read, as a shell command where moving it is enough. location: of the source."""
        name = posixpath.basename(self.file)
        if re.fullmatch(r"metadata\.(jsonl|csv)", name) and self.home is not None:
            file, folder = posixpath.join(location, self.file), posixpath.join(location, self.home, "")
            move = "move {} to {}" if "://" in location else "mv -n {} {}"
            return move.format(shlex.quote(file), shlex.quote(folder))
        return (
            f"write {escaped(name)} as metadata.csv with a header `file_name,text` (or metadata.jsonl with "
            f'{{"file_name": "{escaped(self.name)}", "text": "..."}}) next to the pictures'
        )


def candidates(ignored: Iterable[str], rejected: Iterable[str]) -> list[str]:
    """Files of text among files that no picture uses and rows that were rejected."""
    rows = (match[1] for item in rejected if (match := _ROW.match(item)) is not None)
    files = dict.fromkeys([*ignored, *rows])
    return [file for file in files if extension(file) in ENDINGS][:FILES]


def naming(read: Callable[[str, int], bytes], files: Iterable[str], bare: Sequence[str]) -> Iterator[UnreadList]:
    """The files that name pictures without a caption, with two words or more next to each name.

    Args:
        read: as `Source.read_next_to`. files: see `candidates`. bare: pictures without a caption, some of them.
    """
    names = {composed(posixpath.basename(picture)).lower(): picture for picture in bare[:PICTURES]}
    stems = {split(name)[0]: picture for name, picture in names.items() if len(split(name)[0]) > 3}
    for file in files:
        text = ""
        with suppress(Unreadable):
            text = composed(read(file, BYTES).decode("utf-8", "replace"))
        found = dict[str, str]()
        words = 0
        for token in _TOKEN.findall(text):
            last = posixpath.basename(token.strip("{}[]():").replace("\\", "/")).lower()
            picture = names.get(last) or stems.get(last)
            if picture is not None:
                found.setdefault(picture, token.strip("{}[]():").replace("\\", "/"))
            elif "/" not in token and "." not in token.strip("."):
                words += len(_WORD.findall(token))
        if found and words >= 2 * len(found) and 2 * len(found) >= min(len(names), 4):
            picture, name = next(iter(found.items()))
            yield UnreadList(file, len(found), picture, name)
