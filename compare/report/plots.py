"""The four kinds of drawings in a report: intervals, distributions, stacks and lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

from compare.numbers import number
from compare.report.drawing import Axis, Drawing, Scale, aid_sample, legend, line_sample
from compare.report.styles import Style
from compare.results import SMALLEST_CLAIM

_MAX_VALUES = 2000
_MAX_POINTS = 100
# How many points of a line have a mark, and how many the outline of a distribution has.
_NUM_MARKS = 12
_NUM_OUTLINE = 80
# Parts of a step that have a hatching over their colour.
_HATCHINGS = {1: "rising", 3: "falling", 5: "rising"}
_MAX_LETTERS = 34
# Of a forest plot: the least and the greatest height of a row, the percents that it shows at most, what is near an end.
_FOREST_ROWS = (44, 92)
OFF_THE_SCALE = 100
_NEAR_AN_END = (0.3, 0.7)
_HEIGHT = 280


@dataclass(frozen=True)
class Line:
    """Points that belong together, with an interval around each of them if there is one."""

    name: str
    style: Style
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@dataclass(frozen=True)
class Item:
    """One row of a drawing that has a row for each backend."""

    label: str
    note: str
    style: Style
    values: Sequence[float] = ()
    estimate: float | None = None
    low: float | None = None
    high: float | None = None


def thinned(values: Sequence[float]) -> list[float]:
    """Returns fewer values of the same distribution, with both extremes."""
    if len(values) <= _MAX_VALUES:
        return list(values)
    picks = np.linspace(0, len(values) - 1, _MAX_VALUES).round().astype(int)
    return [float(value) for value in np.sort(np.asarray(values))[picks]]


def decades(values: Iterable[float]) -> dict[float, str]:
    """Returns ticks of a logarithmic axis: powers of ten, and numbers between them if there are few."""
    powers = [math.floor(math.log10(value)) for value in values if value > 0]
    if not powers:
        return {}
    factors = (1, 2, 5) if max(powers) - min(powers) < 3 else (1,)
    ticks = (factor * 10.0**power for power in range(min(powers), max(powers) + 2) for factor in factors)
    return {tick: f"{tick:g}" for tick in ticks}


def bin_size(num_points: int) -> int:
    """Returns how many points of a curve are drawn as one."""
    return -(-num_points // _MAX_POINTS)


def averaged(values: Sequence[float | None], width: int) -> list[float | None]:
    """Returns means of `width` values each; None where one of them is missing, so that the gap shows."""
    bins = [values[start : start + width] for start in range(0, len(values), width)]
    return [None if None in part else sum(value or 0.0 for value in part) / len(part) for part in bins]


def intervals(items: Sequence[Item], axis: Axis) -> Markup:
    """Draws a row for each backend: single values as small marks, the estimate with its interval as a large one."""
    ends = [value for item in items for value in (*item.values, item.estimate, item.low, item.high)]
    drawing, scale = _rows(items, axis, ends, row_height=62)
    for top, item in zip(range(0, drawing.height, 62), items, strict=True):
        colour, of_runs = f"bar c{item.style.colour}", replace(item.style, is_open=True)
        for value in item.values:
            drawing.mark(scale.share(value), top + 52, of_runs, f"one run: {number(value)}", is_small=True)
        if item.estimate is None:
            continue
        said = f"{item.label}: {number(item.estimate)}"
        if item.low is not None and item.high is not None:
            said += f" ({number(item.low)} to {number(item.high)})"
            drawing.line(scale.share(item.low), scale.share(item.high), top + 34, colour)
            for end in (item.low, item.high):
                drawing.rule(scale.share(end), top + 28, top + 40, colour)
        drawing.mark(scale.share(item.estimate), top + 34, item.style, said)
    return drawing.markup()


def forest(items: Sequence[Item], axis: Axis) -> Markup:
    """Draws a row for each backend: by how many percent it takes longer than the first, over the zone of no claim.

    What takes more than twice as long is written at the end of its row, so that small differences remain visible.
    """
    row = min(_FOREST_ROWS[1], max(_FOREST_ROWS[0], _HEIGHT // len(items)))
    margin, drawing = 100 * SMALLEST_CLAIM, Drawing(row * len(items))
    shown = [item for item in items if item.estimate is not None and item.estimate <= OFF_THE_SCALE]
    ends = [value for item in shown for value in (item.estimate, item.low, item.high) if value is not None]
    scale = Scale(axis, [*(min(value, OFF_THE_SCALE) for value in ends), -margin, margin])
    drawing.rectangle(scale.share(-margin), scale.share(margin), 0, drawing.height, "zone")
    drawing.x_axis(axis, scale)
    drawing.rule(scale.share(0), 0, drawing.height, "frame")
    middles = [row * (i + 0.6) for i in range(len(items))]
    drawing.row_labels({y: _shortened(item.label, 16) for y, item in zip(middles, items, strict=True)})
    for y, item in zip(middles, items, strict=True):
        assert item.estimate is not None
        share, kind = (scale.share(item.estimate) if item in shown else 1.0), f"bar c{item.style.colour}"
        if item in shown and item.low is not None and item.high is not None:
            drawing.line(scale.share(item.low), scale.share(min(item.high, OFF_THE_SCALE)), y, kind)
        elif item not in shown:
            drawing.line(0.9, 1, y, f"{kind} d{item.style.dash}")
        drawing.mark(share, y, item.style, f"{item.label}: {item.note}")
        anchor = "end" if share > _NEAR_AN_END[1] else "start" if share < _NEAR_AN_END[0] else "middle"
        drawing.text(item.note, share + (0.02 if anchor == "start" else 0), y - 11, "tick", anchor)
    return drawing.markup()


def distributions(items: Sequence[Item], axis: Axis) -> Markup:
    """Draws a row for each backend: how often each value occurs, with the median and the quartiles."""
    drawing, scale = _rows(items, axis, [value for item in items for value in item.values], row_height=84)
    for top, item in zip(range(0, drawing.height, 84), items, strict=True):
        middle = top + 52
        outline = _density(thinned(item.values))
        above = [(scale.share(value), middle - 27 * density) for value, density in outline]
        below = [(share, 2 * middle - y) for share, y in reversed(above)]
        drawing.curve([*above, *below], f"mark fill edge c{item.style.colour}", closed=True)
        low, median, high = (float(value) for value in np.quantile(item.values, [0.25, 0.5, 0.75]))
        said = f"{item.label}: median {number(median)}, middle half {number(low)} to {number(high)}"
        drawing.rectangle(scale.share(low), scale.share(high), middle - 8, 16, "box", said)
        drawing.rule(scale.share(median), middle - 8, middle + 8, "edge")
    return drawing.markup()


def _density(values: Sequence[float]) -> list[tuple[float, float]]:
    """Estimates a density with Gaussian kernels and Silverman's bandwidth; the largest density is 1."""
    sample = np.asarray(values)
    spread = min(float(sample.std()), float(np.subtract(*np.quantile(sample, [0.75, 0.25]))) / 1.34) or sample.std()
    if spread == 0:
        return [(float(sample[0]), 0.0), (float(sample[0]), 1.0)]
    bandwidth = 0.9 * spread * len(sample) ** -0.2
    grid = np.linspace(sample.min(), sample.max(), _NUM_OUTLINE)
    density = np.exp(-0.5 * ((grid[:, None] - sample) / bandwidth) ** 2).sum(axis=1)
    return [(float(x), float(y)) for x, y in zip(grid, density / density.max(), strict=True)]


