"""How busy a machine is, looked at before each run of a race."""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass

import psutil

IDLE_SHARE = 0.1
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


def wait_until_idle() -> Idleness:
    """Returns as soon as the machine is idle, and otherwise what it sees after about ten seconds."""
    for look in range(_LOOKS):
        # cpu_percent sleeps while it counts, and counts this sleeping process as idle.
        seen = Idleness(psutil.cpu_percent(interval=_SECONDS_OF_A_LOOK) / 100, _gpu_processes())
        if seen.idle or look == _LOOKS - 1:
            break
        time.sleep(0.05)
    return seen


def _gpu_processes() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(listing.split())
