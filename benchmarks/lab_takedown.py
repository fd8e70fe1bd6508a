"""Takedown of 3 of 1,000 pictures (`sana-pipe forget --item`), killed five times, with the demo's small encoders.

takedown_bytes_left: bytes of them that are found afterwards anywhere in the cache: payloads and keys of their records,
their names and captions, in every file as it is and unpacked (Parquet, Arrow, zlib, gzip, zstd).
takedown_found_before: the same search before. takedown_others_changed: records of other pictures whose bytes are
others, or that are gone. takedown_kills: kills, each at another write. takedown_check: the exit code of
`forget --check`. takedown_s: seconds of the run that ended the takedown.
"""

from __future__ import annotations

import gzip
import io
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from PIL import Image

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.forget
import sana_pipe.stages.pack
from benchmarks.report import part_of_lab
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config, load
from sana_pipe.data.cache import withdrawn
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.findings import encoding_names
from sana_pipe.data.cache.folder_store import FolderStore
from sana_pipe.data.cache.keys import key_bytes
from sana_pipe.data.cache.shard import ShardReader
from sana_pipe.tools.demo import small_models

KILLS = 5
GO = (3, 40, 77)
"""Numbers of the pictures that go; the third has a caption that another picture has, too."""

Place = tuple[str, bytes]
"""The name of an encoding and the key of a record."""


WANTED = {
    "takedown_found_before": ">= 1",
    "takedown_bytes_left": "== 0",
    "takedown_others_changed": "== 0",
    "takedown_kills": "== 5",
    "takedown_check": "== 0",
}


def measure(quick: bool, folder: Path) -> dict[str, float]:
    """The figures of the module's docstring. folder: an empty one. quick: 100 pictures."""
    config = _prepared(folder, 100 if quick else 1000)
    cache = Cache(config.cache)
    before, gone = _payloads(cache), _records_of(cache)
    secrets = _secrets(before, gone)
    found = _left(cache.root, secrets)
    kills = _killed(config)
    began = time.perf_counter()
    with open(os.devnull, "w") as nowhere, _stdout_to(nowhere):
        code = sana_pipe.stages.forget.run(config, check=True)
    seconds = time.perf_counter() - began
    after = _payloads(Cache(config.cache))
    others = {place: data for place, data in before.items() if place not in gone}
    return {
        "takedown_pictures": float(len(GO)),
        "takedown_found_before": float(found),
        "takedown_bytes_left": float(_left(cache.root, secrets)),
        "takedown_others_changed": float(sum(after.get(place) != data for place, data in others.items())),
        "takedown_kills": float(kills),
        "takedown_check": float(code),
        "takedown_s": seconds,
    }


def _name(number: int) -> str:
    return f"person-{number:05}.png"


def _caption(number: int) -> str:
    return "a caption of two pictures" if number in (GO[2], GO[2] + 1) else f"the portrait of citizen {number:05}"


def _prepared(folder: Path, count: int) -> Config:
    """A cache of small random pictures with hashes, a snapshot with a held-out part, and a pack."""
    data, rng = folder / "pictures", np.random.default_rng(0)
    data.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(data / _name(number))
        (data / _name(number)).with_suffix(".txt").write_text(_caption(number))
    small_models.make_all(folder / "models", [], ["a portrait"], steps=0, sizes=[(64, 64)])
    options = [f"vae.id={folder / 'models'}", f"text.id={folder / 'models'}", "encode.signals=[phash]"]
    options += [f"cache={folder / 'cache'}", f"train.output={folder / 'run'}", "bucket.heldout=0.1"]
    config = load("tiny", [*options, "data.resolution=64", "data.buckets=[[64, 64]]", "encode.device=cpu"])
    with open(os.devnull, "w") as nowhere, _stdout_to(nowhere):
        sana_pipe.stages.encode.run(config, data=str(data))
        sana_pipe.stages.bucket.run(config, name="all")
        sana_pipe.stages.pack.run(config, snapshot="all", name="packed")
    return config


