"""How a report shows peers: under a heading of their own, a table for each set of conditions."""

from __future__ import annotations

from collections.abc import Callable

from compare.numbers import NOTHING, joined, number, score
from compare.report.page import Block, Cell, Lines, Row, Section, Table, Text, measured
from compare.report.words import side_of_zero
from compare.results import Claim, Interval, PeerComparison, PeerRow, Results

HEADING = "What people would use instead"
ABOUT = (
    "These trainers draw their own batches, so they are compared by real tokens a second, which leave out padding, "
    "and by what they reach. They are not ranked among the backends."
)


def peer_section(results: Results) -> Section:
    """Returns the section of the page; it is empty where no peer took part."""
    sections = [
        Section(f"peers-{number}", one.group, [*_failures(one), _table(one), *_others(one)])
        for number, one in enumerate(results.peers, start=1)
    ]
    return Section("peers", HEADING, [Text(ABOUT)] if sections else [], sections)


def describe_peers(comparison: PeerComparison) -> str:
    """Says in a sentence how much faster the opponent is than each peer."""
    opponent, peers = comparison.opponent, [row for row in comparison.rows if row.claim is not None]
    if not peers:
        names = joined([row.name for row in comparison.rows])
        return f"{comparison.group}: there is no backend to compare with {names}."
    decided = [_against(row) for row in peers if row.claim in ("slower", "faster")]
    undecided = [row for row in peers if row.claim == "none"]
    decided += [f"probably {_against(row)}" for row in undecided if side_of_zero(row.longer)]
    equal = [_against(row) for row in undecided if not side_of_zero(row.longer)]
    if not decided + equal:
        names = joined([row.name for row in peers])
        return f"{comparison.group}: {names} started too seldom to be compared with {opponent}."
    parts = [f"{opponent} reaches {joined(decided)}"] if decided else []
    parts += [f"perhaps as fast: {joined(equal)}"] if equal else []
    return f"{comparison.group}, in real tokens a second: {'; '.join(parts)}."


def _against(row: PeerRow) -> str:
    assert row.longer is not None
    return f"{_ratio(row.longer)} times {row.name}"


def _columns(comparison: PeerComparison) -> list[str]:
    epochs = "1 epoch" if comparison.num_epochs == 1 else f"{comparison.num_epochs} epochs"
    return [
        "trainer",
        "real tokens/s [95 %]",
        f"{comparison.opponent or 'fastest'} is so many times as fast [95 %]",
        "CPU time for a million real tokens, all ranks (s)",
        "instructions for each real token, all ranks (thousands)",
        "positions for each real token",
        f"accuracy after {epochs}",
    ]


def _cells(row: PeerRow) -> list[Cell]:
    speed = row.tokens_per_second
    return [
        Cell(row.name),
        Cell(NOTHING) if speed is None else Cell(_bounded(speed, number), speed.estimate),
        Cell(NOTHING if row.claim is None else _times(row.claim, row.longer)),
        measured(row.cpu_seconds_per_token, 1e6, _short),
        measured(row.instructions_per_token, 1e-3, _short),
        measured(row.positions_per_token, written=_short),
        Cell(score(row.metrics.get("accuracy"))),
    ]


def _times(claim: Claim, longer: Interval | None) -> str:
    if longer is None:
        return "started too seldom to be compared"
    if claim in ("slower", "faster"):
        return _ratio(longer)
    return f"{_ratio(longer)}, {'not certain' if side_of_zero(longer) else 'perhaps as fast'}"


def _table(comparison: PeerComparison) -> Table:
    rows = [
        Row(_cells(row), "failed" if row.failures and row.tokens_per_second is None else "") for row in comparison.rows
    ]
    return Table(f"Peers, {comparison.group}", _columns(comparison), rows).without_empty_columns()


def _others(comparison: PeerComparison) -> list[Block]:
    """Returns a table of the other backends, with a column for each peer; nothing if there is no other."""
    others = comparison.others
    found = {(one.first, one.second): _times(one.claim, one.slowdown) for one in others}
    backends, peers = dict.fromkeys(one.first for one in others), dict.fromkeys(one.second for one in others)
    columns = ["backend", *(f"is so many times as fast as {peer} [95 %]" for peer in peers)]
    rows = [Row([Cell(name), *(Cell(found[name, peer]) for peer in peers)]) for name in backends]
    return [Table(f"Other backends beside these peers, {comparison.group}", columns, rows)] if rows else []


def _failures(comparison: PeerComparison) -> list[Block]:
    lines = [f"{row.name} failed: {line}" for row in comparison.rows for line in row.failures]
    return [Lines(lines)] if lines else []


def _ratio(longer: Interval) -> str:
    return _bounded(longer, lambda share: f"{1 + share:.2f}")


def _bounded(interval: Interval, written: Callable[[float], str]) -> str:
    if interval.low is None or interval.high is None:
        return written(interval.estimate)
    return f"{written(interval.estimate)} [{written(interval.low)}, {written(interval.high)}]"


def _short(value: float) -> str:
    return number(value, 3)
