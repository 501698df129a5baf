"""What a reading of the processor's clock costs: ``python -m tests.clock_costs``, for the figures in docs/race.md.

Where the processor has no counter to offer, the kernel counts something else through the same system call: the
nanoseconds that threads spend on a processor.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from training import clock

# PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK (linux/perf_event.h).
TASK_CLOCK = (1, 1)


def main() -> None:
    torch.set_num_threads(2)
    _measure("instructions")
    clock._INSTRUCTIONS = TASK_CLOCK
    _measure("task clock")


def _measure(event: str) -> None:
    watch = clock.ProcessorClock()
    print(f"{event}: {watch.why_no_instructions or 'counted'}")
    matrix = torch.ones(600, 600)
    in_a_loop, in_between = [], []
    for _ in range(1000):
        in_a_loop.append(_seconds(watch))
    for _ in range(1000):
        torch.mm(matrix, matrix)
        in_between.append(_seconds(watch))
    for where, seconds in (("in a loop", in_a_loop), ("between products of two threads", in_between)):
        print(f"  {where}: median {1e6 * median(seconds):.1f} us, least {1e6 * min(seconds):.1f} us")
    watch.close()


def _seconds(watch: clock.ProcessorClock) -> float:
    began = time.perf_counter()
    watch.read()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
