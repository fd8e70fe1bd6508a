"""Bytes per sample of a 1024 px picture with a caption of 82 tokens, against the padded layout (300 rows, bf16).

Real shards are written and their files measured, headers, captions and record tables included. Values are normally
distributed, each text channel with a gain of its own (six of them 40 times the others): the exponents of a real encoder
compress about as well; its error with int8 is printed by `sana-pipe encode` for the first unit. CPU seconds are those
of one process, writing with sync and read-back, reading from the page cache; the storages take turns, medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.report import finish, table
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.cache import codec, shard
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.encodings import Encoding, encoding_class

TOKENS, WIDTH, PADDED = 82, 2304, 2 * (300 * 2304 + 32 * 32 * 32)
SHAPES = {"latent": (32, 32, 32), "text": (TOKENS, WIDTH)}
KEYS = {codec.PLAIN: "ratio_default", codec.LOSSLESS: "ratio_lossless", codec.INT8: "ratio_int8"}


def values(count: int) -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    gain = np.exp(rng.normal(0, 0.3, WIDTH))
    gain[:6] *= 40
    gains = {"latent": np.ones((32, 1, 1)), "text": gain}
    return {
        kind: [codec.from_float(rng.standard_normal(shape, np.float32) * gains[kind]) for _ in range(count)]
        for kind, shape in SHAPES.items()
    }


def write(
    cache: Cache, encoding: Encoding, arrays: list[np.ndarray], measured: Any = None
) -> tuple[str, int, pa.Table]:
    with shard.ShardWriter(cache.files, encoding, "unit", measured) as writer:
        for i, bits in enumerate(arrays):
            writer.add(i.to_bytes(16, "big"), bits, caption="x" * 400 if encoding.kind == "text" else None)
        return writer.finish()


def read(cache: Cache, encoding: Encoding, name: str, records: pa.Table, into: np.ndarray) -> None:
    reader = shard.ShardReader(cache.files, encoding.name)
    for row in records.to_pylist():
        reader.read(name, row["offset"], row["key"], row["checksum"], into, row["length"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    count, rounds = (32, 3) if quick else (256, 5)
    arrays = values(count)
    sizes: dict[tuple[str, str], float] = {}
    measured = {(storage, kind): codec.Measured() for storage in codec.STORAGES[1:] for kind in SHAPES}
    seconds: dict[tuple[str, str], list[float]] = {(way, s): [] for way in ("write", "read") for s in codec.STORAGES}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            cache = Cache(f"{folder}/{turn}", create=True)
            for storage in codec.STORAGES:
                spent = {"write": 0.0, "read": 0.0}
                for kind, shape in SHAPES.items():
                    encoding = encoding_class(kind)(storage=storage)
                    cache.add_encoding(encoding)
                    start = time.process_time()
                    name, size, records = write(cache, encoding, arrays[kind])
                    spent["write"] += time.process_time() - start
                    sizes[storage, kind] = size / count
                    into = np.empty(shape, np.uint16)
                    start = time.process_time()
                    read(cache, encoding, name, records, into)
                    spent["read"] += time.process_time() - start
                for way, took in spent.items():
                    seconds[way, storage].append(took)
        cache = Cache(f"{folder}/{rounds - 1}")
        for (storage, kind), one in measured.items():
            write(cache, encoding_class(kind)(storage=storage), arrays[kind][:16], one)
    gigabytes = sum(a.nbytes for kind in arrays.values() for a in kind) / 1e9
    rows: list[list[Any]] = [["padded to 300 rows, bf16", PADDED, 1.0, "", "", "", ""]]
    for storage in codec.STORAGES:
        both = sizes[storage, "latent"] + sizes[storage, "text"]
        errors = [f"{measured[storage, k].error:.4f}" if storage != codec.PLAIN else "0" for k in ("latent", "text")]
        cpu = [f"{statistics.median(seconds[way, storage]) / gigabytes:.2f}" for way in ("write", "read")]
        rows.append([storage, both, both / PADDED, *errors, *cpu])
    rows.append(
        [
            "latent bf16-zstd, text int8",
            mixed := sizes[codec.LOSSLESS, "latent"] + sizes[codec.INT8, "text"],
            mixed / PADDED,
            "",
            "",
            "",
            "",
        ]
    )
    table(["storage", "bytes/sample", "ratio", "error latent", "error text", "write CPU s/GB", "read CPU s/GB"], rows)
    ratios = {key: (sizes[storage, "latent"] + sizes[storage, "text"]) / PADDED for storage, key in KEYS.items()}
    finish(
        {
            **ratios,
            "ratio_mixed": mixed / PADDED,
            "error_int8_text": measured[codec.INT8, "text"].error,
            "error_int8_latent": measured[codec.INT8, "latent"].error,
            "read_cost_lossless": statistics.median(seconds["read", codec.LOSSLESS])
            / statistics.median(seconds["read", codec.PLAIN]),
            "read_cost_int8": statistics.median(seconds["read", codec.INT8])
            / statistics.median(seconds["read", codec.PLAIN]),
        }
    )


if __name__ == "__main__":
    run_and_exit(main)
