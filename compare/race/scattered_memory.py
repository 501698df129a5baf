"""Takes the scattered pages of the machine's memory out of a race.

The kernel gives a process that needs memory the smallest free blocks first: what others have left, pages from all over
the memory. Whoever comes later gets long runs of pages, and is faster: of five starts of one program, the first took
four per cent longer for a step than the last (docs/findings.md).
"""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path
from types import TracebackType

_FREE_BLOCKS = Path("/proc/buddyinfo")
_BYTES_OF_A_LONG_RUN = 2**21
_BYTES_OF_A_PART = 2**26
# Entrants may take 0.7 of it together (compare/race/costs.py).
_SHARE_OF_MEMORY = 0.2


class ScatteredMemory:
    """Holds the free pages that are no part of a long run, so that entrants get none of them.

    Nothing is held where the system does not tell how its free memory is divided.
    """

    def __init__(self) -> None:
        self._held: list[mmap.mmap] = []

    def __enter__(self) -> ScatteredMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for part in self._held:
            part.close()
        self._held.clear()

    def take(self) -> None:
        """Takes what is scattered now, a part at a time, for as long as that leaves less of it."""
        import psutil

        num_parts = int(_SHARE_OF_MEMORY * psutil.virtual_memory().available / _BYTES_OF_A_PART)
        before = scattered_bytes()
        while before >= _BYTES_OF_A_PART and len(self._held) < num_parts:
            self._held.append(_part())
            after = scattered_bytes()
            if after > before - _BYTES_OF_A_PART / 2:
                return  # the rest is of kinds that the kernel keeps for itself
            before = after


def _part() -> mmap.mmap:
    """Returns memory of ordinary pages, all of which are there."""
    part = mmap.mmap(-1, _BYTES_OF_A_PART, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        part.madvise(mmap.MADV_NOHUGEPAGE)
    part[:: mmap.PAGESIZE] = bytes(_BYTES_OF_A_PART // mmap.PAGESIZE)
    return part


def scattered_bytes() -> int:
    """Returns the size of all free blocks that are smaller than a long run; 0 where that is not known.

    A line is "Node 0, zone Normal", and the numbers of free blocks of 1, 2, 4 and so on pages
    (https://docs.kernel.org/filesystems/proc.html).
    """
    try:
        lines = _FREE_BLOCKS.read_text().splitlines()
    except OSError:
        return 0
    numbers = [[int(number) for number in line.split()[4:]] for line in lines]
    sizes = [mmap.PAGESIZE << order for order in range(max(map(len, numbers), default=0))]
    return sum(
        number * size
        for zone in numbers
        for number, size in zip(zone, sizes, strict=False)
        if size < _BYTES_OF_A_LONG_RUN
    )
