"""The records of a unit: encode its batches, write them into a shard, commit it.

`image_records` and `caption_records` encode the batches of a unit, `write_unit` writes and commits them.

A record that cannot be made (undecodable, changed since the scan, not finite) becomes a reject with its reason. Only
its batch is smaller then: the other batches keep their composition.
"""

from __future__ import annotations

import platform
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch

from sana_pipe.base.errors import ResourceError, is_out_of_memory
from sana_pipe.data.cache import codec, index, layout, shard
from sana_pipe.data.cache.cache import Cache, Unit, WorkList
from sana_pipe.data.cache.encodings import CaptionEncoding, Encoding
from sana_pipe.data.cache.index import Commit, RecordReject
from sana_pipe.data.encoders.frozen import NonFiniteOutputError
from sana_pipe.data.encoding.scan_rows import mapped
from sana_pipe.data.images import decoding
from sana_pipe.data.signals import CaptionEncoder, PictureEncoder, PictureSignal
from sana_pipe.data.sources import caption_rules as captions
from sana_pipe.data.sources.source import Place, Source

DECODE_AHEAD = 2
WRITE_BEHIND = 2
_NOT_FINITE = "the encoder's output is not finite"


@dataclass
class Limits:
    """The limits that earlier batches have shown of the memory.

    Attributes:
        most: members of a batch that fit, by the shape of a member, as far as one has failed.
        halved: batches that were halved since this was last set to 0.
    """

    most: dict[tuple[int, ...], int] = field(default_factory=dict)
    halved: int = 0


@dataclass(frozen=True)
class EncodedRecord:
    """One encoded record. `caption` is None for records of pictures; `valid` None means every row."""

    key: bytes
    array: np.ndarray
    caption: str | None = None
    valid: int | None = None


Made = tuple[list[EncodedRecord], list[RecordReject]]
"""The records and rejects of a batch."""


def image_records(
    encoding: PictureSignal,
    unit: Unit,
    rows: pa.Table,
    sources: dict[str, Source],
    encoder: PictureEncoder,
    *,
    following: Sequence[FollowingUnit] = (),
    max_pixels: int,
    workers: int,
    only: Container[bytes] | None = None,
    limits: Limits | None = None,
) -> Iterator[Made]:
    """Encode an image unit, batch by batch.

    Args:
        rows: the unit's rows of the plan's table.
        sources: source name -> source; every source of the unit must be here.
        following: are given the pixels of each batch, too.
        only: encode only the batches that hold one of these keys, in their planned composition.
        limits: those of earlier units; updated.
    """
    limits = limits or Limits()
    batches = _batches(unit, rows, only)
    places: dict[str, list[Place]] = defaultdict(list)
    for row in (row for batch in batches for row in batch if row["item"] is not None):
        places[row["source"]].append(_place(row))

    def decode(row: dict[str, Any]) -> np.ndarray | RecordReject:
        key, item, size = row["key"].hex(), row["item"], (row["height"], row["width"])
        if item is None:
            return np.full((*size, 3), encoding.blank, np.uint8)
        try:
            data = read[row["source"]](_place(row))
        except OSError as error:
            return RecordReject(key, item, f"unreadable: {error}", retry=True)
        if layout.digest(data) != row["digest"]:
            return RecordReject(key, item, "changed since it was scanned", retry=True)
        try:
            return encoding.pixels(data, size, max_pixels)
        except decoding.ImageReject as reject:
            return RecordReject(key, item, str(reject))

    with ExitStack() as stack:
        read = {name: stack.enter_context(sources[name].reading(places[name])) for name in places}
        pool = stack.enter_context(ThreadPoolExecutor(max(1, workers)))
        stream = mapped(pool, decode, chain.from_iterable(batches), DECODE_AHEAD * unit.batch)
        for batch in batches:
            decoded = list(islice(stream, len(batch)))
            rejects = [d for d in decoded if isinstance(d, RecordReject)]
            good = [(row, d) for row, d in zip(batch, decoded, strict=True) if not isinstance(d, RecordReject)]
            for each in following:
                each.encode(good, rejects)
            yield _of_pictures(good, rejects, encoder, limits)


