"""Rare long steps: what they take of an entrant's time.

The comparison of two entrants leaves the longest and the shortest of their steps out, since other programs lengthen
single steps of anybody (compare/report/statistics.py). A library may have long steps of its own, as when it collects
something from time to time. Whoever loses more to them than others is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median, median_low

from compare.report.grouping import EntrantRuns
from compare.results import MIN_PAIRS, Entrant, GroupResult

# A step is long if it takes so many times what it is expected to take.
_LONG = 1.5
# Long steps are named where they take so much more of an entrant's time than of another's, on average and in each
# start. In five races of DDP under several names or allocators, which have none of their own, nobody was named.
_MORE_ON_AVERAGE, _MORE_IN_EACH_START = 0.02, 0.01


def shares_of_long_steps(entrants: Sequence[EntrantRuns]) -> list[list[float]]:
    """Returns what long steps take of each entrant's time, in each block in which it took the same turns as others.

    A step is expected to take what it takes for others, beside what their other steps take: batches differ, and so do
    entrants. What it takes beyond that, if it is long, is divided by the time of all steps.
    """
    blocks = [
        {
            (run.race.race, run.race.block): {(span.first, span.number): span.seconds for span in run.timed_steps}
            for run in one.timed
            if run.race is not None and run.race.turns
        }
        for one in entrants
    ]
    shares: list[list[float]] = [[] for _ in blocks]
    for block in dict.fromkeys(block for of_blocks in blocks for block in of_blocks):
        present = [index for index, of_blocks in enumerate(blocks) if block in of_blocks]  # others had failed
        turns = [blocks[index][block] for index in present]
        common = [turn for turn in turns[0] if all(turn in others for others in turns)]
        if len(present) > 1 and common:
            steps = [[second for turn in common for second in others[turn]] for others in turns]
            for index, share in zip(present, _shares(steps), strict=True):
                shares[index].append(share)
    return shares


def _shares(steps: Sequence[Sequence[float]]) -> list[float]:
    """Returns the share of each entrant.

    Args:
        steps: For each entrant the seconds of the same steps.
    """
    usual = [median(seconds) for seconds in steps]
    relative = [[second / one for second in seconds] for seconds, one in zip(steps, usual, strict=True)]
    contents = [median_low(of_step) for of_step in zip(*relative, strict=True)]
    shares = []
    for seconds, one in zip(steps, usual, strict=True):
        beyond = (second - one * content for second, content in zip(seconds, contents, strict=True))
        long = sum(more for more, content in zip(beyond, contents, strict=True) if more > (_LONG - 1) * one * content)
        shares.append(long / sum(seconds))
    return shares


def who_loses_to_long_steps(group: GroupResult) -> list[tuple[Entrant, Entrant]]:
    """Returns whose long steps take more than those of another, and of whom they take least."""
    able = [one for one in group.entrants if one.ranked and len(one.shares_of_long_steps) >= MIN_PAIRS]
    found = []
    for one in able:
        # Of another number of starts, it would not be known which of them are of the same blocks.
        alike = [other for other in able if len(other.shares_of_long_steps) == len(one.shares_of_long_steps)]
        least = min(alike, key=lambda other: mean(other.shares_of_long_steps))
        more = [
            mine - theirs for mine, theirs in zip(one.shares_of_long_steps, least.shares_of_long_steps, strict=True)
        ]
        if mean(more) >= _MORE_ON_AVERAGE and min(more) >= _MORE_IN_EACH_START:
            found.append((one, least))
    return found
