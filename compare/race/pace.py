"""How far a race gets within its budget, from what its parts have taken so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby

from compare.race.plan import PlannedRun, RacePlan, heats_of
from compare.results import MIN_PAIRS

Heat = list[PlannedRun]

# How much the expectation weighs against what finished runs took, as if it had been seen for so many seconds.
_SECONDS_OF_TRUST = 30.0


class Pace:
    """Expects how long runs take: as the plan does, corrected by how it was right so far.

    A race goes on with further blocks of timed runs until its budget is spent, and leaves blocks out that it has no
    time for, but never one of the first three, without which nothing could be compared.

    Args:
        plan: The plan of the race.
        left: The runs that are not finished yet.
        seconds: The time for all runs; what is left has a share of it, as the plan expects.
    """

    def __init__(self, plan: RacePlan, left: Sequence[PlannedRun], seconds: float) -> None:
        self._plan = plan
        self.left = heats_of(list(left))
        self._begun = {heat[0].block for heat in heats_of(plan.runs()) if _is_timed(heat) and heat not in self.left}
        self._expected = self._taken = _SECONDS_OF_TRUST
        expected = [heat for heat in heats_of(plan.runs()) if self._is_expected(heat)]
        share = sum(self._planned(heat) for heat in expected if heat in self.left) / sum(map(self._planned, expected))
        self._deadline = time.monotonic() + seconds * share

    def note(self, heat: Heat, seconds: float) -> None:
        """Notes that runs which took place together are over, and how long they took."""
        self.left.remove(heat)
        if _is_timed(heat):
            self._begun.add(heat[0].block)
        self._expected += self._planned(heat)
        self._taken += seconds

    def skip(self, heat: Heat) -> None:
        """Notes that runs need not take place any more."""
        self.left.remove(heat)

    def skip_block(self, heat: Heat) -> None:
        """Notes that timed runs need not take place any more, nor those of their block that are still to come.

        Less time would suffice for the rest of it, and some conditions would have more starts than others.
        """
        self.left = [one for one in self.left if not _is_timed(one) or one[0].block != heat[0].block]

    def seconds(self, heats: Sequence[Heat]) -> float:
        """Returns how long these are expected to take, one after the other."""
        return sum(map(self._planned, heats)) * self._taken / self._expected

    def to_come(self) -> list[Heat]:
        """Returns the heats that will take place, as far as can be told now."""
        timed = [heat for heat in self.left if _is_timed(heat)]
        seconds = self._deadline - time.monotonic() - self.seconds([heat for heat in self.left if not _is_timed(heat)])
        blocks: set[int] = set()
        for block, heats in groupby(timed, lambda heat: heat[0].block):
            seconds -= self.seconds(list(heats))
            if seconds < 0 and block > MIN_PAIRS and block not in self._begun:
                break
            blocks.add(block)
        return [heat for heat in self.left if not _is_timed(heat) or heat[0].block in blocks]

    def _is_expected(self, heat: Heat) -> bool:
        return not _is_timed(heat) or heat[0].block <= self._plan.schedule.repeats

    def _planned(self, heat: Heat) -> float:
        assert self._plan.costs is not None
        return self._plan.costs.heat(heat, self._plan.options, self._plan.schedule.timed_steps)


def _is_timed(heat: Heat) -> bool:
    return heat[0].purpose == "timed"