class _stdout_to:
    """What the block prints goes to a file, also from libraries."""

    def __init__(self, file: Any):
        self._file = file

    def __enter__(self) -> None:
        self._kept = [os.dup(1), os.dup(2)]
        for number in (1, 2):
            os.dup2(self._file.fileno(), number)

    def __exit__(self, *error: object) -> None:
        for number, kept in zip((1, 2), self._kept, strict=True):
            os.dup2(kept, number)
            os.close(kept)


def _payloads(cache: Cache) -> dict[Place, bytes]:
    """The stored bytes of every record."""
    found = {}
    for name in encoding_names(cache):
        records, reader = cache.index(name), ShardReader(cache.files, name)
        columns = records.columns
        for row in range(len(records)):
            key, checksum = key_bytes(records.keys[row]), key_bytes(columns["checksum"][row])
            shard = records.shards[int(columns["shard"][row])]
            place, length = int(columns["offset"][row]), int(columns["length"][row])
            found[name, key] = bytes(reader.stored(shard, place, key, checksum, length))
    return found


def _records_of(cache: Cache) -> set[Place]:
    """The records of the pictures that go, by the snapshots."""
    gone, shared = set[Place](), set[Place]()
    for name in ("all", "all.heldout"):
        snapshot = cache.open_snapshot(name)
        for row in range(len(snapshot)):
            sample = snapshot.sample(row)
            goes = snapshot.source_item(row)[1] in {_name(number) for number in GO}
            texts = {(snapshot.caption.name, caption.key) for caption in sample.captions}
            if goes:
                gone |= texts | {(snapshot.pictures[kind].name, at.key) for kind, at in sample.pictures.items()}
            else:
                shared |= texts
    return gone - shared


def _secrets(before: dict[Place, bytes], gone: set[Place]) -> list[bytes]:
    records = [part for place in gone for part in (before[place], place[1])]
    texts = [_name(number) for number in GO] + [_caption(number) for number in GO[:2]]
    return [*records, *(text.encode() for text in texts)]


def _left(folder: Path, secrets: list[bytes]) -> int:
    """Bytes of these that are found in files below a folder."""
    forms = (form for path in sorted(folder.rglob("*")) if path.is_file() for form in _forms(path.read_bytes()))
    return sum(form.count(secret) * len(secret) for form in forms for secret in secrets)


def _forms(data: bytes) -> Iterator[bytes]:
    """A file as it is, and unpacked."""
    yield data
    readers: list[Callable[[], bytes]] = [
        lambda: repr(pq.read_table(io.BytesIO(data)).to_pylist()).encode(),
        lambda: repr(pa.ipc.open_file(pa.BufferReader(data)).read_all().to_pylist()).encode(),
        lambda: zlib.decompress(data),
        lambda: gzip.decompress(data),
        lambda: zstandard.ZstdDecompressor().decompressobj().decompress(data),
    ]
    for read in readers:
        with suppress(pa.ArrowException, OSError, ValueError, zlib.error, EOFError, zstandard.ZstdError):
            yield read()


def _killed(config: Config) -> int:
    """Run the takedown in processes that are killed, each some writes later; returns how many were."""
    kills = 0
    for at in (8, 15, 25, 40, 60):
        open_ones = bool(withdrawn.takedowns(Cache(config.cache)))
        child = os.fork()
        if not child:
            _die_at(at)
            with open(os.devnull, "w") as nowhere, _stdout_to(nowhere):
                items = () if open_ones else [_name(number) for number in GO]
                os._exit(sana_pipe.stages.forget.run(config, items=items, check=open_ones))
        kills += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    if not withdrawn.takedowns(Cache(config.cache)):
        raise RuntimeError("every process was killed before it had promised anything")
    return kills


def _die_at(write: int) -> None:
    """Let this process be killed at its write of this number."""
    left = write

    def dying(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*arguments, **named)

        return called

    for name in ("create", "replace", "move", "remove"):
        setattr(FolderStore, name, dying(getattr(FolderStore, name)))


if __name__ == "__main__":
    run_and_exit(partial(part_of_lab, __doc__, measure, WANTED))
