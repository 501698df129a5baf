"""Runs that are started several times for a profile: what they show together, and of one more start."""

from __future__ import annotations

import math
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compare.collectives.measurement import collective_point, fit_line
from compare.results import CollectiveSeries
from forecast import runs
from forecast.measuring import interval_of_run, spread_of_starts
from forecast.model import Conditions, step_time
from forecast.network import parse_network
from forecast.profile import Computing
from forecast.scenario import Scenario, Variant
from forecast.sending import Buckets, Fusion
from forecast.times import RankTimes
from tests.forecasting import certain, collective, made_profile


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


def _series(num_processes: int, seconds: float) -> CollectiveSeries:
    points = [collective_point("all_reduce", num_processes, size, [size * seconds] * 5) for size in (1000, 2000, 4000)]
    return CollectiveSeries(
        backend="ddp",
        transport="gloo",
        operation="all_reduce",
        num_processes=num_processes,
        device="cpu",
        points=points,
        fit=fit_line(points),
    )


def test_all_reduces_of_several_starts_have_the_interval_of_one_more_start() -> None:
    starts = [[_series(2, second), _series(4, 2 * second)] for second in (1e-6, 2e-6, 1.1e-6)]
    two, four = runs.fits_of(*starts)["ddp"]
    assert (two.num_processes, four.num_processes) == (2, 4)
    took = two.times[-1].seconds
    assert took.estimate == pytest.approx(4000 * 1.1e-6)  # of the median start
    assert took.low is not None
    assert took.high is not None
    assert took.low < 4000 * 1e-6
    assert took.high > 4000 * 2e-6
    (alone,) = runs.fits_of([_series(2, 1e-6)])["ddp"]
    assert alone.times[-1].seconds.high == pytest.approx(4000 * 1e-6)


def test_a_compressed_training_fills_its_buckets_with_whole_gradients() -> None:
    """Of 4 gradients of 1 MB, each bucket of 1 MB has one; half of it travels."""
    sent: list[float] = []

    def reduce(num_bytes: float) -> float:
        sent.append(num_bytes)
        return 0.0

    work = made_profile(sent_share=0.5).work
    step_time(work, 2, Buckets(first_bytes=1_000_000, bucket_bytes=1_000_000), reduce, Conditions())
    assert sent == [500_000] * 4
    assert work.compressed(0.5).share == 0.25


def test_the_pace_at_which_a_library_wakes_up_is_no_latency_of_its_messages() -> None:
    """Horovod's all-reduces of few bytes take a cycle of 1 ms on two ranks; on 512 ranks, they do not take 511."""
    fusion = Fusion(cycle_seconds=0.001)
    profile = made_profile(sending=fusion, collectives=[collective(2, 0.00104, 1e9)])
    scenario = Scenario(profile, parse_network("1000tbit"))
    computing = 0.1
    step = scenario.step(Variant("ring", fusion), 512)
    # Each of 1022 messages takes 20 us, for the agreement and for a buffer, in a few cycles.
    assert 1022 * 20e-6 < step.total - computing < 5 * 2 * (1022 * 20e-6)


def test_more_processes_stand_for_fewer_that_were_not_measured() -> None:
    computing = [
        Computing(num_processes=n, step_seconds=certain(second), spread_seconds=None)
        for n, second in ((1, 0.1), (8, 0.3))
    ]
    profile = made_profile(computing=computing)
    for ranks_per_node in (4, 8):
        scenario = Scenario(profile, parse_network("1000tbit,local=1000tbit"), ranks_per_node=ranks_per_node)
        step = scenario.step(Variant("ring", profile.sending), ranks_per_node)
        assert step.computing == pytest.approx(0.3)
        assert any("as fast as in 8 processes at once" in remark for remark in scenario.remarks) == (
            ranks_per_node == 4
        )
