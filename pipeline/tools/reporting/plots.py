"""Plots as inline SVG: drawn from numbers, without a library, scripts or fonts.

Colours are CSS variables of the page (`--series-0` to `--series-7`, `--grid`) and `currentColor`, so one drawing serves
light, dark and paper; lines differ in dashes, too. Every plot has a title and a description for readers who do not see
it, axis labels and units. The drawing scales with the page; its text is legible at 330 pixels of width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 400, 250
WIDE = 1000
"""Width of a plot that has the page's width to itself."""
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 44
SERIES = 8
"""Distinct styles of lines; more series repeat them."""
BAR, LABEL, LETTER = 22, 128, 7
_STEPS = "optimizer step"


@dataclass(frozen=True)
class Line:
    """A curve. x, y: of equal length, finite. low, high: limits of a band around it, or empty."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def line_plot(
    title: str,
    lines: Sequence[Line],
    y_label: str,
    *,
    marks: Sequence[tuple[float, str]] = (),
    until: float | None = None,
    width: int = WIDTH,
) -> Markup:
    """Curves over optimizer steps.

    Args:
        title: unique on the page with the width.
        y_label: with its unit.
        marks: vertical lines at x, with what begins there.
        until: the axis goes from 0 to there; None: over the lines.
    """
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return Markup("")
    across = _Axis.of([0, until] if until else [x for line in lines for x in line.x], LEFT, width - RIGHT)
    up = _Axis.of([y for line in lines for y in (*line.y, *line.low, *line.high)], HEIGHT - BOTTOM, TOP)
    nodes = [*_grid(across, up, _STEPS, y_label, width), *_marks(across, marks)]
    for number, line in enumerate(lines):
        style, points = number % SERIES, _points(line.x, line.y, across, up)
        if len(line.low):
            band = [*_points(line.x, line.high, across, up), *_points(line.x, line.low, across, up)[::-1]]
            nodes.append(_node("polygon", class_=f"band s{style}", points=" ".join(band)))
        if len(points) == 1:
            x, y = points[0].split(",")
            nodes.append(_node("circle", class_=f"dot s{style}", cx=x, cy=y, r=3))
        else:
            nodes.append(_node("polyline", class_=f"line s{style}", points=" ".join(points)))
    described = "; ".join(
        f"{line.name}: from {number_text(line.y[0])} to {number_text(line.y[-1])}, lowest {number_text(min(line.y))}, "
        f"highest {number_text(max(line.y))}"
        for line in lines
    )
    keys = [line.name for line in lines] if len(lines) > 1 else []
    return _figure(title, f"{y_label} against {_STEPS}. {described}.", (width, HEIGHT), nodes, keys)


def column_plot(title: str, edges: Sequence[float], counts: Sequence[float], x_label: str, y_label: str) -> Markup:
    """A histogram. edges: of the columns, one more than `counts`."""
    if not any(counts):
        return Markup("")
    across = _Axis.of(edges, LEFT, WIDTH - RIGHT)
    up = _Axis.of([0, *counts], HEIGHT - BOTTOM, TOP)
    nodes = _grid(across, up, x_label, y_label, WIDTH)
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        if count:
            x, y = across.place(low), up.place(count)
            nodes.append(_bar(0, x, y, max(across.place(high) - x - 0.5, 0.5), up.place(0) - y))
    most = max(range(len(counts)), key=lambda i: counts[i])
    description = (
        f"{y_label} by {x_label}: {number_text(sum(counts))} in all; most, {number_text(counts[most])}, between "
        f"{number_text(edges[most])} and {number_text(edges[most + 1])}."
    )
    return _figure(title, description, (WIDTH, HEIGHT), nodes)


def bar_plot(title: str, labels: Sequence[str], series: Mapping[str, Sequence[float]]) -> Markup:
    """Horizontal bars, the series stacked. series: by name, a value for each label."""
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    if not any(totals):
        return Markup("")
    texts = [" + ".join(number_text(values[row]) for values in series.values()) for row in range(len(labels))]
    scale, nodes = (WIDTH - LABEL - 5 - max(57, LETTER * max(map(len, texts)))) / max(totals), []
    for row, label in enumerate(labels):
        y, x = 4 + row * BAR, float(LABEL)
        shown = label if len(label) <= 19 else f"{label[:18]}…"
        nodes.append(_node("text", shown, x=LABEL - 6, y=y + 15, text_anchor="end"))
        for number, values in enumerate(series.values()):
            nodes.append(_bar(number, x, y + 3, values[row] * scale, BAR - 6))
            x += values[row] * scale
        nodes.append(_node("text", texts[row], x=x + 5, y=y + 15))
    described = "; ".join(f"{label}: {number_text(total)}" for label, total in zip(labels, totals, strict=True))
    size = WIDTH, len(labels) * BAR + 8
    return _figure(title, f"{', '.join(series)}. {described}.", size, nodes, list(series))


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


def _grid(across: _Axis, up: _Axis, x_label: str, y_label: str, width: int) -> list[Markup]:
    left, right, bottom = LEFT, width - RIGHT, HEIGHT - BOTTOM
    turned, nodes = f"translate(12 {(TOP + bottom) / 2}) rotate(-90)", []
    for tick in up.ticks:
        y = up.place(tick)
        nodes.append(_node("line", class_="grid", x1=left, x2=right, y1=y, y2=y))
        nodes.append(_node("text", number_text(tick), x=left - 5, y=y, dy=4, text_anchor="end"))
    for tick in across.ticks:
        nodes.append(_node("text", _tick(tick), x=across.place(tick), y=bottom + 16, text_anchor="middle"))
    return [
        *nodes,
        _node("line", class_="axis", x1=left, x2=right, y1=bottom, y2=bottom),
        _node("text", x_label, x=(left + right) / 2, y=HEIGHT - 8, text_anchor="middle"),
        _node("text", y_label, transform=turned, text_anchor="middle"),
    ]


def _marks(across: _Axis, marks: Sequence[tuple[float, str]]) -> Iterator[Markup]:
    """Lines at x; the texts of those that have the room."""
    places = [across.place(min(max(x, across.lowest), across.highest)) for x, _ in marks]
    for (_, text), x, after in zip(marks, places, [*places, across.end][1:], strict=True):
        room = int((after - x) / 6.5)
        shown = text if len(text) <= room else f"{text[: room - 1]}…" if room > 3 else ""
        yield _node("line", class_="mark", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM)
        yield _node("text", shown, x=x + 4, y=TOP + 9)


def _bar(style: int, x: float, y: float, width: float, height: float) -> Markup:
    return _node("rect", class_=f"bar s{style % SERIES}", x=x, y=y, width=width, height=height)


def _tick(value: float) -> str:
    """A short number below the axis: `20k` for 20,000."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 and value % 100 == 0 else number_text(value)


