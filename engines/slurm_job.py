"""A job in the queue of SLURM: following it to its end, and ending it.

scontrol(1) tells its state: sbatch --wait notices the end late, and sacct(1) needs a database.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

from engines.following import Followed
from launch.errors import one_line, tell
from launch.signals import Interrupted
from launch.train_command import STOPPED

_POLL_SECONDS = 1.0
_SECONDS_TO_ANSWER = 10.0
# SLURM ends a job by SIGTERM, and 30 s later by SIGKILL (KillWait in slurm.conf(5)).
_SECONDS_TO_END = 60.0

# States of which a job does not come back, and what to say of them (squeue(1)); None where its nodes say it.
_ENDS = {
    "COMPLETED": None,
    "FAILED": None,
    "CANCELLED": "was cancelled; continue with --resume latest",
    "TIMEOUT": "has reached its time limit; continue with --resume latest, or give more --time",
    "NODE_FAIL": "has lost a node; continue with --resume latest",
    "OUT_OF_MEMORY": "took more memory than it asked for; give more --mem",
    "PREEMPTED": "had to make room for another job; continue with --resume latest",
    "BOOT_FAIL": "has got a node that does not start; start it again",
    "DEADLINE": "has reached its deadline",
    "FORGOTTEN": "is no longer known to SLURM; its script's output is in job.log",
}
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED")


class SlurmJob:
    """A job that sbatch has taken."""

    def __init__(self, number: str, followed: Followed, log: Path) -> None:
        """Follows nothing yet.

        Args:
            number: The number of the job.
            followed: The output of its nodes.
            log: The output of its script, which leaves its exit code and other files of its own in the same directory.
        """
        self._number = number
        self._followed = followed
        self._log = log
        self._code_file = log.with_name(f"job{number}.code")
        self._state = "PENDING"
        self._code = 0
        self._has_run = False
        self._fields: dict[str, str] = {}
        self._is_said = False  # what it waits for
        self._is_silent = False  # SLURM does not answer

    def to_the_end(self, asked: list[signal.Signals]) -> int:
        """Shows what the nodes print until the job has ended; returns its exit code.

        Args:
            asked: Receives the first signal, and may hold it already: it lets the job stop after a checkpoint, if it is
                running, and otherwise ends it. The next signal, which must raise Interrupted, ends it.

        Raises:
            Interrupted: A signal has ended the job.
        """
        try:
            while self._state not in _ENDS:
                if asked:
                    self._stop(asked.pop())
                time.sleep(_POLL_SECONDS)
                self._look()
                self._tell_waiting()
                self._followed.show()
        except Interrupted:
            self._cancel()
            raise
        finally:
            self._remove_files()
        return self._conclude()

    def _look(self) -> None:
        """Asks SLURM for the state of the job."""
        done = _slurm("scontrol", "show", "job", "--oneliner", self._number)
        if "Invalid job id" in done.stderr:  # it has ended some minutes ago (MinJobAge in slurm.conf(5))
            self._state, self._code = self._as_its_script_ended()
            self._fields = {}
        elif done.returncode:
            if not self._is_silent:
                tell(f"SLURM does not answer ({_reason(done)}); job {self._number} may go on, and is waited for")
            self._is_silent = True
        else:
            self._is_silent = False
            # The first of each name: the last fields are paths.
            self._fields = dict(reversed(re.findall(r"(\w+)=(\S*)", done.stdout)))
            self._state = self._fields["JobState"]
            code, number = map(int, self._fields["ExitCode"].split(":"))
            self._code = code or (128 + number if number else int(self._state != "COMPLETED"))

    def _as_its_script_ended(self) -> tuple[str, int]:
        """Returns the state and the exit code of a job that SLURM no longer knows, from what its script has left."""
        try:
            code = int(self._code_file.read_text())
        except (OSError, ValueError):
            return "FORGOTTEN", 1
        return "FAILED" if code else "COMPLETED", code

    def _tell_waiting(self) -> None:
        """Says, once, what a job waits for before it starts, and again if it goes back into the queue."""
        if self._state in _RUNNING:
            self._has_run, self._is_said = True, False
        elif self._state not in _ENDS and not self._is_said and self._fields.get("Reason", "None") != "None":
            then = "is back in the queue and will continue from its newest checkpoint" if self._has_run else "waits"
            tell(f"job {self._number} {then} ({self._fields['Reason']})")
            self._is_said = True

    def _stop(self, number: signal.Signals) -> None:
        if self._state not in _RUNNING:
            raise Interrupted(number)
        done = _slurm("scancel", "--signal=TERM", "--batch", self._number)
        if done.returncode:
            tell(f"{number.name}: job {self._number} could not be told to stop ({_reason(done)})")

    def _cancel(self) -> None:
        """Ends the job and waits until it has ended."""
        done = _slurm("scancel", self._number)
        if done.returncode:
            tell(f"job {self._number} could not be cancelled ({_reason(done)}); run scancel {self._number} later")
            return
        deadline = time.monotonic() + _SECONDS_TO_END
        while self._state not in _ENDS and not self._is_silent and time.monotonic() < deadline:
            self._look()
            time.sleep(_POLL_SECONDS)
        self._followed.show()

    def _remove_files(self) -> None:
        """Removes what its script keeps beside its output; the script does so itself, but may have been killed.

        A job that is put back into the queue by hand tells by `begun` which checkpoints are its own.
        """
        self._code_file.unlink(missing_ok=True)
        if self._state in _ENDS:  # else the script, which may go on, needs the others
            for path in self._log.parent.glob(f"job{self._number}.*"):
                if path.suffix != ".begun":
                    path.unlink(missing_ok=True)

    def _conclude(self) -> int:
        """Says how the job has ended, where its nodes have not said it; returns its exit code."""
        if (how := _ENDS[self._state]) is not None:
            # A job that has not run has nothing to continue from.
            tell(f"job {self._number} {how if self._has_run else how.partition(';')[0]}")
        elif self._code not in (0, STOPPED):
            lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
            of_srun = [line for line in lines if line.startswith("srun: error: ")]
            last = "".join(f" ({line})" for line in [*lines, *of_srun][-1:])
            tell(one_line(f"job {self._number} failed with exit code {self._code}{last}"))
        return self._code


def _slurm(*command: str) -> subprocess.CompletedProcess[str]:
    # In a session of its own, since Ctrl-C is for this command.
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS_TO_ANSWER,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"nothing within {_SECONDS_TO_ANSWER:g} s")


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
