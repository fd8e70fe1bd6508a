"""The two copies of every document: compare them, repair each from the other. (Tables: `Files.duplicate`.)

`Files` writes every document twice (`name`, then `copies/name`) and reads the copy if the document is lost or damaged.
`inspect` checks both, `repair` repairs both from the intact file, `repair_all` repairs all documents of which one of
the two is missing.

Shards and record tables exist once: they are named by their content, and records can be encoded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sana_pipe.base.errors import IntegrityError
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.layout import Paths


@dataclass(frozen=True)
class Pair:
    """A document and its copy.

    Attributes:
        document, copy: what is wrong with each, "" if nothing.
        data: the intact bytes; None if neither has them, or both have different ones.
    """

    document: str
    copy: str
    data: bytes | None


def inspect(files: Files, name: str) -> Pair:
    """Read a document and its copy."""
    first, second = _read(files, name, name), _read(files, name, Paths.copy(name))
    if isinstance(first, bytes) and isinstance(second, bytes) and first != second:
        what = f"{files.where(name)}: differs from its copy, although both are intact"
        return Pair(what, what, None)
    document = "" if isinstance(first, bytes) else first
    copy = second if isinstance(second, str) else ""
    data = next((result for result in (first, second) if isinstance(result, bytes)), None)
    return Pair(document, copy, data)


def repair(files: Files, name: str) -> bool:
    """Repair a document and its copy from the intact file. Returns whether both are intact now."""
    pair = inspect(files, name)
    if pair.data is None:
        return False
    for path, problem in ((name, pair.document), (Paths.copy(name), pair.copy)):
        if problem:
            files.replace(path, pair.data)
    return True


def documents(files: Files) -> Iterator[tuple[str, int]]:
    """Every document that exists or has a copy, sorted within its folder, with the size of both together in bytes."""
    for folder in layout.DOCUMENTS:
        sizes: dict[str, int] = {}
        for where in (folder, Paths.copy(folder)):
            for entry in files.walk(where):
                name = entry.name.removeprefix("copies/")
                if layout.is_document(name):
                    sizes[name] = sizes.get(name, 0) + entry.size
        yield from sorted(sizes.items())


def repair_all(files: Files) -> None:
    """Copy every document without a copy, restore every lost document, and let `files` repair damaged documents from
    now on.

    For commands that write into the cache. Lists all documents; reads only those that exist once.
    """
    files.repairs = True
    first = {e.name for folder in layout.DOCUMENTS for e in files.walk(folder) if layout.is_document(e.name)}
    second = {e.name.removeprefix("copies/") for e in files.walk("copies") if e.name.endswith(".json")}
    first |= {Paths.FORMAT} if files.has_file(Paths.FORMAT) else set()
    for name in sorted(first ^ second):
        repair(files, name)


def _read(files: Files, name: str, where: str) -> bytes | str:
    """The bytes of a document or of its copy, or the reason why they are not intact."""
    try:
        data = files.read(where)
        files.parse(name, data)
    except IntegrityError as error:
        return error.what
    return data
