"""Notes on what a scan did not take and a user may have meant: pictures that no row of a table names, text in other
columns, several pictures of a sample of a tar.

Price: columns are looked at in a few rows. The names of a folder are read once more where a table names fewer pictures
than the folder has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.config import setting
from sana_pipe.base.errors import escaped
from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.cache.item_rows import ItemRows
from sana_pipe.data.cache.scan_table import control_and_mask_places
from sana_pipe.data.sources import name_patterns
from sana_pipe.data.sources.caption_columns import TEXT_FILE, CaptionRule, columns_of, sure_columns, value_of
from sana_pipe.data.sources.filenames import EXTENSIONS, extension, shortened
from sana_pipe.data.sources.name_patterns import CONTROL, MASK
from sana_pipe.data.sources.reject_kinds import EXAMPLES, examples
from sana_pipe.data.sources.source import Source
from sana_pipe.data.sources.text_parts import unpacked

LENGTH = 80
"""Characters of a text that is not used."""
COLUMNS = 3
"""Columns that are named with the settings that use them."""
_BATCH = 1 << 12
_NAMED = pa.schema([("item", pa.string())])


def unnamed(source: Source, scan: pa.Table) -> Iterator[str]:
    """Pictures of the folder that no row of its tables names."""
    are_files = scan.column("where").null_count == len(scan)
    if not source.pictures_next_to or (are_files and scan.column("reject").null_count >= source.pictures_next_to):
        return
    named = source.scratch.table(_NAMED, _named(scan))
    rows, count, shown = ItemRows(named, source.scratch), 0, list[str]()
    pictures = (file for file in source.filesystem.find() if extension(file) in EXTENSIONS)
    while some := list(islice(pictures, _BATCH)):
        others = [file for file, row in zip(some, rows.find(some).tolist(), strict=True) if row < 0]
        count += len(others)
        shown += others[: EXAMPLES - len(shown)]
    if count:
        tables = examples(list(source.files[:EXAMPLES]), len(source.files))
        kinds = {name_patterns.kind_of(file) for file in shown} & {MASK, CONTROL}
        ways = " or ".join(f"data.pictures.{kind}.column" for kind in sorted(kinds))
        likely = f"; if they are masks or control pictures, a column with their names and {ways}" if ways else ""
        yield (
            f"{count} pictures of the folder are not used, because no row of {tables} names them (add a row for "
            f"each to use it{likely}): {examples(sorted(shown), count)}"
        )


def _named(scan: pa.Table) -> Iterator[pa.Table]:
    """The files that a scan has as pictures and as control pictures or masks; column `item`."""
    for batch in batches(scan.select(["item", "where", "pictures"])):
        where = batch.column("where")
        is_name = pc.fill_null(pc.starts_with(where, "="), False)
        yield pa.table([pc.if_else(is_name, pc.utf8_slice_codeunits(where, 1), batch.column("item"))], _NAMED)
        yield pa.table([control_and_mask_places(batch).column("item").drop_null()], _NAMED)


def other_columns(rule: CaptionRule, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Columns that hold captions by their names and are not used, with a text of each.

    Args:
        rows: `captions` and `meta` of a scan, of pictures with a caption.
    """
    found = dict[str, str]()
    for row in rows:
        meta = json.loads(row["meta"] or "{}")
        texts = [caption["text"] for caption in row["captions"]]
        for column in sure_columns(columns_of(meta)):
            value = unpacked(value_of(meta, column))
            entries = [
                each.strip() for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)
            ]
            whole, is_used = ", ".join(entries), all(any(each in text for text in texts) for each in entries)
            if " " in whole and not is_used and column not in rule.columns:
                found.setdefault(column, whole)
    return found


def said(rule: CaptionRule, others: dict[str, str]) -> Iterator[str]:
    """Lines on columns that are not used, with the settings that use them. others: as of `other_columns`."""
    every = [column for column in (TEXT_FILE, *rule.columns, *rule.fallback) if column not in others]
    taken = [column for column in every if column in rule.seen] or list(rule.columns)
    for column, text in islice(others.items(), COLUMNS):
        either = setting("data.caption_weights", {**dict.fromkeys(taken, 1), column: 1})
        alone = setting("data.caption_field", column)
        if TEXT_FILE in taken:
            either, alone = alone, setting("data.caption_weights", {column: 1})
        yield (
            f"the column {escaped(column)!r} holds text and is not used: {escaped(shortened(text, LENGTH))!r} "
            f"({alone} uses it instead of the captions; {either} draws one of the two)"
        )
    if rest := [*islice(others, COLUMNS, None)]:
        yield f"{len(rest)} more columns hold text and are not used: {examples(rest[:EXAMPLES], len(rest))}"


def more_members(source: Source) -> Iterator[str]:
    """Members of tars that are control pictures or masks of their samples by their names (`x.control.jpg`) and are not
    used."""
    for what, files in source.ignored.examples.items() if source.shares_captions else ():
        ending = what.removesuffix(" member")
        suffix = ending.rpartition(".")[0]
        if what == ending or not suffix or extension(ending) not in EXTENSIONS:
            continue
        kinds = [kind] if (kind := name_patterns.kind_of(suffix)) else [MASK, CONTROL]
        ways = " or ".join(setting(f"data.pictures.{kind}.suffix", suffix) for kind in kinds)
        count = source.ignored.counts[what]
        yield (
            f"{count} {ending} members look like {' or '.join(kinds)} pictures and are not used: "
            f"{examples(files, count)} ({ways})"
        )


def several_pictures(source: Source, scan: pa.Table) -> Iterator[str]:
    """Pictures that have the caption of the sample of a tar in common."""
    if not source.shares_captions:
        return
    count, shown, before = 0, list[str](), ""
    for batch in batches(scan.select(["item", "reject"])):
        items = batch.column("item").filter(pc.is_null(batch.column("reject"))).combine_chunks()
        if not len(items):
            continue
        items = pa.concat_arrays([pa.array([before], pa.string()), items])
        stems = pc.replace_substring_regex(items, r"\.[^./]*$", "")
        rows = pc.indices_nonzero(pc.equal(stems[1:], stems[:-1]))
        count += len(rows)
        shown += [" and ".join(items[row : row + 2].to_pylist()) for row in rows[: EXAMPLES - len(shown)].to_pylist()]
        before = items[-1].as_py()
    if count:
        shown_pairs = examples(shown, count)
        yield f"{count} times two pictures of a sample share its caption, and both are trained on: {shown_pairs}"
