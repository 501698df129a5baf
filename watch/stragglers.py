"""Ranks that are slower than the others, which wait for them in every step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from records.record import RankRecord, Straggler

# How much slower a straggler is, what share of a step the others lose by it, how many steps must show it, and how many
# first steps do not count.
_TIMES_SLOWER = 1.5
_SHARE_OF_STEP = 0.1
_FEWEST_STEPS = 5
_NUM_WARMUP_STEPS = 2


def find_stragglers(ranks: Sequence[RankRecord]) -> list[Straggler]:
    """Compares each rank's median step with that of all other ranks together, without the time of waiting for others.

    Whole steps take equally long on all ranks, since the fast ranks wait for the slow one. A rank for which they wait
    less than a tenth of a step is no straggler, however short its own part of the step is.
    """
    seconds = [rank.own_seconds[_NUM_WARMUP_STEPS:] for rank in ranks]
    if len(ranks) < 2 or min(map(len, seconds)) < _FEWEST_STEPS:
        return []
    found = []
    for mine, rank in zip(seconds, ranks, strict=True):
        others = median(second for other in seconds if other is not mine for second in other)
        least_lost = _SHARE_OF_STEP * median(rank.step_seconds[_NUM_WARMUP_STEPS:])
        if others > 0 and median(mine) > max(_TIMES_SLOWER * others, others + least_lost):
            found.append(
                Straggler(rank=rank.rank, hostname=rank.hostname, times_slower=round(median(mine) / others, 2))
            )
    return found
