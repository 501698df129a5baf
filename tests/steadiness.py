"""Whether cores are as fast at one moment as at the next: ``python -m tests.steadiness`` exits with 0 if they are.

On a virtual machine with neighbours, the speed of a core changes for minutes at a time, though nothing else runs on it.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

_TIMINGS = 250
_ADDITIONS = 200_000  # some 10 ms of work
# How much longer than in the fastest tenth of the timings the work may take in the median.
_MOST_UNSTEADY = 1.12


def _spread_of_core(core: int) -> float:
    """Times a fixed piece of work on a core; returns the median relative to the tenth percentile."""
    os.sched_setaffinity(0, {core})
    seconds = []
    for _ in range(_TIMINGS):
        began, total = time.perf_counter(), 0
        for number in range(_ADDITIONS):
            total += number * number
        seconds.append(time.perf_counter() - began)
    seconds.sort()
    return seconds[_TIMINGS // 2] / seconds[_TIMINGS // 10]


def cores_are_steady() -> bool:
    """Times a fixed piece of work on all cores at once, for some seconds."""
    cores = sorted(os.sched_getaffinity(0))
    with ProcessPoolExecutor(len(cores)) as processes:
        return max(processes.map(_spread_of_core, cores)) < _MOST_UNSTEADY


if __name__ == "__main__":
    sys.exit(0 if cores_are_steady() else 1)
