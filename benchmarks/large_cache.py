"""Synthetic caches of many items, and the memory and time of the commands that read them; part of `encode_scale`.

A source of tars with `PER_TAR` items each, one caption an item. The real code writes scan, plans and indexes,
which have their full size; tars and shards have no content, since nothing here reads a picture or a record. The listing
of a folder is measured on names that are made up; asking a disk for them comes on top. The listing of a folder in S3
(`s3`) is that of a server in another process.

With `PER_UNIT` a unit has so few records, to measure what units and shards cost.

Each command runs in a process of its own. The parent reads that process's private memory (RssAnon) every few
milliseconds: mapped files do not count, because the kernel may drop their pages. `python -m benchmarks.large_cache
COMMAND FOLDER ITEMS DIVISOR PER_UNIT` runs one with all buffers divided by DIVISOR.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks import s3_listing
from benchmarks.report import resident
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config, load
from sana_pipe.data.cache import arrow, audit, garbage, index, keys, layout, scan_table, scratch
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.encodings import Encoding, records_schema
from sana_pipe.data.cache.keys import binary
from sana_pipe.data.cache.layout import Paths
from sana_pipe.data.cache.shard import to_ipc
from sana_pipe.data.cache.snapshot_lists import publish
from sana_pipe.data.cache.status import status
from sana_pipe.data.encoders.text_kind import max_length
from sana_pipe.data.encoding import estimate, last_scan, scan_rows, unit_records
from sana_pipe.data.encoding import plan as planning
from sana_pipe.data.encoding import scan as scanning
from sana_pipe.data.images import buckets
from sana_pipe.data.loader import planner
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.snapshots import assemble, frames
from sana_pipe.data.sources import remote
from sana_pipe.data.sources.caption_columns import CaptionRule
from sana_pipe.data.sources.caption_rules import instruction
from sana_pipe.data.sources.filesystem import LocalFilesystem
from sana_pipe.data.sources.folder import FolderSource
from sana_pipe.data.sources.source import ListedItems, Part
from sana_pipe.data.sources.tars import TarSource
from sana_pipe.data.work import claims
from sana_pipe.data.work.engine import Worker
from sana_pipe.data.work.stop import Stop
from sana_pipe.stages import bucket, encode, snapshots

PER_TAR = 10_000
SOURCE = "synthetic"
SCORES = "scores.parquet"
"""The table that `scores` joins; `benchmarks.lab_scores` writes it."""
COMMANDS = ("scan", "noop", "bucket", "status", "index", "folder", "s3", "dry", "grow", "filter")
"""`grow` and `filter` are `bucket` with options; `grow` needs the snapshot that `bucket` made."""
UNIT_COMMANDS = ("noop", "bucket", "status", "gc", "documents", "open")
"""Commands that read what a cache has of each unit and shard. `documents` is that part of `verify`, `gc` its list,
`open` what a rank does before its first step."""
PER_FOLDER = 1000
PER_UNIT = 0
"""Records of a unit; 0: as the configuration says."""
READ_S = 0.005
BUFFERS = (
    *((module, "ROWS") for module in (arrow, scan_rows, frames)),
    (assemble, "CHUNK_ROWS"),
    (keys, "BATCH"),
    (index, "BATCH"),
    (scratch, "LIMIT"),
    (scratch, "TEXTS"),
    (scratch, "RUN"),
)


class Tars(LocalFilesystem):
    """Files that do not exist: `count` items in tars of `PER_TAR`."""

    def __init__(self, root: Path, count: int):
        super().__init__(root)
        self.files = [f"{i:06d}.tar" for i in range(-(-count // PER_TAR))]

    def require(self, names: Any) -> dict[str, tuple[int, int]]:
        return {name: self.stat(name) for name in names}

    def names(self, folder: str) -> list[str]:
        return self.files

    def stat(self, name: str) -> tuple[int, int]:
        return PER_TAR << 17, 1


class Folder(FolderSource):
    """A folder that does not exist, of `count` pictures with a .txt file each, in folders of `PER_FOLDER`."""

    def __init__(self, root: Path, rule: CaptionRule, count: int):
        super().__init__(root, rule)
        self.count = count

    def _walk(self, disk: Any, found: Any) -> Iterator[tuple[str, str | None]]:
        for number in range(self.count):
            name = f"{number // PER_FOLDER:06d}/{number:09d}"
            yield f"{name}.txt", None
            yield f"{name}.jpg", None


def configuration(folder: Path, *options: str) -> Config:
    if PER_UNIT:
        planning.UNIT_IMAGES = planning.UNIT_CAPTIONS = PER_UNIT
    return load(None, [f"cache={folder / 'cache'}", *options])


def encodings(config: Config) -> tuple[LatentEncoding, TextEncoding]:
    values: dict[str, Any] = {"weights": "scale", "dtype": config.vae.dtype, "storage": config.encode.storage.latent}
    latent = LatentEncoding(**values, background=config.data.background)
    return latent, TextEncoding(
        weights="scale",
        dtype=config.text.dtype,
        normalisation="nvlabs" if config.text.prompting == "nvlabs" else "diffusers",
        max_length=max_length(config.text),
        instruction=instruction(config.text),
        storage=config.encode.storage.text,
    )


def source(folder: Path, config: Config, count: int) -> TarSource:
    tars = Tars(folder, count)
    return TarSource(tars, tars.files, CaptionRule(config.data), SOURCE)


# ---------------------------------------------------------------- the cache


def build(folder: Path, count: int, changed: Callable[[pa.Table], pa.Table] = lambda scan: scan) -> None:
    """A cache in which every item of the source is encoded. changed: as of `scanned`."""
    config = configuration(folder)
    cache, latent, text, scan = scanned(folder, count, changed)
    table = buckets.table(config.data, latent.compression)
    planning.plan_images(cache, latent, planning.image_work(scan, SOURCE, latent, table), config.encode)
    planning.plan_captions(cache, text, planning.caption_work(scan, text), config.encode)
    for encoding in (latent, text):
        for plan in cache.plans(encoding.name):
            _commit(cache, encoding, plan.number, [(unit.unit, unit.count) for unit in plan.units], plan.table)


def scanned(
    folder: Path, count: int, changed: Callable[[pa.Table], pa.Table] = lambda scan: scan
) -> tuple[Cache, LatentEncoding, TextEncoding, pa.Table]:
    """A cache in which the source is scanned, and the scan. changed: what the scan of each tar becomes."""
    config = configuration(folder)
    cache = Cache(config.cache, create=True)
    latent, text = encodings(config)
    for encoding in (latent, text):
        cache.add_encoding(encoding)
    table = buckets.table(config.data, latent.compression)
    tars = source(folder, config, count)
    stamps = {part.name: part.stamp for part in tars.parts()}
    scan = pa.concat_tables(
        changed(_scan(name, stamp, at * PER_TAR, min(PER_TAR, count - at * PER_TAR), table))
        for at, (name, stamp) in enumerate(stamps.items())
    )
    scan = pa.concat_tables(scan.slice(at, 1 << 20).combine_chunks() for at in range(0, count, 1 << 20))
    body = {"encodings": {"latent": latent.name, "text": text.name}, "buckets": [list(shape) for shape in table]}
    rest = {"source": SOURCE, "root": tars.location, "table": cache.put_table(scan), "source_format": "webdataset"}
    counts = {"items": len(scan), "rejected": len(scan) - scan.column("reject").null_count}
    cache.add_scan(SOURCE, body | rest | {"counts": counts})
    return cache, latent, text, scan


def _scan(tar: str, stamp: str | None, start: int, count: int, table: list[tuple[int, int]]) -> pa.Table:
    rng = np.random.default_rng(start)
    numbers = np.arange(start, start + count)
    digits = pc.utf8_lpad(pa.array(numbers).cast(pa.string()), 9, "0")
    sides = np.array(table)[rng.integers(0, len(table), count)]
    text = pc.binary_join_element_wise("a photograph of ", digits, ", seen from the window of a house", "")
    captions = pa.StructArray.from_arrays([text, pa.array(np.ones(count, np.float32))], ["text", "weight"])
    offset = (numbers - start).astype(np.int64) << 17
    columns: dict[str, Any] = {
        "item": pc.binary_join_element_wise(f"{tar}/", digits, ".jpg", ""),
        "size": np.full(count, 99_999),
        "mtime_ns": np.ones(count, np.int64),
        "digest": binary(np.frombuffer(rng.bytes(16 * count), "S16")),
        "width": sides[:, 1].astype(np.int32),
        "height": sides[:, 0].astype(np.int32),
        "captions": pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), captions),
        "meta": pa.repeat('{"score": 5}', count),
        "part": pa.repeat(tar, count),
        "stamp": pa.repeat(stamp, count),
        "where": pc.binary_join_element_wise(pa.array(offset).cast(pa.string()), "99999", "+"),
    }
    return scan_of(count, columns)


def scan_of(count: int, columns: dict[str, Any]) -> pa.Table:
    """A scan table; the columns that are not given are null."""
    nulls = {field.name: pa.nulls(count, field.type) for field in scan_table.SCAN}
    return pa.table(nulls | columns).cast(scan_table.SCAN)


def _commit(cache: Cache, encoding: Encoding, plan: int, units: list[tuple[str, int]], table: str) -> None:
    """The segment of a plan whose units are all made. units: (id, records)."""
    keys, counts = cache.table(table).column("key"), np.array([count for _, count in units])
    total, length = int(counts.sum()), 1 << 17
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    fixed_columns = {"key": keys, "checksum": keys, "caption_checksum": keys, "offset": within * length}
    values = {"length": length, "channels": 32, "rows": 28, "width": 2304, "valid": 28, "caption_length": 60}
    schema = records_schema(encoding.kind)
    columns = [fixed_columns.get(name, np.full(total, values.get(name, 32))) for name in schema.names]
    digests = [layout.digest("shard", encoding.name, unit).hex() for unit, _ in units]
    shard = pa.DictionaryArray.from_arrays(np.repeat(np.arange(len(units), dtype=np.int32), counts), digests)
    records = pa.table(columns, schema.names).cast(schema).append_column("shard", shard).combine_chunks()
    commits = []
    made_by = {**unit_records.provenance(), "model": "scale", "revision": "0" * 40}
    for digest, (unit, count) in zip(digests, units, strict=True):
        path = cache.files.path(Paths.shard(encoding.name, digest))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, count * length)
        commits.append(index.Commit(unit, digest, count * length, count, digest, (), dict(made_by)))
    body = {"encoding": encoding.name, "plan": plan, "records": total}
    body["commits"] = publish(cache.files, index.Commits.table_of(commits)).values()
    name = cache.files.put_content(to_ipc(records), "tables", "arrow")
    cache.files.put(Paths.segment(encoding.name, plan), layout.seal(body | {"table": name}))


# ---------------------------------------------------------------- commands


def scan_and_encode(folder: Path, count: int) -> None:
    """`encode` over an unchanged source."""
    config = configuration(folder)
    cache = Cache(config.cache)
    latent, text = encodings(config)
    worker = Worker(claims.Claims(cache.files), Stop())
    table = buckets.table(config.data, latent.compression)
    here = source(folder, config, count)
    run = encode.EncodeRun(
        config, cache, text, worker, "local", {here.name: here}, here, encode.reading_of(config), [latent, text], table
    )
    done = encode.encode_source(run, False)
    if done["new"] != {"images": 0, "captions": 0} or done["items"] != count or done["missing"]:
        raise RuntimeError(f"there was something to do: {done}")


def scan_alone(folder: Path, count: int) -> None:
    """The unchanged source's scan and its comparison with the last one."""
    config = configuration(folder)
    cache = Cache(config.cache)
    tars = source(folder, config, count)
    scan = scanning.scan(tars, SOURCE, cache, max_pixels=1 << 30, workers=1, rehash=False, progress=lambda *_: None)
    if scan.num_rows != count or last_scan.count_missing(cache, tars, scan, 0.0):
        raise RuntimeError("the source has changed")


