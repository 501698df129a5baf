"""Where the speed is lost that more ranks do not give, from what was measured."""

from __future__ import annotations

from compare.numbers import joined
from compare.report.verdict import breakdown_of, speed_of
from compare.results import Results, Standing
from compare.steps import Breakdown


def where_speed_is_lost(standing: Standing, breakdown: Breakdown | None) -> str:
    """Divides what the opponent lacks of the ideal, which is as much for each rank as with the fewest ranks.

    Processes that work alone show what ranks lose that share a machine. Of this, cores that slow each other down have
    the part by which what needs no memory is slower too (compare/race/core_clock.py), and memory bandwidth and caches
    the rest. What ranks lose beyond it goes to communication and waiting, in the proportion that these have in a step.

    Args:
        standing: The standing.
        breakdown: Where the time of a step of the opponent goes; None if it was not diagnosed.

    Returns:
        A sentence; nothing where no gain from more ranks, or no loss, was shown, or where the parts would be negative.
    """
    opponent, base = standing.placings[0], standing.base
    limit = next((one for one in standing.limits if one.num_processes == opponent.num_processes), None)
    if base is None or limit is None or opponent.num_processes == 1:
        return ""
    if base.claim != "slower" or limit.claim != "faster":
        return ""
    ideal = opponent.num_processes / base.num_processes
    possible, reached = speed_of(limit, base), speed_of(opponent, base)
    if not reached <= possible <= ideal:
        return ""
    parts = [*_shared(standing, ideal - possible, ideal), *_between_ranks(breakdown, possible - reached)]
    said = [f"{times(lost)} to {why}" for why, lost in parts if times(lost) != times(0.0)]
    if not said:
        return ""
    return f"Of the ideal {times(ideal)} times, {joined([said[0].replace(' to ', ' are lost to ', 1), *said[1:]])}."


def where_speed_is_lost_elsewhere(results: Results) -> list[str]:
    """Returns that sentence, after its conditions, for each standing but the first, where there is one."""
    said = [(one, where_speed_is_lost(one, breakdown_of(one.placings[0], results))) for one in results.standings[1:]]
    return [f"{standing.conditions}: {sentence}" for standing, sentence in said if sentence]


def _shared(standing: Standing, lost: float, ideal: float) -> list[tuple[str, float]]:
    if standing.core_slowdown is None:
        return [("memory bandwidth, caches and the clock", lost)]
    to_clock = min(lost, ideal - ideal / max(1.0, standing.core_slowdown))
    return [
        ("busy cores that slow each other down", to_clock),
        ("memory bandwidth and caches", lost - to_clock),
    ]


def _between_ranks(breakdown: Breakdown | None, lost: float) -> list[tuple[str, float]]:
    if breakdown is None or not breakdown.tells_waiting or "communication" in breakdown.unresolved:
        return [("communication and waiting", lost)]
    communication, waiting = breakdown.communication, breakdown.resolved("waiting")
    to_waiting = lost * waiting / (communication + waiting)
    return [("communication", lost - to_waiting), ("waiting for the slowest rank", to_waiting)]


def times(value: float) -> str:
    """Formats a speed relative to another."""
    return f"{value:.2f}"
