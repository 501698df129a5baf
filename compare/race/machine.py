"""How busy a machine is, looked at before each run of a race."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass

IDLE_SHARE = 0.1
# From here on a run is disturbed.
DISTURBED_SHARE = 0.05
_SECONDS_OF_A_LOOK = 0.5
_LOOKS = 20


@dataclass(frozen=True)
class Idleness:
    """What others do on this machine.

    Attributes:
        busy_share: Of all cores, during a short look.
        gpu_processes: How many processes compute on a GPU.
    """

    busy_share: float
    gpu_processes: int

    @property
    def idle(self) -> bool:
        return self.busy_share <= IDLE_SHARE and self.gpu_processes == 0


def look_for_idleness(*, patient: bool) -> Idleness:
    """Returns as soon as the machine is idle, and otherwise what it sees after about ten seconds, or at once."""
    import psutil  # comes with an extra, which the help text does without

    looks = _LOOKS if patient else 1
    for look in range(looks):
        # cpu_percent sleeps while it counts, and counts this sleeping process as idle.
        seen = Idleness(psutil.cpu_percent(interval=_SECONDS_OF_A_LOOK) / 100, _gpu_processes())
        if seen.idle or look == looks - 1:
            break
        time.sleep(0.05)
    return seen


class ForeignLoad:
    """What others took of this machine's cores since this was made: other programs, and the hypervisor.

    Processes that this one has started, and waited for, are not others.
    """

    def __init__(self) -> None:
        self._began, self._busy, self._own = self._look()

    def share(self) -> float:
        """Of all cores, so far."""
        import psutil

        ended, busy, own = self._look()
        foreign = (busy - self._busy) - (own - self._own)
        return max(0.0, foreign / (ended - self._began) / (psutil.cpu_count() or 1))

    @staticmethod
    def _look() -> tuple[float, float, float]:
        import psutil

        times, mine = psutil.cpu_times(), os.times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # On Linux guests are counted in user time already.
        busy = sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        own = mine.user + mine.system + mine.children_user + mine.children_system
        return time.monotonic(), busy, own


def _gpu_processes() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(listing.split())
