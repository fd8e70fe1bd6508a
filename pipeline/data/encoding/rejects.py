"""Rejects of a source: the items that are left out, the report with their reasons, the error if there are too many."""

from __future__ import annotations

import csv
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.config import setting
from sana_pipe.base.disk import cache_errors
from sana_pipe.base.errors import RejectRateError
from sana_pipe.data.cache import withdrawn
from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.encodings import Encoding
from sana_pipe.data.cache.index import RecordReject
from sana_pipe.data.encoding import estimate
from sana_pipe.data.sources import reject_kinds
from sana_pipe.data.sources.caption_columns import TEXT_FILE
from sana_pipe.data.sources.controls_and_masks import remedy
from sana_pipe.data.sources.filenames import is_url
from sana_pipe.data.sources.filesystem import let_read
from sana_pipe.data.sources.reject_kinds import Kinds
from sana_pipe.data.sources.source import Source


@dataclass(frozen=True)
class Rejects:
    """Items of a source that are left out, as (item, reason).

    Attributes:
        table: columns -> those of the scan's table.
        scanned: how many the scan left out.
        failed: of units.
    """

    table: Callable[[list[str]], pa.Table]
    scanned: int
    failed: Sequence[RecordReject] = ()

    def __len__(self) -> int:
        return self.scanned + len(self.failed)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for batch in batches(self.table(["item", "reject"])) if self.scanned else ():
            rejected = batch.filter(pc.is_valid(batch.column("reject")))
            yield from zip(*(column.to_pylist() for column in rejected.columns), strict=True)
        yield from ((reject.item, reject.reason) for reject in self.failed)


def faults(table: pa.Table) -> int:
    """Rejects of a scan that nobody asked for: a row with a width was left out by a setting, others by `forget`."""
    rows = batches(table.select(["width", "reject"]))
    asked = pa.array([withdrawn.REASON])
    kinds = ((some.filter(pc.is_valid(some.column("reject")))) for some in rows)
    return sum(
        some.filter(pc.invert(pc.is_in(some.column("reject"), value_set=asked))).column("width").null_count
        for some in kinds
    )


def withdrawn_notes(table: pa.Table) -> list[str]:
    """Say which items of a scan were met again whose pictures `forget` took out of the cache."""
    rows = (some.filter(pc.equal(some.column("reject"), withdrawn.REASON)) for some in batches(table))
    items = [item for some in rows for item in some.column("item").to_pylist()]
    if not items:
        return []
    names = reject_kinds.examples(items[: reject_kinds.EXAMPLES], len(items))
    return [f"{len(items)} items were met again that sana-pipe forget took out of the cache; they stay out: {names}"]


def of_units(cache: Cache, encoding: Encoding, work_of: Callable[[Iterable[str]], pa.Table]) -> list[RecordReject]:
    """Rejects of some work whose record no later unit has made. work_of: keys (hex) -> their rows."""
    index = cache.index(encoding.name)
    latest = {r.key: r for r in index.rejects if not index.has(bytes.fromhex(r.key))}
    return [latest[key.hex()] for key in work_of(latest).column("key").to_pylist()] if latest else []


def write(cache: Cache, name: str, rejects: Rejects) -> str:
    """Write the report of a source; returns its path in the cache."""
    path, files = reject_kinds.report(name), cache.files
    with files.temporary() as temporary:
        with cache_errors(temporary), open(temporary, "x", encoding="utf-8", newline="") as sheet:
            rows = csv.writer(sheet, lineterminator="\n")
            rows.writerow(["item", "reason"])
            rows.writerows(map(reject_kinds.cell, row) for row in files.scratch.sorted_rows(rejects))
            sheet.flush()
            os.fsync(sheet.fileno())
        files.replace(path, temporary)
    return path


def check(
    cache: Cache,
    source: Source,
    items: int,
    rejects: Rejects,
    faults: int,
    most: float,
    advice: str | None = None,
) -> None:
    """RejectRateError, after the report is written, if there are too many rejects, or nothing but rejects.

    Args:
        faults: rejects that no setting asked for. advice: as of `refuse`.
        most: the largest share of `items` that may be faults.
    """
    if too_many(items, len(rejects), faults, most):
        where, kinds = cache.files.where(write(cache, source.name, rejects)), Kinds.of(rejects)
        found = "\n".join(["the reasons, with examples:", *kinds.lines(), *estimate.ignored_lines(source.ignored)])
        refuse(source, items, kinds, most, f"look at {where}", found, advice)


def too_many(items: int, rejects: int, faults: int, most: float) -> bool:
    """Return whether a source has too many rejects. Arguments as of `check`."""
    return bool(items) and (faults / items > most or rejects == items)


def refuse(
    source: Source, items: int, kinds: Kinds, most: float, look: str, found: str | None, advice: str | None = None
) -> NoReturn:
    """Raises the error for too many rejects. look: where they are listed, as a part of the fix; advice: what the names
    of pictures without a caption say."""
    if kinds.total < items:
        expected = f"at most {most:.1%} (encode.max_reject_rate)"
        fix = f"{look}, or raise encode.max_reject_rate" if advice is None else look
    else:
        expected = "at least one usable item; the source is left as it was"
        fix = look
        if any(os.strerror(errno.EACCES) in kind for kind in kinds.counts) and not is_url(source.location):
            fix = let_read(source.location)
        elif found_by := remedy(source.controls_and_masks, kinds.counts):
            fix = found_by
        elif source.rule.offered and source.rule.config.caption is not None:
            field = setting("data.caption_field", source.rule.likely(sorted(source.rule.offered)))
            fix = f"{field}; {setting('data.caption_weights', {TEXT_FILE: 1})} leaves it out: all get data.caption"
        elif any("caption" in kind for kind in kinds.counts):
            fix = "put the caption of X.jpg into X.txt, name its column (--set data.caption_field=COLUMN), or give all "
            fix += "pictures one caption: --set 'data.caption=a photo of sks dog' (or filename, folder, none)"
    fix = fix if advice is None else f"{advice}; else {fix}"
    what = f"{kinds.total} of {items} items of source {source.name!r} were rejected"
    raise RejectRateError(what, expected=expected, found=found, fix=fix)
