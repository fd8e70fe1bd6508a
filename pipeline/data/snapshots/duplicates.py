"""The pictures of which `bucket.dedup` takes one: every group with all its members, and which of them stay.

What: `Duplicates` collects groups, shows the largest, and `write` lists all of them in a CSV in the cache, the largest
first. `Named` finds the samples of `bucket.dedup_keep`.
Price: 25 bytes of temporary files for each picture in a group, and 16 bytes of memory a group when they are listed.
"""

from __future__ import annotations

import csv
import difflib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.disk import cache_errors
from sana_pipe.base.errors import UserError
from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.layout import sample_id
from sana_pipe.data.images.perceptual_hash import BITS
from sana_pipe.data.snapshots.frames import Frame, pieces
from sana_pipe.data.snapshots.join import Joined
from sana_pipe.data.snapshots.near import DISTANCE
from sana_pipe.data.snapshots.near_samples import NearGroups
from sana_pipe.data.sources import reject_kinds

LARGEST = 10
"""Groups that are shown."""
NAMED = 5
"""Pictures of a group that are shown, of those that stay and of those that are left out."""
OPTION = "bucket.dedup_keep"
CANDIDATES = 5000
"""Names that are compared letter by letter with one that does not exist."""
AT_A_TIME = 1 << 12
"""Groups that are listed at a time."""
EQUAL, NEAR, THROUGH, FLAT = (
    "equal file",
    "looks the same",
    "looks the same as another of its group",
    "too little detail",
)
"""The reasons for which a picture is in a group, or in none."""


@dataclass(frozen=True)
class Member:
    """A picture of a group.

    Attributes:
        group: its number, from 1; None: the picture was not compared.
        stays: whether the snapshot has it, unless another rule leaves it out.
        bits: of 128 in which its hash differs from that of the first picture of the group, which stays; None of the
            first, without hashes, and of a picture in other colours.
        why: of `EQUAL`, `NEAR`, `THROUGH` (the first picture looks different: one between them looks like both) and
            `FLAT`; "" of the first.
    """

    group: int | None
    source: str
    item: str
    width: int
    height: int
    stays: bool
    bits: int | None
    why: str

    @property
    def name(self) -> str:
        """The picture as `bucket.dedup_keep` names it."""
        return f"{self.source}: {self.item}"

    def cells(self) -> list[str | int]:
        """The values of its line in the list, as `COLUMNS`."""
        said = "not compared" if self.group is None else "yes" if self.stays else "no"
        number, bits = ("" if value is None else value for value in (self.group, self.bits))
        return [number, reject_kinds.cell(self.name), self.width, self.height, said, bits, self.why]


COLUMNS = ("group", "picture", "width", "height", "stays", "distance", "why")
"""The columns of the list. distance: `Member.bits`."""


