"""Join: scans and stores to the samples of a snapshot, with every item that is left out and why.

What: `join` finds for each usable item of a source its latent at the bucket it belongs to and the rows of its captions;
`assemble` groups the selected samples (`pipeline.snapshots.selection`) into a snapshot's head and tables.
Why: a snapshot lists only what is there and whole; what is not there is counted by reason, never dropped silently.
Price: scans, indexes and about 150 bytes a sample are held in memory while joining; all of it in columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache import layout
from pipeline.cache.arrow import text as text_column
from pipeline.cache.codec import PLAIN
from pipeline.cache.index import RecordIndex, as_keys, fixed, key_bytes
from pipeline.cache.snapshot import CHUNK_ROWS, NAMES, WRITTEN, samples_schema
from pipeline.config import DataConfig
from pipeline.errors import CacheError, UserError
from pipeline.images import buckets
from pipeline.sources import caption_rules as captions
from pipeline.sources.reasons import EXAMPLES, Kinds

ENCODE = "run sana-pipe encode"


@dataclass
class Frame:
    """Samples in columns, in the order in which they were joined. n samples, m captions.

    Attributes:
        source: (n,) int32 into `Joined.sources`.
        item: (n,) large strings.
        sample_id, picture_id: (n,) uint64; they differ for the records of a picture at further resolutions.
        digest: (n,) S16, of the picture's file.
        height, width: (n,) int64 of the picture, in pixels.
        bucket: (n,) int64 into the bucket table.
        latent: (n,) int64 rows of the latents' index.
        captions: (n + 1,) int64 offsets into the next two.
        text, weight: (m,) int64 rows of the texts' index; (m,) float32.
    """

    source: np.ndarray
    item: pa.Array
    sample_id: np.ndarray
    picture_id: np.ndarray
    digest: np.ndarray
    height: np.ndarray
    width: np.ndarray
    bucket: np.ndarray
    latent: np.ndarray
    captions: np.ndarray
    text: np.ndarray
    weight: np.ndarray

    def __len__(self) -> int:
        return len(self.sample_id)

    def take(self, rows: np.ndarray) -> Frame:
        """Some rows (a boolean mask, or numbers), in their order."""
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows
        counts = np.diff(self.captions)[rows]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        own = np.repeat(self.captions[:-1][rows] - offsets[:-1], counts) + np.arange(offsets[-1])
        per_row = ("source", "sample_id", "picture_id", "digest", "height", "width", "bucket", "latent")
        return Frame(
            item=self.item.take(pa.array(rows)),
            captions=offsets,
            text=self.text[own],
            weight=self.weight[own],
            **{name: getattr(self, name)[rows] for name in per_row},
        )


@dataclass
class Joined:
    """What was joined so far, and what was not.

    Attributes:
        sources: names; `Frame.source` counts into them.
        left_out: reason -> items.
        keep: reason -> what would keep them, where the reason itself does not say it.
        examples: reason -> a few of the items, where the reason is of single items.
    """

    sources: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    keep: dict[str, str] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)

    def leave(self, reason: str, count: int, keep: str | None = None) -> None:
        if count:
            self.left_out[reason] += int(count)
            if keep is not None:
                self.keep[reason] = keep

    def leave_kinds(self, what: str, rejects: Iterable[tuple[str, str]], keep: Callable[[str], str]) -> None:
        """Leave out (item, reason) pairs, by kind of reason. keep: what would keep those of a kind."""
        kinds = Kinds.of(rejects)
        for kind, count in kinds.counts.items():
            self.leave(f"{what}: {kind}", count, keep(kind))
            known = self.examples.setdefault(f"{what}: {kind}", [])
            known += kinds.examples[kind][: EXAMPLES - len(known)]

    def frame(self) -> Frame:
        """Everything that was joined, in one piece."""
        frames = self.frames
        if len(frames) == 1:
            return frames[0]
        values: dict[str, Any] = {}
        for column in fields(Frame):
            parts = [getattr(frame, column.name) for frame in frames]
            if column.name == "item":
                values["item"] = pa.concat_arrays(parts) if parts else pa.array([], pa.large_string())
            elif column.name != "captions":
                values[column.name] = np.concatenate(parts) if parts else np.empty(0, _EMPTY.get(column.name, np.int64))
        counts = [np.diff(frame.captions) for frame in frames]
        values["captions"] = np.concatenate([[0], np.cumsum(np.concatenate(counts) if counts else [])]).astype(np.int64)
        frame = Frame(**values)
        self.frames = [frame]
        return frame


_EMPTY = {"sample_id": np.uint64, "picture_id": np.uint64, "digest": "S16", "weight": np.float32}


def usable(joined: Joined, scan: pa.Table) -> pa.Table:
    """The items that the scan did not reject; the others are counted."""
    rejects = scan.column("reject")
    out = scan.filter(pc.is_valid(rejects))

    def keep(kind: str) -> str:
        return f"change that setting and {ENCODE}" if "data." in kind else f"mend the file and {ENCODE}"

    pairs = zip(out.column("item").to_pylist(), out.column("reject").to_pylist(), strict=True)
    joined.leave_kinds("rejected by the scan", pairs, keep)
    return scan.filter(pc.is_null(rejects))


def unjudged(scan: pa.Table) -> pa.Table:
    """The scan without its rejects by policy (those have a width): they were judged at one resolution."""
    judged = pc.and_(pc.is_valid(scan.column("width")), pc.is_valid(scan.column("reject")))
    reject = pc.if_else(judged, pa.scalar(None, pa.string()), scan.column("reject"))
    return scan.set_column(scan.schema.get_field_index("reject"), "reject", reject)


def join(
    joined: Joined,
    source: str,
    scan: pa.Table,
    table: list[tuple[int, int]],
    latent: layout.LatentRecipe,
    text: layout.TextRecipe,
    latents: RecordIndex,
    texts: RecordIndex,
    *,
    first: int = 0,
    variant: str = "",
    policy: DataConfig | None = None,
) -> None:
    """Add the samples of one source.

    Args:
        scan: the source's scan table.
        table: the bucket table, (height, width) in pixels.
        latents, texts: indexes of the two recipes.
        first: number of the table's first bucket, where a snapshot has several tables.
        variant: name of the resolution if it is not that of the configuration; "" otherwise.
        policy: judge the items by its `min_side`, `max_upscale` and `max_crop_loss` at this table.
    """
    scan = usable(joined, scan)
    if policy is not None:
        scan = _allowed(joined, scan, table, policy, variant)
    height, width = (scan.column(c).to_numpy().astype(np.int64) for c in ("height", "width"))
    digests = fixed(scan.column("digest"))
    chosen = buckets.nearest_all(table, height, width)
    keys = latent_keys(latent, digests, table, chosen)
    at = latents.find(keys)
    failed = {r.key: r.reason for index in (latents, texts) for r in index.rejects}
    setting = f" --set data.resolution={variant}" if variant else ""
    missing = f"its latent{f' at {variant} px' if variant else ''} is not encoded yet ({ENCODE}{setting})"

    def leave(rows: np.ndarray, reasons: list[str | None], rejected: str, otherwise: str) -> None:
        pairs = zip(scan.column("item").take(pa.array(rows)).to_pylist(), reasons, strict=True)
        joined.leave_kinds(rejected, ((i, why) for i, why in pairs if why), lambda _: f"mend the files and {ENCODE}")
        joined.leave(otherwise, reasons.count(None))

    lost = np.flatnonzero(at < 0)
    leave(lost, [failed.get(key_bytes(key).hex()) for key in keys[lost]], "rejected while encoding", missing)
    found = at >= 0
    scan = scan.filter(pa.array(found))
    height, width, digests, chosen, at = height[found], width[found], digests[found], chosen[found], at[found]

    offsets, written, weight = _captions(scan)
    own = np.frombuffer(layout.text_keys(text.id, (captions.normalise(t, text.normalisation) for t in written)), "S16")
    rows = texts.find(own)
    usable_caption = (rows >= 0) & (weight > 0)
    counts = np.diff(offsets)
    per_row = np.add.reduceat(np.append(usable_caption, False), offsets[:-1]) if len(scan) else np.empty(0, np.int64)
    per_row = np.where(counts > 0, per_row, 0)
    said = per_row > 0
    lost = np.flatnonzero(~said)
    mine = ([key_bytes(key).hex() for key in own[offsets[row] : offsets[row + 1]]] for row in lost)
    reasons = [next((failed[key] for key in its if key in failed), None) for its in mine]
    leave(lost, reasons, "caption rejected while encoding", f"its caption is not encoded yet ({ENCODE})")
    joined.leave(
        "(caption only, the sample stays) one of several captions is not encoded",
        int((said & (per_row < counts)).sum()),
        ENCODE,
    )
    scan = scan.filter(pa.array(said))
    items = text_column(scan.column("item"))
    names = items.to_pylist()
    plain = np.frombuffer(layout.sample_ids(source, names), "<u8")
    if source not in joined.sources:
        joined.sources.append(source)
    joined.frames.append(
        Frame(
            source=np.full(len(names), joined.sources.index(source), np.int32),
            item=items,
            sample_id=np.frombuffer(layout.sample_ids(source, names, variant), "<u8") if variant else plain,
            picture_id=plain,
            digest=digests[said],
            height=height[said],
            width=width[said],
            bucket=chosen[said] + first,
            latent=at[said],
            captions=np.concatenate([[0], np.cumsum(per_row[said])]).astype(np.int64),
            text=rows[usable_caption],
            weight=weight[usable_caption],
        )
    )


def latent_keys(
    recipe: layout.LatentRecipe, digests: np.ndarray, table: Sequence[tuple[int, int]], chosen: np.ndarray
) -> np.ndarray:
    """Keys (S16) of pictures at the buckets chosen for them."""
    raw = digests.tobytes()
    whole = (raw[i : i + 16] for i in range(0, len(raw), 16))
    return np.frombuffer(layout.latent_keys(recipe.id, whole, table, chosen.tolist()), "S16")


def _captions(scan: pa.Table) -> tuple[np.ndarray, Iterator[str], np.ndarray]:
    """Offsets (n + 1,), texts and weights of a scan's captions."""
    column = scan.column("captions")
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    chunks = [pc.list_flatten(chunk) for chunk in column.chunks]  # in one piece texts could pass Arrow's 2 GiB
    texts = (text for chunk in chunks for text in chunk.field("text").to_pylist())
    weight = np.concatenate([np.empty(0, np.float32), *(chunk.field("weight").to_numpy() for chunk in chunks)])
    return np.concatenate([[0], np.cumsum(counts)]), texts, weight.astype(np.float32, copy=False)


