"""Choose the samples of a snapshot, and of its held-out part, and assemble both.

Steps: join the sources, filter, leave out copies, hold out a part, take a subset, balance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

from sana_pipe.base.config import setting
from sana_pipe.base.errors import CacheError, UserError
from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import HeldOut, Policies
from sana_pipe.data.signals.phash import ANEW, HashEncoding
from sana_pipe.data.snapshots import balance, group_leaks, groups, metadata_table, near, near_samples, pairs, selection
from sana_pipe.data.snapshots.assemble import Assembled, assemble, folder_repeats
from sana_pipe.data.snapshots.config import BucketConfig, SourceConfig
from sana_pipe.data.snapshots.duplicates import Duplicates, Named, unused
from sana_pipe.data.snapshots.filters import Filter
from sana_pipe.data.snapshots.frames import Frame
from sana_pipe.data.snapshots.group_memory import GroupMemory
from sana_pipe.data.snapshots.inputs import Inputs
from sana_pipe.data.snapshots.join import Joined, join, usable, without_policy
from sana_pipe.data.snapshots.near import Report

PAD_TEXT_MULTIPLE = 16
"""Captions of a batch are padded to a multiple of this many tokens, at most to the longest that the text encoding
has."""


@dataclass(frozen=True)
class Made:
    """A snapshot to be published. duplicates: the groups, where pictures were compared; leaked: as in `Head`; balance:
    the clusters; groups: those of `bucket.group`; memory: groups of near-duplicates, to be stored."""

    assembled: Assembled
    joined: Joined
    frame: Frame
    duplicates: list[Duplicates] = field(default_factory=list)
    leaked: dict[str, int] = field(default_factory=dict)
    balance: list[dict[str, Any]] = field(default_factory=list)
    groups: dict[str, Any] | None = None
    memory: GroupMemory | None = None


Comparing = Callable[[int], AbstractContextManager[Report]]
"""Shows the progress of the comparison of a number of hashes."""


def make(
    inputs: Inputs, settings: BucketConfig, validation: str | None, comparing: Comparing
) -> tuple[Made, Made | None]:
    """The snapshot to train on, and the held-out part if there is one.

    Args:
        validation: name of the held-out snapshot of `train.validation`, if it names one.

    Raises:
        CacheError: `bucket.dedup: near` in a cache without hashes; or hashes of an earlier rule are to be compared.
        UserError: nothing is left to train on, or a filter names what is not there.
    """
    return _Maker(inputs, settings, validation, comparing).make()


class _Maker:
    """Attributes: joined: the usable items of the sources, filtered, at all resolutions; values: those of
    `bucket.group`; earlier: the snapshot that the new one grows from."""

    def __init__(self, inputs: Inputs, settings: BucketConfig, validation: str | None, comparing: Comparing):
        self.inputs, self.settings, self.validation, self.comparing = inputs, settings, validation, comparing
        cache = inputs.caches[0]
        self.joined = Joined(scratch=cache.files.scratch)
        self.values: groups.Values | None = None
        self._join()
        ids = cache.open_snapshot(self.settings.grow).sample_ids() if self.settings.grow else ()
        self.earlier = selection.Earlier(cache.files.scratch, ids)

    def _join(self) -> None:
        settings, joined, scans = self.settings, self.joined, dict[str, pa.Table]()
        for source, scan in self.inputs.scans.items():
            table = scan.cache.table(scan.table)
            if source in self.inputs.unused:
                option = f"bucket.sources.{source}.weight"
                joined.leave(f"{option} is 0", table.num_rows, f"another {option}")
                continue
            scans[source] = without_policy(table) if settings.resolutions else table
        if self.inputs.metadata is not None:
            scans, joined.metadata = metadata_table.joined(joined.scratch, scans, self.inputs.metadata)
        self.scans = scans
        items = {source: usable(joined, table) for source, table in scans.items()}
        common = Filter(settings.filter, "bucket.filter") if settings.filter else None
        by_source = {
            source: Filter(setting.filter, f"bucket.sources.{source}.filter")
            for source, setting in settings.sources.items()
            if setting.filter and source in items
        }
        if common or by_source:
            tables = [resolution.table for resolution in self.inputs.resolutions]
            items = selection.filtered(joined, items, common, by_source, tables)
        if (of_pairs := self.inputs.records.of_pairs) is not None:
            weights = {source: scan.weight for source, scan in self.inputs.scans.items()}
            items = pairs.usable(joined, items, of_pairs.picture, weights)
        if settings.group is not None:
            items, self.values = groups.add_groups(joined, items, settings.group)
        for source, table in items.items():
            counts, wanted = _numbers(table), settings.sources.get(source, SourceConfig()).repeats
            if not counts.keys() - {0, 1} or wanted is False:
                pass
            elif wanted is None and counts[0]:
                joined.notes.append(
                    f"source {source!r}: {sum(counts.values()) - counts[0]} pictures lie in folders such as 10_name, "
                    f"whose numbers are not used, since {counts[0]} others lie in folders without one "
                    f"({setting(f'bucket.sources.{source}.repeats', True)} uses them, and visits the others once)"
                )
            else:
                joined.repeats[source] = {visits or 1: items for visits, items in sorted(counts.items())}
            weight = self.inputs.scans[source].weight
            for resolution in self.inputs.resolutions:
                join(joined, source, table, self.inputs.records, resolution, weight)

    def make(self) -> tuple[Made, Made | None]:
        settings, joined, visits = self.settings, self.joined, [Fraction(1)]
        frame, listed = joined.frame(), list[Duplicates]()
        frame, near_groups, grouped = self._grouped(frame)
        if settings.dedup == "image":
            frame, _ = self._deduplicated(frame, listed)
        if near_groups is None or settings.dedup == "image":
            near_groups = self._near_groups(frame)
        keys = None if near_groups is None else near_groups.keys
        if near_groups is not None and settings.dedup == "near":
            frame, keys = self._deduplicated(frame, listed, near_groups)  # one picture of each, and those of dedup_keep
        elif near_groups is not None:
            listed.append(Duplicates.that_stay(joined, frame, near_groups))
        if settings.dedup_keep and settings.dedup == "none":
            joined.notes.append("bucket.dedup_keep has no effect, since bucket.dedup=none leaves nothing out")
        distance = None if keys is None else near.DISTANCE
        count = len(frame)
        frame, heldout = self._held_out(frame, keys if grouped is None else frame.group, distance)
        if grouped is not None:
            grouped["heldout_samples"] = count - len(frame)
            grouped["heldout_share"] = (count - len(frame)) / max(1, count)
            if heldout is None:
                few = f"none of {grouped['groups']} groups and {grouped['without_value']} samples without one is chosen"
                joined.notes.append(f"bucket.heldout = {settings.heldout:g} holds nothing out: {few}")
        if settings.subset is not None:
            frame, pictures = selection.subset(joined, frame, settings.subset, self.earlier)
            if pictures < settings.subset:
                joined.notes.append(f"bucket.subset = {settings.subset}, but there are only {pictures} pictures")
        if settings.balance is not None and len(frame):
            frame, visits = self._balanced(settings.balance, frame)
        made = self._assembled(joined, frame, "train", distance, visits)
        clusters = _clusters(joined, frame, visits)
        made = replace(made, balance=clusters, duplicates=listed, leaked=self._leaked(frame), groups=grouped)
        return replace(made, memory=None if near_groups is None else near_groups.memory), heldout

    def _grouped(self, frame: Frame) -> tuple[Frame, near_samples.NearGroups | None, dict[str, Any] | None]:
        """The samples with the keys of `bucket.group`'s sets, near-duplicates, and the report on the sets. Samples that
        `dedup` leaves out afterwards join sets, too."""
        if self.values is None:
            return frame, None, None
        if not self.settings.heldout:
            if self.validation is not None:  # `_leaked` counts by groups
                return frame, None, None
            self.joined.notes.append(f"{groups.OPTION} has no effect, since bucket.heldout=0 holds nothing out")
            return frame, None, None
        near_groups = self._near_groups(frame)
        keys, report = groups.united(self.joined, frame, self.values, None if near_groups is None else near_groups.keys)
        return replace(frame, group=keys), near_groups, report

    def _deduplicated(
        self, frame: Frame, listed: list[Duplicates], near_groups: near_samples.NearGroups | None = None
    ) -> tuple[Frame, np.ndarray | None]:
        """Leave out equal files, or near-duplicates; returns what stays, and keys of groups that a held-out part takes
        whole."""
        settings, joined = self.settings, self.joined
        keys, better = None, None
        if near_groups is not None:
            keys, better = near_groups.keys, selection.larger(frame, self.inputs.records)
        if frame.pairs:  # a picture may be chosen in several pairs
            keys = pairs.equal_pairs(frame, keys)
        names = Named.of(settings.dedup_keep, self.inputs.scans)
        kept, pictures = names.rows(joined, frame) if settings.dedup_keep else (None, {})
        missing = [name for name in settings.dedup_keep if name not in pictures]
        if missing:
            names.check(missing, {source: scan.cache.table(scan.table) for source, scan in self.inputs.scans.items()})
        listed.append(Duplicates(settings.dedup, joined, frame, near_groups, pictures.values()))
        result = selection.deduplicated(
            joined,
            frame,
            list(settings.sources),
            self.earlier,
            keys,
            better,
            settings.dedup_captions == "keep",
            kept,
            listed[-1],
        )
        alone = {*missing, *(name for name, picture in pictures.items() if picture not in listed[-1].named)}
        if alone:
            joined.notes.append(unused([name for name in settings.dedup_keep if name in alone]))
        return result

    def _near_groups(self, frame: Frame) -> near_samples.NearGroups | None:
        """The pictures that look the same, where that decides anything."""
        settings, inputs = self.settings, self.inputs
        if HashEncoding.kind not in inputs.records.indexes:
            if settings.dedup == "near":
                raise CacheError(
                    "bucket.dedup: near compares hashes of pictures, and not all sources have them",
                    expected=f"records of the kind {HashEncoding.kind}",
                    found=", ".join(inputs.records.indexes),
                    fix=ANEW,
                )
            return None
        if settings.dedup != "near" and not settings.heldout:
            return None
        with self.comparing(len(frame)) as report:
            shared = inputs.records, inputs.caches
            return near_samples.near_groups(self.joined, frame, *shared, report)

    def _held_out(self, frame: Frame, keys: np.ndarray | None, distance: int | None) -> tuple[Frame, Made | None]:
        """The samples to train on, and the snapshot of those held out, if there are any. keys: of the groups that stay
        on one side; None: digests."""
        joined, share = self.joined, self.settings.heldout
        if frame.pairs and share:
            keys = pairs.sharing_pictures(frame, keys)
        held_out = selection.heldout(frame.digest if keys is None else keys, share, joined.scratch)
        if keys is not None:  # a new copy may have another digest, and with it another side
            held_out &= ~selection.in_earlier_snapshot(joined, frame, self.earlier, keys)
        if not held_out.any():
            return frame, None
        count, others = int(held_out.sum()), Joined(joined.sources, scratch=joined.scratch)
        others.leave("not in the held-out part", len(frame) - count)
        made = self._assembled(others, frame.take(held_out, joined.scratch), "heldout", distance)
        joined.leave("held out for validation", count, "bucket.heldout=0")
        return frame.take(np.logical_not(held_out, out=held_out), joined.scratch), made

    def _balanced(self, strength: float, frame: Frame) -> tuple[Frame, list[Fraction]]:
        """The samples with their clusters, and the visits per epoch of each."""
        inputs = self.inputs
        pooled = balance.vectors(frame, inputs.records, inputs.caches, inputs.table.shapes)
        member = balance.clusters(pooled, frame.sample_id)
        return replace(frame, cluster=member), balance.weights(member, strength)

    def _assembled(
        self,
        joined: Joined,
        frame: Frame,
        side: str,
        distance: int | None,
        clusters: Sequence[Fraction] = (Fraction(1),),
    ) -> Made:
        """side: train, or heldout, which keeps small buckets. distance: as in `HeldOut`. clusters: visits per epoch by
        `Frame.cluster`."""
        settings, heldout = self.settings, side == "heldout"
        policies = Policies(
            small="carry" if heldout else settings.remainder,
            pad_text_multiple=PAD_TEXT_MULTIPLE,
            heldout=HeldOut(settings.heldout, side, distance, settings.group) if settings.heldout else None,
        )
        assembled = assemble(
            joined,
            frame,
            self.inputs.records,
            self.inputs.table,
            policies,
            {source: scan.table for source, scan in self.inputs.used()},
            weights={source: Fraction(str(setting.weight)) for source, setting in settings.sources.items()},
            clusters=clusters,
            places=selection.places(joined, frame, self.earlier),
        )
        return Made(assembled, joined, frame)

    def _leaked(self, frame: Frame) -> dict[str, int]:
        """Count, of the held-out snapshot that the configuration names, the samples that look like one of the training
        or share its group, as far as hashes and groups are known."""
        named, inputs = self.validation, self.inputs
        if named is None:
            return {}
        try:
            part = inputs.caches[0].open_snapshot(named)
        except CacheError:  # not made yet; `train` says so if it stays away
            return {}
        every = [self._looking_alike(frame, part, named), self._sharing_groups(frame, part, named)]
        found = [each for each in every if each is not None]
        return {part.id: int(np.logical_or.reduce(found).sum())} if found else {}

    def _sharing_groups(self, frame: Frame, part: Snapshot, named: str) -> np.ndarray | None:
        """The samples of a held-out snapshot that are of a group of the training, (n,) bool; None: not known."""
        column, inputs = self.settings.group, self.inputs
        if column is None:
            return None
        not_counted = f"samples of {named} in a group of these were not counted"
        try:
            theirs = {source: inputs.caches[0].table(table) for source, table in part.head.sources.items()}
            if inputs.metadata is not None:
                theirs, _ = metadata_table.joined(self.joined.scratch, theirs, inputs.metadata)
        except UserError as error:
            self.joined.notes.append(f"{not_counted}: {error.line}")
            return None
        found = group_leaks.sharing(np.unique(frame.picture_id), self.scans, theirs, part, column)
        if found is None:
            self.joined.notes.append(f"{not_counted}: none of one side has a value of {column}")
        elif found.any():
            self.joined.notes.append(f"{int(found.sum())} samples of {named} share a group of {column} with these")
        return found

    def _looking_alike(self, frame: Frame, part: Snapshot, named: str) -> np.ndarray | None:
        """The samples of a held-out snapshot that look like one of the training, (n,) bool; None: not known."""
        inputs = self.inputs
        if HashEncoding.kind not in inputs.records.indexes or part.head.encodings.get(HashEncoding.kind) is None:
            return None
        both = inputs.records.encodings, part.head.encodings_by_kind.values()
        if not all(map(near_samples.has_hashes, both)):
            self.joined.notes.append(
                f"samples of {named} that look like one of these were not counted: one of the two has hashes of an "
                f"earlier version; {ANEW} makes them again, then sana-pipe bucket for both"
            )
            return None
        with self.comparing(len(frame)) as report:
            leaked, flat = near_samples.leaked(frame, inputs.records, inputs.caches, part, report)
        if flat:
            self.joined.notes.append(
                f"{flat} samples of {named} have too little detail to be compared with these; of them equal files count"
            )
        return leaked


def _numbers(table: pa.Table) -> Counter[int]:
    """The numbers that folders begin with (0: none), with their items."""
    counts: Counter[int] = Counter()
    for batch in batches(table.select(["item"])):
        numbers, items = np.unique(folder_repeats(batch.column("item").combine_chunks()), return_counts=True)
        counts.update(dict(zip(numbers.tolist(), items.tolist(), strict=True)))
    return counts


def _clusters(joined: Joined, frame: Frame, visits: list[Fraction]) -> list[dict[str, Any]]:
    """The clusters that are balanced, the largest first, as JSON values."""
    if len(visits) < 2:
        return []
    sizes = np.bincount(frame.cluster, minlength=len(visits))
    after = sizes * np.array([float(each) for each in visits])
    order = np.argsort(-sizes, kind="stable")
    examples = {int(c): int(row) for c, row in zip(*np.unique(frame.cluster, return_index=True), strict=True)}
    return [
        {
            "samples": int(sizes[c]),
            "share": float(sizes[c] / sizes.sum()),
            "visits": float(visits[c]),
            "share_of_visits": float(after[c] / after.sum()),
            "example": f"{joined.sources[int(frame.source[examples[c]])]}: {frame.item[examples[c]].as_py()}",
        }
        for c in order.tolist()
        if sizes[c]
    ]
