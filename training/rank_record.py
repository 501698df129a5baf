"""What a rank says of itself in the record of a run."""

from __future__ import annotations

import resource
import socket
from typing import Any, NamedTuple

import torch

from records.environment import allocator_in_force
from records.record import RankRecord
from records.resident import peak_resident_bytes
from training.measurements import Measurements
from training.scheduling import policy_in_force


class Place(NamedTuple):
    """Where a rank is.

    Attributes:
        rank: Its number.
        local_rank: Its number among the ranks of its node.
        device: Where it computes.
        settings: The settings that its library uses.
    """

    rank: int
    local_rank: int
    device: torch.device
    settings: dict[str, Any]


def rank_record(place: Place, measurements: Measurements, *, weights_sha256: str, num_updates: int) -> RankRecord:
    """Returns the record of this process, which has trained.

    Args:
        place: Where it is.
        measurements: What it measured of its steps.
        weights_sha256: The digest of all weights as they are now.
        num_updates: How many updates the optimizer has taken.
    """
    on_gpu = place.device.type == "cuda"
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return RankRecord(
        rank=place.rank,
        local_rank=place.local_rank,
        hostname=socket.gethostname(),
        device=str(place.device),
        num_threads=torch.get_num_threads(),
        scheduling=policy_in_force(),
        allocator=allocator_in_force(),
        step_seconds=measurements.step_seconds,
        own_seconds=measurements.own_seconds,
        step_cpu_seconds=measurements.cpu_seconds,
        step_instructions=measurements.instructions,
        samples=measurements.samples,
        tokens=measurements.tokens,
        positions=measurements.positions,
        work=measurements.work,
        peak_memory_bytes=peak_resident_bytes(),
        peak_cuda_memory_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        schedule_steps=num_updates,
        effective_settings=place.settings,
        weights_sha256=weights_sha256,
    )
