"""The rules of a snapshot, used again: read from its head, compared with a configuration, and what came out of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sana_pipe.base.errors import CacheError, UserError
from sana_pipe.base.options import flat, within
from sana_pipe.data.cache import compare
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.snapshots import provenance
from sana_pipe.data.snapshots.config import BucketConfig
from sana_pipe.data.snapshots.inputs import options_of
from sana_pipe.data.sources.config import DataConfig

OPTION = "--like"


@dataclass(frozen=True)
class Rules:
    """The rules that a snapshot was made with.

    Attributes:
        name: of the snapshot, as it was given.
        options: as of `Head.options`.
        bucket: the section, without caches and the settings of packs, which are places and not rules.
        data: those options of `data` that decide which pictures are used, and at which size.
    """

    name: str
    snapshot: Snapshot
    options: dict[str, dict[str, Any]]
    bucket: BucketConfig
    data: dict[str, Any]

    @classmethod
    def of(cls, cache: Cache, name: str) -> Rules:
        """The rules of a snapshot, packed or not. name: a name, an id or the beginning of an id.

        Raises:
            CacheError: no such snapshot; its head does not say the rules, or says some that this version does not have.
            UserError: it is a held-out part, which is made with the other.
        """
        snapshot = cache.open_snapshot(name)
        side, recorded = snapshot.head.policies.heldout, snapshot.head.options
        if side is not None and side.side == "heldout":
            raise UserError(
                f"{OPTION} {name}: this is a held-out part, which is made together with its training snapshot",
                fix=f"{OPTION} with the name of that snapshot"
                + (f", {OPTION} {name.removesuffix('.heldout')}" if name.endswith(".heldout") else ""),
            )
        if recorded is None:
            raise CacheError(
                f"{OPTION} {name}: the head of this snapshot does not say how it was made",
                fix="sana-pipe bucket, with the settings that it was made with",
            )
        options = {section: dict(values) for section, values in recorded.items()}
        try:
            bucket, data = BucketConfig(**options["bucket"]), DataConfig(**options["data"])
        except (ValidationError, KeyError) as error:
            raise CacheError(
                f"{OPTION} {name}: its head has rules that this version does not know",
                found=str(error).splitlines()[0],
                fix="make it with the version that made the snapshot",
            ) from None
        return cls(name, snapshot, options, bucket, {name: getattr(data, name) for name in options["data"]})

    def without(self, held: Collection[str]) -> tuple[BucketConfig, list[str]]:
        """The section for the sources that caches hold now, and those that are gone."""
        gone = sorted({*self.snapshot.head.sources, *self.bucket.sources} - set(held))
        sources = {name: each for name, each in self.bucket.sources.items() if name not in gone}
        return self.bucket.model_copy(update={"sources": sources}), gone

    def check(self, cache: Cache, bucket: BucketConfig, data: DataConfig, chosen: Iterable[str]) -> list[str]:
        """Compare with a configuration; returns a note for each rule that its file states otherwise.

        Args:
            chosen: options that the command line states.

        Raises:
            UserError: one of them says another rule.
        """
        ours, theirs = (dict(flat(each)) for each in (options_of(bucket, data, cache), self.options))
        names, notes = list(chosen), []
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) == theirs.get(name):
                continue
            if any(within(name, option) for option in names):
                raise UserError(
                    f"{OPTION} {self.name} makes the same rules again, and the command line has another {name}",
                    expected=_value(theirs, name),
                    found=_value(ours, name),
                    fix=f"leave {name} out; or without {OPTION}: sana-pipe snapshots show {self.name} prints the "
                    "command with all its settings, to be changed",
                )
            if name in ours:
                used = f"used is that of {self.name}: {_value(theirs, name)}"
                notes.append(f"{name}: the configuration has {_value(ours, name)}; {used}")
        return notes

    def compared(self, cache: Cache, made: str) -> dict[str, Any]:
        """Say what the same rules give now: counts of samples `added`, `removed` and `changed`, kinds of records that
        are not the same (`signals`), whether the content id is (`same_content`), and `why`: sources and rules that
        differ. made: the new snapshot's id."""
        then, now = self.snapshot, cache.open_snapshot(made)
        difference = compare.difference(then, now)
        return {
            "name": self.name,
            "snapshot": then.id,
            "added": len(difference.added),
            "removed": len(difference.removed),
            "changed": len(difference.changed),
            "signals": [*difference.signals, *difference.encodings],
            "same_content": now.head.content_id == then.head.content_id,
            "why": [line.strip() for line in provenance.since(cache, then.id, made)][1:],
        }


def _value(options: dict[str, Any], name: str) -> str:
    return repr(options[name]) if name in options else "the default"
