"""The data card of a snapshot that is given to others: a README for people and for a hub of data sets."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import yaml

from sana_pipe.base.amounts import amount
from sana_pipe.base.errors import escaped
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.snapshot import Snapshot
from sana_pipe.data.snapshots import provenance

NAME = "README.md"
_SIZES = ((1000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))
"""A hub's classes of sizes: samples below, name."""


def card(cache: Cache, snapshot: Snapshot, name: str, license: str, address: str) -> str:
    """Write the card.

    Args:
        cache: where the snapshot was made; it may have scans, which say how captions were read.
        name: of the snapshot where it is sent to.
        license: of pictures and captions, as the front matter states it.
        address: where it is sent to.
    """
    made = provenance.described(cache, snapshot)
    size = next((label for limit, label in _SIZES if snapshot.head.samples < limit), "n>10M")
    front: dict[str, Any] = {"license": license, "tags": ["sana-pipe", "latents", "webdataset"]}
    front["size_categories"] = [size]
    stored = sum(snapshot.shard_files().values())
    buckets = [f"| {b.height} x {b.width} | {b.samples} |" for b in snapshot.buckets]
    encodings = [f"| {kind} | `{encoding}` |" for kind, encoding in made["encodings"].items()]
    folders = sorted({PurePosixPath(shard).parts[1] for shard in snapshot.shard_files()})
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# {escaped(name)}

{snapshot.head.samples} samples in {amount(stored)}: latents of pictures and rows of a text encoder, for
training a latent diffusion transformer without encoders. They were made by `sana-pipe`.
**It holds captions as text, and latents decode to pictures**: who has it has both.

Licence of pictures and captions: {escaped(license)}.

## Train from it

```console
$ sana-pipe pull {address} --snapshot {name}
$ sana-pipe train --snapshot {name}
```

## Read it without sana-pipe

The shards are tars of `.npy` members; bits of bf16 are stored as uint16.

```python
import glob, io
import numpy as np, webdataset

shards = sorted(path for folder in {folders} for path in glob.glob(f"shards/{{folder}}/*/*.tar"))
for sample in webdataset.WebDataset(shards, shardshuffle=False, empty_check=False):
    arrays = {{name: np.load(io.BytesIO(data)) for name, data in sample.items() if name.endswith("npy")}}
    print(sample["__key__"], {{name: array.shape for name, array in arrays.items()}})
```

## What is in it

* Snapshot `{made["id"]}`, content `{made["content"]}`: equal contents give equal batches.

| records | encoding |
|---|---|
{chr(10).join(encodings)}

| height x width | samples |
|---|---|
{chr(10).join(buckets)}

## How it was made

```
{chr(10).join(provenance.lines(made))}
```
"""
