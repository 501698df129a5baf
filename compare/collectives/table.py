"""What the benchmark of collectives shows on the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.measure import Measurement as Width
from rich.table import Table

from compare.numbers import format_seconds, format_size
from compare.results import CollectiveSeries, Interval
from compare.strict import named

_ANY_WIDTH = 1000
_GIB = 2**30


def show(series: list[CollectiveSeries], terminal: Console) -> None:
    """Prints a table for each operation and number of ranks, and below it the line fitted through the times."""
    keys = dict.fromkeys((one.num_processes, one.operation) for one in series)
    for num_processes, operation in keys:
        shown = [one for one in series if (one.num_processes, one.operation) == (num_processes, operation)]
        terminal.print(f"\n{operation}, {num_processes} ranks (median time of the slowest rank; GiB/s)")
        table = _table(shown)
        # The terminal would cut a number that does not fit, and show another number.
        table.width = Width.get(terminal, terminal.options.update(width=_ANY_WIDTH), table).maximum
        terminal.print(table, crop=False)
        for one in shown:
            terminal.print(f"{one.name} ({one.transport} on {one.device}): {_describe_fit(one)}")


def _table(shown: list[CollectiveSeries]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ["\nsize", *(f"{name}\n{one}" for series in shown for name, one in _headings(series))]:
        table.add_column(heading, justify="right", no_wrap=True)
    for points in zip(*(series.points for series in shown), strict=True):
        cells = [
            cell
            for point in points
            for cell in (format_seconds(point.median_seconds), _bandwidth(point.algbw), _bandwidth(point.busbw))
        ]
        table.add_row(format_size(points[0].bytes), *cells)
    return table


def _headings(series: CollectiveSeries) -> list[tuple[str, str]]:
    short = named(series.backend.rpartition(":")[2], series.own_options)
    return [(short, "time"), ("", "algbw"), ("", "busbw")]


def _bandwidth(bytes_per_second: float) -> str:
    return f"{bytes_per_second / _GIB:.3g}"


def _describe_fit(series: CollectiveSeries) -> str:
    if series.fit is None:
        return "no line fitted: a fit needs three sizes, and times that grow with them"
    latency = _describe_interval(series.fit.latency_seconds, format_seconds)
    bandwidth = _describe_interval(series.fit.bytes_per_second, lambda rate: f"{_bandwidth(rate)} GiB/s")
    return f"time = latency {latency} + size / {bandwidth}"


def _describe_interval(interval: Interval, describe: Callable[[float], str]) -> str:
    low, high = (None if end is None else describe(end) for end in (interval.low, interval.high))
    return f"{describe(interval.estimate)} ({low} to {high or 'any'})"
