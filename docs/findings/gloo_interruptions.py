"""Threads of gloo interrupt each other in an all-reduce on one core, unless the kernel schedules them as batch jobs.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 docs/findings/gloo_interruptions.py

Each of two ranks has a core of its own. Rank 0 counts how often the thread that reads from the network loses its core
before it has finished, and times the all-reduce. Medians of three rounds of each.
"""

import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

NUM_CALLS = 300
NUM_ELEMENTS = 600_000


def measure() -> tuple[float, float]:
    """Returns how often the reading thread is interrupted in an all-reduce, and the milliseconds of the median."""
    group = dist.new_group(timeout=timedelta(seconds=60))  # its threads inherit how this one is scheduled
    vector, nothing, seconds = torch.zeros(NUM_ELEMENTS), torch.zeros(1), []
    for _ in range(20):
        dist.all_reduce(vector, group=group)
    readers = threads("gloo_tcp_loop")
    if not readers:
        sys.exit("changed: gloo has no thread of this name")
    newest = max(map(int, readers))
    before = interruptions(newest)
    for _ in range(NUM_CALLS):
        dist.all_reduce(nothing, group=group)
        began = time.perf_counter()
        dist.all_reduce(vector, group=group)
        seconds.append(time.perf_counter() - began)
    return (interruptions(newest) - before) / NUM_CALLS, 1e3 * statistics.median(seconds)


def threads(name: str) -> list[str]:
    """Returns the numbers of this process's threads of that name."""
    return [task.name for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().strip() == name]


def interruptions(thread: int) -> int:
    """Returns how often a thread has lost its core although it could have gone on, from proc_pid_status(5)."""
    lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("nonvoluntary_ctxt_switches")).split()[1])


rank = int(os.environ["LOCAL_RANK"])
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
torch.set_num_threads(1)
dist.init_process_group("gloo")
seen: dict[int, list[tuple[float, float]]] = {os.SCHED_OTHER: [], os.SCHED_BATCH: []}
for policy in [*seen] * 3:  # in turn, so that neither is always first
    os.sched_setscheduler(0, policy, os.sched_param(0))
    seen[policy].append(measure())
usual, batch = (tuple(map(statistics.median, zip(*rounds, strict=True))) for rounds in seen.values())
as_described = rank == 1 or (usual[0] > 2 and batch[0] < 1)
if rank == 0:
    for name, (often, milliseconds) in (("SCHED_OTHER", usual), ("SCHED_BATCH", batch)):
        print(f"{name}: interrupted {often:.1f} times in an all-reduce of {milliseconds:.2f} ms")
    print("as described" if as_described else "changed: expected more than 2 times, and less than once")
sys.stdout.flush()
dist.barrier()
os._exit(0 if as_described else 1)  # leaving Python normally after gloo aborts now and then
