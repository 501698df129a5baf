"""What a forecast shows on the terminal, in 60 columns or more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from compare.numbers import NOTHING, format_seconds, number, points
from compare.results import Interval
from forecast.result import Forecast, Row


def show(forecast: Forecast, terminal: Console) -> None:
    """Prints the tables of a forecast, its advice, and what it assumes."""
    terminal.print(f"\n{describe(forecast)}")
    alone = format_seconds(forecast.one_rank_seconds)
    terminal.print(f"one rank alone takes {alone} for {forecast.samples_per_rank} samples\n")
    terminal.print(_rows(forecast.rows))
    terminal.print("\nefficiency in %, by algorithm of the all-reduce")
    terminal.print(_shares(forecast.rows, [row.by_algorithm for row in forecast.rows]))
    terminal.print("\nefficiency in %, by the way of sending")
    terminal.print(_shares(forecast.rows, [row.by_sending for row in forecast.rows]))
    for title, lines in (("would help", forecast.advice), ("assumed", forecast.remarks)):
        if lines:
            terminal.print(f"\n{title}:")
        for line in lines:
            terminal.print(f"- {line}")


def describe(forecast: Forecast) -> str:
    """Returns what a forecast is about, in a line."""
    of_node = f", {forecast.ranks_per_node} ranks a node" if forecast.ranks_per_node > 1 else ""
    how = f"{forecast.algorithm}, gradients sent in the way '{forecast.sending}'"
    return f"{forecast.name} on {forecast.place}{of_node}: {how}"


def clock(seconds: float) -> str:
    """Formats a duration of any length with three significant digits."""
    if seconds < 120:
        return format_seconds(seconds)
    return f"{number(seconds / 3600, 3)} h" if seconds >= 7200 else f"{number(seconds / 60, 3)} min"


def seconds_with_ends(value: Interval) -> str:
    """Formats a duration with its ends, in one unit: 123 ms [110, 140]."""
    unit, scale = ("s", 1.0) if value.estimate >= 1 else ("ms", 1e3)
    return _with_ends(value, unit, lambda seconds: number(scale * seconds, 3))


def share_with_ends(value: Interval) -> str:
    """Formats a share in percent with its ends: 61 % [55, 70]."""
    return _with_ends(value, "%", points)


def _with_ends(value: Interval, unit: str, written: Callable[[float], str]) -> str:
    low, high = (written(value.estimate if end is None else end) for end in (value.low, value.high))
    return f"{written(value.estimate)} {unit} [{low}, {high}]"


def _rows(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    has_cost = any(row.cost_per_epoch is not None for row in rows)
    for heading in ("ranks", "step", "efficiency", "exposed", "epoch", *(["cost"] * has_cost)):
        table.add_column(heading, justify="right")
    for row in rows:
        cost = NOTHING if row.cost_per_epoch is None else number(row.cost_per_epoch, 3)
        cells = [f"{row.ranks:,}", seconds_with_ends(row.step_seconds), f"{points(row.efficiency.estimate)} %"]
        cells += [format_seconds(row.exposed_seconds), clock(row.epoch_seconds), *([cost] * has_cost)]
        table.add_row(*cells)
    return table


def _shares(rows: Sequence[Row], shares: Sequence[Mapping[str, float]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("ranks", *shares[0]):
        table.add_column(heading, justify="right", no_wrap=True)
    for row, own in zip(rows, shares, strict=True):
        table.add_row(f"{row.ranks:,}", *(number(100 * share, 3) for share in own.values()))
    return table
