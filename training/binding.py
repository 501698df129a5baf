"""Binding a rank to cores of its own, as mpirun's --bind-to core does.

A process that may move keeps the core on which it happens to be, for as long as nothing else wants it, and two cores of
one machine are seldom equally fast: one has busier neighbours. So a rank that is not bound can differ by several
per cent from the same rank in another run.
"""

from __future__ import annotations

import os

from records.config import NETWORK_VARIABLE, RunConfig
from records.environment import num_cpus


def bind_to_cores(rank: int, config: RunConfig) -> None:
    """Binds this process, and the threads that it starts from now on, to its share of the cores.

    Nothing happens where the launcher has bound the ranks already, which leaves fewer cores than all of them need.

    Args:
        rank: The number of this rank.
        config: The configuration of the run.
    """
    threads = config.threads_per_rank
    cores = sorted(os.sched_getaffinity(0))
    nodes_here = config.num_nodes if NETWORK_VARIABLE in os.environ else 1  # such nodes share one machine
    num_here = config.num_processes // config.num_nodes * nodes_here
    if num_cpus() >= threads * num_here:
        # The number of a rank may be that on its node: nodes may leave a job and return to it.
        on_node = config.num_processes // config.num_nodes
        first = (config.node_rank * on_node + rank % on_node) % num_here * threads
        os.sched_setaffinity(0, cores[first : first + threads])
