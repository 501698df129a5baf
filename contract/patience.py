"""How long to wait before an adapter is blamed: longer on a machine that is busy with other things."""

from __future__ import annotations

import os

from records.environment import num_cpus


def stretched(seconds: float, num_ranks: int = 1) -> float:
    """Returns how long to wait for something that takes at most `seconds` on a machine that does nothing else.

    The load of the last minute (getloadavg(3)) is the number of threads on the whole machine that need a CPU, those
    of the ranks included: if it is twice the number of CPUs that this process may use, each thread gets half a CPU.
    Ranks that have only begun are not in it yet. The result is between `seconds` and ten times `seconds`.

    Args:
        seconds: How long it takes at most on an idle machine with a core for each rank.
        num_ranks: How many ranks share the CPUs, each with one thread.
    """
    share = max(os.getloadavg()[0], num_ranks) / num_cpus()
    return seconds * min(max(1.0, share), 10.0)
