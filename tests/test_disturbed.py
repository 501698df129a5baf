"""Starts of a race that other programs disturbed."""

from __future__ import annotations

import dataclasses

import pytest

from compare.report.disturbed import leave_out_disturbed
from compare.report.grouping import EntrantRuns
from compare.report.runs import Run
from tests.test_turns import _timed

DISTURBED = {
    "one": ((0.01, 0.02, 0.09, 0.03), (1, 2, 4), ["9.0"]),
    "the worst": ((0.01, 0.06, 0.60, 0.03), (1, 2, 4), ["60"]),
    "two": ((0.20, 0.01, 0.30, 0.01, 0.01), (2, 4, 5), ["30", "20"]),
    "too few others": ((0.01, 0.02, 0.09), (1, 2, 3), []),
    "too few anyway": ((0.07, 0.09), (1, 2), []),
}


@pytest.mark.parametrize("case", DISTURBED)
def test_a_start_that_was_disturbed_is_left_out_if_enough_remain(case: str) -> None:
    """All entrants of it, even if other programs came during the turns of one alone."""
    shares, kept, told = DISTURBED[case]
    entrants = []
    for name, factor in (("a", 2.0), ("b", 0.0)):
        runs = [_disturbed(_timed(name), block, factor * share) for block, share in enumerate(shares, start=1)]
        entrants.append(EntrantRuns(name, name, name, "backend", runs))
    sentences = leave_out_disturbed([entrants[:1], entrants[1:]])  # of two groups, as with other numbers of ranks
    for entrant in entrants:
        assert [run.race.block for run in entrant.timed if run.race] == [*kept]
        assert {run.race.block for run in entrant.left_out if run.race} == {1, 2, 3, 4, 5}.intersection(
            range(1, len(shares) + 1)
        ) - {*kept}
    assert [sentence.partition("programs took ")[2].partition(" %")[0] for sentence in sentences] == told
    assert all(sentence.startswith("fp32, 32 samples a step: start ") for sentence in sentences)


def test_no_entrant_loses_the_starts_that_it_needs() -> None:
    """One has failed twice."""
    shares = (0.01, 0.02, 0.09, 0.03, 0.01)
    whole, failed = (
        EntrantRuns(
            name, name, name, "backend", [_disturbed(_timed(name), block, shares[block - 1]) for block in blocks]
        )
        for name, blocks in (("a", (1, 2, 3, 4, 5)), ("b", (1, 2, 3)))
    )
    assert leave_out_disturbed([[whole, failed]]) == []
    assert (len(whole.timed), len(failed.timed)) == (5, 3)


def _disturbed(run: Run, block: int, share: float) -> Run:
    assert run.race is not None
    turns = [turn.model_copy(update={"foreign_share": share}) for turn in run.race.turns]
    return dataclasses.replace(run, race=run.race.model_copy(update={"block": block, "turns": turns}))
