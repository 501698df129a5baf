"""Keeps the scattered pages of the machine's free memory from the entrants of a race.

The kernel gives a process that needs memory the smallest free blocks first, which lie all over the memory. A process
that starts later gets long runs of neighbouring pages, and was faster on the virtual machine where this was measured:
of five starts of one program, the first took four per cent longer for a step than the last (docs/findings.md). So the
race takes the scattered pages itself before it starts its entrants, and gives them back when these have ended.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path

from compare.race.memory_limit import is_limited

_FREE_BLOCKS = Path("/proc/buddyinfo")
# As long as the usual huge page; runs of several megabytes were not faster still.
_BYTES_OF_A_LONG_RUN = 2**21
_BYTES_OF_A_PART = 2**26
# Entrants may take 0.8 of the available memory together (compare/race/costs.py).
_SHARE_OF_MEMORY = 0.1
# Taking a gigabyte takes more than half a second.
_MOST_BYTES = 2**32


@contextlib.contextmanager
def scattered_memory_held() -> Iterator[int]:
    """Holds most of the free pages that are no part of a long run, and yields their size in bytes.

    Nothing is held where the system does not tell how its free memory is divided, where memory belongs to several
    NUMA nodes, of which this process would take one's, and where the memory of this process is limited.
    """
    with contextlib.ExitStack() as stack:
        yield _BYTES_OF_A_PART * _take(stack)


def _take(stack: contextlib.ExitStack) -> int:
    """Takes a part at a time, for as long as they lower the amount of scattered memory; returns their number."""
    import psutil

    available = psutil.virtual_memory().available
    scattered, number, in_vain = scattered_bytes(), 0, 0
    most = 0 if is_limited() else min(_SHARE_OF_MEMORY * available, _MOST_BYTES)
    while scattered >= _BYTES_OF_A_PART and (number + 1) * _BYTES_OF_A_PART <= most:
        try:
            part = allocated(_BYTES_OF_A_PART)
        except OSError:  # the system gives this process no more
            break
        stack.callback(part.close)
        left = scattered_bytes()
        # Once it may be that another program has just given memory back. Twice, the parts came from long runs: what is
        # left is not given to programs.
        in_vain = in_vain + 1 if left > scattered - _BYTES_OF_A_PART / 2 else 0
        scattered, number = left, number + 1
        if in_vain == 2:
            break
    return number


def allocated(size: int) -> mmap.mmap:
    """Returns memory whose pages have all been allocated, none of them huge."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[:: mmap.PAGESIZE] = bytes(-(-size // mmap.PAGESIZE))
    return memory


def scattered_bytes() -> int:
    """Returns the size of all free blocks that are smaller than a long run; 0 where that is not known.

    A line is "Node 0, zone Normal", and the numbers of free blocks of 1, 2, 4 and so on pages
    (https://docs.kernel.org/filesystems/proc.html). With several nodes, it is not known which of them will be used.
    """
    try:
        lines = [line.split() for line in _FREE_BLOCKS.read_text().splitlines()]
    except OSError:
        return 0
    if len({node for _, node, *_ in lines}) != 1:
        return 0
    sizes = [mmap.PAGESIZE << order for order in range(max(len(line) - 4 for line in lines))]
    return sum(
        int(number) * size
        for line in lines
        for number, size in zip(line[4:], sizes, strict=False)
        if size < _BYTES_OF_A_LONG_RUN
    )
