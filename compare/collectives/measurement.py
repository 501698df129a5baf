"""Time, algbw and busbw of collectives, the line fitted through them, and the file that keeps all of it.

Sizes, algbw and busbw are those of nccl-tests
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): S is the buffer of a rank for
all_reduce and broadcast, and for all_gather and gather the whole result, to which each rank
contributes S/n; algbw is S/t, and busbw is algbw times a factor that makes it comparable with the
bandwidth of the hardware, whatever the operation and the number of ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from compare.report.results import CollectiveFit, CollectivePoint, CollectiveSeries, Interval
from records.record import Environment

MEASUREMENT_NAME = "measurement.json"
ELEMENT_BYTES = 4  # of float32, in which gradients travel

_GATHERING = ("all_gather", "gather")
OPERATIONS = ("all_reduce", *_GATHERING, "broadcast")

_CONFIDENCE = 0.95
_MIN_SIZES = 3


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Measurement(_Strict):
    """What one group of ranks is to measure: one backend in one world."""

    backend: str
    start_method: str
    device: Literal["cpu", "cuda"]
    num_processes: int
    threads_per_rank: int
    timeout: float
    operations: list[str]
    sizes: list[int]
    seconds_per_point: float


class CollectivesFile(_Strict):
    """What ``launch/run.sh allreduce`` writes."""

    schema_version: Literal[1] = 1
    kind: Literal["collectives"]
    created_at: str
    command: str
    environment: Environment
    series: list[CollectiveSeries]


def read_collectives(path: Path) -> CollectivesFile:
    """Reads and validates the file of a benchmark of collectives.

    Raises:
        OSError, ValueError: It cannot be read, or is no such file.
    """
    return CollectivesFile.model_validate_json(path.read_bytes())


def elements_per_rank(operation: str, num_bytes: int, num_processes: int) -> int:
    """How many float32 values each rank contributes where the size is `num_bytes`, rounded down."""
    return num_bytes // ELEMENT_BYTES // (num_processes if operation in _GATHERING else 1)


def size_in_bytes(operation: str, num_elements: int, num_processes: int) -> int:
    """The size, as nccl-tests defines it, where each rank contributes `num_elements`."""
    return num_elements * ELEMENT_BYTES * (num_processes if operation in _GATHERING else 1)


def bus_factor(operation: str, num_processes: int) -> float:
    """The ratio of busbw to algbw; for gather, which PERFORMANCE.md leaves out, that of nccl-tests' gather_perf."""
    share = (num_processes - 1) / num_processes
    factors: Mapping[str, float] = {"all_reduce": 2 * share, "all_gather": share, "gather": share, "broadcast": 1.0}
    return factors[operation]


def collective_point(operation: str, num_processes: int, num_bytes: int, seconds: list[float]) -> CollectivePoint:
    """One size of one operation, from the slowest rank's time of every repetition."""
    median = statistics.median(seconds)
    algbw = num_bytes / median
    return CollectivePoint(
        bytes=num_bytes,
        seconds=seconds,
        median_seconds=median,
        algbw=algbw,
        busbw=algbw * bus_factor(operation, num_processes),
    )


def fit_line(points: list[CollectivePoint]) -> CollectiveFit | None:
    """Fits time = latency + bytes / bandwidth, the alpha-beta model of a message (Hockney 1994), to medians.

    Sizes span orders of magnitude, so it is the ratio of times that is made small: least squares of
    log(time), in which a factor counts the same at each size, up or down. The intervals are of 95 %,
    from the covariance and Student's t. They hold the noise as well as how badly a straight line
    describes the library, which is mostly the larger part. An upper end is None where the sizes do not
    tell the bandwidth from an infinite one.

    Returns:
        The fit; None with fewer than three sizes, or where the largest takes no longer than the smallest.
    """
    # Here, since ranks read this module, too, and need none of it.
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
