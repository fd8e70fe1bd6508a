"""Documents and their copies: which of the two is right, and how both become so.

What: `Files` writes every document twice (`name`, then `copies/name`) and reads the copy where the document is lost or
damaged. `examined` looks at both, `put_right` makes both what the whole one says, `complete` does so for all documents
of which one of the two is not there.
Why: a document that is lost looks like one that was never written, so that records without a commit look unneeded and
are made again or removed. With two, a single loss or a flipped bit changes no answer, and everything can tell.
Price: two small files for one: two syncs more per unit. Where a name is not taken, object stores are asked twice.

Shards and tables exist once: they are named by their content, and records can be made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.cache import layout
from pipeline.cache.files import Files
from pipeline.cache.layout import Paths
from pipeline.errors import IntegrityError


@dataclass(frozen=True)
class Pair:
    """A document and its copy.

    Attributes:
        document, copy: what is wrong with each; "" if nothing. A copy that is not there is no damage: earlier versions
            made none.
        data: the right bytes; None if neither has them.
        whole: whether both are there and right.
    """

    document: str
    copy: str
    data: bytes | None
    whole: bool


def examined(files: Files, name: str) -> Pair:
    """Read a document and its copy."""
    first, second = _read(files, name, name), _read(files, name, Paths.copy(name))
    if isinstance(first, bytes) and isinstance(second, bytes):
        if first == second:
            return Pair("", "", first, True)
        what = f"{files.where(name)}: differs from its copy, and both are whole"
        return Pair(what, what, None, False)
    document = "" if isinstance(first, bytes) else first
    copy = second if isinstance(second, str) and files.has_file(Paths.copy(name)) else ""
    return Pair(
        document, copy, first if isinstance(first, bytes) else second if isinstance(second, bytes) else None, False
    )


def put_right(files: Files, name: str) -> bool:
    """Make a document and its copy what the whole one of them says. Returns whether both are right now."""
    pair = examined(files, name)
    if pair.whole or pair.data is None:
        return pair.whole
    for one in (name, Paths.copy(name)):
        if not isinstance(_read(files, name, one), bytes):
            files.replace(one, pair.data)
    return True


def documents(files: Files) -> Iterator[tuple[str, int]]:
    """Every document of which there is at least the copy, sorted within its folder, and the bytes of both."""
    for folder in layout.DOCUMENTS:
        sizes: dict[str, int] = {}
        for where in (folder, Paths.copy(folder)):
            for entry in files.walk(where):
                name = entry.name.removeprefix("copies/")
                if layout.is_document(name):
                    sizes[name] = sizes.get(name, 0) + entry.size
        yield from sorted(sizes.items())


def complete(files: Files) -> None:
    """Give every document a copy and put back every one that is lost; from now on also those that are found damaged.

    For commands that write into the cache anyway. Lists the documents and reads those that are not there twice.
    """
    files.repairs = True
    first = {e.name for folder in layout.DOCUMENTS for e in files.walk(folder) if layout.is_document(e.name)}
    second = {e.name.removeprefix("copies/") for e in files.walk("copies") if e.name.endswith(".json")}
    first |= {Paths.FORMAT} if files.has_file(Paths.FORMAT) else set()
    for name in sorted(first ^ second):
        put_right(files, name)


def _read(files: Files, name: str, where: str) -> bytes | str:
    """The bytes of a document or of its copy; what is wrong with them, if something is."""
    try:
        data = files.read(where)
        files.parse(name, data)
    except IntegrityError as error:
        return error.what
    return data
