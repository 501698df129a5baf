"""How much of what ranks computed was of use, and how evenly it was spread over them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from records.record import RankRecord


def positions_per_token(ranks: Sequence[RankRecord]) -> float | None:
    """Returns how many token positions were computed for each real token; 1.0 is no padding, None is no token."""
    positions, tokens = (sum(sum(getattr(rank, name)) for rank in ranks) for name in ("positions", "tokens"))
    return positions / tokens if tokens else None


def imbalance(ranks: Sequence[RankRecord]) -> float | None:
    """Returns the work of the rank with most of it over the mean of the ranks; the mean over all steps.

    Older records, and those of peers, have no work. Positions take its place or, without tokens, samples.

    All ranks of a step wait for the one that has most to compute, so 1.1 is a step that is a tenth longer than it
    might be. It is None without a step.
    """
    of_ranks = (rank.work or rank.positions or rank.samples for rank in ranks)
    steps = [counts for counts in zip(*of_ranks, strict=True) if any(counts)]
    return fmean(max(counts) / fmean(counts) for counts in steps) if steps else None
