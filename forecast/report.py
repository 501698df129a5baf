"""The page of a forecast, in the style of reports: one file that works offline and requests nothing."""

from __future__ import annotations

from collections.abc import Sequence

from compare.numbers import NOTHING, number, points
from compare.report import plots
from compare.report.drawing import Axis
from compare.report.first_screen import FirstScreen
from compare.report.html import Page, render_page
from compare.report.page import Cell, Commands, Figure, Lines, Plot, Row, Section, Table, measured
from compare.report.plots import Line
from compare.report.styles import Style, styles_for
from compare.results import Interval
from forecast.algorithms import ALGORITHMS
from forecast.result import Forecast, ForecastFile
from forecast.result import Row as Forecasted
from forecast.sending import WAYS
from forecast.table import amount_with_ends, describe, seconds_with_ends, share_with_ends


def render(content: ForecastFile) -> str:
    """Renders forecasts as one HTML page, to be stored in UTF-8."""
    first = content.forecasts[0]
    sections = [_section(one, number) for number, one in enumerate(content.forecasts)]
    screen = FirstScreen(
        about="A forecast, not a measurement",
        warnings=[],
        verdict=[_verdict(one) for one in content.forecasts],
        grounds=[],
        figures=_figures(content.forecasts),
        tables=[_table(one) for one in content.forecasts],
    )
    command = Section("command", "The command", [Commands({"this forecast": content.command})])
    return render_page(Page(f"Forecast for {first.name}", content.created_at, screen, sections, [command]))


def _verdict(forecast: Forecast) -> str:
    last = forecast.rows[-1]
    return (
        f"{describe(forecast)}: {last.ranks:,} ranks would take {seconds_with_ends(last.step_seconds)} a step, "
        f"{points(last.efficiency.estimate)} % of {last.ranks:,} times the speed of one."
    )


def _figures(forecasts: Sequence[Forecast]) -> list[Figure]:
    """Returns the efficiency over ranks: of all forecasts, and of the first with each algorithm and way of sending."""
    names = [_name(one, forecasts) for one in forecasts]
    styles = styles_for(names)
    lines = [
        Line(
            name,
            styles[name],
            [row.ranks for row in one.rows],
            [100 * row.efficiency.estimate for row in one.rows],
            [_percent(row.efficiency.low) for row in one.rows],
            [_percent(row.efficiency.high) for row in one.rows],
        )
        for name, one in zip(names, forecasts, strict=True)
    ]
    first = forecasts[0]
    others = styles_for([*ALGORITHMS, *WAYS])
    rows = first.rows
    by_algorithm = [_line(name, others[name], rows, [row.by_algorithm[name] for row in rows]) for name in ALGORITHMS]
    by_sending = [_line(way, others[way], rows, [row.by_sending[way] for row in rows]) for way in WAYS]
    ends = "Speed, over that of one rank times the number of ranks; intervals have all inputs at their ends at once."
    return [
        _figure(
            "Efficiency",
            ends,
            lines,
        ),
        _figure("By algorithm", f"How all-reduces are made: {describe(first)}.", by_algorithm),
        _figure("By the way of sending", f"When gradients are sent: {describe(first)}.", by_sending),
    ]


def _name(forecast: Forecast, forecasts: Sequence[Forecast]) -> str:
    """Returns the shortest name that tells a forecast from the others."""
    if len({one.name for one in forecasts}) == 1:
        return forecast.place
    if len({one.place for one in forecasts}) == 1:
        return forecast.name
    return f"{forecast.name}, {forecast.place}"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _line(name: str, style: Style, rows: Sequence[Forecasted], shares: Sequence[float]) -> Line:
    return Line(name, style, [row.ranks for row in rows], [100 * share for share in shares])


def _figure(title: str, caption: str, lines: Sequence[Line]) -> Figure:
    said = "; ".join(
        f"{line.name} {', '.join(f'{number(y, 3)} % on {number(x)}' for x, y in zip(line.x, line.y, strict=True))}"
        for line in lines
    )
    ticks = {rank: f"{rank:g}" for rank in sorted({rank for line in lines for rank in line.x})}
    shown = dict(list(ticks.items())[:: -(-len(ticks) // 6)])
    across, up = Axis("ranks", log=True, ticks=shown), Axis("efficiency, %", from_zero=True)
    drawing = plots.lines(lines, across, up, level=100.0)
    return Figure(title, caption, [Plot(f"{title}: {said}", drawing)])


def _table(forecast: Forecast) -> Table:
    rows = [
        Row(
            [
                Cell(f"{row.ranks:,}", row.ranks),
                Cell(seconds_with_ends(row.step_seconds), row.step_seconds.estimate),
                Cell(share_with_ends(row.efficiency), row.efficiency.estimate),
                Cell(seconds_with_ends(row.exposed_seconds), row.exposed_seconds.estimate),
                measured(row.waiting_seconds, 1e3),
                Cell(seconds_with_ends(row.epoch_seconds), row.epoch_seconds.estimate),
                _cost(row.cost_per_epoch),
            ]
        )
        for row in forecast.rows
    ]
    columns = ["ranks", "step", "efficiency", "exposed communication", "waiting, ms", "epoch", "cost of an epoch"]
    return Table(describe(forecast), columns, rows).without_empty_columns()


def _cost(value: Interval | None) -> Cell:
    return Cell(NOTHING) if value is None else Cell(amount_with_ends(value), value.estimate)


def _section(forecast: Forecast, number: int) -> Section:
    """Returns the advice, and what is assumed."""
    return Section(
        f"forecast-{number}",
        describe(forecast),
        sections=[
            Section(f"{name}-{number}", heading, [Lines(lines)])
            for name, heading, lines in (
                ("advice", "What would help", forecast.advice),
                ("assumed", "What is assumed", forecast.remarks),
            )
            if lines
        ],
    )
