"""What a forecast shows on the terminal, in 60 columns or more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from compare.numbers import format_seconds, number, points
from compare.results import Interval
from forecast.result import Forecast, Row

# Units of time: from how many seconds on each is used, and how many of it a second has.
_UNITS = (("h", 7200.0, 1 / 3600), ("min", 120.0, 1 / 60), ("s", 0.9995, 1.0), ("ms", 0.9995e-3, 1e3), ("us", 0.0, 1e6))
# The columns that have ends where there is room, the first ones first; a step always has them.
_WITH_ENDS = ("efficiency", "epoch", "cost", "exposed")
_GAP = 2  # between columns


def show(forecast: Forecast, terminal: Console) -> None:
    """Prints the tables of a forecast, its advice, and what it assumes."""
    terminal.print(f"\n{describe(forecast)}")
    alone = format_seconds(forecast.one_rank_seconds)
    terminal.print(f"one rank alone takes {alone} for {forecast.samples_per_rank} samples\n")
    terminal.print(_rows(forecast.rows, terminal.width))
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


def seconds_with_ends(value: Interval) -> str:
    """Formats a duration of any length with its ends, if it has any, in one unit: 123 ms [110, 140]."""
    size = value.estimate or value.high or 0.0
    unit, scale = next((unit, scale) for unit, least, scale in _UNITS if size >= least)
    return _with_ends(value, f" {unit}", lambda seconds: number(scale * seconds, 3))


def share_with_ends(value: Interval) -> str:
    """Formats a share in percent with its ends, if it has any: 61 % [55, 70]."""
    return _with_ends(value, " %", points)


def amount_with_ends(value: Interval) -> str:
    """Formats an amount of any currency with its ends, if it has any: 12.3 [11.0, 14.0]."""
    return _with_ends(value, "", lambda amount: number(amount, 3))


def _with_ends(value: Interval, unit: str, written: Callable[[float], str]) -> str:
    estimate = f"{written(value.estimate)}{unit}"
    if value.low is None or value.high is None:
        return estimate
    return f"{estimate} [{written(value.low)}, {written(value.high)}]"


def _rows(rows: Sequence[Row], width: int) -> Table:
    """Returns the table of steps, with the ends of as many columns as a terminal of this width has room for."""
    shown = {"step"}
    for heading in _WITH_ENDS:
        if _width(_columns(rows, shown | {heading})) <= width:
            shown.add(heading)
    columns = _columns(rows, shown)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for heading in columns:
        table.add_column(heading, justify="right")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _columns(rows: Sequence[Row], with_ends: Collection[str]) -> dict[str, list[str]]:
    """Returns the cells of each column by its heading; intervals are written with their ends, or without."""

    def cells(heading: str, values: Sequence[Interval], written: Callable[[Interval], str]) -> list[str]:
        if heading not in with_ends:
            values = [Interval(estimate=value.estimate) for value in values]
        return [written(value) for value in values]

    columns = {
        "ranks": [f"{row.ranks:,}" for row in rows],
        "step": cells("step", [row.step_seconds for row in rows], seconds_with_ends),
        "efficiency": cells("efficiency", [row.efficiency for row in rows], share_with_ends),
        "exposed": cells("exposed", [row.exposed_seconds for row in rows], seconds_with_ends),
        "epoch": cells("epoch", [row.epoch_seconds for row in rows], seconds_with_ends),
    }
    # All rows have a cost, or none has.
    costs = [row.cost_per_epoch for row in rows if row.cost_per_epoch is not None]
    return {**columns, "cost": cells("cost", costs, amount_with_ends)} if costs else columns


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    return sum(max(map(len, (heading, *cells))) for heading, cells in columns.items()) + _GAP * (len(columns) - 1)


def _shares(rows: Sequence[Row], shares: Sequence[Mapping[str, float]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("ranks", *shares[0]):
        table.add_column(heading, justify="right", no_wrap=True)
    for row, own in zip(rows, shares, strict=True):
        table.add_row(f"{row.ranks:,}", *(number(100 * share, 3) for share in own.values()))
    return table
