"""Stopping a run after a step that all ranks agree on, without a message between them on each step.

On one machine the launcher leaves a file when it is asked to stop. Rank 0 finds it at the end of some
step and, before it begins the next, leaves another file with the number of that next one. Nobody finishes
it without rank 0, so everybody finds the file at its end and stops there. Over several machines, and on GPUs,
whose hosts run ahead of them, the request travels with the loss, which is summed over all ranks every `logging_steps`.
"""

from __future__ import annotations

from pathlib import Path

from records.files import write_atomically
from records.names import LOGS_NAME


def request_stop(run_directory: Path) -> None:
    """Asks the ranks of this machine to stop; called by the launcher."""
    (run_directory / LOGS_NAME / "stop").touch()


def has_stopped(run_directory: Path) -> bool:
    """Whether the ranks of this machine have ended because somebody, maybe on another machine, asked them to."""
    return (run_directory / LOGS_NAME / "stopped").exists()


class StopRequest:
    """What a rank knows of a request to stop."""

    def __init__(self, run_directory: Path, *, rank: int, travels_with_loss: bool) -> None:
        self._asked = run_directory / LOGS_NAME / "stop"
        self._stopped = run_directory / LOGS_NAME / "stopped"
        self._agreed = run_directory / LOGS_NAME / "stop-agreed"
        self._announces = rank == 0
        self.travels_with_loss = travels_with_loss

    def is_asked(self) -> bool:
        """Whether the launcher of this machine was asked to stop."""
        return self._asked.exists()

    def is_agreed(self, step: int) -> bool:
        """Whether all ranks stop after this step; called after each, unless the request travels with the loss."""
        try:
            return step >= int(self._agreed.read_text())
        except FileNotFoundError:
            if self._announces and self.is_asked():
                write_atomically(self._agreed, str(step + 1))
            return False

    def note_stopped(self) -> None:
        """Lets the launcher know that the ranks have stopped."""
        self._stopped.touch()
