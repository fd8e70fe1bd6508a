"""Plots as inline SVG: drawn from numbers, without a library, scripts or fonts.

Colours are CSS variables of the page (`--series-0` to `--series-5`, `--grid`) and `currentColor`, so one drawing serves
light, dark and paper; lines differ in dashes, too. Every plot has a title and a description for readers who do not see
it, axis labels and units. The drawing scales with the page; its text is legible at 330 pixels of width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 400, 250
WIDE = 1000
"""Width of a plot that has the page's width to itself."""
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 44
SERIES = 8
"""Distinct styles of lines; further series repeat them."""
BAR, LABEL = 22, 128


@dataclass(frozen=True)
class Line:
    """A curve. x, y: of equal length, finite. low, high: limits of a band around it, or empty."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def line_plot(
    name: str,
    title: str,
    lines: Sequence[Line],
    y_label: str,
    x_label: str = "optimizer step",
    *,
    marks: Sequence[tuple[float, str]] = (),
    until: float | None = None,
    width: int = WIDTH,
) -> Markup:
    """Curves over one another.

    Args:
        name: unique on the page; the ids of title and description begin with it.
        y_label: with its unit.
        marks: vertical lines at x, with what begins there.
        until: the axis goes from 0 to there; None: over the lines.
    """
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return Markup("")
    ends = [0, until] if until else [x for line in lines for x in line.x]
    across = _Axis.of(ends, LEFT, width - RIGHT)
    values = [y for line in lines for y in (*line.y, *line.low, *line.high)]
    up = _Axis.of(values, HEIGHT - BOTTOM, TOP)
    parts = [_grid(across, up, x_label, y_label, width), *_marks(across, marks)]
    for number, line in enumerate(lines):
        style = number % SERIES
        if len(line.low):
            upper = _points(line.x, line.high, across, up)
            lower = _points(line.x, line.low, across, up)[::-1]
            parts.append(Markup('<polygon class="band s{}" points="{}"/>').format(style, " ".join([*upper, *lower])))
        points = _points(line.x, line.y, across, up)
        if len(points) == 1:
            x, y = points[0].split(",")
            parts.append(Markup('<circle class="dot s{}" cx="{}" cy="{}" r="3"/>').format(style, x, y))
        else:
            parts.append(Markup('<polyline class="line s{}" points="{}"/>').format(style, " ".join(points)))
    described = "; ".join(
        f"{line.name}: from {number_text(line.y[0])} to {number_text(line.y[-1])}, lowest {number_text(min(line.y))}, "
        f"highest {number_text(max(line.y))}"
        for line in lines
    )
    description = f"{y_label} against {x_label}. {described}."
    drawing = _svg(name, title, description, width, HEIGHT, Markup("").join(parts))
    return _figure(title, drawing, [line.name for line in lines] if len(lines) > 1 else [])


def _marks(across: _Axis, marks: Sequence[tuple[float, str]]) -> Iterator[Markup]:
    """Lines at x; the texts of those that have the room."""
    places = [across.place(min(max(x, across.lowest), across.highest)) for x, _ in marks]
    for (_, text), x, after in zip(marks, places, [*places, across.end][1:], strict=True):
        room = int((after - x) / 6.5)
        shown = text if len(text) <= room else f"{text[: room - 1]}…" if room > 3 else ""
        yield Markup('<line class="mark" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
            _short(x), _short(x), TOP, HEIGHT - BOTTOM
        )
        yield Markup('<text x="{}" y="{}">{}</text>').format(_short(x + 4), TOP + 9, shown)


def column_plot(
    name: str, title: str, edges: Sequence[float], counts: Sequence[float], x_label: str, y_label: str
) -> Markup:
    """A histogram. edges: of the columns, one more than `counts`."""
    if not any(counts):
        return Markup("")
    across = _Axis.of(edges, LEFT, WIDTH - RIGHT)
    up = _Axis.of([0, *counts], HEIGHT - BOTTOM, TOP)
    columns = Markup("").join(
        Markup('<rect class="bar s0" x="{}" y="{}" width="{}" height="{}"/>').format(
            _short(across.place(low)),
            _short(up.place(count)),
            _short(max(across.place(high) - across.place(low) - 0.5, 0.5)),
            _short(up.place(0) - up.place(count)),
        )
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
        if count
    )
    highest = max(range(len(counts)), key=lambda i: counts[i])
    description = (
        f"{y_label} by {x_label}: {number_text(sum(counts))} in all; most, {number_text(counts[highest])}, between "
        f"{number_text(edges[highest])} and {number_text(edges[highest + 1])}."
    )
    inside = _grid(across, up, x_label, y_label, WIDTH) + columns
    return _figure(title, _svg(name, title, description, WIDTH, HEIGHT, inside), [])


def bar_plot(
    name: str,
    title: str,
    labels: Sequence[str],
    series: Sequence[tuple[str, Sequence[float]]],
    text: Callable[[float], str] | None = None,
) -> Markup:
    """Horizontal bars, the series stacked. labels: of the bars; series: (name, a value for each); text: of a value;
    None: a number."""
    text = text or number_text
    totals = [sum(values) for values in zip(*(values for _, values in series), strict=True)]
    if not any(totals):
        return Markup("")
    scale = (WIDTH - LABEL - 62) / max(totals)
    height = len(labels) * BAR + 8
    parts = []
    for row, label in enumerate(labels):
        y, x = 4 + row * BAR, float(LABEL)
        shown = label if len(label) <= 19 else f"{label[:18]}…"
        parts.append(Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(LABEL - 6, y + 15, shown))
        for number, (_, values) in enumerate(series):
            width = values[row] * scale
            box = (number % SERIES, _short(x), y + 3, _short(width), BAR - 6)
            parts.append(Markup('<rect class="bar s{}" x="{}" y="{}" width="{}" height="{}"/>').format(*box))
            x += width
        numbers = " + ".join(text(values[row]) for _, values in series)
        parts.append(Markup('<text x="{}" y="{}">{}</text>').format(_short(x + 5), y + 15, numbers))
    names = ", ".join(name for name, _ in series)
    described = "; ".join(f"{label}: {text(total)}" for label, total in zip(labels, totals, strict=True))
    drawing = _svg(name, title, f"{names}. {described}.", WIDTH, height, Markup("").join(parts))
    return _figure(title, drawing, [name for name, _ in series])


def number_text(value: float) -> str:
    """A number in few characters: `1,204`, `0.0312`, `2.5e-5`."""
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    if abs(value) < 1e-3:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"


@dataclass(frozen=True)
class _Axis:
    """A linear axis. ticks: its round numbers; begin, end: where the lowest and highest value lie, in the drawing."""

    lowest: float
    highest: float
    begin: float
    end: float
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float], begin: float, end: float) -> _Axis:
        low, high = min(values), max(values)
        if low == high:
            margin = abs(low) / 2 or 1.0
            low, high = low - margin, high + margin
        rough = (high - low) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return cls(low, high, begin, end, tuple(round(i * step, 12) for i in range(first, last + 1)))

    def place(self, value: float) -> float:
        return self.begin + (value - self.lowest) / (self.highest - self.lowest) * (self.end - self.begin)


def _grid(across: _Axis, up: _Axis, x_label: str, y_label: str, width: int) -> Markup:
    left, right, bottom = LEFT, width - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in up.ticks:
        y = _short(up.place(tick))
        parts.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(left, right, y, y))
        parts.append(
            Markup('<text x="{}" y="{}" dy="4" text-anchor="end">{}</text>').format(left - 5, y, number_text(tick))
        )
    for tick in across.ticks:
        x = _short(across.place(tick))
        parts.append(Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(x, bottom + 16, _tick(tick)))
    parts.append(Markup('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(left, right, bottom, bottom))
    middle = (left + right) / 2
    parts.append(Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(middle, HEIGHT - 8, x_label))
    centre = (TOP + bottom) / 2
    turned = Markup('<text transform="translate(12 {}) rotate(-90)" text-anchor="middle">{}</text>')
    parts.append(turned.format(centre, y_label))
    return Markup("").join(parts)


def _tick(value: float) -> str:
    """A short number below the axis: `20k` for 20,000."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 and value % 100 == 0 else number_text(value)


def _points(x: Sequence[float], y: Sequence[float], across: _Axis, up: _Axis) -> list[str]:
    return [f"{_short(across.place(a))},{_short(up.place(b))}" for a, b in zip(x, y, strict=True)]


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _svg(name: str, title: str, description: str, width: int, height: int, inside: Markup) -> Markup:
    # without a namespace: inside HTML none is needed
    return Markup(
        '<svg viewBox="0 0 {w} {h}" role="img" aria-labelledby="{n}-t {n}-d"><title id="{n}-t">{t}</title>'
        '<desc id="{n}-d">{d}</desc>{inside}</svg>'
    ).format(w=width, h=height, n=name, t=title, d=description, inside=inside)


def _figure(title: str, drawing: Markup, names: Sequence[str]) -> Markup:
    keys = Markup("").join(
        Markup('<span class="key"><i class="k{}"></i>{}</span> ').format(number % SERIES, name)
        for number, name in enumerate(names)
    )
    legend = Markup('<div class="keys">{}</div>').format(keys) if names else Markup("")
    return Markup("<figure>{}{}<figcaption>{}</figcaption></figure>").format(drawing, legend, escape(title))
