"""How long to wait before an adapter is blamed: longer where the machine is busy with other things, too."""

from __future__ import annotations

import os


def stretched(seconds: float) -> float:
    """Returns how long to wait for what takes at most so many seconds on a machine that does nothing else.

    The load of the last minute (getloadavg(3)) is the number of threads on the whole machine that want a CPU, those
    of the ranks included: where it is twice the number of CPUs, each of them gets half of one. Never less than
    `seconds`, and at most ten times as long.
    """
    share = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(max(1.0, share), 10.0)
