"""Runs that are started several times for a profile: what they show together, and of one more start."""

from __future__ import annotations

import math
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forecast import runs
from forecast.measuring import interval_of_run, spread_of_starts
from forecast.times import RankTimes


def test_an_interval_holds_one_more_start_in_95_of_100_cases() -> None:
    """Three kinds of runs have three starts each, which differ by 10 %; steps differ by 5 %."""
    random, held, num_trials = np.random.default_rng(0), 0, 2000

    def start(kind: int) -> list[float]:
        logarithms = math.log(kind + 1) + random.normal(0, 0.1) + random.normal(0, 0.05, 15)
        return [float(second) for second in np.exp(logarithms)]

    for _ in range(num_trials):
        starts = [[start(kind) for _ in range(3)] for kind in range(3)]
        interval = interval_of_run(starts[2], spread_of_starts(starts))
        assert interval.low is not None
        assert interval.high is not None
        assert interval.low <= interval.estimate <= interval.high
        held += interval.low <= median(start(2)) <= interval.high
    assert held / num_trials == pytest.approx(0.95, abs=0.015)


def test_the_median_start_counts() -> None:
    starts = [[1.0, 1.2, 1.1], [9.0, 9.0, 9.0], [1.0, 1.3, 1.2]]
    assert interval_of_run(starts, spread_of_starts([starts])).estimate == 1.2


def test_a_single_start_has_the_interval_of_its_steps() -> None:
    steps = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]
    assert spread_of_starts([[steps], [steps]]) is None
    interval = interval_of_run([steps], None)
    assert (interval.low, interval.estimate, interval.high) == (1.0, 1.3, 1.6)


def _times(first: float, rank: int = 0) -> RankTimes:
    seconds = [first, first + 1]
    return RankTimes(
        rank=rank,
        data_seconds=seconds,
        forward_seconds=seconds,
        backward_seconds=seconds,
        last_backward_seconds=seconds,
        update_seconds=seconds,
        gradient_bytes={"weight": 4, "rare": 4},
        ready_seconds={"weight": seconds, "rare": seconds[:1]},
    )


def test_the_steps_of_all_starts_are_joined() -> None:
    joined = RankTimes.joined([_times(1.0), _times(5.0)])
    assert joined.step_seconds == [4.0, 8.0, 20.0, 24.0]
    assert joined.ready_seconds == {"weight": [1.0, 2.0, 5.0, 6.0], "rare": [1.0, 5.0]}
    assert joined.last_ready_of_steps == [1.0, 2.0, 5.0, 6.0]  # what some step leaves out does not count


def test_runs_with_a_core_for_each_thread_are_not_taken_to_differ_as_those_that_share_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "num_cpus", lambda: 2)
    request: Any = SimpleNamespace(config=SimpleNamespace(threads_per_rank=1))

    def run(num_processes: int, *firsts: float) -> tuple[Any, list[list[float]]]:
        starts = [[_times(first, rank) for rank in range(num_processes)] for first in firsts]
        measured = runs._Measured("ddp", num_processes, starts, [])
        return measured, measured.steps

    described = runs._described(
        request, [run(2, 10.0, 10.0, 10.001), run(4, 10.0, 11.0, 30.0), run(8, 10.0, 9.0, 11.0)]
    )
    two, four, eight = (one.step_seconds for one in described)
    assert two.high is not None
    assert four.high is not None
    assert eight.high is not None
    assert two.high / two.estimate < 1.001
    assert four.high / four.estimate == pytest.approx(eight.high / eight.estimate)
    assert four.high / four.estimate > 2
