"""Which cores an entrant computes on that needs fewer than there are: others in each round of a race.

Two cores of one machine are seldom equally fast, and not for long: on a virtual machine, each took 1.5 times as long
for seconds at a time, whatever the other did (docs/results/README.md). A rank that stays on the first core for a whole
race is compared with ranks on all cores, and seems fast or slow as this core is. Over the rounds of a start, it
therefore takes turns on all cores, and so does every other entrant of its size.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_NODES_WITH_MEMORY = Path("/sys/devices/system/node/has_memory")
_PROCESSES = Path("/proc")


class Rotation:
    """Moves the threads of one entrant.

    Only ranks that are bound to the first cores are moved (training/scheduling.py): whoever binds them elsewhere, or
    not at all, has a reason. Memory of several NUMA nodes would be far from other cores, so nobody is moved there.
    """

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._width: int | None = None
        self._shift = 0

    def move(self, processes: Iterable[int], number: int) -> list[int]:
        """Moves all threads to the cores of a round.

        Args:
            processes: The processes of its ranks, and those that they have started. They are stopped.
            number: The number of the round.

        Returns:
            The cores that the ranks have now; nothing if they stay where they are throughout the race.
        """
        processes = list(processes)
        if self._width is None:
            self._width = self._num_bound(processes)
        if not self._width:
            return []
        bound, self._shift = self._bound(), number % len(self._cores)
        moved = dict(zip(bound, self._bound(), strict=True))
        for thread in _threads_of(processes) if bound != self._bound() else ():
            with contextlib.suppress(OSError):  # it has ended
                if (cores := os.sched_getaffinity(thread)) <= set(bound):
                    os.sched_setaffinity(thread, {moved[core] for core in cores})
        return self._bound()

    def _bound(self) -> list[int]:
        """Returns the cores of the ranks, which follow one another in a ring of all cores."""
        ring = [*self._cores[self._shift :], *self._cores[: self._shift]]
        return ring[: self._width]

    def _num_bound(self, processes: Iterable[int]) -> int:
        """Returns how many cores the ranks are bound to, or 0 if they cannot be moved."""
        bound: set[int] = set()
        for process in processes:
            with contextlib.suppress(OSError):  # it has ended
                bound |= os.sched_getaffinity(process)
        is_first = bound == set(self._cores[: len(bound)])
        return len(bound) if is_first and len(bound) < len(self._cores) and not has_several_numa_nodes() else 0


def _threads_of(processes: Iterable[int]) -> Iterable[int]:
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            yield from [int(thread.name) for thread in _PROCESSES.joinpath(str(process), "task").iterdir()]


def has_several_numa_nodes() -> bool:
    """Whether several NUMA nodes have memory: the kernel writes "0", or "0-1", or "0,2"."""
    try:
        return not _NODES_WITH_MEMORY.read_text().strip().isdecimal()
    except OSError:  # a kernel that knows no nodes
        return False
