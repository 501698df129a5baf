"""How long to wait before an adapter is blamed: longer on a machine that is busy with other things."""

from __future__ import annotations

import os


def stretched(seconds: float) -> float:
    """Returns how long to wait for something that takes at most `seconds` on a machine that does nothing else.

    The load of the last minute (getloadavg(3)) is the number of threads on the whole machine that need a CPU, those
    of the ranks included: if it is twice the number of CPUs, each thread gets half a CPU. The result is between
    `seconds` and ten times `seconds`.
    """
    share = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(max(1.0, share), 10.0)
