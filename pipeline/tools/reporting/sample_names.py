"""Find the sample of a snapshot that a user means.

`find` resolves what is at hand: a sample id (`samples.jsonl`, messages of `train`), an item's name, the key of the
latent (the member's name in its shard), or the beginning of one of them.
Price: it reads the tables of the whole snapshot, in columns.
"""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import UserError
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.cache.snapshot_samples import picture_keys
from sana_pipe.tools.reporting.sample_figures import scanned

HEX_DIGITS = 6
"""The shortest beginning of a key or an id that is looked for."""
SHOWN = 5
ALIKE = 3
"""Characters that a name shares with a name that does not exist, to be compared with it first."""
CANDIDATES = 5000
"""Limit on names that are compared letter by letter with a name that does not exist."""


def find(cache: Cache, snapshot: Snapshot, text: str) -> int:
    """The row of a sample.

    Args:
        text: an id, a name (`item` or `source: item`), a file name in any folder, the key of a latent (hex), or the
            beginning of a name, id or key.

    Raises:
        UserError: no sample has it, or several; the message names the nearest.
    """
    matches = (
        _rows(snapshot, text, pc.equal) or _rows(snapshot, text, _in_a_folder) or _rows(snapshot, text, pc.starts_with)
    )
    if len(matches) == 1:
        return matches[0]
    if matches:
        shown = [f"{snapshot.sample_id(row)} ({': '.join(snapshot.source_item(row))})" for row in matches[:SHOWN]]
        raise UserError(
            f"{text!r} names several samples of snapshot {snapshot.id[:12]}",
            found="; ".join(shown) + ("; ..." if len(matches) > SHOWN else ""),
            fix="give the sample id, which is the number in front of the sample that you mean",
        )
    raise UserError(
        f"no sample of snapshot {snapshot.id[:12]} is called {text!r}{_rejected(cache, snapshot, text)}",
        expected=f"a sample id, an item, or at least {HEX_DIGITS} digits of a key; the nearest names are "
        + ", ".join(_nearest(snapshot, text)),
        fix="give one of them, or another snapshot: --snapshot NAME (sana-pipe snapshots lists them)",
    )


def _in_a_folder(items: Any, name: str) -> Any:
    return pc.ends_with(items, f"/{name}")


def _rows(snapshot: Snapshot, text: str, compare: Callable[[Any, str], Any]) -> list[int]:
    """The first rows that a text names. compare: `pc.equal`, `_in_a_folder` or `pc.starts_with`."""
    source, colon, item = text.partition(": ")
    is_long = len(text) >= HEX_DIGITS
    digits = text.lower() if is_long and set(text) <= set(string.hexdigits) else ""
    rows: list[int] = []
    first = 0
    for samples, names in zip(snapshot.tables(), snapshot.name_tables(), strict=True) if text else ():
        items = names.column("item")
        chosen = compare(items, text)
        if colon:
            chosen = pc.or_(chosen, pc.and_(compare(items, item), pc.equal(names.column("source"), source)))
        if text.isdecimal() and (is_long or compare is pc.equal):
            chosen = pc.or_(chosen, compare(pc.cast(samples.column("sample_id"), pa.string()), text))
        mask = chosen.to_numpy()
        if digits and compare is not pc.equal:
            for kind in snapshot.pictures:
                keys = np.frombuffer(picture_keys(samples, kind).tobytes().hex().encode(), "S32")
                mask = mask | np.char.startswith(keys, digits.encode())
        rows += (first + np.flatnonzero(mask)).tolist()
        first += samples.num_rows
        if len(rows) > SHOWN:
            break
    return rows


def _rejected(cache: Cache, snapshot: Snapshot, item: str) -> str:
    """Say why an item of the sources is not in the snapshot, as a part of a sentence."""
    for source in snapshot.head.sources:
        row = scanned(cache, snapshot, source, item)
        if row is not None:
            if row.reject:
                return f"; source {source!r} has it, but encode rejected it: {row.reject}"
            return f"; source {source!r} has it, but bucket left it out (sana-pipe inspect lists the reasons)"
    return ""


def _nearest(snapshot: Snapshot, text: str) -> list[str]:
    """Names of a few items that resemble a text: of those that begin like it, else of all."""
    text = re.sub(r"^[\w.-]+: ?", "", text)  # a source
    candidates: list[str] = []
    for beginning in (text[:ALIKE], ""):
        for names in snapshot.name_tables():
            items = names.column("item")
            alike = items.filter(pc.starts_with(items, beginning))
            candidates += alike.slice(0, CANDIDATES - len(candidates)).to_pylist()
    return difflib.get_close_matches(text, candidates, SHOWN, 0.3) or candidates[:SHOWN]
