"""The lock of a run that another process holds."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

from sana_pipe.train.training import lock

ELSEWHERE = lock.Owner("07e4", "node7", 4711, {"machine": "node7", "process": "4711", "started": "1"}, 0, None, 0)


def plant(run: Path, owner: lock.Owner, *, untouched_s: float = 0.0, job: str | None = None, attempt: int = 0) -> Path:
    """A lock in a run directory, as its owner would have written it."""
    run.mkdir(exist_ok=True)
    path = run / lock.NAME
    path.write_text(json.dumps(asdict(replace(owner, since=time.time() - 7300, job=job, attempt=attempt))))
    os.utime(path, (time.time() - untouched_s,) * 2)
    return path
