"""Entrants that did the same work, whatever their number of ranks, compared with the fastest of them."""

from __future__ import annotations

from collections.abc import Sequence

from compare.report.grouping import EntrantRuns, unsplit
from compare.report.pairing import paired
from compare.report.statistics import compare_group
from compare.report.words import on_machine, ranks
from compare.results import Entrant, GroupResult, Interval, Placing, Standing


def standings_of(groups: Sequence[GroupResult], grouped: Sequence[list[EntrantRuns]]) -> list[Standing]:
    """Returns a standing for each set of conditions under which two entrants or more were ranked."""
    fields: dict[tuple[str, int], list[tuple[GroupResult, Entrant, EntrantRuns]]] = {}
    for result, runs in zip(groups, grouped, strict=True):
        for entrant, own in zip(result.entrants, runs, strict=True):
            if entrant.ranked and entrant.samples_per_second is not None:
                conditions = unsplit(own.timed[0]), result.group.gradient_accumulation_steps
                fields.setdefault(conditions, []).append((result, entrant, own))
    return [_standing(field) for field in fields.values() if len(field) > 1]


def _standing(field: Sequence[tuple[GroupResult, Entrant, EntrantRuns]]) -> Standing:
    ordered = sorted(field, key=lambda one: _rate(one[1]).estimate, reverse=True)
    labels = [_label(entrant, result) for result, entrant, _ in ordered]
    opponent = ordered[0][2]
    pairs = [
        paired(opponent, runs, names=(labels[0], label)) for label, (_, _, runs) in zip(labels, ordered, strict=True)
    ]
    comparisons = compare_group(pairs[1:])
    group = ordered[0][0].group
    return Standing(
        conditions=(
            f"{group.precision}, global batch {group.global_batch_size}, "
            f"{group.gradient_accumulation_steps} accumulation step(s)" + on_machine(group)
        ),
        opponent=labels[0],
        num_starts=max(len(pair.starts) for pair in pairs[1:]),
        num_turns=min(sum(len(turns) for turns in pair.starts) for pair in pairs[1:]),
        placings=[
            Placing(
                label=label,
                backend=entrant.name,
                num_processes=result.group.num_processes,
                samples_per_second=_rate(entrant),
                longer=None if index == 0 else comparisons[index - 1].slowdown,
                claim=None if index == 0 else comparisons[index - 1].claim,
            )
            for index, (label, (result, entrant, _)) in enumerate(zip(labels, ordered, strict=True))
        ],
    )


def _label(entrant: Entrant, result: GroupResult) -> str:
    return f"{entrant.name}, {ranks(result.group.num_processes)}"


def _rate(entrant: Entrant) -> Interval:
    assert entrant.samples_per_second is not None
    return entrant.samples_per_second
