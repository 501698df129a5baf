"""A small profile made by hand, for tests of forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compare.collectives.measurement import CollectivesFile
from compare.results import CollectiveFit, CollectivePoint, CollectiveSeries, Interval
from forecast.profile import AllReduceTime, Collective, Computing, GradientTime, Profile
from forecast.sending import Buckets
from records.environment import describe_environment


def certain(value: float) -> Interval:
    return Interval(estimate=value, low=value, high=value)


def made_profile(**changes: Any) -> Profile:
    """A step of 100 ms: 1 of data, 29 forward, 60 backward, 10 of update; four gradients of 1 MB, evenly."""
    facts: dict[str, Any] = {
        "created_at": "2026-11-24T12:00:00+00:00",
        "command": "launch/run.sh forecast profile ddp",
        "environment": describe_environment(with_torch=False),
        "backend": "ddp",
        "transport": "gloo",
        "compressions": ["fp16", "bf16"],
        "sending": Buckets(first_bytes=1_000_000, bucket_bytes=1_000_000),
        "samples_per_rank": 16,
        "num_samples": 1600,
        "num_steps": 30,
        "micro_steps": 1,
        "data_seconds": 0.001,
        "forward_seconds": 0.029,
        "backward_seconds": 0.060,
        "last_backward_seconds": 0.060,
        "update_seconds": 0.010,
        "gradients": [
            GradientTime(name=f"weight{k}", num_bytes=1_000_000, ready_seconds=0.015 * k) for k in range(1, 5)
        ],
        "computing": [Computing(num_processes=1, step_seconds=certain(0.1), spread_seconds=None)],
        "overlap_slow_down": None,
        "collectives": [],
        "remarks": [],
    }
    return Profile.model_validate({**facts, **changes})


def collective(
    num_processes: int, latency: float, bandwidth: float, times: Sequence[tuple[float, float]] = ()
) -> Collective:
    return Collective(
        num_processes=num_processes,
        transport="gloo",
        latency_seconds=certain(latency),
        bytes_per_second=certain(bandwidth),
        times=[AllReduceTime(num_bytes=int(size), seconds=certain(seconds)) for size, seconds in times],
    )


def measured_network(network: str | None, **fits: dict[int, tuple[float, float]]) -> CollectivesFile:
    """What ``allreduce`` would write: for each backend, by number of ranks, seconds of latency and bytes per second."""
    series = [
        CollectiveSeries(
            backend=backend,
            transport="gloo",
            operation="all_reduce",
            num_processes=number,
            device="cpu",
            points=[
                CollectivePoint(
                    bytes=size, seconds=[taken], median_seconds=taken, algbw=size / taken, busbw=size / taken
                )
                for size in (10**5, 10**6, 10**7)
                for taken in [latency + size / bandwidth]
            ],
            fit=CollectiveFit(latency_seconds=certain(latency), bytes_per_second=certain(bandwidth)),
        )
        for backend, by_number in fits.items()
        for number, (latency, bandwidth) in by_number.items()
    ]
    return CollectivesFile(
        kind="collectives",
        created_at="2026-11-25T03:00:00+00:00",
        command="launch/run.sh allreduce",
        environment=describe_environment(with_torch=False),
        network=network,
        series=series,
    )
