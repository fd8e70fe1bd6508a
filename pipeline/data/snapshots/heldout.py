"""The held-out part of a snapshot: which snapshot it is, and whether it may validate a training on the snapshot.

What: `find` finds the part that `bucket.heldout` made alongside a snapshot: it has a name, and the same scans and
options. `check` refuses parts of other encodings, `check_disjoint` those that have samples of the training.
Why refused and not left out: a value on samples that are trained on looks good.
Price: unless both sides come from one rule (which decides by the picture's digest), `check_disjoint` reads the tables
of the training snapshot.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pyarrow as pa

from sana_pipe.base.errors import ConfigError, IntegrityError
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_head import Head, HeldOut
from sana_pipe.data.cache.snapshot_samples import picture_keys
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.phash import HashEncoding
from sana_pipe.data.signals.rejected import RejectedEncoding

OPTION = "train.validation.snapshot"


def find(cache: Cache, snapshot: Snapshot) -> str | None:
    """The id of the part that was held out of `snapshot`; None if there is none that has a name."""
    side, ours = snapshot.head.policies.heldout, snapshot.head
    if side is None or side.side != "train":
        return None
    own = {f"{name}.heldout" for name in cache.names_of(snapshot.id)}
    for name in sorted(cache.snapshot_names(), key=lambda name: (name not in own, name)):
        with suppress(IntegrityError):  # of another snapshot
            part = cache.snapshot_of(name)
            head = None if part is None else Head.read(cache.files, part)
            if head is not None and (head.policies.heldout, head.sources, head.options) == (
                replace(side, side="heldout"),
                ours.sources,
                ours.options,
            ):
                return part
    return None


def check(snapshot: Snapshot, part: Snapshot) -> None:
    """Refuse records of other encodings. Hashes are not trained on.

    Raises:
        ConfigError: names the fields that differ.
    """
    for kind in sorted((snapshot.head.encodings.keys() & part.head.encodings.keys()) - {HashEncoding.kind}):
        trained, validated = snapshot.head.encodings_by_kind[kind], part.head.encodings_by_kind[kind]
        if trained != validated:
            raise ConfigError(
                f"{OPTION}: snapshot {part.id[:12]} has {kind} records of another encoding than {snapshot.id[:12]}",
                expected="the same encoders and settings",
                found=f"(training | validation) {'; '.join(trained.difference(validated))}",
                fix=f"--set {OPTION}=null with a held-out part: sana-pipe bucket --set bucket.heldout=0.01",
            )


def check_disjoint(snapshot: Snapshot, part: Snapshot) -> None:
    """Refuse a part with samples of the training, or with their pictures in the same bucket, chosen or rejected.

    Raises:
        ConfigError: says how many there are.
    """
    ours, theirs = snapshot.head.policies.heldout, part.head.policies.heldout
    paired = RejectedEncoding.kind in (
        *snapshot.pictures,
        *part.pictures,
    )  # on which side a pair is, others decide, too
    if ours is not None and theirs is not None and not paired and _one_rule(ours, theirs):
        return
    ids, keys = (np.concatenate(columns) for columns in zip(*map(_identities, part.tables()), strict=True))
    in_both = np.zeros(len(ids), bool)
    for table in snapshot.tables():
        trained_ids, trained_keys = _identities(table)
        in_both |= np.isin(ids, trained_ids) | np.isin(keys, trained_keys).any(axis=1)
    shared = int(in_both.sum())
    if shared:
        raise ConfigError(
            f"{OPTION}: {shared} of the {len(part)} samples of snapshot {part.id[:12]} are trained on "
            f"(snapshot {snapshot.id[:12]}); the loss on them says nothing about others",
            expected="no sample in both",
            fix=f"sana-pipe bucket --set bucket.heldout=0.01, then --set {OPTION}=null",
        )


def _one_rule(ours: HeldOut, theirs: HeldOut) -> bool:
    """Return whether the digests of files alone put every picture on one of the two sides."""
    digests = all(each.distance is None and each.group is None for each in (ours, theirs))
    return digests and (ours.side, theirs.side) == ("train", "heldout") and theirs.share <= ours.share


def _identities(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Sample ids, uint64 (n,), and keys of latents, S16 (n, 1), or of pairs (n, 2)."""
    kinds = [kind for kind in (LatentEncoding.kind, RejectedEncoding.kind) if kind in table.column_names]
    keys = [picture_keys(table, kind) for kind in kinds]
    return table.column("sample_id").to_numpy(), np.stack(keys, axis=1)
