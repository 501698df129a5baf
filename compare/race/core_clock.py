"""How much busy cores slow each other down: ``python -m compare.race.core_clock 2``.

A processor lowers its clock when more of its cores are busy, and what a system calls two cores may be two threads of
one. Both slow down what computes in a core's own caches, which memory bandwidth does not. Therefore small matrices are
multiplied by one process, and by as many as there shall be busy cores, in turns. All that compute together begin at one
moment, from which their time counts, so one that gets a core late has computed less. The command prints how many times
as long they take.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from statistics import fmean, median

from launch.guardian import guarded
from records.environment import num_cpus

# Three such matrices of four-byte numbers take 48 KiB.
_SIZE = 64
_ROUNDS = 5
_SECONDS = 0.2
# By then, the processes have been told when to begin.
_SECONDS_TO_TELL = 0.05
_SECONDS_TO_START = 60.0


def measure(num_cores: int) -> float:
    """Returns how many times as long products of small matrices take when so many processes compute them."""
    context = multiprocessing.get_context("spawn")
    started = context.Barrier(num_cores)
    with ProcessPoolExecutor(num_cores, context, _get_ready, (started,)) as pool:
        _products_per_second(pool, num_cores)  # starts them all, since none is idle before all have started
        ratios = [_products_per_second(pool, 1) / _products_per_second(pool, num_cores) for _ in range(_ROUNDS)]
    return median(ratios)


def _get_ready(started: Barrier) -> None:
    import numpy as np

    np.matmul(np.ones((_SIZE, _SIZE)), np.ones((_SIZE, _SIZE)))
    started.wait(_SECONDS_TO_START)


def _products_per_second(pool: Executor, num_processes: int) -> float:
    """Returns how many products so many processes compute together in a second, divided by their number."""
    begin = time.monotonic() + _SECONDS_TO_TELL
    rates = [pool.submit(_products_per_second_from, begin) for _ in range(num_processes)]
    return fmean(one.result() for one in rates)


def _products_per_second_from(begin: float) -> float:
    import numpy as np

    left, right, product = (np.ones((_SIZE, _SIZE), dtype=np.float32) for _ in range(3))
    time.sleep(max(0.0, begin - time.monotonic()))
    count, seconds = 0, 0.0
    while seconds < _SECONDS:
        for _ in range(100):
            np.matmul(left, right, out=product)
        count += 100
        seconds = time.monotonic() - begin
    return count / seconds


def measure_apart(num_cores: int) -> float | None:
    """Measures in other processes; returns None if that fails, or if there are fewer cores."""
    if num_cores == 1:
        return 1.0
    if num_cores > num_cpus():
        return None
    command = [sys.executable, "-m", "compare.race.core_clock", str(num_cores)]
    with guarded() as mark:
        threads = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment = {**os.environ, **threads, **mark, "PYTHONSAFEPATH": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return float(done.stdout) if done.returncode == 0 else None


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal():
        sys.exit("usage: python -m compare.race.core_clock NUM_CORES")
    print(measure(int(sys.argv[1])))
