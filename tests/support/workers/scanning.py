"""A process that scans a source slowly and writes down every picture that it reads."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.encoding import scan as scanning
from sana_pipe.data.encoding import scan_rows
from sana_pipe.data.encoding.fragments import Fragments
from sana_pipe.data.sources.config import DataConfig
from sana_pipe.data.sources.detect import open_source
from sana_pipe.data.sources.source import Place, Source
from sana_pipe.data.work.claims import Claims
from sana_pipe.data.work.engine import Worker
from sana_pipe.data.work.stop import Stop, Stopped

RUN = 4


def slow(data: str, log: Path, seconds: float) -> Source:
    source = open_source(data, DataConfig(), "photos")
    read = source.read

    def slowly(place: Place) -> bytes:
        content = read(place)
        with log.open("a") as file:
            file.write(place.item + "\n")
        time.sleep(seconds)
        return content

    source.read = slowly  # type: ignore[method-assign]
    return source


def main(cache_root: str, data: str, log: str, task: str, tasks: str, stale_s: str, seconds: str) -> None:
    scan_rows.RUN = RUN
    cache = Cache(cache_root, create=True)
    stop = Stop(grace_s=0)
    fragments = Fragments(cache, "photos", Worker(Claims(cache.files, float(stale_s)), stop, int(task), int(tasks)))
    try:
        with stop.signals(), stop.polite():
            table = scanning.scan(
                slow(data, Path(log), float(seconds)),
                "photos",
                cache,
                max_pixels=10**6,
                workers=1,
                rehash=False,
                progress=lambda done, total: None,
                fragments=fragments,
            )
            cache.add_scan(
                "photos", {"root": data, "table": cache.put_table(table), "encodings": {"latent": "l", "text": "t"}}
            )
            fragments.finish()
    except Stopped:
        print("stopped", flush=True)


if __name__ == "__main__":
    run_and_exit(lambda: main(*sys.argv[1:]))
