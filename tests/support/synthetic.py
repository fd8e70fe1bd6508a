"""Caches without encoders: real shards, tables, plans and scans whose records are small and random.

Pictures are 16 to 32 pixels a side and latents 4 channels at compression 8, so that thousands cost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sana_pipe.config import Config, load
from sana_pipe.data.cache import index, layout, shard
from sana_pipe.data.cache.cache import Cache, Unit
from sana_pipe.data.cache.encodings import Encoding
from sana_pipe.data.cache.scan_table import SCAN
from sana_pipe.data.encoders.text_kind import max_length
from sana_pipe.data.images import buckets
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.sources import caption_rules as captions
from sana_pipe.tools.locations import cache_location

LATENT = LatentEncoding(weights="w", compression=8, channels=4, decoder="pillow-srgb-1")
TABLE = [(16, 32), (16, 24), (24, 24), (24, 16), (32, 16)]
PER_UNIT = 50


@dataclass(frozen=True)
class Picture:
    """One item of a source. `content` decides its digest: equal contents are equal pictures."""

    item: str
    content: str
    height: int = 24
    width: int = 24
    captions: tuple[tuple[str, float], ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    reject: str | None = None

    @property
    def texts(self) -> tuple[tuple[str, float], ...]:
        return self.captions or ((f"caption of {self.content}", 1.0),)


def config(root: Path | str, *overrides: str) -> Config:
    table, run = ", ".join(f"[{h}, {w}]" for h, w in TABLE), str(root).rpartition("://")[2]
    return load(
        "tiny", [f"cache={root}", f"train.output={run}-run", f"data.buckets=[{table}]", "bucket.batch=4", *overrides]
    )


def text_encoding(of: Config) -> TextEncoding:
    return TextEncoding(
        weights="w",
        width=6,
        dtype=of.text.dtype,
        instruction=captions.instruction(of.text),
        normalisation=of.text.prompting,
        max_length=max_length(of.text),
    )


def add(
    of: Config,
    source: str,
    pictures: Iterable[Picture],
    *,
    table: list[tuple[int, int]] | None = None,
    without: Iterable[str] = (),
) -> Cache:
    """Scan a source and make its records.

    Args:
        table: the bucket table that its latents are made for.
        without: items whose latents are not made.
    """
    pictures, table = list(pictures), table or TABLE
    cache = cache_location(of).open(create=True)
    text = text_encoding(of)
    rows = [
        {
            "item": p.item,
            "size": 1,
            "mtime_ns": 1,
            "digest": layout.digest(p.content),
            "width": p.width,
            "height": p.height,
            "captions": [{"text": t, "weight": w} for t, w in p.texts],
            "meta": json.dumps(p.meta),
            "reject": p.reject,
        }
        for p in pictures
    ]
    scan = pa.Table.from_pylist(rows, schema=SCAN)
    for encoding in (LATENT, text):
        cache.add_encoding(encoding)
    cache.add_scan(
        source,
        {
            "source": source,
            "root": "/nowhere",
            "table": cache.put_table(scan),
            "encodings": {"latent": LATENT.name, "text": text.name},
            "buckets": [list(b) for b in table],
        },
    )
    usable = [p for p in pictures if p.reject is None and p.item not in set(without)]
    latents = {
        LATENT.key(layout.digest(p.content), *size): (size, source, p)
        for p in usable
        for size in [buckets.nearest(table, p.height, p.width)]
    }
    texts = {
        text.key(captions.normalise(t, text.normalisation)): t for p in pictures if p.reject is None for t, _ in p.texts
    }
    _make(cache, LATENT, {k: _bits(k, (4, h // 8, w // 8)) for k, ((h, w), _, _) in latents.items()}, {})
    rows_of = {k: _bits(k, (1 + k[0] % 9, 6)) for k in sorted(texts)}
    _make(cache, text, {text.null_key: _bits(b"null", (300, 6)), **rows_of}, texts)
    return cache


def _make(cache: Cache, encoding: Encoding, arrays: dict[bytes, np.ndarray], texts: dict[bytes, str]) -> None:
    """Append one plan with the records that no shard holds yet, committed unit by unit."""
    stored = cache.index(encoding.name)
    missing = [key for key in arrays if not stored.has(key)]
    if not missing:
        return
    number, units, commits = len(cache.plans(encoding.name)), [], []
    for start in range(0, len(missing), PER_UNIT):
        keys = missing[start : start + PER_UNIT]
        unit = layout.digest("unit", encoding.name, str(number), *keys).hex()
        with shard.ShardWriter(cache.files, encoding, unit) as writer:
            for key in keys:
                if encoding.kind == "latent":
                    writer.add(key, arrays[key])
                elif key in texts:
                    writer.add(key, arrays[key], caption=texts[key])
                else:
                    writer.add(key, arrays[key], caption="", valid=1)
            commits.append(index.commit_of(cache.files, unit, writer.finish()))
        units.append(Unit(unit, start, len(keys), 8))
    cache.add_plan(encoding.name, number, units, pa.table({"key": pa.array(missing, pa.binary(16))}))
    for commit in commits:
        index.publish_commit(cache.files, encoding.name, number, commit)
    index.merge(cache.files, encoding.name, number, [unit.unit for unit in units])


def _bits(key: bytes, shape: tuple[int, ...]) -> np.ndarray:
    seed = int.from_bytes(layout.digest(key)[:8], "little")
    return np.random.default_rng(seed).integers(0, 0x7F80, shape, np.uint16)


SIZES = [(24, 24), (16, 24), (24, 16), (16, 32), (32, 16)]


def pictures(count: int, prefix: str = "", first: int = 0) -> list[Picture]:
    """Different pictures, most of them square, with one or two captions and a score."""
    shape = [0, 0, 0, 0, 1, 1, 2, 2, 2, 3]
    return [
        Picture(
            f"{prefix}{i:05d}.png",
            f"{prefix}{i}",
            *SIZES[shape[i % 10]],
            ((f"a {prefix}{i}", 1.0), (f"the {prefix}{i}", 3.0)) if i % 3 == 0 else (),
            {"score": i % 7, "tag": "even" if i % 2 == 0 else "odd"},
        )
        for i in range(first, first + count)
    ]


def with_another(folder: Path) -> Config:
    """A new cache in a folder, and a second one that its configuration names in `bucket.caches`."""
    here, there = folder / "here", folder / "there"
    add(config(here), "one", pictures(10))
    add(config(there), "two", pictures(60, "two-"))
    return config(here, f"bucket.caches=[{there}]")
