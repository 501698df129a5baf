"""Which entrants are meant, in few words: what many have in common is said once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from compare.numbers import joined
from compare.report.words import ranks
from compare.results import Entrant, GroupResult

# Ranks, precision, accumulation, name: in this order, facets are tried that split entrants into fewer descriptions.
_ORDER = (1, 2, 3, 0)


class Seat(NamedTuple):
    """One entrant of one group; `facets` tell it from all others."""

    key: str
    facets: tuple[str, ...]


def seats_of(groups: Iterable[GroupResult]) -> list[tuple[Seat, Entrant]]:
    """Returns all entrants, each with the seat that it has."""
    return [
        (
            Seat(
                result.group.key,
                (
                    entrant.name,
                    ranks(result.group.num_processes),
                    result.group.precision,
                    _accumulation(result.group.gradient_accumulation_steps),
                ),
            ),
            entrant,
        )
        for result in groups
        for entrant in result.entrants
    ]


def _accumulation(steps: int) -> str:
    return "no accumulation" if steps == 1 else f"{steps} accumulation steps"


def describe_seats(found: Sequence[Seat], everyone: Sequence[Seat]) -> str:
    """Says which entrants are meant: all, those that share names, ranks or conditions, or else each of them."""
    if set(found) == set(everyone):
        return "all"
    for facet in (None, *_ORDER):
        parts = _split(found, facet)
        if all(_fitting(part, everyone) == set(part) for part in parts):
            return " · ".join(_shared(part, everyone) for part in parts)
    return " · ".join(f"{seat.facets[0]}; {seat.key}" for seat in found)


def _split(found: Sequence[Seat], facet: int | None) -> list[list[Seat]]:
    parts: dict[str, list[Seat]] = {}
    for seat in found:
        parts.setdefault("" if facet is None else seat.facets[facet], []).append(seat)
    return list(parts.values())


def _values(seats: Iterable[Seat]) -> list[dict[str, None]]:
    """Returns the values of each facet, in the order in which they first appear."""
    return [dict.fromkeys(values) for values in zip(*(seat.facets for seat in seats), strict=True)]


def _fitting(found: Sequence[Seat], everyone: Sequence[Seat]) -> set[Seat]:
    """Returns all seats whose facets have no other values than those that are found."""
    allowed = _values(found)
    return {seat for seat in everyone if all(value in some for value, some in zip(seat.facets, allowed, strict=True))}


def _shared(found: Sequence[Seat], everyone: Sequence[Seat]) -> str:
    """Names the values of those facets that tell the seats from others."""
    pairs = zip(_values(found), _values(everyone), strict=True)
    return "; ".join(joined(list(some)) for some, known in pairs if some.keys() != known.keys()) or "all"
