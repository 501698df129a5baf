"""What Lockstep's loop and adapters cost: each adapter beside a loop that was written by hand with its library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from compare.numbers import NOTHING, difference, joined, longer
from compare.report.grouping import EntrantRuns
from compare.report.page import Block, Cell, Row, Table, Text, measured
from compare.report.pairing import paired
from compare.report.runs import Run, TurnFacts, name_of_loop, per_second
from compare.report.statistics import compare_group, mean_interval
from compare.report.tables import interval_cell
from compare.results import MIN_PAIRS, AdapterCost, Comparison, Interval

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
    bare = {_loop_of(entrant): entrant for entrant in entrants if entrant.role == "bare" and entrant.timed}
    return [
        _Twins(entrant, bare[_loop_of(entrant)])
        for entrant in entrants
        if entrant.role == "backend" and entrant.timed and _loop_of(entrant) in bare
    ]


def _loop_of(entrant: EntrantRuns) -> str:
    """Returns what is the same for an adapter and its loop: the name of the loop, and all software.

    The settings that an adapter reads back from its library are left out: a loop reads none.
    """
    facts = json.loads(entrant.key)
    del facts["in force"]
    if entrant.role == "backend":
        facts["name"] = name_of_loop(facts["name"])
    return json.dumps(facts)


def _cost(key: str, twins: _Twins, comparison: Comparison) -> AdapterCost:
    starts = [_shared_turns(one, other) for one, other in _starts(twins)]
    cpu_seconds = _sums([[(one.cpu_seconds, other.cpu_seconds) for one, other in turns] for turns in starts])
    counted = [
        [
            (one.instructions, other.instructions)
            for one, other in turns
            if one.instructions is not None and other.instructions is not None
        ]
        for turns in starts
    ]
    # Part of the turns would be compared on other batches than the rest of the row.
    instructions = _sums(counted) if [*map(len, counted)] == [*map(len, starts)] else []
    return AdapterCost(
        group=key,
        name=twins.adapter.name,
        num_starts=comparison.num_pairs,
        samples_per_second=_rate(twins.adapter),
        bare_samples_per_second=_rate(twins.bare),
        time=comparison.slowdown,
        cpu_seconds=_more(cpu_seconds),
        cpu_seconds_interval=_more_of_starts(cpu_seconds),
        instructions=_more(instructions),
        instructions_interval=_more_of_starts(instructions),
    )


def _rate(entrant: EntrantRuns) -> Interval | None:
    rates = [per_second(run, "samples") for run in entrant.timed if run.timed_steps]
    return mean_interval(rates) if rates else None


def _starts(twins: _Twins) -> list[tuple[Run, Run]]:
    """Returns the runs of both that took turns with each other."""
    heats = {(run.race.race, run.race.block, run.race.heat): run for run in twins.bare.timed if run.race}
    return [
        (run, heats[run.race.race, run.race.block, run.race.heat])
        for run in twins.adapter.timed
        if run.race and (run.race.race, run.race.block, run.race.heat) in heats
    ]


def _shared_turns(adapter: Run, bare: Run) -> list[tuple[TurnFacts, TurnFacts]]:
    """Returns the turns of a start in which both took the same steps."""
    return [
        (one, other)
        for one in _timed(adapter)
        for other in _timed(bare)
        if (one.first_step, one.num_steps) == (other.first_step, other.num_steps)
    ]


def _timed(run: Run) -> list[TurnFacts]:
    return [turn for turn in run.race.turns if turn.round > 0] if run.race else []


def _sums(starts: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Returns the sums over the turns of each start, leaving out starts without turns."""
    return [(sum(one for one, _ in turns), sum(other for _, other in turns)) for turns in starts if turns]


def _more(sums: Sequence[tuple[float, float]]) -> float | None:
    """Returns by how much the sum of the first is above that of the second, relative to the second."""
    first, second = (sum(values) for values in zip(*sums, strict=True)) if sums else (0.0, 0.0)
    return first / second - 1 if second else None


def _more_of_starts(sums: Sequence[tuple[float, float]]) -> Interval | None:
    """Returns the mean of that over starts with its interval; None of too few starts, or where a clock stood still."""
    if len(sums) < MIN_PAIRS or any(min(pair) <= 0 for pair in sums):
        return None
    ratio = mean_interval([first / second for first, second in sums])
    return Interval.model_validate({name: value - 1 for name, value in ratio})


def adapter_cost_blocks(costs: Sequence[AdapterCost]) -> list[Block]:
    """Returns the content of the section."""
    if not costs:
        return []
    columns = ["adapter", "conditions", "more time of a step than by hand (%)", "more CPU seconds (%)"]
    columns += ["more instructions (%)", "starts", "samples/s", "samples/s by hand"]
    rows = [
        Row(
            [
                Cell(cost.name),
                Cell(cost.group),
                Cell(_interval(cost.time), 100 * cost.time.estimate if cost.time else None),
                _counted(cost.cpu_seconds, cost.cpu_seconds_interval),
                _counted(cost.instructions, cost.instructions_interval),
                measured(cost.num_starts),
                interval_cell(cost.samples_per_second),
                interval_cell(cost.bare_samples_per_second),
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
        counted = {
            "CPU seconds": (cost.cpu_seconds, cost.cpu_seconds_interval),
            "instructions": (cost.instructions, cost.instructions_interval),
        }
        more = [
            f"{what} {f'{difference(share)} %' if mean is None else longer(mean)}"
            for what, (share, mean) in counted.items()
            if share is not None
        ]
        said = joined([f"time {longer(cost.time)}", *more])
        lines.append(f"{cost.name}, {cost.group}, beside a loop written by hand: {said}")
    return lines


def _counted(share: float | None, mean: Interval | None) -> Cell:
    """Returns a cell for what was summed, with its interval if there is one, as older results have none."""
    return measured(share, 1, difference) if mean is None else Cell(_interval(mean), mean.estimate)


def _interval(value: Interval | None) -> str:
    return (
        NOTHING
        if value is None
        else f"{difference(value.estimate)} ({difference(value.low)} to {difference(value.high)})"
    )
