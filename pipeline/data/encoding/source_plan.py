"""Plan the work of a source: publish its scan, and plan the records that the cache lacks.

`publish_scan` does it in one process; `decisive` names what its result depends on, and `opened` opens the result in the
other processes. `WorkLists` lists the records of a scan by encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from sana_pipe.data import signals
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.cache import Cache, WorkList
from sana_pipe.data.cache.encodings import CaptionEncoding, Encoding, PictureEncoding, caption_of
from sana_pipe.data.encoding import estimate, last_scan, refusals, understood
from sana_pipe.data.encoding import plan as planning
from sana_pipe.data.encoding import rejects as rejecting
from sana_pipe.data.encoding import survey as surveying
from sana_pipe.data.encoding.image_batch import Fitting
from sana_pipe.data.encoding.reading import Reading
from sana_pipe.data.encoding.rejects import Rejects
from sana_pipe.data.images import buckets
from sana_pipe.data.signals import PictureSignal
from sana_pipe.data.sources import caption_signs
from sana_pipe.data.sources.reject_kinds import Kinds
from sana_pipe.data.sources.source import Source
from sana_pipe.data.work.engine import Work


@dataclass(frozen=True)
class Inputs:
    """A source, how it is read, and the records that are made of it.

    Attributes:
        encodings: of the records, as of `signals.encodings`.
        shapes: the target resolutions (height, width) of the buckets; empty until the scan gives them (`with_sizes`).
        fitting: gives the limit on a batch of pictures on this machine; see `planning.plan_images`.
    """

    cache: Cache
    source: Source
    reading: Reading
    encodings: list[Encoding]
    shapes: list[buckets.Shape]
    fitting: Callable[[PictureSignal], Fitting | None]

    def with_sizes(self, scan: pa.Table) -> Inputs:
        """The same with the shapes that occur in a scan, where the configuration gives none."""
        return self if self.shapes else replace(self, shapes=surveying.sizes_of(scan))

    @property
    def text(self) -> CaptionEncoding:
        """The kind of the text records."""
        return caption_of(self.encodings)

    @property
    def pictures(self) -> list[PictureSignal]:
        """The kinds of picture records. The first is made first, and those without a model from the same pixels."""
        return [encoding for encoding in self.encodings if isinstance(encoding, PictureSignal)]


@dataclass(frozen=True)
class SourcePlan:
    """The result of planning a source, for every process, as JSON values.

    Attributes:
        table: digest of the scan's table.
        items: in the scan; rejects: those of them that the scan rejected; faults: rejects that no setting asked for.
        missing: usable pictures of the last scan that are not there now.
        ignored: as `Source.ignored`, its fields by name.
        new, reused: records by noun.
        plans: number of plans by encoding.
        taken: as `Understood.summary`.
        fit: as `Understood.remarks`, `caption_signs.emptied` and `surveying.fit_notes`.
    """

    table: str
    items: int
    rejects: int
    faults: int
    missing: int
    ignored: dict[str, Any]
    new: dict[str, int]
    reused: dict[str, int]
    plans: dict[str, int]
    taken: list[str]
    fit: list[str]

    def summary(self, source: Source) -> list[str]:
        """Say what the source has, for people."""
        new, reused = self.new, self.reused
        return [
            f"source {source.name!r}: {self.items} items, {self.rejects} rejected by the scan",
            *estimate.column_lines(sorted(source.picture_columns)),
            f"pictures: {new['images']} new, {reused['images']} reused, {self.missing} missing",
            *(f"{noun}: {count} new, {reused[noun]} reused" for noun, count in new.items() if noun != "images"),
        ]


class WorkLists:
    """The table and the work lists of a scan. A process that did not plan reads what it needs from the cache.

    Args:
        table: the scan's, if it is at hand, or its digest.

    Attributes:
        plans: of each encoding, by name.
    """

    def __init__(self, inputs: Inputs, table: pa.Table | str):
        self._inputs, self._table = inputs, table
        self._all: dict[str, pa.Table] = {}
        self.plans: dict[str, list[WorkList]] = {}

    def table(self, columns: list[str] | None = None) -> pa.Table:
        """The scan's table, or some of its columns."""
        if isinstance(self._table, str):
            return self._inputs.cache.table(self._table, columns)
        return self._table if columns is None else self._table.select(columns)

    def all(self, encoding: Encoding) -> pa.Table:
        """The work list of an encoding, which stays at hand."""
        self._all[encoding.kind] = self._list(encoding, None)
        return self._all[encoding.kind]

    def of(self, encoding: Encoding, keys: Iterable[str]) -> pa.Table:
        """The rows of some keys (hex)."""
        if (work := self._all.get(encoding.kind)) is not None:
            return work.filter(planning.has_key(work, keys))
        return self._list(encoding, list(keys))

    def _list(self, encoding: Encoding, only: list[str] | None) -> pa.Table:
        inputs, scratch = self._inputs, self._inputs.cache.files.scratch
        if isinstance(encoding, CaptionEncoding):
            return planning.caption_work(self.table(["captions", "reject"]), encoding, scratch, only)
        assert isinstance(encoding, PictureEncoding)
        return planning.image_work(
            self.table(planning.SCANNED), inputs.source.name, encoding, inputs.shapes, scratch, only
        )


