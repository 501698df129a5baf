"""Drawings with plotly: what is drawn, for paper. The page's script exchanges colours where it is dark.

Plotly takes `<b>`, `<a>` and the like in any text for markup; names from records pass through `plain`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go

INK, MUTED, GRID, PAPER = "#1a1a1a", "#595959", "#d9d9d9", "#ffffff"

# Okabe and Ito's colours (https://jfly.uni-koeln.de/color/), which people who are colour-blind can tell
# apart; but for yellow, which white paper swallows.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")

# Parts of a step are no backends: other colours, cividis, and hatching.
_PARTS = (("#00224e", ""), ("#575d6d", "/"), ("#8a8678", ""), ("#c4b56c", "\\"), ("#fee838", ""))

DARK = {
    INK: "#e8e8e8",
    MUTED: "#b4b8bf",
    GRID: "#3b4048",
    PAPER: "#16181c",
    "#0072b2": "#3d9fdc",
    "#000000": "#ffffff",
    "#00224e": "#3f6fb5",
}

_MOST_VALUES = 2000
_MOST_POINTS = 100


@dataclass(frozen=True)
class Style:
    """How a backend looks in every drawing; colour is never the only sign."""

    colour: str
    symbol: str
    dash: str

    def varied(self, times: int) -> Style:
        """The look of the same backend where it appears once more in one drawing."""
        if not times:
            return self
        return Style(self.colour, f"{self.symbol}-open", _DASHES[(_DASHES.index(self.dash) + times) % len(_DASHES)])


def styles_for(backends: Iterable[str]) -> dict[str, Style]:
    """Gives each backend a look of its own."""
    return {
        backend: Style(_COLOURS[i % len(_COLOURS)], _SYMBOLS[i % len(_SYMBOLS)], _DASHES[i % len(_DASHES)])
        for i, backend in enumerate(dict.fromkeys(backends))
    }


@dataclass(frozen=True)
class Axis:
    """What runs along an axis; `ticks` replaces numbers by words."""

    title: str
    log: bool = False
    from_zero: bool = False
    ticks: Mapping[float, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """Points that belong together, with an interval around each where it has one."""

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


def plain(text: str) -> str:
    """Makes plotly show a text as it is."""
    return html.escape(text, quote=False)


def thinned(values: Sequence[float]) -> list[float]:
    """Stands for many values by fewer of the same distribution, extremes included."""
    if len(values) <= _MOST_VALUES:
        return list(values)
    picks = np.linspace(0, len(values) - 1, _MOST_VALUES).round().astype(int)
    return [float(value) for value in np.sort(np.asarray(values))[picks]]


def decades(values: Iterable[float]) -> dict[float, str]:
    """Ticks of a logarithmic axis: powers of ten, and what lies between where there are few of them."""
    powers = [math.floor(math.log10(value)) for value in values if value > 0]
    if not powers:
        return {}
    factors = (1, 2, 5) if max(powers) - min(powers) < 3 else (1,)
    ticks = (factor * 10.0**power for power in range(min(powers), max(powers) + 2) for factor in factors)
    return {tick: f"{tick:g}" for tick in ticks}


def bin_size(num_points: int) -> int:
    """How many points of a curve are drawn as one."""
    return -(-num_points // _MOST_POINTS)


def averaged(values: Sequence[float | None], width: int) -> list[float | None]:
    """Means of `width` values each; none where one of them is missing, which must stay visible."""
    bins = [values[start : start + width] for start in range(0, len(values), width)]
    return [None if None in part else sum(value or 0.0 for value in part) / len(part) for part in bins]


def intervals(items: Sequence[Item], axis: Axis) -> go.Figure:
    """One row a backend: single values small, the estimate with its interval large."""
    figure = _rows(items, axis, row_height=62)
    for i, item in enumerate(items):
        colour = item.style.colour
        figure.add_scatter(
            x=list(item.values),
            y=[i + 0.32] * len(item.values),
            mode="markers",
            marker={"symbol": f"{item.style.symbol}-open", "size": 7, "color": colour},
            hovertemplate="one run: %{x:.4~g}<extra></extra>",
        )
        if item.estimate is None:
            continue
        bounds = {}
        if item.low is not None and item.high is not None:
            bounds = {"array": [item.high - item.estimate], "arrayminus": [item.estimate - item.low]}
        figure.add_scatter(
            x=[item.estimate],
            y=[i + 0.04],
            mode="markers",
            marker={"symbol": item.style.symbol, "size": 13, "color": colour},
            error_x={"type": "data", "symmetric": False, "thickness": 2.5, "width": 7, "color": colour, **bounds},
            hovertemplate="estimate: %{x:.4~g}<extra></extra>",
        )
    return figure


def distributions(items: Sequence[Item], axis: Axis) -> go.Figure:
    """One row a backend: how often which value occurred, with median and quartiles."""
    figure = _rows(items, axis, row_height=84)
    for i, item in enumerate(items):
        values = thinned(item.values)
        figure.add_violin(
            x=values,
            y=[i + 0.12] * len(values),
            orientation="h",
            width=0.66,
            spanmode="hard",
            points=False,
            fillcolor=item.style.colour,
            line={"color": INK, "width": 1},
            box={"visible": True, "fillcolor": PAPER, "line": {"color": INK, "width": 1}, "width": 0.3},
            hoverinfo="x",
        )
    return figure


def stacks(items: Sequence[Item], parts: Sequence[str], axis: Axis) -> go.Figure:
    """One bar a backend, one piece of it a part; `values` of an item are those of its parts."""
    figure = _rows(items, axis, row_height=56)
    figure.update_layout(barmode="stack", showlegend=True)
    figure.update_layout(legend={"traceorder": "normal", "entrywidth": 94, "font": {"size": 12}})
    # A legend of several lines, as on a phone, must not take the names' room.
    figure.layout.height += 50
    for k, part in enumerate(parts):
        colour, shape = _PARTS[k % len(_PARTS)]
        figure.add_bar(
            name=part,
            orientation="h",
            x=[item.values[k] for item in items],
            y=[i + 0.1 for i in range(len(items))],
            width=0.5,
            marker={
                "color": colour,
                "line": {"color": INK, "width": 1},
                "pattern": {"shape": shape, "size": 7, "fgcolor": INK, "fillmode": "overlay"},
            },
            hovertemplate="%{fullData.name}: %{x:.4~g}<extra></extra>",
        )
    return figure


def lines(
    series: Sequence[Line], x: Axis, y: Axis, ideal: Sequence[Line] = (), level: float | None = None
) -> go.Figure:
    """One line a backend; `ideal` lines and a `level` to reach are drawn thin behind them."""
    # Where names are long the legend has a line for each, and takes what it needs.
    figure = _figure(320 + 22 * len(series), x, y)
    figure.update_layout(showlegend=True, legend_maxheight=40 + 22 * len(series))
    for k, line in enumerate(ideal):
        figure.add_scatter(
            name="ideal",
            legendgroup="ideal",
            showlegend=k == 0,
            x=list(line.x),
            y=list(line.y),
            mode="lines",
            line={"color": MUTED, "width": 1, "dash": "dot"},
            hoverinfo="skip",
        )
    if level is not None:
        figure.add_hline(level, line={"color": MUTED, "width": 1, "dash": "dot"})
    for k, line in enumerate(series):
        bounds: dict[str, Any] = {}
        if line.low and line.high:
            bounds = {"error_y": {"type": "data", "symmetric": False, **_distances(line)}}
        figure.add_scatter(
            name=plain(_shortened(line.name, 34)),
            x=list(line.x),
            y=list(line.y),
            mode="lines+markers",
            # Lines that coincide stay visible: later ones are thinner, and dashed.
            line={"color": line.style.colour, "dash": line.style.dash, "width": max(2.0, 4.5 - 1.2 * k)},
            marker={"symbol": line.style.symbol, "size": 8, "maxdisplayed": 12},
            hovertemplate="%{y:.4~g}",
            **bounds,
        )
    return figure


def _distances(line: Line) -> dict[str, list[float | None]]:
    above = [None if y is None or high is None else high - y for y, high in zip(line.y, line.high, strict=True)]
    below = [None if y is None or low is None else y - low for y, low in zip(line.y, line.low, strict=True)]
    return {"array": above, "arrayminus": below}


def _rows(items: Sequence[Item], axis: Axis, row_height: int) -> go.Figure:
    figure = _figure(70 + row_height * len(items), axis, Axis(""))
    # The first row on top; names stand above what is drawn, which leaves it the whole width of a phone.
    figure.update_yaxes(range=[len(items) - 0.45, -0.6], showgrid=False, zeroline=False, showticklabels=False, ticks="")
    for i, item in enumerate(items):
        note = f" <i>({plain(item.note)})</i>" if item.note else ""
        figure.add_annotation(
            text=plain(_shortened(item.label, 20 if note else 34)) + note,
            showarrow=False,
            xref="paper",
            x=0,
            xanchor="left",
            xshift=3,
            y=i - 0.56,
            yanchor="top",
        )
    return figure


def _shortened(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _figure(height: int, x: Axis, y: Axis) -> go.Figure:
    return go.Figure(
        layout=go.Layout(
            template=go.layout.Template(),
            height=height,
            autosize=True,
            font={"family": "system-ui, sans-serif", "size": 13, "color": INK},
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            margin={"l": 10, "r": 14, "t": 10, "b": 10},
            showlegend=False,
            legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "itemsizing": "constant"},
            hoverlabel={"bgcolor": PAPER, "bordercolor": MUTED, "font": {"color": INK}, "namelength": -1},
            uirevision="same",
            xaxis=_axis(x),
            yaxis=_axis(y),
        )
    )


def _axis(axis: Axis) -> dict[str, Any]:
    ticks = {"tickvals": list(axis.ticks), "ticktext": list(axis.ticks.values())} if axis.ticks else {}
    return {
        "title": {"text": axis.title, "standoff": 10},
        "type": "log" if axis.log else "linear",
        "rangemode": "tozero" if axis.from_zero else "normal",
        "automargin": True,
        "gridcolor": GRID,
        "zerolinecolor": GRID,
        "linecolor": MUTED,
        "showline": True,
        "ticks": "outside",
        "tickcolor": MUTED,
        **ticks,
    }
