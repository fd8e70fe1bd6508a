"""Joint shards: the records of a sample's picture and captions, and the captions, side by side.

`JointWriter` writes a tar whose members carry the sample's id: `<id>.latent.npy` and so for each kind of picture
record, `<id>.text.npy`, `<id>.txt`, and `<id>.1.text.npy`, `<id>.1.txt` for a second caption. Its record table has the
samples' rows of the packed snapshot.

Records keep their payload, key and checksum, so readers verify them as in the shards that they were copied from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sana_pipe.data.cache import layout
from sana_pipe.data.cache.codec import PLAIN
from sana_pipe.data.cache.encodings import Encoding, caption_of, records_schema
from sana_pipe.data.cache.files import Files
from sana_pipe.data.cache.shard import TarWriter, npy_header, to_ipc
from sana_pipe.data.cache.snapshot_samples import NAMES, samples_schema

NULL = f"{layout.META}/null"


def joint_schema(encodings: Iterable[Encoding]) -> pa.Schema:
    """`samples_schema` plus `NAMES` (its `captions` column is renamed `written`). `shard` is 0: this shard."""
    schema = samples_schema(encodings)
    for name, column in (("source", "source"), ("item", "item"), ("written", "captions")):
        schema = schema.append(NAMES.field(column).with_name(name))
    return schema


@dataclass(frozen=True)
class Payload:
    """A verified payload, copied from a shard of its encoding. shape: of its values. weight: as in `RecordPlace`."""

    key: bytes
    checksum: bytes
    payload: bytes | bytearray
    shape: tuple[int, ...]
    weight: float | None = None


class JointWriter(TarWriter):
    """Writes one joint shard.

    Args:
        files: the cache.
        folder: of the pack, below `shards/`.
        unit: the unit's id, written to the shard's head.
        encodings: of the records, by kind.
    """

    def __init__(self, files: Files, folder: str, unit: str, encodings: Mapping[str, Encoding]):
        self.folder, self.encodings, self.caption = folder, encodings, caption_of(encodings.values())
        self._rows: list[dict[str, Any]] = []
        self._null: dict[str, Any] | None = None
        head = {
            "format": layout.FORMAT,
            "version": layout.VERSION,
            "pack": folder,
            "unit": unit,
            **{kind: encoding.name for kind, encoding in encodings.items()},
        }
        super().__init__(files, head)

    def add(
        self,
        sample_id: int,
        pictures: Mapping[str, Payload],
        captions: list[tuple[Payload, float, str]],
        source: str,
        item: str,
    ) -> None:
        """Add a sample. pictures: its records by kind; captions: the record, its weight and the original caption."""
        name = f"{sample_id:016x}"
        row: dict[str, Any] = {
            "sample_id": sample_id,
            **{kind: self._record(f"{name}.{kind}.npy", one, self.encodings[kind]) for kind, one in pictures.items()},
            "source": source,
            "item": item,
            "captions": [],
            "written": [],
        }
        for number, (record, weight, caption) in enumerate(captions):
            stem = f"{name}.{number}" if number else name
            place = self._record(f"{stem}.{self.caption.kind}.npy", record, self.caption)
            row["captions"].append({**place, "rows": record.shape[0], "weight": weight})
            text = caption.encode("utf-8")
            offset = self._member(f"{stem}.txt", text)
            checksum = layout.digest("caption", record.key, text)
            row["written"].append({"offset": offset, "length": len(text), "checksum": checksum})
        self._rows.append(row)

    def add_null(self, record: Payload, valid: int) -> None:
        """Make this the shard of the null record, which has no other record; webdataset skips it."""
        place = self._record(NULL, record, self.caption)
        rows, width = record.shape
        self._null = {
            **place,
            "rows": rows,
            "width": width,
            "valid": valid,
            "caption_offset": place["offset"],
            "caption_length": 0,
            "caption_checksum": layout.digest("caption", record.key, b""),
        }

    def finish(self) -> tuple[str, int, pa.Table]:
        """Close and publish the shard. Returns its digest (hex), its size in bytes and the record table."""
        if self._null is None:
            table = pa.Table.from_pylist(self._rows, schema=joint_schema(self.encodings.values()))
        else:
            table = pa.Table.from_pylist([self._null], schema=records_schema(self.caption.kind))
        digest = self.close(self.folder, to_ipc(table))
        return digest, self.size, table

    def _record(self, name: str, record: Payload, encoding: Encoding) -> dict[str, Any]:
        plain = encoding.storage == PLAIN
        header = npy_header(record.shape) if plain else npy_header((len(record.payload),), "|u1")
        start = self._member(name, header, memoryview(record.payload))
        return {
            "shard": 0,
            "offset": start + len(header),
            "key": record.key,
            "checksum": record.checksum,
            "length": len(record.payload),
            "weight": record.weight,
        }
