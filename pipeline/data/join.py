"""Join: scans and stores to the samples of a snapshot, with every item that is left out and why.

What: for each usable item of a source, find its latent at the bucket it belongs to and the rows of its captions.
Why: a snapshot lists only what is there and whole; what is not there is counted by reason, never dropped silently.
Price: scans and indexes are held in memory while joining.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pipeline.cache import layout
from pipeline.cache.codec import PLAIN
from pipeline.cache.index import RecordIndex, as_keys, key_bytes
from pipeline.cache.snapshot import NAMES, samples_schema
from pipeline.data import buckets, captions
from pipeline.errors import CacheError, UserError


@dataclass
class Joined:
    """Rows of a snapshot, by bucket index of the table, and what is not in it.

    left_out: reason -> items. crop: bucket index -> summed crop loss.
    """

    rows: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    crop: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    shards: dict[str, dict[int, int]] = field(default_factory=lambda: {"latent": {}, "text": {}})


def join(
    joined: Joined, source: str, scan: pa.Table, table: list[tuple[int, int]],
    latent: layout.LatentRecipe, text: layout.TextRecipe, latents: RecordIndex, texts: RecordIndex,
) -> None:  # fmt: skip
    """Add the samples of one source.

    Args:
        scan: the source's scan table.
        table: the bucket table, (height, width) in pixels.
        latents, texts: indexes of the two recipes.
    """
    failed = {r.key: r.reason for index in (latents, texts) for r in index.rejects}
    number = {size: i for i, size in enumerate(table)}
    for row in scan.to_pylist():
        if row["reject"] is not None:
            joined.left_out[f"rejected by the scan: {row['reject']}"] += 1
            continue
        size = buckets.nearest(table, row["height"], row["width"])
        key = layout.latent_key(latent.id, row["digest"], *size)
        at = int(latents.find(as_keys([key]))[0])
        if at < 0:
            reason = failed.get(key.hex())
            joined.left_out[
                f"rejected while encoding: {reason}"
                if reason
                else "its latent is not encoded yet (run sana-pipe encode)"
            ] += 1
            continue
        keys = [
            layout.text_key(text.id, captions.normalise(caption["text"], text.normalisation))
            for caption in row["captions"]
        ]
        found = texts.find(as_keys(keys)).tolist()
        chosen = [(i, c["weight"]) for i, c in zip(found, row["captions"], strict=True) if i >= 0 and c["weight"] > 0]
        if not chosen:
            reason = next((failed[k.hex()] for k in keys if k.hex() in failed), None)
            joined.left_out[
                f"caption rejected while encoding: {reason}"
                if reason
                else "its caption is not encoded yet (run sana-pipe encode)"
            ] += 1
            continue
        if len(chosen) < len(found):
            joined.left_out["(caption only, the sample stays) one of several captions is not encoded"] += 1
        bucket = number[size]
        joined.crop[bucket] += buckets.crop_loss(row["height"], row["width"], size)
        joined.rows.setdefault(bucket, []).append(_row(joined, source, row["item"], latents, at, texts, chosen))


def _row(
    joined: Joined, source: str, item: str, latents: RecordIndex, at: int, texts: RecordIndex,
    chosen: list[tuple[int, float]],
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    def shard(kind: str, number: int) -> int:
        return joined.shards[kind].setdefault(number, len(joined.shards[kind]))

    one, own = latents.columns, texts.columns
    sample = {
        "sample_id": layout.sample_id(source, item),
        "shard": shard("latent", int(one["shard"][at])), "offset": int(one["offset"][at]),
        "key": key_bytes(one["key"][at]), "checksum": key_bytes(one["checksum"][at]), "length": int(one["length"][at]),
        "captions": [
            {
                "shard": shard("text", int(own["shard"][i])), "offset": int(own["offset"][i]),
                "rows": int(own["valid"][i]), "weight": weight,
                "key": key_bytes(own["key"][i]), "checksum": key_bytes(own["checksum"][i]),
                "length": int(own["length"][i]),
            }
            for i, weight in chosen
        ],
    }  # fmt: skip
    written = [
        {
            "offset": int(own["caption_offset"][i]), "length": int(own["caption_length"][i]),
            "checksum": key_bytes(own["caption_checksum"][i]),
        }
        for i, _ in chosen
    ]  # fmt: skip
    return sample, {"sample_id": sample["sample_id"], "source": source, "item": item, "captions": written}


@dataclass(frozen=True)
class BucketReport:
    """One line of the table that `sana-pipe bucket` prints."""

    height: int
    width: int
    samples: int
    batch: int
    steps: float
    crop: float
    note: str


def assemble(
    joined: Joined, table: list[tuple[int, int]], *, batch: int, small: str, pad_text_multiple: int,
    latent: layout.LatentRecipe, text: layout.TextRecipe, latents: RecordIndex, texts: RecordIndex,
    sources: dict[str, Any],
) -> tuple[dict[str, Any], pa.Table, pa.Table, list[BucketReport]]:  # fmt: skip
    """Turn joined rows into a snapshot's head and tables.

    Raises:
        UserError: nothing is left to train on; the message counts the reasons.
        CacheError: the null record is missing.
    """
    left = Counter(joined.left_out)
    samples: list[dict[str, Any]] = []
    names: list[dict[str, Any]] = []
    counts: list[dict[str, int]] = []
    report: list[BucketReport] = []
    for bucket, (height, width) in enumerate(table):
        rows = sorted(joined.rows.get(bucket, []), key=lambda pair: pair[0]["sample_id"])
        if not rows:
            continue
        crop = joined.crop[bucket] / len(rows)
        if small == "drop" and len(rows) < batch:
            left[
                f"bucket {height}x{width} has fewer samples than one batch of {batch} "
                "(keep them: bucket.small=carry, or a smaller bucket.batch)"
            ] += len(rows)
            report.append(BucketReport(height, width, len(rows), batch, 0, crop, "left out: smaller than one batch"))
            continue
        steps = len(rows) / batch if small == "carry" else len(rows) // batch
        note = "smaller than one batch: batches repeat samples of later epochs" if len(rows) < batch else ""
        report.append(BucketReport(height, width, len(rows), batch, steps, crop, note))
        counts.append({"height": height, "width": width, "samples": len(rows), "batch": batch})
        samples.extend(pair[0] for pair in rows)
        names.extend(pair[1] for pair in rows)
    ids = [sample["sample_id"] for sample in samples]
    if len(set(ids)) < len(ids):
        raise UserError(
            f"{len(ids) - len(set(ids))} samples share a 64-bit sample id with another", fix="rename their files"
        )
    if not samples:
        reasons = "; ".join(f"{count} items: {reason}" for reason, count in left.most_common()) or "the scan is empty"
        raise UserError("nothing is left to train on", found=reasons, fix="mend the reason that counts most")
    null_at = int(texts.find(as_keys([layout.null_key(text.id)]))[0])
    if null_at < 0:
        raise CacheError("the text store has no null record", fix="sana-pipe encode (it makes it first)")
    own = texts.columns
    null = {
        "shard": texts.shards[int(own["shard"][null_at])], "offset": int(own["offset"][null_at]),
        "rows": int(own["rows"][null_at]), "valid": int(own["valid"][null_at]),
        "key": key_bytes(own["key"][null_at]).hex(), "checksum": key_bytes(own["checksum"][null_at]).hex(),
    }  # fmt: skip
    if text.storage != PLAIN:
        null["length"] = int(own["length"][null_at])
    joined.shards["text"].setdefault(int(own["shard"][null_at]), len(joined.shards["text"]))
    head = {
        "recipes": {"latent": latent.values(), "text": text.values()},
        "policies": {"small": small, "pad_text_multiple": pad_text_multiple},
        "buckets": counts,
        "shards": {
            kind: [{"name": index.shards[n], "bytes": index.bytes[n]} for n in joined.shards[kind]]
            for kind, index in (("latent", latents), ("text", texts))
        },
        "null": null,
        "counts": {"samples": len(samples)},
        "left_out": dict(sorted(left.items())),
        "sources": sources,
    }  # fmt: skip
    return (
        head, pa.Table.from_pylist(samples, schema=samples_schema(latent, text)),
        pa.Table.from_pylist(names, schema=NAMES), report,
    )  # fmt: skip
