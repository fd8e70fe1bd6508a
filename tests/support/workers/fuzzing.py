"""Feeds every parser of foreign bytes with damaged files: `fuzzing.py SEED INPUTS FOLDER [TARGET ...]`.

What: each target has small valid files (`SEEDS`) and a function that parses one. An input is a seed with a few random
edits. A parser may accept it or raise an error for people; it may take neither long nor much memory.
The input at hand lies in FOLDER/input while it is parsed, so that it is known if the process dies. Failures are printed
as JSON lines; the last line counts the inputs.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tarfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from sana_pipe import config
from sana_pipe.base.errors import UserError
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.cache import codec, layout, shard
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.files import Files
from sana_pipe.data.encoding import scan
from sana_pipe.data.images import decoding, vips_decoder
from sana_pipe.data.signals.text import TextEncoding
from sana_pipe.data.snapshots import filters
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.detect import open_source
from sana_pipe.data.sources.source import Place
from sana_pipe.data.work import claims
from sana_pipe.train.models.sana_shape import read_config

SECONDS = 5.0
"""Of the processor, for one input."""
MEMORY = 1 << 30
"""Beyond what the process has when it starts."""
PIXELS = 200_000

warnings.simplefilter("ignore")


class TooSlow(BaseException):
    pass


# ---------------------------------------------------------------- valid files


def picture(kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    values = np.random.default_rng(0).integers(0, 255, (13, 17, 3), np.uint8)
    plain = Image.fromarray(values).resize((34, 26))
    plain = Image.fromarray(np.asarray(plain.convert("L")).astype("f4")) if mode == "F" else plain.convert(mode)
    plain.save(out, kind, **options)
    return out.getvalue()


def tar(format: int, *members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return out.getvalue()


def parquet(columns: dict[str, Any], **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, row_group_size=2, **options)
    return out.getvalue()


ROW = b'{"text": "said", "score": 27.5, "when": [1, 2, {"x": null}], "n": 12345678901234567890}'
MEMBERS = (("0.txt", b"said"), ("0.png", picture()), ("1.jpg", picture("JPEG")), ("1.json", ROW), ("é/long" * 30, b"x"))
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
IMAGES = pa.array([{"bytes": picture(), "path": "a.png"}] * 3, STRUCT)
RECORDS = shard.records_schema("latent").empty_table()


def shard_file() -> bytes:
    folder = Path(FOLDER) / "shard"
    encoding = TextEncoding(weights="w", width=6)
    with shard.ShardWriter(Cache(folder, create=True).files, encoding, "unit") as writer:
        for i in range(3):
            writer.add(bytes([i] * 16), np.full((3, 6), i, np.uint16), caption=f"caption {i}")
        writer.finish()
    return next(folder.rglob("*.tar")).read_bytes()


def array(values: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, values)
    return out.getvalue()


def metadata() -> bytes:
    import torch
    from torch.distributed import checkpoint

    folder = Path(FOLDER) / "saved"
    checkpoint.save({"a": torch.zeros(3), "b": torch.ones(2, 2)}, checkpoint_id=folder, no_dist=True)
    return (folder / ".metadata").read_bytes()


# ---------------------------------------------------------------- parsers


def fresh() -> Path:
    folder = Path(FOLDER) / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def scanned(name: str, *beside: tuple[str, bytes], **options: Any) -> Callable[[bytes], None]:
    """Scan a folder in which the input has a name, then read every picture."""

    def parse(data: bytes) -> None:
        folder = fresh()
        for other, content in ((name, data), *beside):
            (folder / other).write_bytes(content)
        source = open_source(
            str(folder), DataConfig(**{k: v for k, v in options.items() if k != "format"}), "x", options.get("format")
        )
        result = scan.scan(
            source,
            "x",
            None,
            max_pixels=PIXELS,
            workers=1,
            rehash=False,
            progress=lambda done, total: None,
        )
        result.validate(full=True)
        for row in result.to_pylist():
            assert row["reject"] is None or row["reject"].isprintable(), row["reject"]
            if row["reject"] is None:
                source.read(Place(row["item"], row["part"], row["where"]))
                json.loads(row["meta"])

    return parse


def pixels(data: bytes) -> None:
    limits: dict[str, Any] = {"max_pixels": PIXELS}
    for decoder in decoding.DECODERS.values() if vips_decoder.why_not() is None else ["pillow-srgb-1"]:
        try:
            size = decoding.probe(data, **limits)
            assert decoding.load(data, (16, 24), decoder=decoder, **limits).shape == (16, 24, 3), size
        except decoding.ImageReject as reject:
            assert str(reject)


def stored(suffix: str, read: Callable[[Files, str], Any]) -> Callable[[bytes], None]:
    """The input as a content-addressed table, under its own digest."""

    def parse(data: bytes) -> None:
        files, digest = Files(fresh()), layout.content_digest(data)
        path = files.path(layout.Paths.table(digest, suffix))
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        read(files, digest)

    return parse


def shards(data: bytes) -> None:
    files = Files(fresh())
    files.path("a.tar").write_bytes(data)
    for read in (shard.read_head, shard.read_table):
        try:
            read(files, "a.tar")
        except UserError:
            continue


def payload(storage: str) -> Callable[[bytes], None]:
    def parse(data: bytes) -> None:
        codec.Codec(True, storage).decode(data, np.empty((3, 6), np.uint16), "here")

    return parse


def encoded(storage: str) -> bytes:
    bits = codec.from_float(np.arange(18, dtype=np.float32).reshape(3, 6))
    return codec.Codec(True, storage).encode(bits)


def file_of(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], None]:
    def parse(data: bytes) -> None:
        path = fresh() / name
        path.write_bytes(data)
        read(path)

    return parse


def dcp(path: Path) -> None:
    from sana_pipe.train.training.metadata_reader import read_metadata

    read_metadata(path)


def document(path: Path) -> None:
    from sana_pipe.train.training.checkpoint import read_document

    read_document(path.parent)


def expression(data: bytes) -> None:
    text = data.decode("utf-8", errors="replace")
    meta = ['{"a": 1, "b": "x"}', ""]
    batch = pa.table(
        {"item": ["0", "1"], "width": [1, 2], "height": [1, 2], "size": [1, 2], "captions": [[], []], "meta": meta}
    )
    rule = filters.Filter(text, "bucket.filter")
    metadata = filters.Metadata([batch], rule.paths)
    rule.check_columns(metadata.known, metadata.valid)
    filters.select([rule], batch, "one", dict.fromkeys(rule.paths, "DOUBLE") | metadata.types(metadata.text))


JSONL = b'{"file_name": "a.png", "text": "one"}\n' + b'{"file_name": "b.png", "text": ["two", "three"], "score": 1.5}\n'
CSV = b'file_name,text,score\na.png,one,1\nb.png,"two, three",2.5\n'
FILES = (("a.png", picture()), ("b.png", picture()))
WIDS = b'{"wids_version": 1, "shardlist": [{"url": "0.tar", "nsamples": 2, "filesize": 123}]}'
SCORES = b'{"0": {"text": 27.25, "other": "said"}, "1": {"text": 1e9}}'
TAR = tar(tarfile.USTAR_FORMAT, *MEMBERS[:4])
YAML = b"extends: {}\ncache: ./c\ndata: {resolution: 512, caption_weights: {short: 1, long: 3.5}}\ntrain:\n  steps: 5\n"
MODEL = b'{"_class_name": "SanaTransformer2DModel", "in_channels": 32, "num_layers": 2, "mlp_ratio": 2.5}'
SCORED = {"caption_weights": {"text": 1.0, "other": 2.0}, "caption_scores": {"text": "score"}}

TARGETS: dict[str, tuple[Callable[[], list[bytes]], Callable[[bytes], object]]] = {
    "tar": (lambda: [TAR, tar(tarfile.PAX_FORMAT, *MEMBERS), tar(tarfile.GNU_FORMAT, *MEMBERS)], scanned("a.tar")),
    "index of tars": (lambda: [WIDS], scanned("wids-meta.json", ("0.tar", TAR))),
    "scores beside a tar": (lambda: [SCORES], scanned("0_clip.json", ("0.tar", TAR), **SCORED)),
    "text": (lambda: [b"said", "\ufeffé 日本".encode()], scanned("a.txt", *FILES)),
    "JSON": (lambda: [ROW], scanned("a.json", *FILES, ("b.txt", b"b"), **SCORED)),
    "metadata.jsonl": (lambda: [JSONL], scanned("metadata.jsonl", *FILES, **SCORED)),
    "metadata.csv": (lambda: [CSV], scanned("metadata.csv", *FILES)),
    "listing": (lambda: [JSONL], scanned("list.jsonl", *FILES, format="jsonl")),
    "CSV listing": (lambda: [CSV], scanned("list.csv", *FILES, format="csv")),
    "parquet": (
        lambda: [
            parquet({"image": IMAGES, "text": ["a", "b", "c"], "n": [1, 2, 3]}, compression="none"),
            parquet({"jpg": [picture()] * 3, "text": [["a"], [], None], "t": pa.array([1, 2, 3], pa.timestamp("ns"))}),
            parquet({"file_name": ["a.png", "b.png", "../c"], "text": pa.array(["a", "b", "a"]).dictionary_encode()}),
        ],
        scanned("a.parquet", *FILES, format="parquet"),
    ),
    "picture": (
        lambda: [
            picture(),
            picture(mode="RGBA"),
            picture(mode="P"),
            picture("JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0"),
            picture("JPEG", "CMYK"),
            picture("WEBP"),
            picture("GIF"),
            picture("BMP"),
            picture("TIFF", "F"),
            picture("QOI"),
            picture("TIFF", compression="tiff_adobe_deflate"),
            picture("JPEG2000"),
            picture("AVIF"),
            picture("ICO"),
            picture("TGA"),
            picture("PPM"),
            picture("MPO"),
        ],
        pixels,
    ),
    "document": (
        lambda: [layout.seal({"units": [{"unit": "a", "start": 0}], "x": "é", "f": 1.5})],
        lambda data: layout.unseal(data, "here"),
    ),
    "Arrow": (
        lambda: [
            shard.to_ipc(pa.table({"key": [b"a" * 16] * 3, "x": [[1], [], None], "t": ["a", "b", None]})),
            shard.to_ipc(RECORDS),
        ],
        lambda data: shard.from_ipc(data, "here").validate(full=True),
    ),
    "table": (
        lambda: [parquet({"item": ["a", "b", "c"], "captions": [["x"], [], None]})],
        stored("parquet", lambda files, digest: plan_table(files, digest)),
    ),
    "shard": (lambda: [shard_file()], shards),
    "lossless payload": (lambda: [encoded(codec.LOSSLESS)], payload(codec.LOSSLESS)),
    "int8 payload": (lambda: [encoded(codec.INT8)], payload(codec.INT8)),
    "checkpoint": (
        lambda: [json.dumps({"format": "x", "version": 1, "files": {}, "digest": "0"}).encode()],
        file_of("checkpoint.json", document),
    ),
    "checkpoint's metadata": (lambda: [metadata()], file_of(".metadata", dcp)),
    "YAML": (
        lambda: [YAML, (Path(config.__file__).parents[1] / "configs" / "tiny.yaml").read_bytes()],
        file_of("c.yaml", config.load),
    ),
    "override": (
        lambda: [b"train.steps=5", b"data.caption_weights={a: 1}", b"data.buckets=[[32, 32]]"],
        lambda data: config.load("tiny", [data.decode("utf-8", "replace")]),
    ),
    "model": (lambda: [MODEL], file_of("config.json", lambda path: read_config(path.parent))),
    "claim": (lambda: [b'{"host": "a", "process": 12, "time": 1.5}'], claims.parse_claim),
    "filter": (
        lambda: [b"a > 1 AND NOT b = 'x'", b"least(a, width) IN (1, 2) OR b IS NULL", b"regexp_matches(b, '^x+')"],
        expression,
    ),
}


def plan_table(files: Files, digest: str) -> None:
    cache = Cache.__new__(Cache)
    cache.files, cache._last_table = files, None
    cache.table(digest).validate(full=True)


# ---------------------------------------------------------------- edits

WORDS = [
    b"null",
    b"NaN",
    b"1e999",
    b"-0",
    b"9" * 400,
    b"9" * 5000,
    b'"\\ud800"',
    b"\\u0000",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"{}",
    b"[]",
    b"true",
    b'""',
    b"\xff\xfe",
    b"\0",
    b"\x1b[2J",
    b"../",
    b"/",
    b"http://x/",
    b"&a *a",
    b"!!python/object:os.x",
    b"(" * 500,
    b"\n",
    b"\r",
    b'"',
    b",",
    b":",
    "é".encode("utf-16"),
    b"0" * 12,
    b"7" * 12,
    b"x" * 300,
]
NUMBERS = [0, 1, 2, 127, 128, 255, 256, 32767, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1]


def edited(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """A few random edits."""
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        data = _edit(bytearray(data), others, rng)
    return data


def _edit(data: bytearray, others: list[bytes], rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    length = min(len(data) - at, rng.choice([1, 2, 4, 8, 64, 512, 4096]))
    match rng.randrange(9):
        case 0 if at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        case 1 if at < len(data):
            data[at] = rng.choice([0, 1, 9, 10, 32, 34, 47, 127, 128, 255, rng.randrange(256)])
        case 2:
            del data[at : at + length]
        case 3:
            data[at:at] = data[at : at + length] * rng.choice([1, 1, 3])
        case 4:
            data[at:at] = rng.choice(WORDS)
        case 5:
            number = rng.choice(NUMBERS)
            kinds = (("<H", 16), ("<I", 32), (">I", 32), ("<Q", 64))
            kind = rng.choice([kind for kind, limit in kinds if number >> limit == 0])
            size = struct.calcsize(kind)
            data[at : at + size] = struct.pack(kind, number)
        case 6:
            del data[at:]
        case 7:
            digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
            if digits:
                place = rng.choice(digits)
                data[place : place + 1] = rng.choice(WORDS[:6])
        case 8:
            other = rng.choice(others)
            begin = rng.randrange(len(other) + 1)
            data[at : at + length] = other[begin : begin + length]
    return bytes(data)


# ---------------------------------------------------------------- running


def outcome(parse: Callable[[bytes], object], data: bytes) -> str | None:
    """None, or what is wrong."""
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        parse(data)
    except UserError as error:
        return None if error.what.strip() else "an error that says nothing"
    except (TooSlow, Exception) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f"{f.filename}:{f.lineno}" for f in reversed(frames) if "/pipeline/" in f.filename), "")
        return f"{type(error).__name__}: {error} ({place})"[:500]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return None


def inputs(seed: int, count: int, names: list[str]) -> Iterator[tuple[str, bytes]]:
    seeds = {name: TARGETS[name][0]() for name in names}
    for n in range(count):
        name = names[n % len(names)]
        rng = random.Random(f"{seed} {n}")
        yield name, edited(rng.choice(seeds[name]), seeds[name], rng)


def main(seed: int, count: int, names: list[str]) -> None:
    def slow(*_: object) -> None:
        raise TooSlow(f"more than {SECONDS:g} s")

    signal.signal(signal.SIGVTALRM, slow)
    for name in names:
        for data in TARGETS[name][0]():
            wrong = outcome(TARGETS[name][1], data)
            assert wrong is None, f"the valid {name}: {wrong}"
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    done = 0
    for name, data in inputs(seed, count, names):
        (Path(FOLDER) / "input").write_bytes(data)
        wrong = outcome(TARGETS[name][1], data)
        if wrong is not None:
            print(json.dumps({"target": name, "wrong": wrong, "input": data.hex()}), flush=True)
        done += 1
    print(json.dumps({"inputs": done}), flush=True)


if __name__ == "__main__":
    FOLDER = sys.argv[3]
    run_and_exit(lambda: main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4:] or list(TARGETS)))
