"""Stopping a run after the same step on all ranks, without a message between them in each step.

On one machine the launcher leaves a file when it is asked to stop. Rank 0 finds it at the end of some step and leaves
another file before it begins the next step, with the number of that step. No rank can finish that step without rank 0,
so every rank finds the second file at its end and stops there.

On several machines, and on GPUs, where a rank runs ahead of its device, the request travels with the losses, which are
summed over all ranks every `logging_steps`, by default about once in a second.
"""

from __future__ import annotations

import os
from pathlib import Path

from records.files import write_atomically
from records.names import LOGS_NAME


def request_stop(run_directory: Path) -> None:
    """Asks the ranks of this machine to stop. The launcher calls it."""
    (run_directory / LOGS_NAME / "stop").touch()


def has_stopped(run_directory: Path) -> bool:
    """Returns whether the ranks of this machine have stopped because a launcher, maybe on another machine, asked."""
    return (run_directory / LOGS_NAME / "stopped").exists()


class StopRequest:
    """A request to stop, as a rank sees it.

    Attributes:
        travels_with_loss: Whether ranks learn of the request together with the losses instead of from files.
    """

    def __init__(self, run_directory: Path, *, rank: int, travels_with_loss: bool) -> None:
        # As texts: this is looked for after each step, and a Path takes three times as long.
        self._asked = str(run_directory / LOGS_NAME / "stop")
        self._stopped = run_directory / LOGS_NAME / "stopped"
        self._agreed = str(run_directory / LOGS_NAME / "stop-agreed")
        self._announces = rank == 0
        self.travels_with_loss = travels_with_loss

    def is_asked(self) -> bool:
        """Returns whether the launcher of this machine was asked to stop."""
        return os.path.exists(self._asked)  # noqa: PTH110

    def is_agreed(self, step: int) -> bool:
        """Returns whether all ranks stop after this step. It is called after each step, and not with the losses."""
        if os.path.exists(self._agreed):  # noqa: PTH110
            return step >= int(Path(self._agreed).read_text())
        if self._announces and self.is_asked():
            write_atomically(Path(self._agreed), str(step + 1))
        return False

    def note_stopped(self) -> None:
        """Tells the launcher that the ranks have stopped."""
        self._stopped.touch()
