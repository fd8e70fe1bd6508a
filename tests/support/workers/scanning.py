"""A process that scans a folder slowly and writes down every picture that it reads."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pipeline.cache.root import Cache
from pipeline.encoding import scan as scanning
from pipeline.encoding.fragments import Fragments
from pipeline.processes import run_and_exit
from pipeline.sources.folder import FolderSource
from pipeline.work.claims import Claims
from pipeline.work.engine import Worker
from pipeline.work.stop import Stop, Stopped

RUN = 4


class Slow(FolderSource):
    def __init__(self, root: Path, log: Path, seconds: float):
        super().__init__(root, "text", "photos")
        self.log, self.seconds = log, seconds

    def read(self, key: str) -> bytes:
        data = super().read(key)
        with self.log.open("a") as file:
            file.write(key + "\n")
        time.sleep(self.seconds)
        return data


def main(cache_root: str, data: str, log: str, task: str, tasks: str, stale_s: str, seconds: str) -> None:
    scanning.RUN = RUN
    cache = Cache(cache_root, create=True)
    stop = Stop(grace_s=0)
    fragments = Fragments(cache, "photos", Worker(Claims(cache.files, float(stale_s)), stop, int(task), int(tasks)))
    try:
        with stop.signals(), stop.polite():
            table = scanning.scan(
                Slow(Path(data), Path(log), float(seconds)),
                "photos",
                cache,
                max_pixels=10**6,
                workers=1,
                rehash=False,
                progress=lambda done, total: None,
                fragments=fragments,
            )
            cache.add_scan("photos", {"root": data, "table": cache.put_table(table)})
            fragments.finish()
    except Stopped:
        print("stopped", flush=True)


if __name__ == "__main__":
    run_and_exit(lambda: main(*sys.argv[1:]))
