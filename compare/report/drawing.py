"""Drawing in SVG: axes, marks and curves that fill the width they are given, without scaling their text.

Across, positions are shares of the width (`50%`); down, they are pixels. What has no such coordinates, a curve, lies in
an inner `svg` that is stretched. A drawing therefore fits a phone, a screen and paper, and needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup

from compare.report.styles import Style

_MAX_TICKS = 6
# Of the inner svg, whatever its real width.
_WIDTH = 1000
_PIXELS_OF_A_LETTER = 7.4
_TICK_LABEL = 18
_AXIS_TITLE = 38
_MARGIN_RIGHT = 14
_MARGIN_BOTTOM = 44

# Marks by number, within a circle of radius 6.5 around the origin.
_MARKS = (
    "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0 -12 0Z",
    "M-5.5-5.5h11v11h-11Z",
    "M0-7.5L6.5 0L0 7.5L-6.5 0Z",
    "M0-6.5L6.5 5.5h-13Z",
    "M-6-3.5L-3.5-6L0-2.5L3.5-6L6-3.5L2.5 0L6 3.5L3.5 6L0 2.5L-3.5 6L-6 3.5L-2.5 0Z",
    "M0-7L1.9-2.4L6.8-2L3-1.2L3-1.2L4.2 5.8L0 3.1L-4.2 5.8L-3 1.2L-6.8-2L-1.9-2.4Z",
)


@dataclass(frozen=True)
class Axis:
    """What runs along an axis; `ticks` replaces numbers by words."""

    title: str
    log: bool = False
    from_zero: bool = False
    ticks: Mapping[float, str] = field(default_factory=dict)


class Scale:
    """Where the values of an axis lie, as shares of its length."""

    def __init__(self, axis: Axis, values: Iterable[float | None]) -> None:
        self._log = axis.log
        known = [value for value in values if value is not None and (value > 0 or not axis.log)]
        low, high = (min(known), max(known)) if known else (1.0, 2.0)
        if axis.from_zero:
            low = min(low, 0.0)
        ends = np.array([self._transformed(low), self._transformed(high)])
        margin = 0.04 * (ends[1] - ends[0]) or 0.5 * abs(ends[0]) or 1.0
        self._low = float(ends[0]) - (0.0 if axis.from_zero and low == 0 else margin)
        self._high = float(ends[1]) + margin
        ticks = axis.ticks or _nice_ticks(self._low, self._high)
        self.ticks = {value: text for value, text in ticks.items() if 0 <= self.share(value) <= 1}

    def share(self, value: float) -> float:
        """Returns where a value lies: 0 is the beginning of the axis, 1 its end."""
        return (self._transformed(value) - self._low) / (self._high - self._low)

    def _transformed(self, value: float) -> float:
        return math.log10(value) if self._log else value


def _nice_ticks(low: float, high: float) -> dict[float, str]:
    """Returns a few round numbers between both ends, with their texts."""
    rough = (high - low) / _MAX_TICKS
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return {number * step: f"{number * step:,.{decimals}f}" for number in numbers}


class Drawing:
    """The marks of one drawing, over its axes.

    Across, all methods take shares of the width; down, they take pixels.
    """

    def __init__(self, height: int) -> None:
        self.height = height
        self._left = 3
        self._top = 4
        self._parts: list[Markup] = []

    def _add(self, template: str, *values: object) -> None:
        """Adds an element; the values are escaped."""
        self._parts.append(Markup(template).format(*values))

    def x_axis(self, axis: Axis, scale: Scale) -> None:
        """Draws the axis at the bottom, and the grid that belongs to it."""
        for value, text in scale.ticks.items():
            share = scale.share(value)
            self.rule(share, 0, self.height, "grid")
            # At the ends of the axis, a label must not leave the drawing.
            anchor = "end" if share > 0.93 else "start" if share < 0.03 else "middle"
            self.text(text, share, self.height + _TICK_LABEL, "tick", anchor)
        self.line(0, 1, self.height, "frame")
        self.text(axis.title, 0.5, self.height + _AXIS_TITLE, "name", "middle")

    def y_axis(self, axis: Axis, scale: Scale) -> None:
        """Draws the axis on the left, its grid, and its title above."""
        for value, text in scale.ticks.items():
            y = self.y(scale, value)
            self.line(0, 1, y, "grid")
            self._add('<text class="tick" x="-7" y="{}" text-anchor="end">{}</text>', _px(y + 4), text)
        self.rule(0, 0, self.height, "frame")
        longest = max((len(text) for text in scale.ticks.values()), default=1)
        self._left, self._top = math.ceil(12 + _PIXELS_OF_A_LETTER * longest), 26
        self._add('<text class="name" x="{}" y="-12">{}</text>', 8 - self._left, axis.title)

    def row_labels(self, labels: Mapping[float, str]) -> None:
        """Writes a label on the left of each row, by the position of its middle."""
        for y, label in labels.items():
            self._add('<text class="name" x="-12" y="{}" text-anchor="end">{}</text>', _px(y + 4.5), label)
        self._left = math.ceil(16 + _PIXELS_OF_A_LETTER * max(map(len, labels.values())))

    def y(self, scale: Scale, value: float) -> float:
        """Returns where a value lies on a scale that runs upwards, in pixels."""
        return self.height * (1 - scale.share(value))

    def text(self, text: str, share: float, y: float, kind: str, anchor: str = "start") -> None:
        """Writes a text."""
        self._add(
            '<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>', kind, _percent(share), _px(y), anchor, text
        )

    def line(self, start: float, end: float, y: float, kind: str) -> None:
        """Draws a horizontal line."""
        self._add(
            '<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>', kind, _percent(start), _percent(end), _px(y), _px(y)
        )

    def rule(self, share: float, top: float, bottom: float, kind: str) -> None:
        """Draws a vertical line."""
        self._add(
            '<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>',
            kind,
            _percent(share),
            _percent(share),
            _px(top),
            _px(bottom),
        )

    def rectangle(self, start: float, end: float, top: float, height: float, kind: str, said: str = "") -> None:
        """Draws a rectangle; `said` shows where a pointer rests on it."""
        self._add(
            '<rect class="{}" x="{}" width="{}" y="{}" height="{}">{}</rect>',
            kind,
            _percent(start),
            _percent(end - start),
            _px(top),
            _px(height),
            _title(said),
        )

    def mark(self, share: float, y: float, style: Style, said: str = "", *, is_small: bool = False) -> None:
        """Draws the mark of a backend; `said` shows where a pointer rests on it."""
        kind = "open" if style.is_open else "fill"
        self._add(
            '<g class="mark c{}">{}<use class="{}" href="#{}" x="{}" y="{}"/></g>',
            style.colour,
            _title(said),
            kind,
            f"small{style.mark}" if is_small else f"mark{style.mark}",
            _percent(share),
            _px(y),
        )

    def hint(self, share: float, y: float, said: str) -> None:
        """Has a text shown where a pointer rests on a point that has no mark."""
        self._add('<circle class="hit" cx="{}" cy="{}" r="6">{}</circle>', _percent(share), _px(y), _title(said))

    def curve(
        self, points: Sequence[tuple[float, float] | None], kind: str, *, width: float = 1, closed: bool = False
    ) -> None:
        """Draws a curve through points; where one is None the curve has a gap."""
        commands, letter = [], "M"
        for point in points:
            if point is None:
                letter = "M"
                continue
            commands.append(f"{letter}{_short(point[0] * _WIDTH)} {_short(point[1])}")
            letter = "L"
        path = "".join(commands) + ("Z" if closed else "")
        self._add(
            '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" width="100%" height="{}" overflow="visible">'
            '<path class="{}" stroke-width="{}" d="{}"/></svg>',
            _WIDTH,
            self.height,
            self.height,
            kind,
            _short(width),
            path,
        )

    def markup(self) -> Markup:
        """Returns the drawing for an HTML page."""
        margins = f"{self._top}px {_MARGIN_RIGHT}px {_MARGIN_BOTTOM}px {self._left}px"
        style = f"margin: {margins}; width: calc(100% - {self._left + _MARGIN_RIGHT}px)"
        return Markup('<svg class="chart" height="{}" style="{}">{}</svg>').format(
            self.height, style, Markup("").join(self._parts)
        )

    def placed(self, x: float, y: float, width: float) -> Markup:
        """Returns the drawing for a place in a larger drawing, all in pixels."""
        return Markup('<svg class="chart" x="{}" y="{}" width="{}" height="{}">{}</svg>').format(
            _px(x), _px(y), _px(width), self.height, Markup("").join(self._parts)
        )


def definitions() -> Markup:
    """Returns the marks and hatchings that drawings refer to; a page needs them once."""
    marks = Markup("").join(
        Markup('<path id="mark{}" d="{}"/><path id="small{}" d="{}" transform="scale(.6)"/>').format(i, path, i, path)
        for i, path in enumerate(_MARKS)
    )
    lines = {"rising": "M-1 1L1-1M0 7L7 0M6 8L8 6", "falling": "M-1 6L1 8M0 0L7 7M6-1L8 1"}
    hatchings = Markup("").join(
        Markup(
            '<pattern id="{}" width="7" height="7" patternUnits="userSpaceOnUse"><path class="hatch" d="{}"/></pattern>'
        ).format(name, path)
        for name, path in lines.items()
    )
    return Markup("<defs>{}{}</defs>").format(marks, hatchings)


def legend(entries: Sequence[tuple[str, Markup]]) -> Markup:
    """Returns a list of names, each with a sample of how it is drawn."""
    items = Markup("").join(
        Markup('<li><svg class="chart" width="34" height="14">{}</svg><span>{}</span></li>').format(sample, name)
        for name, sample in entries
    )
    return Markup('<ul class="legend">{}</ul>').format(items)


def line_sample(style: Style) -> Markup:
    """Returns a sample of the line of a backend, for a legend."""
    kind = "open" if style.is_open else "fill"
    return Markup(
        '<g class="c{}"><line class="line d{}" x1="0" x2="34" y1="7" y2="7" stroke-width="2.5"/>'
        '<use class="{}" href="#small{}" x="17" y="7"/></g>'
    ).format(style.colour, style.dash, kind, style.mark)


def aid_sample(kind: str) -> Markup:
    """Returns a sample of a line that is no backend's, for a legend."""
    return Markup('<line class="{}" x1="0" x2="34" y1="7" y2="7"/>').format(kind)


def _title(said: str) -> Markup:
    return Markup("<title>{}</title>").format(said) if said else Markup("")


def _percent(share: float) -> str:
    return f"{_short(100 * share)}%"


def _px(value: float) -> str:
    return _short(value)


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