def _of_pictures(
    good: list[tuple[dict[str, Any], np.ndarray]],
    rejects: list[RecordReject],
    encoder: PictureEncoder,
    limits: Limits,
) -> Made:
    """The records of a batch. good: rows and their pixels; rejects: of the others."""
    records, pictures = [], [picture for _, picture in good]
    made = encode_finite(pictures, lambda some: encoder.encode(np.stack(some)), limits) if good else []
    for (row, _), values in zip(good, made, strict=True):
        if values is not None:
            records.append(EncodedRecord(row["key"], values))
        else:
            rejects.append(RecordReject(row["key"].hex(), row["item"], _NOT_FINITE))
    return records, rejects


class UnitWriter:
    """Writes the batches of a unit into its shard and commits it. A thread does so, at most `WRITE_BEHIND` batches
    behind. Leaving the `with` block without `commit` discards the shard."""

    def __init__(
        self, cache: Cache, encoding: Encoding, plan: WorkList, unit: Unit, measured: codec.Measured | None = None
    ):
        self.cache, self.encoding, self.plan, self.unit = cache, encoding, plan, unit
        self._rejects: list[RecordReject] = []
        self._waiting: deque[Future[None]] = deque()
        self._stack = ExitStack()
        self._shard = self._stack.enter_context(shard.ShardWriter(cache.files, encoding, unit.unit, measured))
        self._thread = self._stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="writer"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def add(self, make: Callable[..., Made], *given: Any) -> None:
        """Write a batch. The thread makes it: `make(*given)`."""
        self._waiting.append(self._thread.submit(self._write, make, *given))
        if len(self._waiting) > WRITE_BEHIND:
            self._waiting.popleft().result()

    def _write(self, make: Callable[..., Made], *given: Any) -> None:
        records, rejects = make(*given)
        for record in records:
            self._shard.add(record.key, record.array, caption=record.caption, valid=record.valid)
        self._rejects += rejects

    def commit(self, made_by: dict[str, Any]) -> Commit:
        """Publish the shard, and the unit with its provenance."""
        for written in self._waiting:
            written.result()
        files, unit = self.cache.files, self.unit.unit
        if len(self._shard):
            commit = index.commit_of(files, unit, self._shard.finish(), self._rejects, made_by)
        else:
            commit = Commit(unit, None, 0, 0, None, tuple(self._rejects), made_by)
        index.publish_commit(files, self.encoding.name, self.plan.number, commit)
        return commit


class FollowingUnit(UnitWriter):
    """A unit of another kind of picture records, made from the pixels that are decoded for the unit that it goes with
    (see `encoding.plan.plan_following`), in a thread alongside that one's encoder.

    Args:
        rows: of its plan, for this unit; lead: those of the other unit.
    """

    def __init__(
        self,
        cache: Cache,
        encoding: Encoding,
        plan: WorkList,
        unit: Unit,
        rows: pa.Table,
        lead: pa.Table,
        encoder: PictureEncoder,
    ):
        super().__init__(cache, encoding, plan, unit)
        self._encoder = encoder
        self._rows = dict(zip(lead.column("key").to_pylist(), rows.to_pylist(), strict=True))

    def encode(self, good: list[tuple[dict[str, Any], np.ndarray]], rejects: list[RecordReject]) -> None:
        """Make the records of a batch of the other unit. Arguments as of `_of_pictures`."""
        ours = [(self._rows[row["key"]], picture) for row, picture in good]
        bad = [replace(each, key=self._rows[bytes.fromhex(each.key)]["key"].hex()) for each in rejects]
        self.add(_of_pictures, ours, bad, self._encoder, Limits())


