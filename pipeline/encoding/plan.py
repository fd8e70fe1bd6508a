"""Plan: which records are still to be made, cut into units whose membership and batches never change.

What: `plan_images` and `plan_captions` append at most one plan, listing work that no earlier plan assigned and no
shard holds, and return every plan.
Why: any number of processes may plan at once: a plan's number is taken by put-if-absent, the loser adopts the winner's
plan and looks again. A unit's records and batches are fixed here, so bytes do not depend on who encodes it.
Price: planning reads the keys of all earlier plans.

A unit's id is the digest of its recipe and keys. A record that failed for a cause that may pass (its file was gone or
had changed) counts as not assigned.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute

from pipeline.cache import layout
from pipeline.cache.index import committed
from pipeline.cache.store import Cache, Plan, Unit
from pipeline.config import EncodeConfig
from pipeline.data import buckets, captions
from pipeline.data.names import said
from pipeline.errors import UserError

IMAGES = pa.schema(
    [("key", pa.binary(16)), ("source", pa.string()), ("item", pa.string()), ("digest", pa.binary(16)),
     ("height", pa.int32()), ("width", pa.int32())]
)  # fmt: skip
CAPTIONS = pa.schema([("key", pa.binary(16)), ("caption", pa.string())])
"""`caption` is the caption as written; null marks the null record."""


def image_work(
    scan: pa.Table, source: str, recipe: layout.LatentRecipe, table: list[tuple[int, int]],
    targets: dict[str, tuple[int, int]] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of `IMAGES` for the usable items of a scan, in listing order, equal pictures once.

    Args:
        targets: item -> (height, width) in pixels that it is to be encoded at, too (see `read_targets`).

    Raises:
        UserError: `targets` has an item that is not there.
    """
    work: dict[bytes, dict[str, Any]] = {}
    usable = scan.filter(pa.compute.is_null(scan.column("reject")))
    extra = dict(targets or {})
    for item, digest, width, height in zip(
        *(usable.column(c).to_pylist() for c in ("item", "digest", "width", "height")), strict=True
    ):
        wanted = [buckets.nearest(table, height, width)]
        if item in extra:
            wanted.append(extra.pop(item))
        for target in wanted:
            key = layout.latent_key(recipe.id, digest, *target)
            if key not in work:
                work[key] = {
                    "key": key, "source": source, "item": item, "digest": digest, "height": target[0],
                    "width": target[1],
                }  # fmt: skip
    if extra:
        raise UserError(
            f"the list of --reassign has {len(extra)} items that source {source!r} has not, or that were rejected",
            found=", ".join(sorted(extra)[:3]), fix="run sana-pipe bucket again; each source has a list of its own",
        )  # fmt: skip
    return list(work.values())


def read_targets(path: str, compression: int) -> dict[str, tuple[int, int]]:
    """A list of pictures to encode for other buckets: CSV with the columns item, height and width (pixels).

    Raises:
        UserError: it is not there, not such a list, or has sides that the VAE's compression does not divide.
    """
    found = {}
    try:
        with fsspec.open(path, "rt", newline="", encoding="utf-8") as sheet:
            for row in csv.DictReader(sheet):
                found[row["item"]] = (int(row["height"]), int(row["width"]))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {said(error)}", fix="sana-pipe bucket writes it") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: is not a list of pictures for other buckets",
            expected="CSV with item,height,width",
            found=str(error),
        ) from None
    for item, sides in found.items():
        if any(side <= 0 or side % compression for side in sides):
            raise UserError(
                f"{path}: {item!r} has a side that the VAE's compression {compression} does not divide",
                found=f"{sides[0]}x{sides[1]}",
            )
    return found


def caption_work(scan: pa.Table, recipe: layout.TextRecipe) -> list[dict[str, Any]]:
    """Rows of `CAPTIONS` for the captions of a scan's usable items, equal captions once, and the null record."""
    work: dict[bytes, dict[str, Any]] = {}
    usable = scan.filter(pa.compute.is_null(scan.column("reject")))
    for listed in usable.column("captions").to_pylist():
        for caption in listed:
            key = layout.text_key(recipe.id, captions.normalise(caption["text"], recipe.normalisation))
            work.setdefault(key, {"key": key, "caption": caption["text"]})
    null = layout.null_key(recipe.id)
    return [{"key": null, "caption": None}, *(work[key] for key in sorted(work))]


def plan_images(
    cache: Cache, recipe: layout.LatentRecipe, work: list[dict[str, Any]], config: EncodeConfig
) -> list[Plan]:
    """Adopt the image plans there are and append one for what they do not cover.

    Units hold one target resolution each, drawn from windows of `config.window` items of the listing.
    """

    def cut(missing: list[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
        for start in range(0, len(missing), config.window):
            targets: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
            for row in missing[start : start + config.window]:
                targets[row["height"], row["width"]].append(row)
            for (height, width), rows in sorted(targets.items()):
                record = 2 * recipe.channels * (height // recipe.compression) * (width // recipe.compression)
                most = max(1, min(config.unit_images, (config.unit_mib << 20) // record))
                for first in range(0, len(rows), most):
                    yield rows[first : first + most]

    return _plan(cache, recipe, work, IMAGES, config.image_batch, cut)


def plan_captions(
    cache: Cache, recipe: layout.TextRecipe, work: list[dict[str, Any]], config: EncodeConfig
) -> list[Plan]:
    """Adopt the text plans there are and append one for what they do not cover.

    Units are ranges of the sorted keys; inside a unit rows stand by caption length, so that a batch of the plan holds
    captions of similar length, which the encoder cuts into forward passes by their tokens.
    """

    def cut(missing: list[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
        null = [row for row in missing if row["caption"] is None]
        if null:
            yield null
        rest = [row for row in missing if row["caption"] is not None]
        for first in range(0, len(rest), config.unit_captions):
            yield sorted(
                rest[first : first + config.unit_captions], key=lambda r: (len(r["caption"].encode()), r["key"])
            )

    return _plan(cache, recipe, work, CAPTIONS, config.text_batch, cut)


def _plan(
    cache: Cache, recipe: layout.Recipe, work: list[dict[str, Any]], schema: pa.Schema, batch: int, cut: Any
) -> list[Plan]:
    while True:
        plans = cache.plans(recipe.name)
        assigned = {key for plan in plans for key in cache.table(plan.table).column("key").to_pylist()}
        index = cache.index(recipe.name)
        again = {bytes.fromhex(r.key) for r in index.rejects if r.retry}
        missing = [
            row for row in work if row["key"] not in assigned or (row["key"] in again and not index.has(row["key"]))
        ]
        # A retried key that a later plan already took up waits for that plan's unit.
        if again:
            last = _last_plans(cache, plans)
            done = {plan.number for plan in plans if _finished(cache, plan)}
            missing = [row for row in missing if row["key"] not in assigned or last[row["key"]] in done]
        if not missing:
            return plans
        units: list[Unit] = []
        rows: list[dict[str, Any]] = []
        for members in cut(missing):
            unit = layout.digest("unit", recipe.name, str(len(plans)), *(row["key"] for row in members)).hex()
            units.append(Unit(unit, len(rows), len(members), batch))
            rows.extend(members)
        cache.add_plan(recipe.name, len(plans), units, pa.Table.from_pylist(rows, schema=schema))


def _last_plans(cache: Cache, plans: list[Plan]) -> dict[bytes, int]:
    return {key: plan.number for plan in plans for key in cache.table(plan.table).column("key").to_pylist()}


def _finished(cache: Cache, plan: Plan) -> bool:
    return committed(cache.files, plan.recipe, plan.number) == {unit.unit for unit in plan.units}