def stacks(items: Sequence[Item], parts: Sequence[str], axis: Axis) -> Markup:
    """Draws a bar for each backend, made of its parts; `values` of an item are those of the parts.

    A part below zero, as noise may make it, is drawn to the left of zero.
    """
    ends = [sum(value for value in item.values if value * sign > 0) for item in items for sign in (-1, 1)]
    drawing, scale = _rows(items, axis, ends, row_height=56)
    for top, item in zip(range(0, drawing.height, 56), items, strict=True):
        reached = {True: 0.0, False: 0.0}
        for k, (part, value) in enumerate(zip(parts, item.values, strict=True)):
            start = reached[value >= 0]
            reached[value >= 0] = start + value
            low, high = sorted((scale.share(start), scale.share(start + value)))
            drawing.rectangle(low, high, top + 24, 26, f"mark edge p{k}", f"{part}: {number(value)}")
            if k in _HATCHINGS:
                drawing.rectangle(low, high, top + 24, 26, _HATCHINGS[k])
    samples = [
        (part, Markup('<rect class="edge p{}" x="4" width="26" y="1" height="12"/>').format(k))
        for k, part in enumerate(parts)
    ]
    return legend(samples) + drawing.markup()


def lines(series: Sequence[Line], x: Axis, y: Axis, ideal: Sequence[Line] = (), level: float | None = None) -> Markup:
    """Draws a line for each backend; lines of the ideal, and a level to reach, are thin and lie behind them.

    A line of the ideal that has a name is in the legend.
    """
    drawing = Drawing(_HEIGHT)
    everything = [*series, *ideal]
    across = Scale(x, [value for line in everything for value in line.x])
    bounds = [value for line in everything for value in (*line.y, *line.low, *line.high)]
    up = Scale(y, [*bounds, level])
    drawing.x_axis(x, across)
    drawing.y_axis(y, up)
    for line in ideal:
        drawing.curve(_points(line, across, up, drawing), "aid")
    if level is not None:
        drawing.line(0, 1, drawing.y(up, level), "level")
    for k, line in enumerate(series):
        # Later lines are thinner, so that lines that coincide remain visible.
        if len(line.x) > 1:
            drawing.curve(
                _points(line, across, up, drawing),
                f"mark line c{line.style.colour} d{line.style.dash}",
                width=max(2.0, 4.5 - 1.2 * k),
            )
        _draw_intervals(line, across, up, drawing)
    for line in series:
        _draw_marks(line, across, up, drawing)
    aids = [(line.name, aid_sample("aid")) for line in ideal if line.name]
    return legend([*((_shortened(line.name), line_sample(line.style)) for line in series), *aids]) + drawing.markup()


