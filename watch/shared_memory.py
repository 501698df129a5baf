"""Recognises failures that come from a full /dev/shm, in which processes hand data to each other."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# How libraries report it. A page that the system cannot provide causes a bus error, without a message.
_SURELY = re.compile("bus error|SIGBUS|/dev/shm|unable to allocate shared memory", re.IGNORECASE)
# Open MPI only says that its processes cannot reach each other. Triton's message is about the memory of a GPU.
_PERHAPS = re.compile(
    r"(?<!out of resource: )shared memory|No space left on device|Errno 28|ENOSPC|Out of resource"
    r"|unable to reach each other"
)
# Messages about a disk that is full, such as that of a checkpoint or of a file elsewhere.
_OF_DISK = re.compile(r"checkpoint|\bsave|: '/(?!dev/shm)")
# Containers come with 64 MiB. When this is checked, the memory of the failed job is free again.
_SMALL_BYTES = 256 * 2**20
# Open MPI asks for 4 MiB for each process. With less, a process may die before it can report an error.
_TINY_BYTES = 16 * 2**20


def advice(message: str, starter_log: str, *, ended_silently: bool) -> str:
    """Returns what to add to the message of a failure that a full /dev/shm explains, else nothing.

    Args:
        message: The error of the failed rank, or of the starter.
        starter_log: What the starter has printed.
        ended_silently: Whether the rank ended without any message.
    """
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return ""
    is_named = _SURELY.search(message)
    is_likely = usage.free < _SMALL_BYTES and _PERHAPS.search(message + starter_log) and not _OF_DISK.search(message)
    is_possible = usage.free < _TINY_BYTES and ended_silently
    if not (is_named or is_likely or is_possible):
        return ""
    return (
        f"; {SHARED_MEMORY} has {_mebibytes(usage.free)} free of {_mebibytes(usage.total)}: make it larger (mount -o "
        f"remount,size=2g {SHARED_MEMORY}; of a container: --shm-size 2g), or use neither --dataloader-num-workers nor "
        "--transport shared-memory"
    )


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:.3g} MiB" if number < 2**30 else f"{number / 2**30:.3g} GiB"