def _allowed(
    joined: Joined, scan: pa.Table, table: list[tuple[int, int]], policy: DataConfig, variant: str
) -> pa.Table:
    """The items that the policy allows at this table; the others are counted by its reasons."""
    height, width = (scan.column(c).to_numpy().astype(np.int64) for c in ("height", "width"))
    shapes = np.array(table, np.int64)[buckets.nearest_all(table, height, width)]
    scale, loss = buckets.fits(height, width, shapes)
    odd = np.zeros(len(height), bool)
    if policy.min_side is not None:
        odd |= np.minimum(height, width) < policy.min_side
    if policy.max_upscale is not None:
        odd |= scale > policy.max_upscale
    if policy.max_crop_loss is not None:
        odd |= loss > policy.max_crop_loss
    refused = np.zeros(len(height), bool)
    for row in np.flatnonzero(odd):
        size = (int(shapes[row, 0]), int(shapes[row, 1]))
        reason = buckets.refusal(int(height[row]), int(width[row]), size, policy)
        if reason is not None:
            refused[row] = True
            joined.leave(f"at {variant or policy.resolution} px {reason}", 1, "change that setting")
    return scan.filter(pa.array(~refused))


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
    joined: Joined,
    table: list[tuple[int, int]],
    *,
    batch: int | Sequence[int],
    small: str,
    pad_text_multiple: int,
    latent: layout.LatentRecipe,
    text: layout.TextRecipe,
    latents: RecordIndex,
    texts: RecordIndex,
    sources: dict[str, Any],
    frame: Frame | None = None,
    weights: dict[str, Fraction] | None = None,
    before: np.ndarray | None = None,
    policies: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], pa.Table, pa.Table, list[BucketReport]]:
    """Turn joined rows into a snapshot's head and tables.

    Args:
        batch: the global batch, of all buckets or of each.
        small: `carry`, `drop` or `repeat`.
        sources: source -> digest of its scan's table.
        frame: the samples; default: everything that was joined.
        weights: visits per epoch by source, where they are not 1.
        before: (n,) place in an earlier snapshot, for the samples that stand before the others of their bucket.
        policies: what else to write down.

    Raises:
        UserError: nothing is left to train on; the message counts the reasons.
        CacheError: the null record is missing.
    """
    frame = joined.frame() if frame is None else frame
    batches = [batch] * len(table) if isinstance(batch, int) else list(batch)
    scale, loss = buckets.fits(frame.height, frame.width, np.array(table, np.int64).reshape(-1, 2)[frame.bucket])
    crops = np.bincount(frame.bucket, loss, len(table))
    held = np.bincount(frame.bucket, minlength=len(table))
    by_source = [(weights or {}).get(name, Fraction(1)) for name in joined.sources]
    classes = sorted(set(by_source), reverse=True)
    part = np.array([classes.index(weight) for weight in by_source], np.int64)[frame.source]
    parts = np.array([np.bincount(frame.bucket[part == k], minlength=len(table)) for k in range(len(classes))])
    parts = parts.reshape(len(classes), len(table))

    counts: list[dict[str, Any]] = []
    report: list[BucketReport] = []
    out = np.zeros(len(table), bool)
    for bucket, (height, width) in enumerate(table):
        samples, size = int(held[bucket]), batches[bucket]
        if not samples:
            continue
        own = [(int(parts[k, bucket]), weight) for k, weight in enumerate(classes) if parts[k, bucket]]
        visits = sum((n * weight for n, weight in own), Fraction(0))
        crop = crops[bucket] / samples
        if small == "drop" and visits < size:
            joined.leave(
                f"bucket {height}x{width} has fewer samples than one batch of {size} "
                "(keep them: bucket.remainder=carry, or a smaller bucket.batch)",
                samples,
            )
            report.append(BucketReport(height, width, samples, size, 0, crop, "left out: smaller than one batch"))
            out[bucket] = True
            continue
        steps = {"carry": float(visits / size), "drop": visits // size, "repeat": -(-visits // size)}[small]
        note = "smaller than one batch: batches repeat samples of later epochs" if visits < size else ""
        if small == "repeat" and visits % size:
            note = f"{float(steps * size - visits):g} second visits an epoch fill the last batch"
        if small == "drop" and visits % size:
            note = f"{float(visits % size):g} samples, others each time, sit out an epoch (bucket.remainder=carry)"
        report.append(BucketReport(height, width, samples, size, steps, crop, note))
        entry: dict[str, Any] = {"height": height, "width": width, "samples": samples, "batch": size}
        if any(weight != 1 for _, weight in own):
            entry["parts"] = [{"samples": n, "weight": [w.numerator, w.denominator]} for n, w in own]
        counts.append(entry)
    if out.any():
        kept = ~out[frame.bucket]
        frame, part = frame.take(kept), part[kept]
        before = None if before is None else before[kept]
    if len(np.unique(frame.sample_id)) < len(frame):
        raise UserError(
            f"{len(frame) - len(np.unique(frame.sample_id))} samples share a 64-bit sample id with another",
            fix="rename their files",
        )
    if not len(frame):
        left = joined.left_out
        reasons = "; ".join(f"{count} items: {reason}" for reason, count in left.most_common()) or "the scan is empty"
        raise UserError("nothing is left to train on", found=reasons, fix="mend the reason that counts most")
    null_at = int(texts.find(as_keys([layout.null_key(text.id)]))[0])
    if null_at < 0:
        raise CacheError("the text store has no null record", fix="sana-pipe encode (it makes it first)")
    own_columns = texts.columns
    null = {
        "shard": texts.shards[int(own_columns["shard"][null_at])],
        "offset": int(own_columns["offset"][null_at]),
        "rows": int(own_columns["rows"][null_at]),
        "valid": int(own_columns["valid"][null_at]),
        "key": key_bytes(own_columns["key"][null_at]).hex(),
        "checksum": key_bytes(own_columns["checksum"][null_at]).hex(),
    }
    if text.storage != PLAIN:
        null["length"] = int(own_columns["length"][null_at])
    # Shards are numbered as they are first met in the order of joining.
    latent_shard, latent_used = _renumbered(latents.columns["shard"][frame.latent])
    text_shard, text_used = _renumbered(own_columns["shard"][frame.text])
    if int(own_columns["shard"][null_at]) not in text_used:
        text_used.append(int(own_columns["shard"][null_at]))

    rank = np.zeros(len(frame), np.int64) if before is None else before
    order = np.lexsort((frame.sample_id, rank, part, frame.bucket))
    frame = replace(
        frame,
        latent=np.stack([frame.latent, latent_shard.astype(np.int64)], 1),
        text=np.stack([frame.text, text_shard.astype(np.int64)], 1),
    ).take(order)
    head = {
        "recipes": {"latent": latent.values(), "text": text.values()},
        "policies": {"small": small, "pad_text_multiple": pad_text_multiple, **(policies or {})},
        "buckets": counts,
        "shards": {
            kind: [{"name": index.shards[n], "bytes": index.bytes[n]} for n in used]
            for kind, index, used in (("latent", latents, latent_used), ("text", texts, text_used))
        },
        "null": null,
        "counts": {"samples": len(frame)},
        "left_out": dict(sorted(joined.left_out.items())),
        "sources": sources,
    }
    pieces = [
        _tables(
            frame.take(np.arange(start, min(start + CHUNK_ROWS, len(frame)))),
            joined.sources,
            latent,
            text,
            latents,
            texts,
        )
        for start in range(0, len(frame), CHUNK_ROWS)
    ]
    samples, names = (pa.concat_tables(own) for own in zip(*pieces, strict=True))
    return head, samples, names, report


def _renumbered(shards: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Numbers by first appearance, and what they stand for."""
    used, first, codes = np.unique(shards, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty(len(used), np.uint32)
    number[order] = np.arange(len(used), dtype=np.uint32)
    return number[codes], used[order].tolist()


def _tables(
    frame: Frame,
    sources: list[str],
    latent: layout.LatentRecipe,
    text: layout.TextRecipe,
    latents: RecordIndex,
    texts: RecordIndex,
) -> tuple[pa.Table, pa.Table]:
    """The two tables of a snapshot, rows in the frame's order; `latent` and `text` have (row, shard's number).

    Of one chunk at a time: the lists of many would count more captions than Arrow's lists can.
    """
    schema = samples_schema(latent, text)
    offsets = pa.array(frame.captions.astype(np.int32))

    def lists(columns: dict[str, Any], of: pa.StructType) -> pa.Array:
        return pa.ListArray.from_arrays(
            offsets, pa.StructArray.from_arrays([columns[f.name] for f in of], fields=list(of))
        )

    def of(index: RecordIndex, at: np.ndarray, /, **renamed: str) -> dict[str, Any]:
        names = {name: name for name in ("offset", "key", "checksum", "length")} | renamed
        found = {}
        for ours, theirs in names.items():
            values = index.columns[theirs][at]
            found[ours] = _binary(values) if values.dtype.kind == "S" else pa.array(values)
        return found

    one = of(latents, frame.latent[:, 0])
    said = of(texts, frame.text[:, 0], rows="valid")
    caption = schema.field("captions").type.value_type
    columns: dict[str, Any] = {
        **one,
        "sample_id": pa.array(frame.sample_id),
        "shard": pa.array(frame.latent[:, 1].astype(np.uint32)),
        "captions": lists(
            {**said, "shard": pa.array(frame.text[:, 1].astype(np.uint32)), "weight": pa.array(frame.weight)}, caption
        ),
    }
    samples = pa.table([columns[name] for name in schema.names], schema=schema)
    written = of(texts, frame.text[:, 0], offset="caption_offset", length="caption_length", checksum="caption_checksum")
    names = pa.table(
        [
            columns["sample_id"],
            pa.DictionaryArray.from_arrays(pa.array(frame.source), sources).cast(pa.string()),
            frame.item.cast(pa.string()),
            lists(written, WRITTEN),
        ],
        schema=NAMES,
    )
    return samples, names


def _binary(keys: np.ndarray) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(keys), [None, pa.py_buffer(keys.tobytes())])
