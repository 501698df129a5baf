"""The arithmetic of the benchmark of collectives: bandwidths, sizes, and the line fitted through the times."""

from __future__ import annotations

import numpy as np
import pytest

from compare.collectives.measurement import collective_point, elements_per_rank, fit_line, pooled, size_in_bytes
from compare.numbers import format_seconds, format_size, rate
from compare.results import CollectiveFit, CollectivePoint, CollectiveSeries

SIZES = (2**10, 2**14, 2**18)


# What nccl-tests would print: n ranks, S bytes, t seconds, algbw and busbw in GB/s.
@pytest.mark.parametrize(
    ("operation", "num_processes", "num_bytes", "seconds", "algbw", "busbw"),
    [
        ("all_reduce", 2, 10**9, 0.5, 2.0, 2.0),
        ("all_reduce", 4, 10**9, 0.5, 2.0, 3.0),
        ("all_reduce", 8, 128 * 2**20, 0.001, 134.217728, 234.881024),
        ("all_gather", 2, 10**9, 0.5, 2.0, 1.0),
        ("all_gather", 4, 10**9, 0.25, 4.0, 3.0),
        ("gather", 4, 10**9, 0.25, 4.0, 3.0),
        ("broadcast", 8, 10**9, 0.5, 2.0, 2.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(
    operation: str, num_processes: int, num_bytes: int, seconds: float, algbw: float, busbw: float
) -> None:
    point = collective_point(operation, num_processes, num_bytes, [seconds / 2, seconds, seconds * 5])
    assert point.median_seconds == seconds
    assert point.algbw / 1e9 == pytest.approx(algbw)
    assert point.busbw / 1e9 == pytest.approx(busbw)


@pytest.mark.parametrize(
    ("operation", "num_elements", "num_bytes"),
    [("all_reduce", 256, 1024), ("gather", 85, 1020), ("all_gather", 85, 1020)],
)
def test_sizes_count_the_whole_result(operation: str, num_elements: int, num_bytes: int) -> None:
    assert elements_per_rank(operation, 1024, 3) == num_elements
    assert size_in_bytes(operation, num_elements, 3) == num_bytes


def _points(
    latency: float, bandwidth: float, noise: float, seed: int = 0, num_sizes: int = 10
) -> list[CollectivePoint]:
    random = np.random.default_rng(seed)
    return [
        collective_point("broadcast", 2, size, [(latency + size / bandwidth) * float(np.exp(random.normal(0, noise)))])
        for size in (2**10 * 4**exponent for exponent in range(num_sizes))
    ]


def test_equally_many_repetitions_of_each_start_count() -> None:
    def series(seconds: float, fit: CollectiveFit | None = None) -> CollectiveSeries:
        points = [collective_point("all_reduce", 2, 1024 * size, [size * seconds] * 2) for size in (1, 2, 3)]
        what = {"backend": "ddp", "transport": "gloo", "operation": "all_reduce", "num_processes": 2, "device": "cpu"}
        return CollectiveSeries.model_validate({**what, "points": points, "fit": fit})

    (found,) = pooled([[series(1.0)], [series(2.0)], [series(9.0)]])
    assert found.points[0].seconds == [1.0, 1.0, 2.0, 2.0, 9.0, 9.0]
    assert [point.median_seconds for point in found.points] == [2.0, 4.0, 6.0]
    assert found.fit == fit_line(found.points)
    fast = series(0.1)
    fast.points[0].seconds.extend([0.1] * 50)
    assert pooled([[series(1.0)], [fast], [series(2.0)]])[0].points[0].seconds == [1.0, 1.0, 0.1, 0.1, 2.0, 2.0]
    once = series(1.0, found.fit)
    assert pooled([[once]])[0].points == once.points


@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-4, 1e9), (5e-6, 2e11), (2e-3, 3e8)])
def test_the_fit_finds_what_was_planted(latency: float, bandwidth: float) -> None:
    exact = fit_line(_points(latency, bandwidth, noise=0))
    assert exact is not None
    assert exact.latency_seconds.estimate == pytest.approx(latency, rel=1e-4)
    assert exact.bytes_per_second.estimate == pytest.approx(bandwidth, rel=1e-4)
    covered = []
    for seed in range(200):
        fit = fit_line(_points(latency, bandwidth, noise=0.1, seed=seed))
        assert fit is not None
        for interval, truth in ((fit.latency_seconds, latency), (fit.bytes_per_second, bandwidth)):
            assert interval.estimate == pytest.approx(truth, rel=0.5)
            assert interval.low is not None
            assert interval.low <= interval.estimate <= (interval.high or np.inf)
            covered.append(interval.low <= truth <= (interval.high or np.inf))
    assert np.mean(covered) == pytest.approx(0.95, abs=0.04)


def test_no_latency_is_a_latency_of_nothing() -> None:
    fit = fit_line(_points(0.0, 1e9, noise=0.05))
    assert fit is not None
    assert fit.latency_seconds.low == 0
    assert fit.latency_seconds.estimate < 1e-6
    assert fit.bytes_per_second.estimate == pytest.approx(1e9, rel=0.1)


def test_a_bandwidth_that_the_sizes_do_not_tell_has_no_upper_end() -> None:
    seconds = {2**10: 1.0e-3, 2**11: 1.2e-3, 2**12: 0.9e-3, 2**13: 1.01e-3}
    fit = fit_line([collective_point("broadcast", 2, size, [time]) for size, time in seconds.items()])
    assert fit is not None
    assert fit.bytes_per_second.high is None


def test_there_is_no_fit_without_three_sizes_and_growth() -> None:
    assert fit_line(_points(1e-4, 1e9, noise=0, num_sizes=2)) is None
    assert fit_line(_points(1e-4, 1e9, noise=0, num_sizes=3)) is not None
    assert fit_line([collective_point("broadcast", 2, 1024, [seconds]) for seconds in (1e-3, 2e-3, 3e-3)]) is None
    shrinking = [collective_point("broadcast", 2, size, [1 / size]) for size in SIZES]
    assert fit_line(shrinking) is None


def test_numbers_for_people() -> None:
    assert [format_size(size) for size in (4, 1020, 1024, 3 * 2**19, 2**28, 2**32)] == [
        *("4 B", "1,020 B", "1 KiB", "1.50 MiB", "256 MiB", "4 GiB")
    ]
    assert [format_seconds(seconds) for seconds in (4.56e-7, 8.13e-5, 1.2345e-3, 0.25, 2.0)] == [
        *("0.456 us", "81.3 us", "1.23 ms", "250 ms", "2 s")
    ]
    assert [format_seconds(seconds) for seconds in (7040.0, 0.9996, 0.00099951, 999.4)] == [
        *("7,040 s", "1 s", "1 ms", "999 s")
    ]
    assert [rate(value) for value in (1234.4, 99.96, 12.34, 2.345, 0.4321)] == ["1234", "100", "12.3", "2.35", "0.432"]
