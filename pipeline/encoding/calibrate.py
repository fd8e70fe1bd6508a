"""Calibration: the channel scales of an int8 recipe, measured once before its first record is written.

Up to `BATCHES` batches are encoded, spread evenly over the first unit that gives records. The rms of each channel over
them is published for all workers (`scales/<recipe>.json`, put-if-absent).
Why: every record of a recipe must be divided by the same scales. The plan decides which batches are measured, so
workers that race measure the same; the first publication counts.
Price: each worker that starts before the publication encodes these batches once more than needed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

import pyarrow as pa

from pipeline.cache import codec, layout
from pipeline.cache.root import Cache, Unit, WorkPlan
from pipeline.encoding.unit_records import Made
from pipeline.errors import UserError

BATCHES = 8

Encode = Callable[[Unit, pa.Table, Container[bytes]], Iterable[Made] | None]
"""Encodes the batches of a unit (its rows given) that hold one of the keys; None if it cannot be encoded here."""


def ensure(cache: Cache, recipe: layout.Recipe, plans: list[WorkPlan], encode: Encode) -> codec.Scale | None:
    """The channel scales of an int8 recipe, measured now if they are not published yet; None for other storages.

    Raises:
        UserError: no unit gave a record.
    """
    if codec.storage_of(recipe) != codec.INT8:
        return None
    published = codec.find_scale(cache.files, recipe.name)
    if published is not None:
        return published
    for plan in plans:
        for unit in plan.units:
            rows = cache.unit_rows(plan, unit)
            if "caption" in rows.column_names and rows.column("caption").null_count:
                continue  # the null record is not like the others
            made = encode(unit, rows, set(_chosen(unit, rows)))
            if made is None:
                continue
            arrays = [record.array for records, _ in made for record in records]
            if arrays:
                scale = codec.measure_scale(arrays, recipe.kind)
                return codec.publish_scale(cache.files, recipe.name, scale, len(arrays))
    raise UserError(
        f"int8 storage of {recipe.kind} records needs scales per channel, and no record could be made to measure them",
        fix="look at the rejects, or set encode.storage to bf16 or bf16-zstd",
    )


def _chosen(unit: Unit, rows: pa.Table) -> list[bytes]:
    """The first key of each batch to measure."""
    batches = -(-unit.count // unit.batch)
    take = min(BATCHES, batches)
    picked = [i * batches // take * unit.batch for i in range(take)]
    return rows.column("key").take(picked).to_pylist()