def list_folder(folder: Path, count: int) -> None:
    """The listing of a folder, as every process of a scan makes it."""
    pictures = Folder(folder, CaptionRule.column("text"), count)
    pictures.scratch = Cache(configuration(folder).cache).files.scratch
    fragments = list(pictures.fragments(Part(""), scan_rows.RUN, ListedItems(pictures.scratch)))
    if sum(fragment.count or 0 for fragment in fragments) != count or pictures.ignored.total:
        raise RuntimeError("pictures or captions are missing")


def list_s3(folder: Path, count: int) -> None:
    """The listing of a folder in S3, with the sizes that the server says."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.s3_listing", str(count)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        try:
            files = remote.RemoteFilesystem(f"s3://{s3_listing.BUCKET}/{s3_listing.FOLDER}", 60.0)
            pictures = FolderSource(files, CaptionRule.column("text"))
            pictures.scratch = Cache(configuration(folder).cache).files.scratch
            fragments = pictures.fragments(Part(""), scan_rows.RUN, ListedItems(pictures.scratch))
            seen = sum(len(fragment.look()) for fragment in fragments)
            if seen != count or pictures.ignored.total:
                raise RuntimeError("pictures or captions are missing")
        finally:
            server.terminate()


def dry_run(folder: Path, count: int) -> None:
    """What `encode --dry-run` does with an unchanged source of whose records none is in the cache, without a probe."""
    config = configuration(folder)
    cache = Cache(config.cache)
    latent, text = encodings(config)
    latent, text = dataclasses.replace(latent, weights="others"), dataclasses.replace(text, weights="others")
    tars = source(folder, config, count)
    scan = scanning.scan(tars, SOURCE, cache, max_pixels=1 << 30, workers=1, rehash=False, progress=lambda *_: None)
    work = estimate.wanted(scan, cache, [latent, text], buckets.table(config.data, latent.compression))
    size = estimate.sizes(work, text, lambda captions: [len(caption) for caption in captions])
    if (work.images, work.captions) != (count, count) or not size.total:
        raise RuntimeError("pictures or captions are missing")


def divide_buffers(divisor: int) -> None:
    """Lower every limit on the rows and bytes that a command has in memory."""
    for module, name in BUFFERS:
        setattr(module, name, max(1, getattr(module, name) // divisor))


def command(name: str, folder: Path, count: int) -> None:
    config = configuration(folder)
    if name == "scan":
        scan_alone(folder, count)
    elif name == "noop":
        scan_and_encode(folder, count)
    elif name == "bucket":
        bucket.run(config)
    elif name == "grow":
        bucket.run(configuration(folder, "bucket.grow=latest", "bucket.dedup=image"))
    elif name == "filter":
        bucket.run(configuration(folder, "bucket.filter=score > 4 and contains(item, '1')"))
    elif name == "group":
        bucket.run(configuration(folder, "bucket.group=artist", "bucket.heldout=0.1"))
    elif name == "scores":
        table = f"bucket.metadata={folder / SCORES}", "bucket.metadata_key=id"
        bucket.run(configuration(folder, *table, "bucket.filter=quality > 5"))
    elif name == "list":
        snapshots.write_list(config, "made", str(folder.parent / "list.csv"))
    elif name in ("diff", "list_diff"):
        other = "list.csv" if name == "list_diff" else "two/cache:made"
        if snapshots.diff(config, "made", str(folder.parent / other)) != 1:
            raise RuntimeError("no difference was found")
    elif name == "folder":
        list_folder(folder, count)
    elif name == "s3":
        list_s3(folder, count)
    elif name == "dry":
        dry_run(folder, count)
    elif name == "status":
        told = status(Cache(config.cache))["sources"][SOURCE]
        if told["items"] != count:
            raise RuntimeError(f"status counts {told['items']} items")
    elif name == "gc":
        if list(garbage.unneeded(Cache(config.cache), older_than_s=-1.0)):
            raise RuntimeError("there is nothing to remove")
    elif name == "documents":
        if found := next(audit.verify_documents(Cache(config.cache)), None):
            raise RuntimeError(f"a document is damaged: {found}")
    elif name == "open":
        snapshot = Cache(config.cache).open_snapshot()
        snapshot.check_shards()
        planner.Planner(snapshot, seed=0, phase=0).step(0)
    elif name == "index":
        indexes = [Cache(config.cache).index(encoding.name) for encoding in encodings(config)]
        if [len(one) for one in indexes] != [count, count + 1]:
            raise RuntimeError("records are missing")
    else:
        build(folder, count)


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Cost:
    """Of one command. own: largest private memory in bytes, of which `before` was there when it began; peak: with
    mapped files; cpu, wall: seconds of the command alone."""

    own: int
    before: int
    peak: int
    cpu: float
    wall: float

    def per_item(self, count: int) -> float:
        return (self.own - self.before) / count


def cost(name: str, folder: Path, count: int, divisor: int = 1, per_unit: int = 0) -> Cost:
    """Run a command in a process of its own and watch its memory. divisor: of the buffers, see `divide_buffers`.
    per_unit: see `PER_UNIT`."""
    numbers = [str(number) for number in (count, divisor, per_unit)]
    arguments = [sys.executable, "-m", "benchmarks.large_cache", name, str(folder), *numbers]
    own = 0
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        status_file = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            lines = dict(line.split(":", 1) for line in status_file.read_text().splitlines())
            own = max(own, int(lines.get("RssAnon", "0").split()[0]) * 1024)
            time.sleep(READ_S)
        assert process.stdout is not None
        output = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"{name} with {count} items failed")
    return Cost(**{**json.loads(output.splitlines()[-1]), "own": own})


def main() -> None:
    name, folder, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    divide_buffers(int(sys.argv[4]))
    globals()["PER_UNIT"] = int(sys.argv[5])
    before = next(int(line.split()[1]) * 1024 for line in _status() if line.startswith("RssAnon:"))
    began, cpu = time.perf_counter(), time.process_time()
    command(name, folder, count)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - began
    result = Cost(own=0, before=before, peak=resident("VmHWM"), cpu=cpu, wall=wall)
    print(json.dumps(dataclasses.asdict(result)))


def _status() -> list[str]:
    return Path("/proc/self/status").read_text().splitlines()


if __name__ == "__main__":
    run_and_exit(main)
