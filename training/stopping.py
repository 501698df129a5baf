"""Stopping a run after the same step on all ranks, without a message between them in each step.

On one machine the launcher leaves a file when it is asked to stop. Rank 0 finds it at the end of some step, within a
twentieth of a second, and writes the number of the next step into a file that all ranks have mapped into their memory,
before it begins that step. No rank can finish that step without rank 0, so every rank finds the number at its end and
stops there. To look for a file instead would take each step 15 us.

On several machines, and on GPUs, where a rank runs ahead of its device, the request travels with the losses, which are
summed over all ranks every `logging_steps`, by default about once in a second.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

from records.names import LOGS_NAME

_AGREED = struct.Struct("q")  # the last step, 0 before there is one; native, so that it is copied as a whole
_SECONDS_BETWEEN_LOOKS = 0.05


def request_stop(run_directory: Path) -> None:
    """Asks the ranks of this machine to stop. The launcher calls it."""
    (run_directory / LOGS_NAME / "stop").touch()


def has_stopped(run_directory: Path) -> bool:
    """Returns whether the ranks of this machine have stopped because a launcher, maybe on another machine, asked."""
    return (run_directory / LOGS_NAME / "stopped").exists()


class StopRequest:
    """A request to stop, as a rank sees it.

    Attributes:
        travels_with_loss: Whether ranks learn of the request together with the losses instead.
    """

    def __init__(self, run_directory: Path, *, rank: int, travels_with_loss: bool) -> None:
        self._asked = run_directory / LOGS_NAME / "stop"
        self._stopped = run_directory / LOGS_NAME / "stopped"
        path = run_directory / LOGS_NAME / "stop-agreed"
        self._agreed = mmap.mmap(-1, _AGREED.size) if travels_with_loss else _shared(path)
        self._announces = rank == 0
        self._next_look = 0.0
        self.travels_with_loss = travels_with_loss

    def is_asked(self) -> bool:
        """Returns whether the launcher of this machine was asked to stop."""
        return self._asked.exists()

    def is_agreed(self, step: int) -> bool:
        """Returns whether all ranks stop after this step. It is called after each step, and not with the losses."""
        (last,) = _AGREED.unpack_from(self._agreed)
        if last:
            return bool(step >= last)
        if self._announces and (now := time.monotonic()) >= self._next_look:
            self._next_look = now + _SECONDS_BETWEEN_LOOKS
            if self.is_asked():
                _AGREED.pack_into(self._agreed, 0, step + 1)
        return False

    def note_stopped(self) -> None:
        """Tells the launcher that the ranks have stopped."""
        self._stopped.touch()


def _shared(path: Path) -> mmap.mmap:
    """Returns memory that all ranks of a machine share; the first one to come makes it."""
    path.touch()
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, _AGREED.size)  # on a disk that is full later, to write would end the rank
        return mmap.mmap(file.fileno(), _AGREED.size)
