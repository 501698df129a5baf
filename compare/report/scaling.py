"""Throughput over the number of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from compare.report.grouping import EntrantRuns, condition, version
from compare.report.runs import Run
from compare.report.words import on_machine
from compare.results import Group, GroupResult, Interval, Scaling, ScalingPoint


def scaling_of(groups: Sequence[GroupResult], grouped: Sequence[list[EntrantRuns]]) -> list[Scaling]:
    """Returns throughput over ranks for groups that differ in the number of ranks and in what follows from it."""
    lines: dict[tuple[str, Literal["strong", "weak"], str, str], list[tuple[int, Interval]]] = defaultdict(list)
    for result, runs in zip(groups, grouped, strict=True):
        for entrant, own in zip(result.entrants, runs, strict=True):
            if entrant.ranked and entrant.samples_per_second:
                run = own.timed[0]
                for kind, words, fixed in _fixed(run, result.group):
                    point = (result.group.num_processes, entrant.samples_per_second)
                    lines[run.record.config.backend, kind, words, fixed].append(point)
    return [
        Scaling(backend=name, kind=kind, condition=words, points=_points(points))
        for (name, kind, words, _), points in sorted(lines.items())
        if len({number for number, _ in points}) > 1
    ]


def _points(points: list[tuple[int, Interval]]) -> list[ScalingPoint]:
    base_number, base = min(points, key=lambda point: point[0])
    return [
        ScalingPoint(
            num_processes=number,
            samples_per_second=rate,
            efficiency=rate.estimate / base.estimate * base_number / number,
        )
        for number, rate in sorted(points, key=lambda point: point[0])
    ]


def _fixed(run: Run, group: Group) -> Iterable[tuple[Literal["strong", "weak"], str, str]]:
    """Yields, for each kind of scaling, what stays the same along a line: in words, and all of it as a key."""
    rest = condition(run) | version(run.record)
    for name in ("num_processes", "micro_batch_size", "global_batch_size"):
        del rest[name]
    where = f"{group.precision}, {group.gradient_accumulation_steps} accumulation step(s)"
    yield "strong", f"{where}, global batch {group.global_batch_size}{on_machine(group)}", repr(rest)
    yield (
        "weak",
        f"{where}, {group.global_batch_size // group.num_processes} samples a rank{on_machine(group)}",
        repr(rest),
    )
