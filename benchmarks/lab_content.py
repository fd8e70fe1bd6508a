"""One content id on two machines, and what it costs to compare snapshots of 10^6 samples (10^5 with --quick).

Machines: two folders of equal pictures whose files have other times, each encoded by the small models of the tests into
a cache of its own. content_ids: the number of content ids that their snapshots have. content_differences: what
`snapshots diff` names between them, and between the first and the second's list.

Costs: two synthetic caches of one list of samples, in which a hundredth differs. Each command runs in a process of its
own; MiB are its largest private memory. diff_: two snapshots. list_, list_diff_: a list in CSV is written, and compared
with the other snapshot.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from functools import partial
from pathlib import Path

import pyarrow as pa

import sana_pipe.stages.bucket
import sana_pipe.stages.encode
import sana_pipe.stages.snapshots
from benchmarks import large_cache
from benchmarks.report import part_of_lab
from sana_pipe.base.processes import run_and_exit
from sana_pipe.config import Config, load
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.keys import binary, fixed
from sana_pipe.tools.demo import small_models
from sana_pipe.tools.demo.photographs import demo_photos

PICTURES, QUICK = 1_000_000, 100_000
CHANGED = 100
"""One picture in so many differs between the two synthetic caches."""
LIST = "list.csv"
WANTED = {"content_ids": "== 1", "content_differences": "== 0", "diff_mib": "<= 700", "list_diff_mib": "<= 600"}


def measure(quick: bool, folder: Path) -> dict[str, float]:
    """The figures of the module's docstring. folder: an empty one."""
    count = QUICK if quick else PICTURES
    figures = _machines(folder / "machines")
    for name, changed in (("one", False), ("two", True)):
        large_cache.build(folder / name, count, _changed if changed else lambda scan: scan)
        with contextlib.redirect_stdout(io.StringIO()):
            sana_pipe.stages.bucket.run(large_cache.configuration(folder / name), name="made")
    for command, cache in (("list", "two"), ("list_diff", "one"), ("diff", "one")):
        cost = large_cache.cost(command, folder / cache, count)
        figures[f"{command}_mib"], figures[f"{command}_cpu_s"] = cost.own / 2**20, cost.cpu
    return figures


def _changed(scan: pa.Table) -> pa.Table:
    """A tar's scan of which every picture in `CHANGED` is another file."""
    digests = fixed(scan.column("digest")).copy()
    digests[::CHANGED] = [layout.digest("other", str(row)) for row in range(0, len(scan), CHANGED)]
    return scan.set_column(scan.schema.get_field_index("digest"), scan.schema.field("digest"), binary(digests))


def _machines(folder: Path) -> dict[str, float]:
    """Encode equal files with other times into two caches, and compare the snapshots."""
    models = folder / "models"
    photos = demo_photos(folder / "photos")
    small_models.make_all(models, [], [caption for _, caption in photos], steps=0, sizes=[(64, 64)])
    contents, configs = set[str | None](), list[Config]()
    for name, seconds in (("here", 1e9), ("there", 1.5e9)):
        shutil.copytree(folder / "photos", folder / name / "photos")
        for number, file in enumerate(sorted((folder / name / "photos").rglob("*.*"))):
            os.utime(file, (seconds, seconds + number))
        sets = [f"cache={folder / name / 'cache'}", f"vae.id={models}", f"text.id={models}"]
        configs.append(config := load("tiny", sets))
        with contextlib.redirect_stdout(io.StringIO()):
            sana_pipe.stages.encode.run(config, data=str(folder / name / "photos"))
            sana_pipe.stages.bucket.run(config, name="made")
        contents.add(Cache(config.cache).open_snapshot("made").head.content_id)
    with contextlib.redirect_stdout(io.StringIO()):
        sana_pipe.stages.snapshots.write_list(configs[1], "made", str(folder / LIST))
    differences = 0
    for other in (f"{configs[1].cache}:made", str(folder / LIST)):
        with contextlib.redirect_stdout(printed := io.StringIO()):
            sana_pipe.stages.snapshots.diff(configs[0], "made", other, as_json=True)
        differences += sum(json.loads(printed.getvalue())["counts"].values())
    return {"content_ids": float(len(contents)), "content_differences": float(differences)}


if __name__ == "__main__":
    run_and_exit(partial(part_of_lab, __doc__, measure, WANTED))
