"""What a race shows first: several ranks of each backend beside one process on the same batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backends.registry import REFERENCE
from compare.results import Entrant, Group, GroupResult, Interval, Results


@dataclass(frozen=True)
class Headline:
    """One process, and the entrants that computed the same on several ranks, under equal conditions.

    Attributes:
        alone: The conditions of one process.
        rate: What one process reached, in samples a second.
        rivals: The entrants with several ranks, each with its conditions.
    """

    alone: Group
    rate: Interval
    rivals: Sequence[tuple[Group, Entrant]]


def headlines(results: Results) -> Iterator[Headline]:
    """Yields a headline for each condition without gradient accumulation under which one process was timed."""
    groups = [one for one in results.groups if one.group.gradient_accumulation_steps == 1]
    for alone in (one for one in groups if one.group.num_processes == 1):
        single = next((entrant for entrant in alone.entrants if entrant.name == REFERENCE), None)
        if single is not None and single.samples_per_second is not None:
            several = [one for one in groups if one.group.num_processes > 1]
            same = [one for one in several if _conditions(one) == _conditions(alone)]
            backends = [(one.group, entrant) for one in same for entrant in one.entrants if entrant.role == "backend"]
            rivals = [
                (group, entrant) for group, entrant in backends if entrant.ranked or entrant.samples_per_second is None
            ]
            yield Headline(alone.group, single.samples_per_second, rivals)


def _conditions(result: GroupResult) -> tuple[str | None, str, str, str, int]:
    group = result.group
    return group.machine, group.task, group.device, group.precision, group.global_batch_size