def _points(x: Sequence[float], y: Sequence[float], across: _Axis, up: _Axis) -> list[str]:
    return [f"{_short(across.place(a))},{_short(up.place(b))}" for a, b in zip(x, y, strict=True)]


def _short(value: object) -> object:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def _figure(
    title: str, description: str, size: tuple[int, int], nodes: Sequence[Markup], keys: Sequence[str] = ()
) -> Markup:
    """A drawing of `size` (width, height) with its texts and a legend. keys: names of the series by style."""
    name = "-".join([*re.findall(r"\w+", title.lower()), str(size[0])])
    texts = _node("title", title, id=f"{name}-t") + _node("desc", description, id=f"{name}-d")
    box = {"viewBox": f"0 0 {size[0]} {size[1]}", "role": "img", "aria-labelledby": f"{name}-t {name}-d"}
    legend = Markup(" ").join(
        _node("span", _node("i", "", class_=f"k{number % SERIES}") + key, class_="key")
        for number, key in enumerate(keys)
    )
    drawing = _node("svg", texts + Markup("").join(nodes), **box)
    below = _node("div", legend, class_="keys") if keys else Markup("")
    return _node("figure", drawing + below + _node("figcaption", title))


def _node(tag: str, inside: str | None = None, **attributes: object) -> Markup:
    """An element, its values and text escaped. SVG needs no namespace inside HTML."""
    given = Markup("").join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), _short(value))
        for name, value in attributes.items()
    )
    return Markup("<{0}{1}/>" if inside is None else "<{0}{1}>{2}</{0}>").format(tag, given, inside)
