"""Time, algbw and busbw of collectives, the line fitted through the times, and the file that holds all of it.

Sizes, algbw and busbw are defined as in nccl-tests
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). The size S is the buffer of a rank for all_reduce
and broadcast; for all_gather and gather it is the whole result, to which each of n ranks contributes S/n. algbw is S/t.
busbw is algbw times a factor that makes it comparable with the bandwidth of the hardware, whatever the operation and
the number of ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from compare.numbers import significant
from compare.results import CollectiveFit, CollectivePoint, CollectiveSeries, Interval
from compare.strict import OfBackend, Strict
from records.record import Environment

MEASUREMENT_NAME = "measurement.json"
ELEMENT_BYTES = 4  # of float32, in which gradients travel

_GATHERING = ("all_gather", "gather")
Operation = Literal["all_reduce", "all_gather", "gather", "broadcast"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)

_CONFIDENCE = 0.95
_MIN_SIZES = 3


class Measurement(OfBackend):
    """What one group of ranks is to measure: one backend with one number of ranks."""

    start_method: str
    device: Literal["cpu", "cuda"]
    num_processes: int
    threads_per_rank: int
    scheduling: Literal["batch", "normal"]
    timeout: float
    operations: list[Operation]
    sizes: list[int]
    seconds_per_point: float


class CollectivesFile(Strict):
    """What ``launch/run.sh allreduce`` writes."""

    schema_version: Literal[1] = 1
    kind: Literal["collectives"]
    created_at: str
    command: str
    environment: Environment = Field(description="of rank 0, in the first measurement")
    network: str | None = Field(
        default=None,
        description="where ranks were on nodes: what each sends in a second at most, such as 1gbit, or unlimited, "
        "then latency and loss if there are any, if this machine made them; otherwise the name of the engine",
    )
    series: list[CollectiveSeries]


def read_collectives(path: Path) -> CollectivesFile:
    """Reads and validates the file of a benchmark of collectives.

    Raises:
        OSError, ValueError: The file cannot be read, or is not one of this benchmark.
    """
    return CollectivesFile.model_validate_json(path.read_bytes())


def elements_per_rank(operation: str, num_bytes: int, num_processes: int) -> int:
    """Returns how many float32 values each rank contributes to a size of `num_bytes`, rounded down."""
    return num_bytes // ELEMENT_BYTES // (num_processes if operation in _GATHERING else 1)


def size_in_bytes(operation: str, num_elements: int, num_processes: int) -> int:
    """Returns the size in bytes, as nccl-tests defines it, if each rank contributes `num_elements` values."""
    return num_elements * ELEMENT_BYTES * (num_processes if operation in _GATHERING else 1)


def bus_factor(operation: str, num_processes: int) -> float:
    """Returns the ratio of busbw to algbw; for gather, which PERFORMANCE.md leaves out, it is that of gather_perf."""
    share = (num_processes - 1) / num_processes
    factors: Mapping[str, float] = {"all_reduce": 2 * share, "all_gather": share, "gather": share, "broadcast": 1.0}
    return factors[operation]


def collective_point(operation: str, num_processes: int, num_bytes: int, seconds: list[float]) -> CollectivePoint:
    """Makes the point of one operation at one size from the time of the slowest rank in every repetition."""
    seconds = [significant(second) for second in seconds]
    median = statistics.median(seconds)
    algbw = num_bytes / median
    return CollectivePoint(
        bytes=num_bytes,
        seconds=seconds,
        median_seconds=median,
        algbw=algbw,
        busbw=algbw * bus_factor(operation, num_processes),
    )


def pooled(starts: Sequence[Sequence[CollectiveSeries]]) -> list[CollectiveSeries]:
    """Puts the repetitions of several starts of the same measurements together.

    A start that is fast repeats more in the same time. So that all starts count the same, only as many repetitions of
    each are kept as the one with the fewest has.

    Args:
        starts: The series of each start, in the same order.
    """
    return [_pooled(series) for series in zip(*starts, strict=True)]


def _pooled(series: Sequence[CollectiveSeries]) -> CollectiveSeries:
    first = series[0]
    points = []
    for same in zip(*(one.points for one in series), strict=True):
        fewest = min(len(point.seconds) for point in same)
        seconds = [second for point in same for second in point.seconds[:fewest]]
        points.append(collective_point(first.operation, first.num_processes, same[0].bytes, seconds))
    return first.model_copy(update={"points": points, "fit": fit_line(points)})


def fit_line(points: list[CollectivePoint]) -> CollectiveFit | None:
    """Fits time = latency + bytes / bandwidth, the alpha-beta model of a message (Hockney 1994), to the medians.

    Sizes span orders of magnitude, so the fit minimizes the squares of the differences of log(time): a factor counts
    the same at each size, up or down. The 95 % intervals follow from the covariance and Student's t. They contain the
    noise and the error of a straight line as a model of the library, and the latter is mostly the larger part. The
    upper end of the bandwidth is None if the sizes cannot tell it from an infinite bandwidth.

    Returns:
        The fit; None with fewer than three sizes, or if the largest takes no longer than the smallest.
    """
    # Imported here because the ranks import this module and need none of these.
    import numpy as np
    from scipy import optimize, special

    sizes = np.array([point.bytes for point in points], dtype=float)
    seconds = np.array([point.median_seconds for point in points])
    if len(set(sizes)) < _MIN_SIZES or seconds[sizes.argmax()] <= seconds[sizes.argmin()]:
        return None
    units = np.array([seconds.min(), seconds.max() / sizes.max()])  # so that both parameters are around 1
    terms = np.stack([np.ones_like(sizes), sizes], axis=1) * units
    found = optimize.least_squares(lambda x: np.log(terms @ x / seconds), x0=[1.0, 1.0], bounds=(0, np.inf))
    slopes = terms / (terms @ found.x)[:, None]
    freedom = len(sizes) - 2
    variances = np.diag(np.linalg.inv(slopes.T @ slopes)) * (found.fun @ found.fun) / freedom
    half_widths = special.stdtrit(freedom, (1 + _CONFIDENCE) / 2) * np.sqrt(variances)

    latency, per_byte = (float(value) for value in found.x * units)
    latency_half, per_byte_half = (float(value) for value in half_widths * units)
    return CollectiveFit(
        latency_seconds=Interval(estimate=latency, low=max(0.0, latency - latency_half), high=latency + latency_half),
        bytes_per_second=Interval(
            estimate=1 / per_byte,
            low=1 / (per_byte + per_byte_half),
            high=1 / (per_byte - per_byte_half) if per_byte > per_byte_half else None,
        ),
    )
