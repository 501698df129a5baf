"""Malformed input of every kind ends in one line and exit code 2: nothing executed, overwritten or exhausted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.hostile.families import FAMILIES
from tests.hostile.special import SPECIAL
from tests.hostile.victim import Victim, victim

pytestmark = pytest.mark.slow

NUM_EXAMPLES = 40


@pytest.fixture(scope="module")
def target() -> Iterator[Victim]:
    with victim() as place:
        yield place


@pytest.mark.parametrize("attack", SPECIAL, ids=lambda attack: attack.__name__)
def test_special(target: Victim, attack: Callable[[Victim], None]) -> None:
    attack(target)


@pytest.mark.parametrize("name", FAMILIES)
def test_family(target: Victim, name: str) -> None:
    FAMILIES[name](target, NUM_EXAMPLES)
    # An oracle that calls everything usable would prove nothing.
    assert target.tally.accepted[name] < 0.9 * target.tally.tried[name]
