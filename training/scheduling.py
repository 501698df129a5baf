"""How the kernel schedules a rank: on cores of its own, and as a batch job.

A process that may move keeps the core on which it happens to be, for as long as nothing else wants it, and two cores of
one machine are seldom equally fast: one has busier neighbours. So a rank that is not bound can differ by several
per cent from the same rank in another run. mpirun's --bind-to core binds ranks likewise.

A rank has more threads than cores: beside the one that computes, those of its communication library, which wake up for
each packet that arrives. Under the usual policy of Linux, a thread that wakes up may interrupt the one that runs, which
often has not finished what the first one needs; it seems that both then wait for the scheduler's next tick (4 ms at
250 Hz, docs/findings.md). Under SCHED_BATCH, which needs no rights, a thread that wakes up waits its turn, and threads
share a core as fairly as before (https://man7.org/linux/man-pages/man7/sched.7.html).
"""

from __future__ import annotations

import contextlib
import os

from records.config import RunConfig
from records.environment import num_cpus, num_ranks_here


def schedule_as_batch() -> None:
    """Gives this thread, and the threads and processes that it starts from now on, the policy SCHED_BATCH.

    Nothing changes where the user has chosen another policy than the usual one, as with chrt, where a sandbox forbids
    it or where there are no policies. The record of the run tells what is in force.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def policy_in_force() -> str | None:
    """Returns the policy by which this thread is scheduled; None where there are no policies."""
    if not hasattr(os, "sched_getscheduler"):
        return None
    return {os.SCHED_OTHER: "normal", os.SCHED_BATCH: "batch"}.get(os.sched_getscheduler(0), "other")


def bind_to_cores(rank: int, config: RunConfig) -> None:
    """Binds this process, and the threads that it starts from now on, to its share of the cores.

    Nothing happens where the launcher has bound the ranks already, which leaves fewer cores than all of them need.

    Args:
        rank: The number of this rank.
        config: The configuration of the run.
    """
    threads = config.threads_per_rank
    cores = sorted(os.sched_getaffinity(0))
    num_here = num_ranks_here(config.num_processes, config.num_nodes)
    if num_cpus() >= threads * num_here:
        # The number of a rank may be that on its node: nodes may leave a job and return to it.
        on_node = config.num_processes // config.num_nodes
        first = (config.node_rank * on_node + rank % on_node) % num_here * threads
        os.sched_setaffinity(0, cores[first : first + threads])
