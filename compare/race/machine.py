"""How busy the machine is before and during each run of a race."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

IDLE_SHARE = 0.1
_SECONDS_OF_A_LOOK = 0.5
_LOOKS = 20


@dataclass(frozen=True)
class Idleness:
    """What other programs do on this machine.

    Attributes:
        busy_share: The share of all cores that is busy during half a second.
        gpu_processes: The number of processes that use a GPU.
    """

    busy_share: float
    gpu_processes: int

    @property
    def idle(self) -> bool:
        """Whether the machine is idle enough for a run."""
        return self.busy_share <= IDLE_SHARE and self.gpu_processes == 0


def look_for_idleness(*, patient: bool, say: Callable[[str], None]) -> Idleness:
    """Looks how busy the machine is.

    Args:
        patient: Wait up to ten seconds for an idle machine; otherwise look once.
        say: Is told if the machine is busy.

    Returns:
        What the last look saw: the first one that found the machine idle, or the last one of all.
    """
    import psutil  # not needed by --help, which works without the packages of the extra `compare`

    looks = _LOOKS if patient else 1
    for look in range(looks):
        # cpu_percent sleeps while it counts, and counts this sleeping process as idle.
        seen = Idleness(psutil.cpu_percent(interval=_SECONDS_OF_A_LOOK) / 100, _gpu_processes())
        if seen.idle or look == looks - 1:
            break
        if look == 0:
            say(f"waiting up to 10 s for other programs, which take {seen.busy_share:.0%} of the cores")
        time.sleep(0.05)
    return seen


class ForeignLoad:
    """What other programs and the hypervisor take of this machine's cores, from the construction of this object on.

    Processes that this process has started and waited for do not count.
    """

    def __init__(self) -> None:
        self._cores, self._own = BusyCores(), own_seconds()

    def share(self) -> float:
        """Returns the share of all cores so far."""
        return max(0.0, self._cores.share() - self._cores.share_of(own_seconds() - self._own))


def own_seconds() -> float:
    """Returns the processor time of this process, and of those that it has started and waited for."""
    mine = os.times()
    return mine.user + mine.system + mine.children_user + mine.children_system


class BusyCores:
    """How busy the cores of this machine are, from the construction of this object on."""

    def __init__(self) -> None:
        self._began, self._busy = _busy_seconds()

    def share(self) -> float:
        """Returns the share of all cores that was busy so far, whatever program it was."""
        return self.share_of(_busy_seconds()[1] - self._busy)

    def share_of(self, seconds: float) -> float:
        """Returns the share of all cores so far that so many seconds of processor time are."""
        import psutil

        return seconds / (time.monotonic() - self._began) / (psutil.cpu_count() or 1)


def _busy_seconds() -> tuple[float, float]:
    """Returns the time, and the seconds for which all cores together have been busy; stolen time counts."""
    import psutil

    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # On Linux guests are counted in user time already.
    return time.monotonic(), sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)


def _gpu_processes() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(listing.split())
