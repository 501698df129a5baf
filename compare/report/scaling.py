"""Throughput over the number of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from compare.machine_facts import kind_of
from compare.report.grouping import EntrantRuns, condition, version
from compare.report.runs import Run
from compare.report.words import on_machine
from compare.results import Group, GroupResult, Interval, Scaling, ScalingPoint


def scaling_of(groups: Sequence[GroupResult], grouped: Sequence[list[EntrantRuns]]) -> list[Scaling]:
    """Returns throughput over ranks for groups that differ in the number of ranks and in what follows from it."""
    lines: dict[tuple[str, Literal["strong", "weak"], str, str], list[_Point]] = defaultdict(list)
    for result, runs in zip(groups, grouped, strict=True):
        for entrant, own in zip(result.entrants, runs, strict=True):
            if entrant.ranked and entrant.samples_per_second:
                run = own.timed[0]
                network = result.group.conditions.get("network")
                point = _Point(result.group.num_processes, entrant.samples_per_second, kind_of(network))
                for kind, words, fixed in _fixed(run, result.group):
                    lines[run.entrant, kind, words, fixed].append(point)
    return [
        Scaling(
            backend=name,
            kind=kind,
            condition=f"{network}, {words}" if network else words,
            points=[_scaled(point, points[0]) for point in points],
        )
        for (name, kind, words, _), of_networks in sorted(lines.items())
        for network, points in _by_network(of_networks)
        if len({point.num_processes for point in points}) > 1
    ]


class _Point(NamedTuple):
    """What an entrant reached with so many ranks, on nodes with such a network between them, if there are several."""

    num_processes: int
    rate: Interval
    network: str | None


def _by_network(points: list[_Point]) -> Iterable[tuple[str | None, list[_Point]]]:
    """Yields the points of each network in the order of ranks; one rank needs none, and belongs to all of them."""
    for network in dict.fromkeys(one.network for one in points if one.num_processes > 1):
        of_network = [one for one in points if one.num_processes == 1 or one.network == network]
        yield network, sorted(of_network, key=lambda one: one.num_processes)


def _scaled(point: _Point, base: _Point) -> ScalingPoint:
    return ScalingPoint(
        num_processes=point.num_processes,
        samples_per_second=point.rate,
        efficiency=point.rate.estimate / base.rate.estimate * base.num_processes / point.num_processes,
    )


def _fixed(run: Run, group: Group) -> Iterable[tuple[Literal["strong", "weak"], str, str]]:
    """Yields, for each kind of scaling, what stays the same along a line: in words, and all of it as a key."""
    of_entrant = run.record.config.model_dump(include={"batching", "allocator", "scheduling"})
    rest = condition(run) | version(run.record) | of_entrant
    for name in ("num_processes", "micro_batch_size", "global_batch_size", "network"):
        rest.pop(name, None)
    where = f"{group.precision}, {group.gradient_accumulation_steps} accumulation step(s)"
    yield "strong", f"{where}, global batch {group.global_batch_size}{on_machine(group)}", repr(rest)
    yield (
        "weak",
        f"{where}, {group.global_batch_size // group.num_processes} samples a rank{on_machine(group)}",
        repr(rest),
    )
