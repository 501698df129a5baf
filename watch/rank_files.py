"""The files through which ranks and launcher know of each other, in logs/ of the run directory."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from records.files import write_atomically
from records.names import LOGS_NAME
from watch.failures import FailureKind, PeerStopped, RankFailure, kind_of
from watch.heartbeat import Position, read_position

_SECONDS_TO_WRITE = 5.0

# What makes a rank write the Python stacks of all its threads.
STACKS_SIGNAL = signal.SIGUSR1

# How Python's faulthandler begins.
_CRASH = re.compile(r"^Fatal Python error: (.{1,80})", re.MULTILINE)


class RankFiles:
    """One rank's log and its announcement, error and success files."""

    def __init__(self, run_directory: Path, rank: int) -> None:
        self.rank = rank
        directory = run_directory / LOGS_NAME
        self.log = directory / f"rank{rank}.log"
        self._announcement = directory / f"rank{rank}.pid"
        self._error = directory / f"rank{rank}.error.json"
        self._success = directory / f"rank{rank}.done"
        self.heartbeat = directory / f"rank{rank}.heartbeat"
        self.stacks = directory / f"rank{rank}.stacks"
        self.sigterm = directory / f"rank{rank}.sigterm"

    def redirect_output(self) -> None:
        """Sends everything this process prints, from C++ too, to its log."""
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def announce(self) -> None:
        """Leaves this process's number, and its stacks should a SIGTERM end it or the launcher ask for them.

        The stacks are written from C, so also while it is stuck in a collective. They tell a rank
        that its launcher ended from one that ended by itself.
        """
        self._stacks_files = self.sigterm.open("w"), self.stacks.open("w")
        faulthandler.register(signal.SIGTERM, file=self._stacks_files[0], chain=True)
        faulthandler.register(STACKS_SIGNAL, file=self._stacks_files[1])
        write_atomically(self._announcement, f"{os.getpid()} {_start_time(os.getpid())}")

    def report_error(self, error: BaseException) -> None:
        """Tells the launcher with which error this rank ends."""
        text = " ".join(str(error).split())
        facts = {
            "kind": kind_of(error),
            "message": f"{type(error).__name__}: {text}" if text else type(error).__name__,
            "peer_stopped": isinstance(error, PeerStopped),
            "time": time.time(),
        }
        write_atomically(self._error, json.dumps(facts))

    def report_success(self) -> None:
        """Tells the launcher that this rank has done all its work."""
        write_atomically(self._success, "")

    def position(self) -> Position | None:
        """Where this rank was when it last wrote; None if it never did."""
        return read_position(self.heartbeat)

    def started(self) -> bool:
        """Whether this rank has announced itself."""
        return self._announcement.exists()

    def running_pid(self) -> int | None:
        """The process of this rank; None before it started and once it has ended."""
        if not self.started():
            return None
        pid, _, start_time = self._announcement.read_text(errors="replace").partition(" ")
        if not pid.isdecimal():  # damaged
            return None
        # The number may meanwhile belong to another process, which then started later.
        return int(pid) if _start_time(int(pid)) == start_time else None

    def state(self) -> str:
        """What its main thread is doing: R on a processor or waiting for one, S asleep, T stopped.

        As proc_pid_stat(5) has it; empty where there is no process.
        """
        pid = self.running_pid()
        return (_process_state(pid) or [""])[0].upper() if pid is not None else ""

    def queued_seconds(self) -> dict[str, float]:
        """How long each of its threads has waited for a processor so far; empty where the system does not count."""
        found = {}
        for thread in Path(f"/proc/{self.running_pid()}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                found[thread.parent.name] = int(thread.read_text().split()[1]) / 1e9
        return found

    def succeeded(self) -> bool:
        """Whether this rank has done all its work."""
        return self._success.exists()

    def ended_silently(self) -> bool:
        """Whether it started but left neither success, nor error, nor the trace of a SIGTERM."""
        terminated = self.sigterm.exists() and self.sigterm.stat().st_size > 0
        return self.started() and not (self.succeeded() or self._error.exists() or terminated)

    def crash(self) -> str | None:
        """What the interpreter wrote when a signal such as SIGBUS or SIGSEGV ended it: its name for that."""
        if not self.log.exists():
            return None
        found: list[str] = _CRASH.findall(self.log.read_text(errors="replace"))
        return found[-1] if found else None

    def failure(self) -> RankFailure | None:
        """The error this rank reported, if any."""
        if not self._error.exists():
            return None
        facts = json.loads(self._error.read_text())
        return RankFailure(rank=self.rank, **{**facts, "kind": FailureKind(facts["kind"])})


def started_ranks(run_directory: Path) -> list[RankFiles]:
    """The ranks that have announced themselves on this machine, in order."""
    names = [re.fullmatch(r"rank(\d+)\.pid", path.name) for path in (run_directory / LOGS_NAME).glob("rank*.pid")]
    return [RankFiles(run_directory, number) for number in sorted(int(name[1]) for name in names if name)]


@contextlib.contextmanager
def reporting(run_directory: Path, rank_variable: str | None) -> Iterator[int]:
    """What every rank does around its work: gives the rank, and lets the launcher know how the work ended.

    The launcher has told this process its rank in the environment variable `rank_variable`; without one it is rank 0.

    Everything printed goes to the rank's log. The process ends at once when the work is over, with
    code 0, or with code 1 after an error.
    """
    rank = int(os.environ[rank_variable]) if rank_variable is not None else 0
    files = RankFiles(run_directory, rank)
    files.redirect_output()
    faulthandler.enable()
    files.announce()
    try:
        yield rank
        files.report_success()
        sys.stdout.flush()
        sys.stderr.flush()
        # All is done, and what torch and gloo leave to the end of the interpreter aborts it now and then.
        os._exit(0)
    except BaseException as error:
        try:
            with contextlib.suppress(OSError):  # the log may lie on a full disk
                traceback.print_exc()
            files.report_error(error)
            # First of all the error must be known: a launcher ends this rank as soon as it misses another one.
            _wait_for_writers()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Not a normal exit: with peers gone, tearing a process group down can wait for ever.
            os._exit(1)


def _wait_for_writers() -> None:
    """Gives the thread that writes a checkpoint a moment to end."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(timeout=_SECONDS_TO_WRITE)


def _start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot. None if it has ended."""
    fields = _process_state(pid)
    return None if fields is None or fields[0] == "Z" else fields[19]


def _process_state(pid: int) -> list[str] | None:
    """What the system knows of a process, from its state on: proc_pid_stat(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
