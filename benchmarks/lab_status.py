"""Requests and bytes of one `status` of an unchanged cache on S3: counted at moto's server.

The commands that change a cache end with `join`, so this one is joined before the first call. The cache is
that of `benchmarks.large_cache`, copied to a bucket: scan, plans and indexes in full size, shards without
content.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from functools import partial
from pathlib import Path
from uuid import uuid4

import fsspec

from benchmarks import large_cache, s3_listing
from benchmarks.report import part_of_lab
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.config import MirrorConfig
from sana_pipe.data.cache.status import join, status

QUICK_ITEMS, ITEMS = 2_000, 200_000
WANTED = {"status_requests": "<= 5", "status_requests_again": "<= 5"}


def measure(quick: bool, folder: Path) -> dict[str, float]:
    """Count what a `status` asks of S3, with an empty mirror and again with what that left there.

    Args:
        quick: a cache of `QUICK_ITEMS` items, else of `ITEMS`.
        folder: for the cache and the mirror; empty.

    Returns:
        `status_requests` and `status_bytes` (received) of the first call, `status_requests_again` and
        `status_bytes_again` of a second one in another process's place: a newly opened cache.
    """
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it prints a line a request
    large_cache.build(folder, QUICK_ITEMS if quick else ITEMS)
    for shard in (folder / "cache/shards").rglob("*.tar"):
        os.truncate(shard, 0)  # no snapshot asks for its size, and the server keeps every byte in memory
    bucket, sent, figures = f"status-{uuid4().hex}", Counter[str](), dict[str, float]()
    with s3_listing.counting_server(sent) as requests:
        store = fsspec.filesystem("s3")
        store.mkdir(bucket)
        store.put(str(folder / "cache"), f"{bucket}/cache", recursive=True)
        join(Cache(f"s3://{bucket}/cache", mirror=MirrorConfig(path=str(folder / "writer"))))
        for call in ("", "_again"):
            requests.clear()
            sent.clear()
            report = status(Cache(f"s3://{bucket}/cache", mirror=MirrorConfig(path=str(folder / "mirror"))))
            if report["damaged"] or not report["complete"]:
                raise RuntimeError(f"this is not the status of an intact cache: {report}")
            figures[f"status_requests{call}"] = sum(requests.values())
            figures[f"status_bytes{call}"] = sum(sent.values())
    return figures


if __name__ == "__main__":
    run_and_exit(partial(part_of_lab, __doc__, measure, WANTED))