def _points(line: Line, across: Scale, up: Scale, drawing: Drawing) -> list[tuple[float, float] | None]:
    return [None if y is None else (across.share(x), drawing.y(up, y)) for x, y in zip(line.x, line.y, strict=True)]


def _draw_intervals(line: Line, across: Scale, up: Scale, drawing: Drawing) -> None:
    for x, low, high in zip(line.x, line.low, line.high, strict=False):
        if low is not None and high is not None:
            drawing.rule(across.share(x), drawing.y(up, high), drawing.y(up, low), f"bar c{line.style.colour}")


def _draw_marks(line: Line, across: Scale, up: Scale, drawing: Drawing) -> None:
    """Draws some marks of a line; a text shows at every point."""
    every = -(-len(line.x) // _NUM_MARKS)
    for i, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
        if y is None:
            continue
        said = f"{line.name}: {number(y)} at {number(x)}"
        if i % every == 0:
            drawing.mark(across.share(x), drawing.y(up, y), line.style, said, is_small=True)
        else:
            drawing.hint(across.share(x), drawing.y(up, y), said)


def _rows(items: Sequence[Item], axis: Axis, ends: Iterable[float | None], row_height: int) -> tuple[Drawing, Scale]:
    """Begins a drawing with a row for each backend, whose name is above what is drawn."""
    drawing, scale = Drawing(row_height * len(items)), Scale(axis, ends)
    drawing.x_axis(axis, scale)
    for i, item in enumerate(items):
        label = _shortened(item.label, 20 if item.note else _MAX_LETTERS)
        drawing.text(label + (f" ({item.note})" if item.note else ""), 0, row_height * i + 16, "name")
    return drawing, scale


def _shortened(name: str, most: int = _MAX_LETTERS) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
