"""Which entrants a row of a table is about, in few words."""

from __future__ import annotations

from itertools import product

import pytest

from compare.report.seats import Seat, describe_seats

_ALL = [
    Seat(f"{ranks}, {precision}", (name, ranks, precision, "no accumulation"))
    for name, ranks, precision in product(("single", "ddp", "horovod"), ("1 rank", "2 ranks"), ("fp32", "bf16"))
    if (name, ranks) != ("single", "2 ranks")
]


def _where(*facets: tuple[str, str, str]) -> list[Seat]:
    return [seat for seat in _ALL if seat.facets[:3] in facets]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (_ALL, "all"),
        ([seat for seat in _ALL if "ddp" in seat.facets], "ddp"),
        ([seat for seat in _ALL if "2 ranks" in seat.facets], "ddp and horovod; 2 ranks"),
        ([seat for seat in _ALL if "bf16" in seat.facets], "bf16"),
        (
            [seat for seat in _ALL if "bf16" in seat.facets or "1 rank" in seat.facets],
            "1 rank · ddp and horovod; 2 ranks; bf16",
        ),
        (_where(("ddp", "1 rank", "fp32")), "ddp; 1 rank; fp32"),
        (
            _where(("ddp", "1 rank", "fp32"), ("ddp", "2 ranks", "bf16"), ("horovod", "1 rank", "bf16")),
            "ddp; 1 rank, fp32 · ddp; 2 ranks, bf16 · horovod; 1 rank, bf16",
        ),
    ],
)
def test_what_many_have_in_common_is_said_once(found: list[Seat], words: str) -> None:
    assert describe_seats(found, _ALL) == words
