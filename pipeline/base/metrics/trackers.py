"""Metrics to TensorBoard, Weights & Biases and the like, through accelerate's trackers: nine services, one interface.

`check` refuses trackers whose package is missing, before anything starts. The rows of JSON lines stay the source: a
tracker that fails (no network, no login) is reported and dropped, and the work continues.
Price: a service shows each resumed attempt as a separate run; TensorBoard drops repeated steps.
TensorBoard reads `tensorboard --logdir RUN`. The services have the project `sana-pipe` and the run directory's name.
Pictures come from the process that decodes them: TensorBoard shows them next to the metrics, a service as another
run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sana_pipe.base.errors import UserError, machine_error
from sana_pipe.base.options import flat

if TYPE_CHECKING:
    from PIL import Image

PROJECT = "sana-pipe"
_SINGLE = ("aim", "clearml")
"""Trackers that take a picture; the others take several."""


def check(names: Sequence[str], option: str) -> None:
    """Refuse trackers that cannot be imported. option: the one that names them.

    Raises:
        UserError: a package is missing; says how to install it.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        rest = [name for name in names if name not in missing]
        raise UserError(
            f"{option} names trackers that are not installed: {', '.join(missing)}",
            fix=f"pip install {' '.join(name.replace('_', '-') for name in missing)}, or --set "
            f"'{option}=[{', '.join(rest)}]'",
        )


class Trackers:
    """The open trackers of a run, on the first process.

    Args:
        names: accelerate's names.
        run: the run directory.
        done: steps that are done already; None: nothing is dropped.
        config: the whole configuration; empty: it is not logged.
        log: prints one line.

    Raises:
        UserError: a tracker cannot be opened.
    """

    def __init__(
        self, names: Sequence[str], run: Path, done: int | None, config: dict[str, Any], log: Callable[[str], None]
    ):
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
                if values:
                    tracker.store_init_configuration(values)
            except Exception as error:
                what = f"the tracker {name} cannot be opened"
                raise machine_error(error, what, "--resume auto") or UserError(
                    f"{what}: {type(error).__name__}: {error}",
                    fix=f"fix the cause, or take {name} out of train.trackers",
                ) from None
            self._open[name] = tracker

    def log(self, step: int, row: dict[str, Any], group: str) -> None:
        """Log the numbers of a row as GROUP/NAME. A tracker that fails is reported and dropped."""
        values = {f"{group}/{name}": v for name, v in row.items() if isinstance(v, int | float) and name != "step"}
        self._each(lambda name, tracker: tracker.log(values, step=step))

    def log_pictures(self, step: int, pictures: Mapping[str, Image.Image]) -> None:
        """Log pictures as pictures/NAME; a tracker without a function for pictures gets none."""
        values = {f"pictures/{name}": np.asarray(picture) for name, picture in pictures.items()}

        def show(name: str, tracker: Any) -> None:
            if not hasattr(tracker, "log_images"):
                return
            layout = {"dataformats": "NHWC"} if name == "tensorboard" else {}
            made = values if name in _SINGLE else {each: picture[None] for each, picture in values.items()}
            tracker.log_images(made, step=step, **layout)
            if name == "tensorboard":
                tracker.tracker.flush()

        self._each(show)

    def _each(self, use: Callable[[str, Any], None]) -> None:
        """Use each tracker. One that fails is reported and dropped."""
        for name, tracker in list(self._open.items()):
            try:
                use(name, tracker)
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


class PictureTrackers:
    """The trackers of one run or several, for pictures that are decoded alongside a training.

    Args:
        names: accelerate's names. log: prints one line.
    """

    def __init__(self, names: Sequence[str], log: Callable[[str], None]):
        self._names, self._log = names, log
        self._of_run: dict[Path, Trackers] = {}

    def log(self, run: Path, step: int, pictures: Mapping[str, Image.Image]) -> None:
        """Log the pictures of a step. A tracker that cannot be opened is reported, and gets none."""
        if run not in self._of_run:
            try:
                self._of_run[run] = Trackers(self._names, run, None, {}, self._log)
            except UserError as error:
                self._log(f"warning: {run}: pictures are not sent to trackers: {error.line}")
                self._of_run[run] = Trackers((), run, None, {}, self._log)
        self._of_run[run].log_pictures(step, pictures)

    def close(self) -> None:
        for trackers in self._of_run.values():
            trackers.close()


def _make(kind: Any, name: str, run: Path, done: int | None) -> Any:
    if name == "tensorboard":
        return kind("tensorboard", logging_dir=str(run), purge_step=None if done is None else done + 1)
    if name == "wandb":
        return kind(PROJECT, name=run.name, dir=str(run))
    return kind(PROJECT, logging_dir=str(run)) if kind.requires_logging_directory else kind(PROJECT)
