"""Which turns of two entrants are compared with each other: those of the same round of a block."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from compare.report.grouping import EntrantRuns
from compare.report.runs import Run
from compare.report.statistics import PairedStarts, log_ratio


def paired(first: EntrantRuns, second: EntrantRuns, *, names: tuple[str, str] | None = None) -> PairedStarts:
    """Pairs the turns of two entrants.

    Args:
        first: The entrant that is compared with.
        second: The entrant that the claim is about.
        names: What to call them; by default, their backends.
    """
    ours, theirs = _by_block(first.timed), _by_block(second.timed)
    starts = [
        [log_ratio(ours[block][steps], theirs[block][steps]) for steps in ours[block] if steps in theirs[block]]
        for block in ours
        if block in theirs
    ]
    return PairedStarts(*(names or (first.name, second.name)), [turns for turns in starts if turns])


def _by_block(runs: Sequence[Run]) -> dict[tuple[str, int, int], dict[tuple[int, int], list[float]]]:
    """Returns the seconds of each step, by the run's race, block and heat, and by the steps that were timed together.

    Outside a race, the block is the number of the run, and all of its steps have one time together. What is left before
    the end of an epoch can be a turn of a step or two, which says too little to count as much as the others.
    """
    found = {}
    for number, run in enumerate(runs):
        usual = median(span.number for span in run.timed_steps) if run.timed_steps else 0
        block = (run.race.race, run.race.block, run.race.heat) if run.race else ("", number, 0)
        found[block] = {(span.first, span.number): span.seconds for span in run.timed_steps if 2 * span.number >= usual}
    return found