def caption_records(
    encoding: CaptionEncoding,
    unit: Unit,
    rows: pa.Table,
    encoder: CaptionEncoder,
    *,
    only: Container[bytes] | None = None,
    limits: Limits | None = None,
) -> Iterator[Made]:
    """Encode a text unit, batch by batch. `only` as in `image_records`; `limits` counts halved batches only."""
    limits = limits or Limits()
    for batch in _batches(unit, rows, only):
        if batch[0]["caption"] is None:
            null, valid = encoder.null()
            yield [EncodedRecord(batch[0]["key"], null, "", valid)], []
            continue
        normalised = [captions.normalise(row["caption"], encoding.normalisation) for row in batch]
        records, rejects, of_batch = [], [], Limits()  # the next captions may be shorter
        arrays = encode_finite(normalised, encoder.encode, of_batch)
        limits.halved += of_batch.halved
        for row, array in zip(batch, arrays, strict=True):
            if array is not None:
                records.append(EncodedRecord(row["key"], array, row["caption"]))
            else:
                rejects.append(RecordReject(row["key"].hex(), row["caption"], _NOT_FINITE))
        yield records, rejects


def write_unit(
    cache: Cache,
    encoding: Encoding,
    plan: WorkList,
    unit: Unit,
    made: Iterable[Made],
    progress: Callable[[int, int], None],
    origin: dict[str, Any] | None = None,
    measured: codec.Measured | None = None,
    limits: Limits | None = None,
) -> Commit:
    """Write the records of a unit into its shard and commit it.

    Args:
        made: what `image_records` or `caption_records` yield.
        progress: called with (records made, records rejected) after each batch.
        origin: added to the unit's provenance.
        measured: sums what the encoding's storage saves and costs.
        limits: those with which `made` is encoded. Its number of halved batches goes into the provenance.
    """
    with UnitWriter(cache, encoding, plan, unit, measured) as writer:
        for batch in made:
            writer.add(lambda batch: batch, batch)
            progress(len(batch[0]), len(batch[1]))
        return writer.commit({**provenance(limits.halved if limits else 0), **(origin or {})})


def provenance(halved: int = 0) -> dict[str, Any]:
    """Hardware, library versions and halved batches of a unit, on which its bf16 bytes depend."""
    return {
        **({"halved_batches": halved} if halved else {}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "zstd": codec.ZSTD,
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu",
        "threads": torch.get_num_threads(),
        **decoding.versions(),
    }


def _place(row: dict[str, Any]) -> Place:
    """Return where the picture of a row of a plan is."""
    return Place(row["item"], row["part"], row["where"])


def _batches(unit: Unit, rows: pa.Table, only: Container[bytes] | None) -> list[list[dict[str, Any]]]:
    members = rows.to_pylist()
    batches = [members[i : i + unit.batch] for i in range(0, len(members), unit.batch)]
    return batches if only is None else [batch for batch in batches if any(row["key"] in only for row in batch)]


def encode_finite(inputs: list[Any], encode: Callable[[list[Any]], Any], limits: Limits) -> list[np.ndarray | None]:
    """Encode a batch. Members with NaN or infinity become None, and the others are encoded again without them.

    A batch that does not fit into memory is halved, down to single members, and so are all later ones of its size, at
    once. The unit's provenance counts the halvings (`halved_batches`), because bf16 bytes differ slightly between batch
    sizes.
    """
    shape = getattr(inputs[0], "shape", ())
    if len(inputs) <= limits.most.get(shape, len(inputs)):
        try:
            return list(encode(inputs))
        except NonFiniteOutputError as error:
            bad = set(error.rows)
            rest = [member for i, member in enumerate(inputs) if i not in bad]
            good = iter(encode_finite(rest, encode, limits) if rest else [])
            return [None if i in bad else next(good) for i in range(len(inputs))]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if len(inputs) == 1:
                raise ResourceError(
                    "the encoder runs out of memory with a single item",
                    found=str(error).strip().partition("\n")[0],
                    fix="use a device with more memory, or a smaller data.resolution",
                ) from None
        limits.most[shape] = len(inputs) - 1
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    limits.halved += 1
    middle = (len(inputs) + 1) // 2
    return encode_finite(inputs[:middle], encode, limits) + encode_finite(inputs[middle:], encode, limits)
