"""A small profile made by hand, for tests of forecasts."""

from __future__ import annotations

from typing import Any

from compare.results import Interval
from forecast.profile import Collective, Computing, GradientTime, Profile
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


def collective(num_processes: int, latency: float, bandwidth: float) -> Collective:
    return Collective(
        num_processes=num_processes,
        transport="gloo",
        latency_seconds=certain(latency),
        bytes_per_second=certain(bandwidth),
    )
