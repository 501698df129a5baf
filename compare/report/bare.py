"""What Lockstep's loop and adapters cost: each adapter beside a loop that was written by hand with its library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from compare.numbers import NOTHING, difference, joined, longer
from compare.report.grouping import EntrantRuns
from compare.report.page import Block, Cell, Row, Table, Text, measured
from compare.report.pairing import paired
from compare.report.runs import Run, TurnFacts
from compare.report.statistics import compare_group
from compare.results import AdapterCost, Comparison, Interval

_ABOUT = (
    "A loop written by hand with the library alone takes the same steps, in turn with the adapter. What the adapter "
    "takes more, or less, is what Lockstep's own loop and adapter cost. Both are observed in the same way."
)


class _Twins(NamedTuple):
    """An adapter and the loop that was written by hand for its library, under equal conditions."""

    adapter: EntrantRuns
    bare: EntrantRuns


def without_bare(entrants: Sequence[EntrantRuns]) -> list[EntrantRuns]:
    """Leaves out the loops that were written by hand, which only their adapters are compared with."""
    return [entrant for entrant in entrants if entrant.role != "bare"]


def adapter_costs_of(keys: Sequence[str], grouped: Sequence[list[EntrantRuns]]) -> list[AdapterCost]:
    """Compares adapters with loops written by hand.

    Args:
        keys: The names of the groups.
        grouped: The entrants of each group.
    """
    costs = []
    for key, entrants in zip(keys, grouped, strict=True):
        twins = _twins(entrants)
        compared = compare_group([paired(two.bare, two.adapter) for two in twins])
        costs += [_cost(key, two, comparison) for two, comparison in zip(twins, compared, strict=True)]
    return costs


def _twins(entrants: Sequence[EntrantRuns]) -> list[_Twins]:
    bare = {_software(entrant): entrant for entrant in entrants if entrant.role == "bare" and entrant.timed}
    return [
        _Twins(entrant, bare[_software(entrant)])
        for entrant in entrants
        if entrant.role == "backend" and entrant.timed and _is_plain(entrant) and _software(entrant) in bare
    ]


def _is_plain(entrant: EntrantRuns) -> bool:
    """Returns whether this is the backend as it comes, and not one of `--entrant` or `--tune`, which has no loop."""
    return entrant.timed[0].entrant == entrant.backend


def _software(entrant: EntrantRuns) -> str:
    """Returns what is the same for an adapter and its loop: all but its name, and the settings that it reads back."""
    return json.dumps(
        {name: value for name, value in json.loads(entrant.key).items() if name not in ("name", "in force")}
    )


def _cost(key: str, twins: _Twins, comparison: Comparison) -> AdapterCost:
    turns = [
        (adapter, bare)
        for one, other in _starts(twins)
        for adapter in _timed(one)
        for bare in _timed(other)
        if (adapter.first_step, adapter.num_steps) == (bare.first_step, bare.num_steps)
    ]
    instructions = [
        (adapter.instructions, bare.instructions)
        for adapter, bare in turns
        if adapter.instructions is not None and bare.instructions is not None
    ]
    return AdapterCost(
        group=key,
        name=twins.adapter.name,
        num_starts=comparison.num_pairs,
        time=comparison.slowdown,
        cpu_seconds=_more([(adapter.cpu_seconds, bare.cpu_seconds) for adapter, bare in turns]),
        # Part of the turns would be compared on other batches than the rest of the row.
        instructions=_more(instructions) if len(instructions) == len(turns) else None,
    )


def _starts(twins: _Twins) -> list[tuple[Run, Run]]:
    """Returns the runs of both that were started together."""
    blocks = {(run.race.race, run.race.block): run for run in twins.bare.timed if run.race}
    return [
        (run, blocks[run.race.race, run.race.block])
        for run in twins.adapter.timed
        if run.race and (run.race.race, run.race.block) in blocks
    ]


def _timed(run: Run) -> list[TurnFacts]:
    return [turn for turn in run.race.turns if turn.round > 0] if run.race else []


def _more(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Returns by how much the sum of the first is above that of the second, relative to the second."""
    first, second = (sum(values) for values in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    return first / second - 1 if second else None


def adapter_cost_blocks(costs: Sequence[AdapterCost]) -> list[Block]:
    """Returns the content of the section."""
    if not costs:
        return []
    columns = ["adapter", "conditions", "more time of a step than by hand (%)", "more CPU seconds (%)"]
    columns += ["more instructions (%)", "starts"]
    rows = [
        Row(
            [
                Cell(cost.name),
                Cell(cost.group),
                Cell(_interval(cost.time), 100 * cost.time.estimate if cost.time else None),
                measured(cost.cpu_seconds, 1, difference),
                measured(cost.instructions, 1, difference),
                measured(cost.num_starts),
            ]
        )
        for cost in costs
    ]
    table = Table("Each adapter beside a loop written by hand", columns, rows)
    return [Text(_ABOUT), table.without_empty_columns()]


def adapter_cost_lines(costs: Sequence[AdapterCost]) -> list[str]:
    """Returns the same as a line for each adapter."""
    lines = []
    for cost in costs:
        counted = {"CPU seconds": cost.cpu_seconds, "instructions": cost.instructions}
        more = [f"{what} {difference(share)} %" for what, share in counted.items() if share is not None]
        said = joined([f"time {longer(cost.time)}", *more])
        lines.append(f"{cost.name}, {cost.group}, beside a loop written by hand: {said}")
    return lines


def _interval(value: Interval | None) -> str:
    return (
        NOTHING
        if value is None
        else f"{difference(value.estimate)} ({difference(value.low)} to {difference(value.high)})"
    )
