"""Preference pairs: which of them a snapshot takes, their weights, and the groups of those that share a picture.

A pair is an item with a rejected picture (`data.pictures.rejected`); the item's own picture is the chosen one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.keys import as_keys, fixed, key_bytes
from sana_pipe.data.cache.layout import digest
from sana_pipe.data.cache.scratch import Scratch
from sana_pipe.data.snapshots.frames import Frame, pieces
from sana_pipe.data.snapshots.join import Joined, pair_columns
from sana_pipe.data.snapshots.near import Forest

_OPTION = "data.pictures.rejected.weight"


def usable(
    joined: Joined, scans: Mapping[str, pa.Table], picture: str, weights: Mapping[str, str | None]
) -> dict[str, pa.Table]:
    """Leave out what is no preference: ties, pairs of equal pictures, and of pairs that stand in both orders under the
    same captions the order that has less weight; of equal weights both orders.

    Args:
        scans: usable items by source. picture: kind of the rejected pictures. weights: column of weights by source.
    """
    # Votes on the pictures A and B, each a pair of weight 1: A over B, A over B, B over A. The order A over B has the
    # weight 2 and stays, both pairs with their weights; B over A is left out. A fourth vote for B makes a tie of it.
    facts = joined.scratch.arrays(
        (_facts(batch, picture, weights[source]) for source, scan in scans.items() for batch in batches(scan)),
        {"key": "S16", "is_first": bool, "is_equal": bool, "weight": np.float32},
    )
    odd = np.isnan(facts["weight"])
    joined.leave(
        "its pair has no weight: the column holds no number of at least 0",
        int(odd.sum()),
        f"fill the column that {_OPTION} names, and run sana-pipe encode",
    )
    tied = facts["weight"] == 0
    joined.leave("its pair is a tie: its weight is 0", int(tied.sum()))
    equal = facts["is_equal"] & ~odd & ~tied
    joined.leave(
        "its pair is of equal pictures: the chosen and the rejected file have the same bytes", int(equal.sum())
    )
    stays = ~(odd | tied | equal)
    contradicted, balanced = _contradicted(joined.scratch, facts, stays)
    joined.leave("its pair stands in the other order with more weight", int(contradicted.sum()))
    joined.leave("its pair is a tie: both orders have the same weight", int(balanced.sum()))
    stays &= ~(contradicted | balanced)

    def chosen(scan: pa.Table, first: int) -> Iterator[pa.Table]:
        for batch in batches(scan):
            yield batch.filter(pa.array(stays[first : first + len(batch)]))
            first += len(batch)

    result, first = dict[str, pa.Table](), 0
    for source, scan in scans.items():
        result[source] = joined.scratch.table(scan.schema, chosen(scan, first))
        first += len(scan)
    return result


def _facts(scan: pa.Table, picture: str, weight: str | None) -> dict[str, np.ndarray]:
    """Key of each pair, the same for both orders; whether the chosen picture is the first of the key; whether both are
    equal; and the weight."""
    chosen, pair = fixed(scan.column("digest")), pair_columns(scan, picture, weight)
    keys, is_first = list[bytes](), list[bool]()
    for one, other, captions in zip(chosen, pair["rejected"], scan.column("captions").to_pylist(), strict=True):
        both = key_bytes(one), key_bytes(other)
        texts = json.dumps(sorted(caption["text"] for caption in captions))
        keys.append(digest("pair", *sorted(both), texts))
        is_first.append(both[0] <= both[1])
    return {
        "key": as_keys(keys),
        "is_first": np.array(is_first, bool),
        "is_equal": chosen == pair["rejected"],
        "weight": pair["weight"],
    }


def _contradicted(scratch: Scratch, facts: dict[str, Any], stays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find which pairs stand in the other order with more weight, and which with the same, (n,) bool each."""
    lighter, balanced = np.zeros(len(stays), bool), np.zeros(len(stays), bool)
    for _, rows, first in scratch.by_key(facts["key"][batch] for batch in pieces(len(stays))):
        group, here = np.cumsum(first) - 1, np.where(stays[rows], facts["weight"][rows].astype(np.float64), 0.0)
        forward = facts["is_first"][rows]
        ours, theirs = (np.bincount(group, here * order) for order in (forward, ~forward))
        mine = np.where(forward, ours[group], theirs[group])
        others = np.where(forward, theirs[group], ours[group])
        lighter[rows] = stays[rows] & (mine < others)
        balanced[rows] = stays[rows] & (mine == others)
    return lighter, balanced


def equal_pairs(frame: Frame, groups: np.ndarray | None) -> np.ndarray:
    """(n,) S16: equal for pairs of the same chosen picture (or group of pictures) and the same rejected file. groups:
    (n,) S16 keys of the chosen pictures; None: their digests."""
    chosen = frame.digest if groups is None else groups
    pairs = zip(chosen, frame.pairs["rejected"], strict=True)
    return as_keys([digest("pair", key_bytes(one), key_bytes(other)) for one, other in pairs])


def sharing_pictures(frame: Frame, groups: np.ndarray | None) -> np.ndarray:
    """(n,) S16: equal for pairs that share a picture, chosen or rejected, directly or through other pairs; see
    `linked`. groups: (n,) S16 keys of the chosen pictures; None: their digests."""
    chosen, rejected = frame.digest[:], frame.pairs["rejected"][:]
    if groups is None:
        return linked(chosen, rejected)
    return linked(np.concatenate([chosen, chosen]), np.concatenate([rejected, groups[:]]))[: len(chosen)]


def linked(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(n,) S16: the smallest digest among the pictures that a pair is linked with. first, second: (n,) S16, digests of
    the pictures of each pair.

    Pairs with an equal result are on one side of a held-out part.
    """
    # Pairs (A, B), (C, B), (D, E) with A < B < ...: the first two share B, so the results are A, A, D.
    pictures, numbers = np.unique(np.concatenate([first, second]), return_inverse=True)
    left, right = numbers[: len(first)], numbers[len(first) :]
    forest = Forest(len(pictures))
    forest.join(left, right)
    return pictures[forest.roots(left)]
