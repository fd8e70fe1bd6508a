"""The first section of the report: losses and pictures of the runs on one axis of optimizer steps.

Each prompt has a slider over the steps of each run; on a wide page its pictures lie below the plot, where they were
drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from PIL import Image

from sana_pipe.tools.reporting.blocks import COLUMNS, Block, Prompt, Slider
from sana_pipe.tools.reporting.curves import column, held_out, labels, length, line, marks, starts
from sana_pipe.tools.reporting.figures import Figures
from sana_pipe.tools.reporting.plots import WIDE, WIDTH, line_plot
from sana_pipe.tools.reporting.run_figures import RunFigures, undecoded
from sana_pipe.tools.reporting.run_pictures import DrawingFigures
from sana_pipe.tools.reporting.source_pictures import Embedded, embedded

FRAMES = 24
"""Limit on the pictures of a slider: the first, the last, and others evenly between them."""
PICTURE_SIDE = 320


class _Frame(NamedTuple):
    """A picture of a slider: its place on the axis, its label, what it shows, its file."""

    step: float
    label: str
    alt: str
    file: str | None


def progress(figures: Figures) -> Iterator[Block]:
    """A plot of losses and a `Prompt` for each prompt; a line about the pictures of each run."""
    runs = [run for run in (figures.run, figures.compare) if run is not None]
    if not runs:
        return
    until, lines = max(map(length, runs)), []
    for what, curve_of in (("training loss", column("loss")), ("held-out loss", held_out)):
        for label, run in zip(labels(runs), runs, strict=True):
            lines.append(line(f"{what}{'' if len(runs) == 1 else f', {label}'}", run, curve_of))
    for width in (WIDE, WIDTH):
        title, at = "Training loss and held-out loss", marks(runs[0])
        yield line_plot(title, lines, "loss", marks=at, until=until, width=width)
    sliders: dict[str, list[Slider]] = {}
    for number, (label, run) in enumerate(zip(labels(runs), runs, strict=True)):
        frames, drawn = _frames(run)
        if drawn:
            longest = max(map(len, frames.values()))
            of = f"{FRAMES} of " if longest > FRAMES else ""
            steps = "step" if longest == 1 else "steps"
            yield f"{label}: pictures of {of}{longest} {steps}, drawn with the {' and the '.join(sorted(drawn))}."
        for order, (prompt, places) in enumerate(frames.items()):
            shown = _spread(places)
            columns = _columns([frame.step / (until or 1) for frame in shown])
            slider = Slider(f"time-{number}-{order}", label, [_picture(frame) for frame in shown], columns)
            sliders.setdefault(prompt, []).append(slider)
    if sliders:
        yield from (f"{what}: {command}" for run in runs for what, command in undecoded(run))
    yield from (Prompt(prompt, of_prompt, _controls(runs, prompt)) for prompt, of_prompt in sliders.items())


def _controls(runs: list[RunFigures], prompt: str) -> list[Embedded]:
    """The control pictures that a prompt was drawn with, each once."""
    controls = dict[str, Embedded]()
    for drawing in (drawing for run in runs for part in run.parts for drawing in part.pictures):
        if isinstance(drawing, DrawingFigures) and drawing.controls and prompt in drawing.prompts:
            _, shown = _picture(_Frame(0, "", "control", drawing.controls[drawing.prompts.index(prompt)]))
            controls[shown.data] = shown
    return list(controls.values())


def _frames(run: RunFigures) -> tuple[dict[str, list[_Frame]], set[str]]:
    """The decoded pictures of each prompt, and the weights that drew them."""
    frames: dict[str, list[_Frame]] = {}
    several, drawn = len(run.parts) > 1, set()
    for start, part in zip(starts(run), run.parts, strict=False):
        for drawing in part.pictures:
            if not isinstance(drawing, DrawingFigures) or drawing.pictures is None:
                continue
            step, name = f"{drawing.step:,}", part.name
            when = (f"{name} {step}", f"{name}, step {step}") if several else (step, f"step {step}")
            drawn.add("EMA weights" if drawing.ema else "last weights")
            for prompt, file in zip(drawing.prompts, drawing.pictures, strict=True):
                frames.setdefault(prompt, []).append(_Frame(start + drawing.step, *when, file))
    return frames, drawn


def _columns(places: Sequence[float]) -> list[tuple[int, int]]:
    """(first column, columns) of `COLUMNS` for pictures in ascending places on an axis from 0 to 1: as near as they can
    be without lying over each other."""
    span = min(COLUMNS // 8, COLUMNS // max(1, len(places)))
    firsts, least, most = [], 0, COLUMNS - span * len(places)
    for place in places:
        least, most = max(least, min(round(COLUMNS * place - span / 2), most)) + span, most + span
        firsts.append(least - span)
    return [(first + 1, span) for first in firsts]


def _spread(frames: Sequence[_Frame]) -> list[_Frame]:
    last, count = len(frames) - 1, min(len(frames), FRAMES)
    return [frames[round(i * last / max(1, count - 1))] for i in range(count)]


def _picture(frame: _Frame) -> tuple[str, Embedded]:
    if frame.file is None:
        return frame.label, Embedded(frame.alt, why="the latent was not finite")
    try:
        with Image.open(frame.file) as picture:
            return frame.label, embedded(picture, frame.alt, PICTURE_SIDE)
    except OSError:
        return frame.label, Embedded(frame.alt)
