"""A format in one file: zips of pictures, each with a .txt of its name."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator

from sana_pipe.data.sources.caption_columns import PictureCaptions
from sana_pipe.data.sources.filenames import EXTENSIONS, extension, stem
from sana_pipe.data.sources.source import FilesSource, Format, Given, Item, Place, Reject, Source


class ZipSource(FilesSource):
    format = "zip"
    WHERE = re.compile(r"(?P<name>.+)")

    def part(self, name: str) -> Iterator[Item | Reject]:
        with zipfile.ZipFile(self.filesystem.open(name)) as archive:
            members = archive.namelist()
            for member in sorted(member for member in members if extension(member) in EXTENSIONS):
                key, text = f"{name}/{member}", f"{stem(member)}.txt"
                if text in members:
                    said = PictureCaptions(self.rule.text_file(archive.read(text).decode()))
                    yield self._captioned(Place(key, name, member), said)
                else:
                    yield Reject(key, "has no caption")

    def _prepare(self) -> None: ...

    def _stamp(self, file: str) -> str | None:
        return str(self._versions[file])

    def stat(self, place: Place) -> tuple[int, int]:
        return len(self.read(place)), self._version(self._located(place)[0])

    def read(self, place: Place) -> bytes:
        part, where = self._located(place)
        with zipfile.ZipFile(self.filesystem.open(part)) as archive:
            return archive.read(where["name"])


class Zip(Format):
    endings = ("zip",)

    def source(self, given: Given, files: Iterable[str]) -> Source:
        return ZipSource(given.filesystem, files, given.rule, given.name)
