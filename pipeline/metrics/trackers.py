"""Metrics to TensorBoard, Weights & Biases and the like, through accelerate's trackers: nine services, one interface.

`check` refuses trackers whose package is missing, before anything starts. The rows of JSON lines stay the source: a
tracker that fails (no network, no login) is reported and dropped, and the work continues.
Price: a service shows each resumed attempt as a separate run; TensorBoard drops repeated steps.
TensorBoard reads `tensorboard --logdir RUN`. The services have the project `sana-pipe` and the run directory's name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import UserError, machine_error
from pipeline.options import flat

PROJECT = "sana-pipe"


def check(names: Sequence[str], option: str) -> None:
    """Refuse trackers that cannot be imported. option: the one that names them.

    Raises:
        UserError: a package is missing; says how to install it.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        rest = [name for name in names if name not in missing]
        raise UserError(
            f"{option} names {', '.join(missing)}, and that is not installed",
            fix=f"pip install {' '.join(name.replace('_', '-') for name in missing)}, or --set "
            f"'{option}=[{', '.join(rest)}]'",
        )


class Trackers:
    """The open trackers of a run, on the first process.

    Args:
        names: accelerate's names.
        run: the run directory.
        done: steps that are done already.
        config: the whole configuration.
        log: prints one line.

    Raises:
        UserError: a tracker cannot be opened.
    """

    def __init__(self, names: Sequence[str], run: Path, done: int, config: dict[str, Any], log: Callable[[str], None]):
        self._log = log
        self._open: dict[str, Any] = {}
        if not names:
            return
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS  # slow: imports many backends

        values = {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in flat(config)}
        for name in names:
            try:
                tracker = _make(LOGGER_TYPE_TO_CLASS[name], name, run, done)
                tracker.start()
                tracker.store_init_configuration(values)
            except Exception as error:
                what = f"the tracker {name} cannot be opened"
                raise machine_error(error, what, "--resume auto") or UserError(
                    f"{what}: {type(error).__name__}: {error}",
                    fix="mend that, or take it out of the option trackers",
                ) from None
            self._open[name] = tracker

    def log(self, step: int, row: dict[str, Any], group: str) -> None:
        """Log the numbers of a row as GROUP/NAME. A tracker that fails is reported and dropped."""
        values = {f"{group}/{name}": v for name, v in row.items() if isinstance(v, int | float) and name != "step"}
        for name, tracker in list(self._open.items()):
            try:
                tracker.log(values, step=step)
            except Exception as error:
                del self._open[name]
                self._log(f"warning: the tracker {name} failed and is left out: {type(error).__name__}: {error}")

    def close(self) -> None:
        for name, tracker in self._open.items():
            try:
                tracker.finish()
            except Exception as error:
                self._log(f"warning: the tracker {name} could not be closed: {type(error).__name__}: {error}")
        self._open = {}


def _make(kind: Any, name: str, run: Path, done: int) -> Any:
    if name == "tensorboard":
        return kind("tensorboard", logging_dir=str(run), purge_step=done + 1)
    if name == "wandb":
        return kind(PROJECT, name=run.name, dir=str(run))
    return kind(PROJECT, logging_dir=str(run)) if kind.requires_logging_directory else kind(PROJECT)
