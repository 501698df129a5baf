"""The first drawing of a report: every entrant's time of a step, beside that of the fastest."""

from __future__ import annotations

from compare.numbers import difference, interval
from compare.report import plots
from compare.report.drawing import Axis
from compare.report.figures import Styles
from compare.report.page import Cell, Figure, Plot, Row, Table, measured
from compare.report.plots import Item
from compare.results import Interval, Placing, Standing


def standing_figure(standing: Standing, styles: Styles) -> Figure:
    """Returns the drawing of a standing, with its numbers."""
    items = [
        Item(
            placing.label,
            "",
            styles[placing.backend],
            estimate=_relative(placing.longer).estimate,
            low=_relative(placing.longer).low,
            high=_relative(placing.longer).high,
        )
        for placing in standing.placings
    ]
    title = f"Time of a step, {standing.conditions}"
    return Figure(
        title,
        f"The time of a step relative to that of {standing.opponent}, the fastest, with confidence intervals that hold "
        "together. Further left is faster.",
        [Plot(title, plots.intervals(items, Axis(f"time of a step, {standing.opponent} = 1")))],
        standing_table(standing),
    )


def standing_table(standing: Standing) -> Table:
    """Returns the numbers of a standing."""
    rows = [
        Row([Cell(placing.label), Cell(interval(placing.samples_per_second)), _longer(placing)])
        for placing in standing.placings
    ]
    columns = ["entrant", "samples/s (interval)", f"longer than {standing.opponent} (%) (interval)"]
    return Table(standing.conditions, columns, rows)


def _longer(placing: Placing) -> Cell:
    if placing.longer is None:
        return measured(None)
    bounds = f"{difference(placing.longer.low)} to {difference(placing.longer.high)}"
    return Cell(f"{difference(placing.longer.estimate)} ({bounds})", placing.longer.estimate)


def _relative(longer: Interval | None) -> Interval:
    """Returns a time relative to the opponent's, from by how much it is longer."""
    if longer is None:
        return Interval(estimate=1.0)
    low, high = (None if bound is None else 1 + bound for bound in (longer.low, longer.high))
    return Interval(estimate=1 + longer.estimate, low=low, high=high)
