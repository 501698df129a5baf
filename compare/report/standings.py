"""Entrants that did the same work, whatever their number of ranks, compared with one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from compare.machine_facts import kind_of
from compare.report.grouping import EntrantRuns, unsplit, unsplit_condition
from compare.report.headings import leaves, told_apart
from compare.report.info import UnknownOpponent
from compare.report.pairing import paired
from compare.report.statistics import compare_group
from compare.report.words import on_machine, ranks, seen_from
from compare.results import Comparison, Entrant, Group, GroupResult, Interval, Placing, Standing


class _Candidate(NamedTuple):
    """One entrant that did the work of a standing, with its group."""

    result: GroupResult
    entrant: Entrant
    runs: EntrantRuns

    @property
    def group(self) -> Group:
        return self.result.group

    @property
    def rate(self) -> Interval:
        assert self.entrant.samples_per_second is not None
        return self.entrant.samples_per_second

    @property
    def is_rival(self) -> bool:
        """Whether it is a backend that is compared with others in its own right."""
        return self.entrant.role == "backend" and self.entrant.ranked

    @property
    def communicates(self) -> bool:
        """Whether its ranks communicate, so that a network matters."""
        return self.group.num_processes > 1 and self.entrant.role != "limit"

    @property
    def label(self) -> str:
        """The name with the number of ranks; what is possible here is called what it is."""
        number = self.group.num_processes
        if self.entrant.role == "alternative":
            return "one process with all cores" if self.group.device == "cpu" else "one process on one GPU"
        if self.entrant.role == "limit":
            return f"{number} independent processes"
        return f"{self.entrant.name}, {ranks(number)}"


def standings_of(
    groups: Sequence[GroupResult],
    grouped: Sequence[list[EntrantRuns]],
    order: Sequence[tuple[str, int]] = (),
    opponent: str | None = None,
) -> list[Standing]:
    """Returns a standing for each set of conditions under which an entrant was ranked.

    Args:
        groups: What was found of each group.
        grouped: The runs of the entrants of each group.
        order: Precisions and accumulation steps in the order in which the user named them.
        opponent: With whom to compare all others, wherever it was ranked; by default, the fastest under the first
            conditions.

    Raises:
        UnknownOpponent: The opponent was not ranked under any conditions.
    """
    fields: dict[tuple[str, int], list[_Candidate]] = {}
    for result, runs in zip(groups, grouped, strict=True):
        for entrant, own in zip(result.entrants, runs, strict=True):
            takes_part = entrant.ranked or entrant.role == "limit" or entrant.parity.verdict == "approximate"
            if takes_part and entrant.samples_per_second is not None:
                conditions = unsplit(own.timed[0]), result.group.gradient_accumulation_steps
                fields.setdefault(conditions, []).append(_Candidate(result, entrant, own))
    # A limit by itself is of no use.
    complete = [
        field for together in fields.values() for field in _by_network(together) if any(one.is_rival for one in field)
    ]
    complete.sort(key=lambda field: _place(field[0].group, order))
    rivals = {one.entrant.name for field in complete for one in field if one.is_rival}
    if opponent is not None and opponent not in rivals:
        raise UnknownOpponent(f"{opponent!r} was not ranked; choose one of {', '.join(sorted(rivals))}")
    standings: list[Standing] = []
    for field in complete:
        standings.append(_standing(field, opponent))
        opponent = opponent or standings[0].placings[0].name
    names = told_apart([one.conditions for one in standings], [_facts(field) for field in complete])
    return [one.model_copy(update={"conditions": own}) for one, own in zip(standings, names, strict=True)]


def _by_network(field: Sequence[_Candidate]) -> list[list[_Candidate]]:
    """Returns a field for each network, one node among them; what does not communicate is in all of them."""
    networks = dict.fromkeys(kind_of(_network(one.group)) for one in field if one.communicates) or {None: None}
    return [
        [one for one in field if not one.communicates or kind_of(_network(one.group)) == network]
        for network in networks
    ]


def _facts(field: Sequence[_Candidate]) -> dict[str, str]:
    """Returns what all of a field have in common, and what connects their ranks, of which one rank says nothing."""
    network = next((kind_of(_network(one.group)) for one in field if one.communicates), None)
    return dict(leaves({**unsplit_condition(field[0].runs.timed[0]), "ranks on": network or "one node"}))


def _network(group: Group) -> str | None:
    return group.conditions.get("network")


def _place(group: Group, order: Sequence[tuple[str, int]]) -> int:
    conditions = group.precision, group.gradient_accumulation_steps
    return list(order).index(conditions) if conditions in order else len(order)


def _standing(field: Sequence[_Candidate], named: str | None) -> Standing:
    backends = [one for one in field if one.is_rival]
    opponents = _opponents(backends, named)
    opponent = _fastest(opponents)
    others = [one for one in field if one is not opponent]
    comparisons = {id(one): found for one in others if (found := _within(opponent, one)) is not None}
    across = [one for one in others if id(one) not in comparisons]
    compared = compare_group(
        [paired(opponent.runs, one.runs, names=(opponent.label, one.label)) for one in across], len(opponents)
    )
    comparisons |= {id(one): comparison for one, comparison in zip(across, compared, strict=True)}
    ordered = sorted(backends, key=lambda one: (one is not opponent, -one.group.num_processes, -one.rate.estimate))
    limits = [one for one in others if one.entrant.role != "backend"]
    return Standing(
        conditions=_conditions(opponent.group),
        network=_network(opponent.group),
        opponent=opponent.label,
        num_starts=len(opponent.runs.timed),
        num_disturbed=len(opponent.runs.left_out),
        num_turns=sum(len(run.timed_steps) for run in opponent.runs.timed if run.race and run.race.turns),
        core_slowdown=_core_slowdown(opponent, min(backends, key=lambda one: one.group.num_processes)),
        placings=[_placing(one, comparisons.get(id(one))) for one in ordered],
        limits=[_placing(one, comparisons.get(id(one))) for one in limits],
        approximations=[
            _placing(one, comparisons.get(id(one))) for one in others if one.entrant.parity.verdict == "approximate"
        ],
    )


def _core_slowdown(opponent: _Candidate, base: _Candidate) -> float | None:
    """Returns how many times as long what needs no memory takes for the opponent; None if that was not measured."""
    own, of_base = (
        next((run.race.core_slowdown for run in one.runs.timed if run.race), None) for one in (opponent, base)
    )
    return own / of_base if own is not None and of_base is not None else None


def _opponents(backends: Sequence[_Candidate], named: str | None) -> list[_Candidate]:
    """Returns the one that is named, with the most ranks that it has, or all of those with the most ranks."""
    able = [one for one in backends if one.entrant.name == named] or backends
    most = max(one.group.num_processes for one in able)
    return [one for one in able if one.group.num_processes == most]


def _fastest(rivals: Sequence[_Candidate]) -> _Candidate:
    """Returns the fastest by its pairs, which say more than rates."""
    first = max(rivals, key=lambda one: one.rate.estimate)

    def longer(one: _Candidate) -> float:
        seen = _within(first, one)
        return 0.0 if seen is None or seen.slowdown is None else seen.slowdown.estimate

    return min(rivals, key=lambda one: (longer(one), one is not first))


def _within(opponent: _Candidate, other: _Candidate) -> Comparison | None:
    """Returns what the group of both says of the other, seen from the opponent; None if they are of two groups."""
    if other.result is not opponent.result:
        return None
    names = {opponent.entrant.name, other.entrant.name}
    found = [one for one in opponent.result.comparisons if {one.first, one.second} == names]
    return seen_from(opponent.entrant.name, found[0]) if len(names) == 2 and found else None


def _conditions(group: Group) -> str:
    parts = f" in {group.gradient_accumulation_steps} parts" if group.gradient_accumulation_steps > 1 else ""
    network = f" ({found})" if (found := _network(group)) is not None else ""
    return f"{group.precision}, {group.global_batch_size} samples a step{parts}{network}{on_machine(group)}"


def _placing(one: _Candidate, comparison: Comparison | None) -> Placing:
    return Placing(
        label=one.label,
        name=one.entrant.name,
        group=one.group.key,
        num_processes=one.group.num_processes,
        samples_per_second=one.rate,
        longer=comparison.slowdown if comparison else None,
        claim=comparison.claim if comparison else None,
        detectable=comparison.detectable if comparison else None,
        spread=comparison.spread if comparison else None,
    )
