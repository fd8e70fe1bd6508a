"""Plan: missing records, cut into units whose members and batches never change.

`plan_images` and `plan_captions` append at most one plan for work that no earlier plan assigned and no shard holds, and
return every plan.
Why: any number of processes may plan at the same time. A plan's number is taken by put-if-absent; the loser adopts the
winner's plan and looks again. The plan fixes the records and batches of a unit, so its bytes do not depend on the
worker.
Price: planning reads the keys of all earlier plans, and needs some 200 bytes of memory per item.

A record counts as not assigned if it failed for a temporary cause
(its file was gone or had changed), or if its shard is missing or cut. Records of later plans win.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache import layout
from pipeline.cache.arrow import take_rows
from pipeline.cache.index import committed
from pipeline.cache.key_columns import as_keys, binary, fixed
from pipeline.cache.root import Cache, Unit, WorkPlan
from pipeline.config import EncodeConfig
from pipeline.errors import UserError
from pipeline.images import buckets
from pipeline.snapshots.join import latent_keys
from pipeline.sources import caption_rules
from pipeline.sources.filenames import error_text

IMAGES = pa.schema(
    [
        ("key", pa.binary(16)),
        ("source", pa.string()),
        ("item", pa.string()),
        ("digest", pa.binary(16)),
        ("height", pa.int32()),
        ("width", pa.int32()),
    ]
)
CAPTIONS = pa.schema([("key", pa.binary(16)), ("caption", pa.string())])
"""`caption` is the caption as written; null marks the null record."""

CHUNK = 1 << 20
"""Rows per chunk of the column that repeats a source's name."""


def image_work(
    scan: pa.Table,
    source: str,
    recipe: layout.LatentRecipe,
    table: list[tuple[int, int]],
    targets: dict[str, tuple[int, int]] | None = None,
) -> pa.Table:
    """Rows of `IMAGES` for the usable items of a scan, in listing order; equal pictures once.

    Args:
        targets: item -> (height, width) in pixels of a further record of it (see `read_targets`).

    Raises:
        UserError: `targets` has an unknown or rejected item.
    """
    usable = scan.filter(pc.is_null(scan.column("reject")))
    sizes = list(dict.fromkeys([*table, *(targets or {}).values()]))
    height, width = (usable.column(c).to_numpy().astype(np.int64) for c in ("height", "width"))
    rows, which = np.arange(len(usable)), buckets.nearest_all(table, height, width)
    if targets:
        further_rows, further = _further(usable, source, targets, sizes)
        rows, which = np.concatenate([rows, further_rows]), np.concatenate([which, further])
        order = np.argsort(rows, kind="stable")
        rows, which = rows[order], which[order]
    keys = latent_keys(recipe, fixed(usable.column("digest"))[rows], sizes, which)
    first = np.sort(np.unique(keys, return_index=True)[1])
    sides = np.array(sizes, np.int32).reshape(-1, 2)[which[first]]
    items = take_rows(usable.select(["item", "digest"]), rows[first])
    counts = [min(CHUNK, len(first) - start) for start in range(0, len(first), CHUNK)]
    columns = [
        binary(keys[first]),
        pa.chunked_array([pa.repeat(source, count) for count in counts], pa.string()),
        items.column("item"),
        items.column("digest"),
        pa.array(sides[:, 0]),
        pa.array(sides[:, 1]),
    ]
    return pa.table(columns, schema=IMAGES)


