"""How much memory this process has taken."""

from __future__ import annotations

import resource
from pathlib import Path


def peak_resident_bytes() -> int:
    """Returns the largest resident set that this process has had since its program was started, in bytes.

    It is VmHWM of proc_pid_status(5). What getrusage(2) calls ru_maxrss also counts what the process was before
    exec(2), a copy of the one that started it: under a large parent, it is the parent's size. It is the answer where
    there is no VmHWM.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    found = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return 1024 * (found[0] if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
