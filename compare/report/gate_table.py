"""The outcome of a gate as a table, and on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compare.numbers import NOTHING, number
from compare.results import Gate, GateRow, Interval

GATE_HEADINGS = (
    *("entrant", "then (samples/s)", "now (samples/s)", "change of time (%)", "relative to one process (%)"),
    *("seen from (%)", "outcome"),
)


def gate_cells(row: GateRow) -> list[str]:
    """Returns the cells of the row of one entrant."""
    return [
        row.entrant,
        _rate(row.baseline),
        _rate(row.now),
        _change(row.change),
        _change(row.relative_change),
        NOTHING if row.detectable is None else f"+{number(100 * row.detectable, 2)}",
        row.status,
    ]


def gate_values(row: GateRow) -> list[float | None]:
    """Returns the numbers in these cells, to sort by; None for texts."""
    percents = [
        None if change is None or change.low is None or change.high is None else 100 * change.estimate
        for change in (row.change, row.relative_change)
    ]
    rates = [None if rate is None else rate.estimate for rate in (row.baseline, row.now)]
    return [None, *rates, *percents, None if row.detectable is None else 100 * row.detectable, None]


def verdict_of(gate: Gate) -> list[str]:
    """Returns the sentences about a gate: what was compared, who does not pass, and what could not have been seen."""
    failed = [row.text for row in gate.rows if row.status not in ("passed", "new")]
    allowed = f"{100 * gate.fail_above:g} %"
    sentences = [f"Compared with {gate.baseline}."]
    sentences += [f"The baseline was used although {difference}." for difference in gate.differences]
    sentences += [f"FAILED: {text}." for text in failed]
    if not failed:
        sentences.append(f"PASSED: no entrant is shown to be slower than in the baseline by more than {allowed}.")
    blunt = [row.detectable for row in gate.rows if row.detectable is not None]
    if blunt:
        unseen = number(100 * max(blunt), 2)
        sentences.append(
            f"An entrant that is up to {unseen} % slower may have passed; four races of five would show one that is "
            "slower than that. More starts of both races, on an idle machine, show smaller differences."
        )
    return sentences


def show_gate(gate: Gate, terminal: Console) -> None:
    """Prints the table, and the sentences about it."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in GATE_HEADINGS:
        table.add_column(heading)
    for row in gate.rows:
        table.add_row(*(Text(cell) for cell in gate_cells(row)))
    terminal.print(table)
    for sentence in verdict_of(gate):
        terminal.print(Text(sentence))


def _rate(interval: Interval | None) -> str:
    return NOTHING if interval is None else number(interval.estimate, 3)


def _change(interval: Interval | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return NOTHING
    return f"{100 * interval.estimate:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"
