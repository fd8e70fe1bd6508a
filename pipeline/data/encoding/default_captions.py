"""Captions that a source makes for pictures without one, and which items of a scan have one of theirs."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.data.cache.arrow import batches
from sana_pipe.data.sources.caption_columns import CaptionCandidate, CaptionRule
from sana_pipe.data.sources.config import DataConfig


def made_of(data: DataConfig, text: str, item: str, source: str) -> str:
    """A caption as a source makes it; of no text the default caption."""
    candidates = [CaptionCandidate(text)] if text else []
    made, _ = CaptionRule(data).weigh(candidates, item, source)
    return made[0][0] if made else ""


def has_caption(scan: pa.Table, data: DataConfig, source: str) -> pa.ChunkedArray:
    """Return whether each item has a caption that is not the default."""
    chunks = []
    for batch in batches(scan.select(["item", "captions"])):
        captions = batch.column("captions")
        there = pc.fill_null(pc.greater(pc.list_value_length(captions), 0), False)
        if data.caption is not None:
            filled = pc.if_else(there, captions, pa.scalar([{"text": "", "weight": 0.0}], captions.type))
            texts = pc.struct_field(pc.list_element(filled, 0), "text")
            default = _default(batch.column("item"), data, source)
            wrapped = pc.binary_join_element_wise(data.caption_prefix, default, "")
            there = pc.and_(there, pc.not_equal(texts, wrapped))
        chunks += there.chunks
    return pa.chunked_array(chunks, pa.bool_())


def _default(items: pa.Array, data: DataConfig, source: str) -> pa.Array | pa.Scalar:
    """Return what `CaptionRule` gives items without a caption."""
    if data.caption == "none":
        return pa.scalar("")
    if data.caption == "filename":
        names = pc.replace_substring_regex(pc.replace_substring_regex(items, r"\.[^./]*$", ""), "^.*/", "")
    elif data.caption == "folder":
        names = pc.replace_substring_regex(items, "(?:^|/)[^/]*$", "")
        names = pc.replace_substring_regex(names, "^.*/", "")
        names = pc.if_else(pc.equal(names, ""), source, names)
        names = pc.replace_substring_regex(names, r"\.(?:tar|parquet)$", "")
        names = pc.replace_substring_regex(names, "^[1-9][0-9]{0,2}_([^_])", r"\1")
    else:
        return pa.scalar(data.caption or "")
    return pc.utf8_trim_whitespace(pc.replace_substring(names, "_", " "))
