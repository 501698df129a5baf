"""Starts of a race that other programs disturbed; they do not count where enough others remain.

Whether a start counts depends on what other programs took of the cores, never on what was measured. It counts for all
entrants that took turns in it or for none, so that nobody is favoured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from statistics import fmean

from compare.numbers import points
from compare.report.grouping import EntrantRuns
from compare.report.parts import block_of
from compare.report.runs import Run
from compare.results import DISTURBED_SHARE, MIN_PAIRS


def leave_out_disturbed(groups: Sequence[Sequence[EntrantRuns]]) -> list[str]:
    """Moves disturbed starts from the timed runs of entrants to those that are left out, the most disturbed ones first.

    No entrant is left with fewer starts than a comparison needs.

    Args:
        groups: The entrants of all groups: those with other numbers of ranks, and peers, take turns in the same starts.

    Returns:
        A sentence about each start that is left out.
    """
    starts: dict[tuple[object, ...], list[tuple[EntrantRuns, Run]]] = defaultdict(list)
    for entrant in chain.from_iterable(groups):
        for run in entrant.timed:
            if run.race is not None and run.race.turns:
                starts[block_of(run)].append((entrant, run))
    shares = {start: _foreign_share([run for _, run in together]) for start, together in starts.items()}
    sentences = []
    for start in sorted(shares, key=lambda start: shares[start], reverse=True):
        together = starts[start]
        if shares[start] <= DISTURBED_SHARE or any(len(entrant.timed) <= MIN_PAIRS for entrant, _ in together):
            continue
        for entrant, run in together:
            entrant.timed.remove(run)
            entrant.left_out.append(run)
        sentences.append(_sentence(together[0][1], shares[start]))
    return sentences


def _foreign_share(together: Sequence[Run]) -> float:
    """Returns what other programs took while the entrants of a start took turns, as a mean."""
    shares = [turn.foreign_share for run in together if run.race for turn in run.race.turns if turn.round > 0]
    return fmean(shares) if shares else 0.0


def _sentence(run: Run, share: float) -> str:
    config, number = run.record.config, run.record.gradient_accumulation_steps
    parts = f" in {number} parts" if number > 1 else ""
    assert run.race is not None
    return (
        f"{config.precision}, {config.global_batch_size} samples a step{parts}: start {run.race.block} is left out, "
        f"since other programs took {points(share)} % of the cores meanwhile"
    )