_DECISIVE = ("image_batch", "max_shrink", "max_reject_rate")
"""Settings of `encode` that decide a plan, or whether there is one."""


def decisive(inputs: Inputs) -> bytes:
    """Return what decides a plan in addition to the scan."""
    reading = inputs.reading
    data, encode = reading.data.model_dump(mode="json"), reading.encode.model_dump(mode="json")
    encodings = [encoding.name for encoding in inputs.encodings]
    settings = [planning.captions_of_batch(reading.encode), *(encode[name] for name in _DECISIVE)]
    return layout.canonical(["plan-2", encodings, inputs.shapes, data, settings])


def opened(inputs: Inputs, planned: SourcePlan) -> WorkLists:
    """Open what another process has planned."""
    inputs.source.ignored = Kinds(**planned.ignored)
    if not inputs.shapes:
        inputs = inputs.with_sizes(inputs.cache.table(planned.table, ["height", "width", "reject"]))
    work = WorkLists(inputs, planned.table)
    for encoding, count in planned.plans.items():
        work.plans[encoding] = [inputs.cache.plan(encoding, number) for number in range(count)]
    return work


def publish_scan(inputs: Inputs, table: pa.Table, work: WorkLists) -> SourcePlan:
    """Check and publish a scan, and plan the records that the cache lacks.

    Args:
        work: of this scan; its plans are added.

    Raises:
        UserError: too many rejects or missing pictures, or a reading of the source that the user must choose.
    """
    cache, source, data, encode = inputs.cache, inputs.source, inputs.reading.data, inputs.reading.encode
    missing = last_scan.count_missing(cache, source, table, encode.max_shrink)
    faults = rejecting.faults(table)
    rejects = len(table) - table.column("reject").null_count
    most = encode.max_reject_rate
    taken = understood.of(source, table, data)
    rejecting.check(cache, source, table.num_rows, Rejects(work.table, rejects), faults, most, taken.remedy)
    refusals.refuse(taken, inputs.reading.given, table, cache)
    digest = cache.put_table(table)
    cache.add_scan(
        source.name,
        {
            "table": digest,
            "counts": {"items": table.num_rows, "rejected": rejects},
            "encodings": {encoding.kind: encoding.name for encoding in inputs.encodings},
            "buckets": [list(shape) for shape in inputs.shapes],
            **source.document(),
            **inputs.reading.document(),
        },
    )
    lists = {encoding: work.all(encoding) for encoding in inputs.encodings}
    counts = {_noun(encoding): planning.count_missing(cache, encoding, rows) for encoding, rows in lists.items()}
    text = inputs.text
    work.plans[text.name] = planning.plan_captions(cache, text, lists[text], encode)
    lead, *others = inputs.pictures
    work.plans[lead.name] = plan_images(inputs, lead, lists[lead])
    for encoding in others:
        if encoding.shares_pixels:
            planning.plan_following(cache, encoding, work.plans[lead.name])
        work.plans[encoding.name] = plan_images(inputs, encoding, lists[encoding])
    return SourcePlan(
        table=digest,
        items=table.num_rows,
        rejects=rejects,
        faults=faults,
        missing=missing,
        ignored=vars(source.ignored),
        new={noun: missing for noun, (missing, _) in counts.items()},
        reused={noun: reused for noun, (_, reused) in counts.items()},
        plans={encoding: len(plans) for encoding, plans in work.plans.items()},
        taken=taken.summary(data, text.normalisation),
        fit=[
            *taken.remarks(data),
            *caption_signs.emptied(table, text.normalisation),
            *surveying.fit_notes(table, inputs.shapes, data),
            *rejecting.withdrawn_notes(table.select(["item", "reject"])),
        ],
    )


def _noun(encoding: Encoding) -> str:
    """Return what the records of an encoding are called in the result."""
    assert isinstance(encoding, signals.Signal)
    return encoding.noun


def plan_images(inputs: Inputs, encoding: PictureSignal, work: pa.Table) -> list[WorkList]:
    """Plan the missing records of a work list."""
    return planning.plan_images(inputs.cache, encoding, work, inputs.reading.encode, inputs.fitting(encoding))


def readable(cache: Cache, todo: Work, name: str) -> tuple[Work, list[str]]:
    """Return the units whose pictures are all of source `name`, and for each of the others a line that names the source
    for which it waits."""
    ready, waiting = Work(), list[str]()
    for plan, unit in todo:
        rows = cache.unit_rows(plan, unit)
        if others := set(rows.column("source").to_pylist()) - {name}:
            names = ", ".join(sorted(others))
            waiting.append(f"{len(rows)} pictures wait for source {names}: encode that source to finish them")
        else:
            ready.append((plan, unit))
    return ready, waiting
