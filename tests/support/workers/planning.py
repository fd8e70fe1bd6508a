"""A process of a launch that encodes a source with a maker that commits empty units.

argv: a JSON object; see `main`. It writes `planned` or `made UNIT` with its process id for each planning and each unit
to a log, and waits for the others where it says so.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sana_pipe.stages.encode
from benchmarks import large_cache
from benchmarks.report import resident
from sana_pipe.base.errors import UserError
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import load
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.encoding import plan as planning
from sana_pipe.data.encoding.fragments import Fragments
from sana_pipe.data.images import buckets
from sana_pipe.data.sources.source import Source
from sana_pipe.data.work.claims import Claims
from sana_pipe.data.work.engine import Worker, make_units
from sana_pipe.data.work.progress import Progress
from sana_pipe.data.work.stop import Stop
from tests.support.empty_units import Maker

WAIT_S = 240


def meet(folder: Path, place: str, count: int) -> None:
    """Wait until so many processes are at a place."""
    (folder / f"{place}-{os.getpid()}").touch()
    end = time.monotonic() + WAIT_S
    while len(list(folder.glob(f"{place}-*"))) < count:
        if time.monotonic() > end:
            raise TimeoutError(place)
        time.sleep(0.02)


def encode_run(
    cache_root: str,
    source: Source,
    task: int,
    tasks: int,
    stale_s: float,
    options: list[str],
    log: Callable[[str], None],
) -> sana_pipe.stages.encode.EncodeRun:
    """A run whose engine commits empty units."""
    config = load(None, [f"cache={cache_root}", *options])
    cache = Cache(config.cache, create=True)
    latent, text = large_cache.encodings(config)
    for encoding in (latent, text):
        cache.add_encoding(encoding)
    worker = Worker(Claims(cache.files, stale_s), Stop(0), task, tasks)

    @contextmanager
    def engine(run: Any) -> Iterator[sana_pipe.stages.encode.Make]:
        def make(todo: Any, noun: str) -> Any:
            maker = Maker(cache, lambda unit, progress: log(f"made {unit.unit}"))
            records, left = make_units(maker, todo, worker, Progress(noun, 0))
            return sana_pipe.stages.encode.Made(records, left, {})

        yield make

    sana_pipe.stages.encode.ENGINES["empty"] = engine
    table = buckets.table(config.data, latent.compression)
    return sana_pipe.stages.encode.EncodeRun(
        config,
        cache,
        text,
        worker,
        "empty",
        {source.name: source},
        source,
        sana_pipe.stages.encode.reading_of(config),
        [latent, text],
        table,
    )


def main(
    cache: str,
    data: str,
    log: str,
    task: int,
    tasks: int,
    stale_s: float = 60.0,
    meetings: dict[str, int] | None = None,
    dies: str = "",
    items: int = 0,
    options: list[str] | None = None,
) -> None:
    """meetings: place (`once`, `finish`) -> number of processes that wait for one another there. dies: the moment at
    which the first process that plans kills itself (`planning`, `published`). items: of a synthetic source in place of
    `data`."""
    notes = Path(log)

    def note(text: str) -> None:
        with notes.open("a") as file:
            file.write(f"{os.getpid()} {text}\n")

    real_once, real_finish, real_plan = Fragments.once, Fragments.finish, planning.plan_images
    meetings = meetings or {}
    owner: list[bool] = []

    def die(moment: str) -> None:
        if dies == moment and not (notes.parent / "died").exists():
            (notes.parent / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def plan_images(*args: Any) -> Any:
        note("planned")
        owner.append(True)
        die("planning")
        return real_plan(*args)

    def once(self: Fragments, *args: Any) -> Any:
        meet(notes.parent, "once", meetings.get("once", 1))
        result = real_once(self, *args)
        if owner:
            die("published")
        return result

    def finish(self: Fragments) -> None:
        meet(notes.parent, "finish", meetings.get("finish", 1))
        real_finish(self)

    planning.plan_images = plan_images  # type: ignore[assignment]
    Fragments.once, Fragments.finish = once, finish  # type: ignore
    config = load(None, [f"cache={cache}", *(options or [])])
    if items:
        source: Source = large_cache.source(Path(cache).parent, config, items)
    else:
        _, source, _ = sana_pipe.stages.encode.opened(config, data, "photos", None)
    run = encode_run(cache, source, task, tasks, stale_s, options or [], note)
    note(f"began {resident('RssAnon')}")
    began = time.process_time()
    try:
        done = sana_pipe.stages.encode.encode_source(run, False)
    except UserError as error:
        done = {"error": type(error).__name__, "text": str(error)}
    note(f"cpu {time.process_time() - began:.2f}")
    note("done " + json.dumps(done))


if __name__ == "__main__":
    run_and_exit(lambda: main(**json.loads(sys.argv[1])))
