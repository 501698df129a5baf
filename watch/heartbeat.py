"""Where each rank is: written into a few bytes of shared memory by the rank, read by the launcher.

Each time a rank enters a phase, it reads the clock and copies 24 bytes; where its own phases begin or end, it also
reads how long its thread has waited for a processor. There is no lock and no message. A rank that is stopped, stuck or
dead does not write any more.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

PHASES = ("start", "data", "forward", "backward", "update", "evaluation", "saving", "end", "rest")
# Phases in which no other rank can delay this one, unless ranks wait for each other in the forward pass; in the others
# it may have to wait.
OWN_PHASES: tuple[str, ...] = ("data", "forward")
_LAYOUT = struct.Struct("<dqq")  # monotonic seconds, step, phase


@dataclass(frozen=True)
class Position:
    """What a rank was doing when it last wrote, at `time` on the machine's monotonic clock."""

    time: float
    step: int
    phase: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}" if self.step else self.phase


def own_phases(*, waits_in_forward: bool) -> tuple[str, ...]:
    """Returns the phases in which no other rank can delay this one.

    Args:
        waits_in_forward: Whether ranks wait for each other in the forward pass, too.
    """
    return tuple(phase for phase in OWN_PHASES if not (waits_in_forward and phase == "forward"))


class Heartbeat:
    """The heartbeat of one rank; without a path, it is not shared.

    Attributes:
        own_phases: The phases in which no other rank can delay this one.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._memory = mmap.mmap(-1, _LAYOUT.size)
        else:
            path.write_bytes(bytes(_LAYOUT.size))
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        self.own_phases = OWN_PHASES
        self._queue = _RunQueue()
        self._own_seconds = self._queued = 0.0
        self._step, self._phase, self._own_since = 0, "start", 0.0
        self.enter("start")

    def enter(self, phase: str, step: int | None = None) -> None:
        """Notes that a phase begins, and where the last of several `own_phases` ends, adds up how long they took."""
        now = time.monotonic()
        was_own, is_own = self._phase in self.own_phases, phase in self.own_phases
        if was_own != is_own:
            queued = self._queue.seconds()
            if is_own:
                self._own_since, self._queued = now, queued
            else:
                self._own_seconds += max(0.0, now - self._own_since - (queued - self._queued))
        self._phase = phase
        if step is not None:
            self._step = step
        _LAYOUT.pack_into(self._memory, 0, now, self._step, PHASES.index(phase))

    @property
    def own_seconds(self) -> float:
        """Seconds spent so far in phases in which no other rank can delay this one.

        Time in which the calling thread waited for a processor is not included; that of other threads is not known.
        """
        return self._own_seconds


class _RunQueue:
    """How long the thread that creates this has waited for a processor, if the system counts that."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def seconds(self) -> float:
        """Returns the seconds since the thread began; always 0 where the system does not count them."""
        if self._file < 0:
            return 0.0
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e9


def read_position(path: Path) -> Position | None:
    """Reads the last position of a rank; returns None before the first."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(content) < _LAYOUT.size:
        return None
    moment, step, phase = _LAYOUT.unpack(content)
    return Position(moment, step, PHASES[phase]) if moment else None