def _further(
    usable: pa.Table, source: str, targets: dict[str, tuple[int, int]], sizes: list[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the usable items that `targets` lists, and which of the sizes each gets: two int64 arrays (n,)."""
    at = pc.index_in(usable.column("item"), value_set=pa.array(list(targets), pa.string())).to_numpy()
    rows = np.flatnonzero(~np.isnan(at.astype(np.float64)))
    if len(rows) < len(targets):
        unknown = set(targets) - set(usable.column("item").take(pa.array(rows)).to_pylist())
        raise UserError(
            f"the list of --reassign has {len(unknown)} items that source {source!r} has not, or that were rejected",
            found=", ".join(sorted(unknown)[:3]),
            fix="run sana-pipe bucket again; each source has a separate list",
        )
    number = {size: i for i, size in enumerate(sizes)}
    return rows, np.array([number[size] for size in targets.values()])[at[rows].astype(np.int64)]


def read_targets(path: str, compression: int) -> dict[str, tuple[int, int]]:
    """A list of pictures to encode for other buckets: CSV with the columns item, height and width (pixels).

    Raises:
        UserError: the file is missing, is not such a list, or has sides that are no multiples of `compression`.
    """
    targets = {}
    try:
        with fsspec.open(path, "rt", newline="", encoding="utf-8") as sheet:
            for row in csv.DictReader(sheet):
                targets[row["item"]] = (int(row["height"]), int(row["width"]))
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise UserError(
            f"{path}: is not a list of pictures for other buckets",
            expected="CSV with item,height,width",
            found=str(error),
        ) from None
    except Exception as error:  # drivers raise what they like
        raise UserError(f"{path}: cannot be read: {error_text(error)}", fix="sana-pipe bucket writes it") from None
    for item, sides in targets.items():
        if any(side <= 0 or side % compression for side in sides):
            raise UserError(
                f"{path}: {item!r} has a side that the VAE's compression {compression} does not divide",
                found=f"{sides[0]}x{sides[1]}",
            )
    return targets


def caption_work(scan: pa.Table, recipe: layout.TextRecipe) -> pa.Table:
    """Rows of `CAPTIONS` for the null record and the captions of a scan's usable items; equal captions once."""
    usable = scan.filter(pc.is_null(scan.column("reject")))
    pieces = [
        pc.list_flatten(chunk).field("text").cast(pa.large_string()) for chunk in usable.column("captions").chunks
    ]
    written = pa.chunked_array(pieces, pa.large_string()).unique()
    normalised = (caption_rules.normalise(text.as_py(), recipe.normalisation) for text in written)
    keys = np.frombuffer(layout.text_keys(recipe.id, normalised), "S16")
    first = np.unique(keys, return_index=True)[1]
    null = pa.table([binary(as_keys([layout.null_key(recipe.id)])), pa.nulls(1, pa.string())], schema=CAPTIONS)
    rest = take_rows(pa.table({"key": binary(keys), "caption": written}), first, CAPTIONS)
    return pa.concat_tables([null, rest])


def plan_images(cache: Cache, recipe: layout.LatentRecipe, work: pa.Table, config: EncodeConfig) -> list[WorkPlan]:
    """Adopt the existing image plans, and append a plan for the rows that they do not cover.

    Units hold one target resolution each, drawn from windows of `config.window` items of the listing.
    """

    def cut(missing: pa.Table) -> Iterator[np.ndarray]:
        height, width = (missing.column(c).to_numpy().astype(np.int64) for c in ("height", "width"))
        target = height << 32 | width
        for start in range(0, len(missing), config.window):
            window = target[start : start + config.window]
            for size in np.unique(window):
                rows = start + np.flatnonzero(window == size)
                h, w = int(size) >> 32, int(size) & 0xFFFFFFFF
                record = 2 * recipe.channels * (h // recipe.compression) * (w // recipe.compression)
                most = max(1, min(config.unit_images, (config.unit_mib << 20) // record))
                yield from (rows[first : first + most] for first in range(0, len(rows), most))

    return _plan(cache, recipe, work, config.image_batch, cut)


def plan_captions(cache: Cache, recipe: layout.TextRecipe, work: pa.Table, config: EncodeConfig) -> list[WorkPlan]:
    """Adopt the existing text plans, and append a plan for the rows that they do not cover.

    Units are ranges of the sorted keys. A unit's rows are sorted by caption length, so that a batch holds captions of
    similar length; the encoder cuts it into forward passes by tokens.
    """

    def cut(missing: pa.Table) -> Iterator[np.ndarray]:
        length = pc.fill_null(pc.binary_length(missing.column("caption")), -1).to_numpy()
        if (length < 0).any():
            yield np.flatnonzero(length < 0)
        rest = np.flatnonzero(length >= 0)
        for first in range(0, len(rest), config.unit_captions):
            rows = rest[first : first + config.unit_captions]
            yield rows[np.argsort(length[rows], kind="stable")]

    return _plan(cache, recipe, work, config.text_batch, cut)


def _plan(
    cache: Cache, recipe: layout.Recipe, work: pa.Table, batch: int, cut: Callable[[pa.Table], Iterator[np.ndarray]]
) -> list[WorkPlan]:
    while True:
        plans = cache.plans(recipe.name)
        missing = work.filter(pa.array(_missing(cache, recipe, plans, work)))
        if not len(missing):
            return plans
        keys = fixed(missing.column("key"))
        units: list[Unit] = []
        members: list[np.ndarray] = []
        start = 0
        for rows in cut(missing):
            units.append(Unit.of(recipe.name, len(plans), keys[rows], start, batch))
            members.append(rows)
            start += len(rows)
        cache.add_plan(recipe.name, len(plans), units, take_rows(missing, np.concatenate(members)))


def _missing(cache: Cache, recipe: layout.Recipe, plans: list[WorkPlan], work: pa.Table) -> np.ndarray:
    """Which rows a new plan must list: not assigned, failed for a temporary cause, or lost with their shard.

    A key that failed or was lost waits until the last plan that lists it is finished.
    """
    wanted, index = work.column("key"), cache.index(recipe.name)
    assigned = [cache.table(plan.table).column("key") for plan in plans]
    planned = np.zeros(len(work), bool)
    for keys in assigned:
        planned |= pc.is_in(wanted, value_set=keys.combine_chunks()).to_numpy()
    again = as_keys([bytes.fromhex(r.key) for r in index.rejects if r.retry])
    if not len(again) and not index.lost.any():
        return ~planned
    rows = index.find(fixed(wanted))
    absent = rows < 0
    lost = np.zeros(len(work), bool)
    lost[~absent] = index.lost[index.columns["shard"][rows[~absent]]]
    retry = absent & pc.is_in(wanted, value_set=binary(again)).to_numpy()
    failed = np.flatnonzero(planned & (retry | lost))
    last = np.full(len(failed), -1)
    for plan, keys in zip(plans, assigned, strict=True):
        last[pc.is_in(wanted.take(pa.array(failed)), value_set=keys.combine_chunks()).to_numpy()] = plan.number
    done = [plan.number for plan in plans if _finished(cache, plan)]
    missing = ~planned
    missing[failed[np.isin(last, done)]] = True
    return missing


def count_missing(cache: Cache, recipe: layout.Recipe, work: pa.Table) -> tuple[int, int]:
    """How many records of a work list are missing, and how many exist. Permanent failures are neither."""
    index = cache.index(recipe.name)
    present = index.present(fixed(work.column("key")))
    failed = has_key(work, (r.key for r in index.rejects if not r.retry)).to_numpy()
    return int((~present & ~failed).sum()), int(present.sum())


def retryable_from_another_item(cache: Cache, recipe: layout.Recipe, work: pa.Table) -> pa.Table:
    """Rows of an image work list that failed for a temporary cause through another, equal item.

    Equal pictures are encoded once, from the item that the plan names. If that item has changed since, the picture can
    be encoded from the item of this row.
    """
    index = cache.index(recipe.name)
    failed = {reject.key: reject.item for reject in index.rejects if reject.retry}  # of several, the latest
    rows = work.filter(pc.and_(has_key(work, failed), pa.array(~index.present(fixed(work.column("key"))))))
    pairs = zip(rows.column("key").to_pylist(), rows.column("item").to_pylist(), strict=True)
    return rows.filter(pa.array([failed[key.hex()] != item for key, item in pairs], pa.bool_()))


def has_key(work: pa.Table, keys: Iterable[str]) -> pa.ChunkedArray:
    """Which rows of a work list have one of these keys (hex)."""
    return pc.is_in(work.column("key"), value_set=binary(as_keys([bytes.fromhex(key) for key in keys])))


def _finished(cache: Cache, plan: WorkPlan) -> bool:
    return committed(cache.files, plan.recipe, plan.number) == {unit.unit for unit in plan.units}
