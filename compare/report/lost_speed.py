"""Where the speed is lost that more ranks do not give, from what was measured."""

from __future__ import annotations

from compare.numbers import joined
from compare.report.verdict import speed_of
from compare.results import Standing
from compare.steps import Breakdown


def where_speed_is_lost(standing: Standing, breakdown: Breakdown | None) -> str:
    """Divides what the opponent lacks of the ideal, which is as much for each rank as with the fewest ranks.

    Processes that work alone show what ranks lose that share a machine. Of this, the clock has the part by which what
    needs no memory is slower too, and the rest is due to memory bandwidth and caches. What ranks lose beyond it goes to
    communication and waiting, in the proportion that these have in a step.

    Args:
        standing: The standing.
        breakdown: Where the time of a step of the opponent goes; None if it was not diagnosed.

    Returns:
        A sentence; nothing where nobody worked alone, or where the parts would be negative.
    """
    opponent, base = standing.placings[0], standing.base
    limit = next((one for one in standing.limits if one.num_processes == opponent.num_processes), None)
    if base is None or limit is None or opponent.num_processes == 1:
        return ""
    ideal = opponent.num_processes / base.num_processes
    possible, reached = speed_of(limit, base), speed_of(opponent, base)
    if not reached <= possible <= ideal:
        return ""
    parts = [*_shared(standing, ideal - possible, ideal), *_between_ranks(breakdown, possible - reached)]
    return f"Of the ideal {times(ideal)} times, {joined([f'{times(lost)} are lost to {why}' for why, lost in parts])}."


def _shared(standing: Standing, lost: float, ideal: float) -> list[tuple[str, float]]:
    if standing.core_slowdown is None:
        return [("memory bandwidth, caches and the clock, which ranks share", lost)]
    to_clock = min(lost, ideal - ideal / max(1.0, standing.core_slowdown))
    return [
        ("a lower clock when all of these cores compute", to_clock),
        ("memory bandwidth and caches, which ranks share", lost - to_clock),
    ]


def _between_ranks(breakdown: Breakdown | None, lost: float) -> list[tuple[str, float]]:
    communication, waiting = (
        breakdown.resolved(part) if breakdown is not None else 0.0 for part in ("communication", "waiting")
    )
    if breakdown is None or breakdown.waiting is None or not communication + waiting:
        return [("communication and waiting", lost)]
    to_waiting = lost * waiting / (communication + waiting)
    return [("communication", lost - to_waiting), ("waiting for the slowest rank", to_waiting)]


def times(value: float) -> str:
    """Formats a speed relative to another."""
    return f"{value:.2f}"
