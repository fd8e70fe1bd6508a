"""Bytes per sample of a 1024 px picture with a caption of 82 tokens, against the padded layout (300 rows, bf16).

Real shards are written and their files measured; the values are random, which does not matter for these layouts.
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np

from benchmarks.report import finish, table
from pipeline.cache import layout, shard
from pipeline.cache.store import Cache

TOKENS, WIDTH, PADDED = 82, 2304, 2 * (300 * 2304 + 32 * 32 * 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    count = 32 if parser.parse_args().quick else 256
    rng = np.random.default_rng(0)
    sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(folder + "/cache", create=True)
        for recipe, shape in ((layout.LatentRecipe(), (32, 32, 32)), (layout.TextRecipe(), (TOKENS, WIDTH))):
            with shard.ShardWriter(cache.files, recipe, "unit") as writer:
                for i in range(count):
                    bits = rng.integers(0, 0x7F80, shape, np.uint16)
                    writer.add(i.to_bytes(16, "big"), bits, caption="x" * 400 if recipe.kind == "text" else None)
                _, sizes[recipe.kind], _ = writer.finish()
    latent, text = sizes["latent"] / count, sizes["text"] / count
    table(
        ["layout", "bytes/sample", "ratio"],
        [["padded to 300 rows, bf16", PADDED, 1.0], ["latent shard", latent, latent / PADDED],
         ["text shard", text, text / PADDED], ["both", latent + text, (latent + text) / PADDED]],
    )  # fmt: skip
    finish({"ratio_default": (latent + text) / PADDED})


if __name__ == "__main__":
    main()