class Duplicates:
    """Groups of pictures of one frame.

    Args:
        kind: what a group has in common, as `bucket.dedup` names it: image or near.
        near_groups: of the frame's pictures, where hashes were compared.

    Attributes:
        named: of the pictures in `wanted`, those that are in a group with others. They are ids of pictures.
    """

    def __init__(
        self,
        kind: str,
        joined: Joined,
        frame: Frame,
        near_groups: NearGroups | None = None,
        wanted: Iterable[int] = (),
    ):
        self._wanted, self.named = np.fromiter(wanted, np.uint64), set[int]()
        self.kind, self._sources, self._frame = kind, joined.sources, frame
        self._near = near_groups
        self.not_compared = np.empty(0, np.int64) if near_groups is None else near_groups.not_compared
        scratch = joined.scratch
        self._writers = scratch.writer(np.int64), scratch.writer(bool), scratch.writer(np.int64)
        self._rows, self._stays, self._starts = (np.empty(0, dtype) for dtype in (np.int64, bool, np.int64))

    @classmethod
    def that_stay(cls, joined: Joined, frame: Frame, near_groups: NearGroups) -> Duplicates:
        """Groups of near-duplicates of which all pictures stay."""
        every = cls("near", joined, frame, near_groups)
        for _, rows, first in joined.scratch.by_key(near_groups.keys[piece] for piece in pieces(len(frame))):
            every.add(rows, np.cumsum(first), np.ones(len(rows), bool))
        every.finish()
        return every

    def add(self, rows: np.ndarray, groups: np.ndarray, stays: np.ndarray) -> None:
        """Add whole groups. rows: (k,) of the frame; groups: (k,) ascending numbers; stays: (k,) bool."""
        pictures = self._frame.picture_id[rows]
        order = np.lexsort((np.arange(len(rows)), pictures, groups))
        group, picture = groups[order], pictures[order]
        new = np.append(True, (group[1:] != group[:-1]) | (picture[1:] != picture[:-1]))[: len(order)]
        one = np.sort(order[new])  # of the resolutions of a picture
        sizes = np.bincount(groups[one])
        one = one[sizes[groups[one]] > 1]
        self.named.update(np.intersect1d(self._wanted, pictures[one]).tolist())
        for writer, values in zip(self._writers, (rows[one], stays[one], sizes[sizes > 1]), strict=True):
            writer.add(values)

    def finish(self) -> None:
        """No group can be added any more."""
        self._rows, self._stays, sizes = (writer.finish() for writer in self._writers)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])

    def __len__(self) -> int:
        """Count the groups."""
        return max(0, len(self._starts) - 1)

    def report(self) -> dict[str, Any]:
        """Count the groups, the pictures in them and those that are left out; add the largest groups, as JSON
        values."""
        largest = []
        for group in self._order()[:LARGEST].tolist():
            places = np.arange(self._starts[group], self._starts[group + 1])
            stays = self._stays[places]
            sides = {"stays": self._rows[places[stays]], "left_out": self._rows[places[~stays]]}
            names = {side: self._names(rows[:NAMED]) for side, rows in sides.items()}
            largest.append({"pictures": len(places), **names, "left_out_pictures": len(sides["left_out"])})
        flat = self.not_compared
        return {
            "kind": self.kind,
            "groups": len(self),
            "pictures": len(self._rows),
            "left_out": len(self._rows) - int(np.count_nonzero(self._stays)),
            "largest": largest,
            "not_compared": {"pictures": len(flat), "examples": self._names(flat[: reject_kinds.EXAMPLES])},
        }

    def write(self, files: Files) -> str:
        """List all groups, then what was not compared; returns the path in the cache."""
        path = f"reports/duplicates-{self.kind}.csv"
        with files.temporary() as temporary:
            with cache_errors(temporary), open(temporary, "x", encoding="utf-8", newline="") as sheet:
                lines = csv.writer(sheet, lineterminator="\n")
                lines.writerow(COLUMNS)
                for members in self._listed():
                    lines.writerows(member.cells() for member in members)
                sheet.flush()
                os.fsync(sheet.fileno())
            files.replace(path, temporary)
        return path

    def largest(self, groups: int, members: int) -> Iterator[tuple[int, list[Member]]]:
        """The largest groups: how many pictures each has, and its first ones, what stays before what is left out."""
        for at, group in enumerate(self._order()[:groups].tolist()):
            places, numbers = self._places(np.array([group]))
            some = places[:members]
            yield len(places), self._members(self._rows[some], at + 1 + numbers[:members], self._stays[some])

    def _listed(self) -> Iterator[list[Member]]:
        """All pictures of all groups, then what was not compared, some thousands at a time."""
        order = self._order()
        for first in range(0, len(order), AT_A_TIME):
            places, numbers = self._places(order[first : first + AT_A_TIME])
            for piece in pieces(len(places)):
                some, of = places[piece], numbers[piece]
                heads = places[np.searchsorted(numbers, of)]
                yield self._members(self._rows[some], first + 1 + of, self._stays[some], self._rows[heads])
        for piece in pieces(len(self.not_compared)):
            rows = self.not_compared[piece]
            yield self._members(rows, None, np.ones(len(rows), bool), rows)

    def _places(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places in `_rows` of all pictures of some groups, what stays first; and which of the groups, from 0."""
        sizes = self._starts[groups + 1] - self._starts[groups]
        numbers = np.repeat(np.arange(len(groups)), sizes)
        places = np.arange(len(numbers)) + (self._starts[groups] - np.cumsum(sizes) + sizes)[numbers]
        return places[np.lexsort((~self._stays[places], numbers))], numbers

    def _members(
        self, rows: np.ndarray, groups: np.ndarray | None, stays: np.ndarray, firsts: np.ndarray | None = None
    ) -> list[Member]:
        """Describe pictures. groups: their numbers; None: they were not compared. firsts: rows of the first picture of
        the group of each; None: all are of one group, and `rows` begins with it."""
        frame, heads = self._frame, np.broadcast_to(rows[:1], len(rows)) if firsts is None else firsts
        bits = None if self._near is None or groups is None else self._near.bits(rows, heads)
        equal = frame.digest[rows] == frame.digest[heads]
        members = []
        items = frame.item.take(pa.array(rows)).to_pylist()
        for at, (row, head, item) in enumerate(zip(rows.tolist(), heads.tolist(), items, strict=True)):
            apart = None if bits is None or row == head or bits[at] == BITS else int(bits[at])
            if groups is None:
                why = FLAT
            elif row == head:
                why = ""
            elif equal[at]:
                why = EQUAL
            else:
                why = NEAR if apart is not None and apart <= DISTANCE else THROUGH
            members.append(
                Member(
                    None if groups is None else int(groups[at]),
                    self._sources[frame.source[row]],
                    item,
                    int(frame.width[row]),
                    int(frame.height[row]),
                    bool(stays[at]),
                    apart,
                    why,
                )
            )
        return members

    def _order(self) -> np.ndarray:
        """The groups, the largest first."""
        return np.argsort(-np.diff(self._starts), kind="stable")

    def _names(self, rows: np.ndarray) -> list[str]:
        items = self._frame.item.take(pa.array(rows)).to_pylist()
        return [
            f"{self._sources[of]}: {item}" for of, item in zip(self._frame.source[rows].tolist(), items, strict=True)
        ]


@dataclass(frozen=True)
class Named:
    """Pictures by name: `ITEM`, or `SOURCE: ITEM`. of_id: sample id -> the name that gives it."""

    of_id: Mapping[int, str]

    @classmethod
    def of(cls, names: Iterable[str], sources: Iterable[str]) -> Named:
        """Read names. An item may have a colon in it."""
        every = list(sources)
        of_id: dict[int, str] = {}
        for name in names:
            source, colon, item = name.partition(": ")
            of_id |= {sample_id(each, name): name for each in every}
            if colon and source in every:
                of_id[sample_id(source, item)] = name
        return cls(of_id)

    def rows(self, joined: Joined, frame: Frame) -> tuple[np.ndarray, dict[str, int]]:
        """Find the samples that are named, (n,) bool; and the id of the picture of each name that has one.

        Raises:
            UserError: a name is that of several pictures.
        """
        ids, named = np.fromiter(self.of_id, np.uint64, len(self.of_id)), joined.scratch.array(len(frame), bool)
        pictures = defaultdict[str, dict[int, str]](dict)
        for piece in pieces(len(frame)):
            rows = piece.start + np.flatnonzero(np.isin(frame.picture_id[piece], ids))
            named[rows] = True
            for row in rows.tolist():
                picture = int(frame.picture_id[row])
                source = joined.sources[int(frame.source[row])]
                pictures[self.of_id[picture]][picture] = f"{source}: {frame.item[row].as_py()}"
        for name, several in pictures.items():
            if len(several) > 1:
                raise UserError(
                    f"{OPTION}: {name!r} is the name of {len(several)} pictures",
                    found=reject_kinds.examples(list(several.values())[:NAMED], len(several)),
                    fix="write the source before it, SOURCE: ITEM, as `bucket` lists them",
                )
        return named, {name: next(iter(several)) for name, several in pictures.items()}

    def check(self, given: Iterable[str], scans: Mapping[str, pa.Table]) -> None:
        """Refuse names that no item of a source has.

        Args:
            given: names without a sample. scans: of all sources, with `item`.

        Raises:
            UserError: names one, and the nearest items.
        """
        left = {name: {of for of, each in self.of_id.items() if each == name} for name in given}
        candidates: list[str] = []
        for source, scan in scans.items():
            ids = {of for each in left.values() for of in each}
            wanted = pa.array([*left, *(name.removeprefix(f"{source}: ") for name in left)], pa.string())
            for batch in batches(scan.select(["item"])) if left else ():
                items = batch.column("item")
                candidates += items.slice(0, max(0, CANDIDATES - len(candidates))).to_pylist()
                for item in items.filter(pc.is_in(items, wanted)).to_pylist():
                    if (there := sample_id(source, item)) in ids:
                        left.pop(self.of_id[there], None)
        if left:
            name = next(iter(left))
            near = difflib.get_close_matches(name.rpartition(": ")[2], candidates, 3)
            raise UserError(
                f"{OPTION}: no picture is called {name!r}"
                + (f" ({len(left) - 1} other names are unknown, too)" if len(left) > 1 else ""),
                expected="SOURCE: ITEM or ITEM, as `bucket` lists them"
                + (f"; near: {', '.join(near)}" if near else ""),
                fix=f"correct or remove it in {OPTION}",
            )


def unused(names: Sequence[str]) -> str:
    """A note on names that change nothing."""
    shown = reject_kinds.examples(list(names[:NAMED]), len(names))
    return f"{OPTION}: {len(names)} of its pictures have no duplicate among the samples, or are not samples: {shown}"
