"""Rare long steps, which comparisons leave out: who loses more to them than others is named."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from compare.report.long_steps import shares_of_long_steps, who_loses_to_long_steps
from compare.report.runs import TimedSteps
from compare.report.statistics import log_ratio
from compare.report.verdict import _long_steps

NUM_TURNS, NUM_STEPS = 60, 4


def _entrant(*starts: list[float]) -> SimpleNamespace:
    """An entrant with so many starts, whose steps took so many seconds."""
    return SimpleNamespace(
        timed=[
            SimpleNamespace(
                race=SimpleNamespace(race="race", block=block, turns=[1]),
                timed_steps=[
                    TimedSteps(first + 1, NUM_STEPS, seconds[first : first + NUM_STEPS])
                    for first in range(0, len(seconds), NUM_STEPS)
                ],
            )
            for block, seconds in enumerate(starts, start=1)
        ]
    )


def _seconds(seed: int, *, times: float = 1.0, every: int = 0) -> list[float]:
    """Steps of batches that differ, and one of `every` takes twice as long."""
    contents = np.random.default_rng(0).uniform(0.01, 0.02, NUM_TURNS * NUM_STEPS)
    noise = np.exp(np.random.default_rng(seed).normal(0, 0.05, len(contents)))
    seconds = times * contents * noise
    if every:
        seconds[seed::every] *= 2
    return [float(second) for second in seconds]


def test_what_long_steps_take_is_found_beside_batches_and_entrants_that_differ() -> None:
    fast = _entrant(*(_seconds(seed) for seed in (1, 2, 3)))
    slow = _entrant(*(_seconds(seed, times=3.0) for seed in (4, 5, 6)))
    rare = _entrant(*(_seconds(seed, every=10) for seed in (7, 8, 9)))
    none, neither, some = shares_of_long_steps([fast, slow, rare])  # type: ignore[list-item]
    assert none == neither == [0.0, 0.0, 0.0]
    assert some == pytest.approx([0.1 / 1.1] * 3, abs=0.02)


def test_comparisons_leave_them_out() -> None:
    """Which is why they are said apart."""
    calm, rare = np.reshape(_seconds(1), (-1, NUM_STEPS)), np.reshape(_seconds(1, every=10), (-1, NUM_STEPS))
    turns = [log_ratio(list(first), list(second)) for first, second in zip(calm, rare, strict=True)]
    assert float(np.mean(turns)) == pytest.approx(0.0, abs=1e-12)


def test_one_that_took_part_alone_or_in_another_block_has_none() -> None:
    assert shares_of_long_steps([_entrant(_seconds(1))]) == [[]]  # type: ignore[list-item]
    first, second = shares_of_long_steps([_entrant(_seconds(1), _seconds(2)), _entrant(_seconds(3))])  # type: ignore[list-item]
    assert (len(first), len(second)) == (1, 1)


def test_one_that_failed_takes_nothing_from_the_others() -> None:
    entrants = [_entrant(_seconds(1), _seconds(2), _seconds(3)), _entrant(*(_seconds(i, every=10) for i in (4, 5, 6)))]
    failed, stopped = _entrant(), _entrant(_seconds(7))
    alone = shares_of_long_steps(entrants)  # type: ignore[arg-type]
    assert [len(shares) for shares in alone] == [3, 3]
    assert shares_of_long_steps([*entrants, failed]) == [*alone, []]  # type: ignore[list-item]
    assert [len(one) for one in shares_of_long_steps([*entrants, stopped])] == [3, 3, 1]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("shares", "is_named"),
    [
        ([0.05, 0.06, 0.04], True),
        ([0.15, 0.0, 0.0], False),  # something happened once
        ([0.02, 0.02, 0.02], False),  # as much as other programs may do
        ([0.05, 0.06], False),  # too few starts
    ],
)
def test_who_loses_in_each_start_is_named(shares: list[float], is_named: bool) -> None:
    one = SimpleNamespace(name="horovod", ranked=True, shares_of_long_steps=shares)
    other = SimpleNamespace(name="ddp", ranked=True, shares_of_long_steps=[0.01] * len(shares))
    group = SimpleNamespace(entrants=[other, one], group=SimpleNamespace(key="2 ranks"))
    assert who_loses_to_long_steps(group) == ([(one, other)] if is_named else [])  # type: ignore[arg-type]
    sentence = (
        "Rare long steps take 5.0 % of the time of horovod, and 1.0 % of that of ddp (2 ranks): samples/s counts them, "
        "and comparisons do not."
    )
    assert _long_steps([group]) == [sentence] * is_named  # type: ignore[list-item]


def test_shares_of_different_starts_are_not_compared() -> None:
    one = SimpleNamespace(name="horovod", ranked=True, shares_of_long_steps=[0.05, 0.06, 0.04])  # it failed once
    other = SimpleNamespace(name="ddp", ranked=True, shares_of_long_steps=[0.01] * 4)
    group = SimpleNamespace(entrants=[other, one], group=SimpleNamespace(key="2 ranks"))
    assert who_loses_to_long_steps(group) == []  # type: ignore[arg-type]
    third = SimpleNamespace(name="accelerate", ranked=True, shares_of_long_steps=[0.07] * 4)
    group.entrants.append(third)
    assert who_loses_to_long_steps(group) == [(third, other)]  # type: ignore[arg-type]
