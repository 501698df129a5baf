"""The files through which ranks report to the launcher, in logs/ of the run directory."""

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
from typing import NoReturn

from records.files import write_atomically
from records.names import LOGS_NAME
from watch.failures import FailureKind, PeerStopped, RankFailure, kind_of
from watch.heartbeat import Position, read_position

_SECONDS_TO_WRITE = 5.0
# One character takes up to twelve bytes in JSON.
_RESERVED_BYTES, _MOST_CHARACTERS = 8192, 600

# What makes a rank write the Python stacks of all its threads.
STACKS_SIGNAL = signal.SIGUSR1

# How Python's faulthandler begins.
_NUM_LAST_LINES = 10
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
        self._reserve = directory / f"rank{rank}.reserve"  # room for an error on a full disk

    def redirect_output(self) -> None:
        """Sends everything that this process prints to its log, also from C++."""
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def announce(self) -> None:
        """Writes the number of this process, and arranges that SIGTERM and STACKS_SIGNAL make it write its stacks.

        What an earlier process left in its place, before its starter started it again, no longer counts, nor does what
        the log holds by now. The stacks are written from C, so also while it is stuck in a collective. They distinguish
        a rank that its starter ended from one that ended by itself.
        """
        for path in (self._error, self._success, self.heartbeat):
            path.unlink(missing_ok=True)
        self._stacks_files = self.sigterm.open("w"), self.stacks.open("w")
        faulthandler.register(signal.SIGTERM, file=self._stacks_files[0], chain=True)
        faulthandler.register(STACKS_SIGNAL, file=self._stacks_files[1])
        log_size = self.log.stat().st_size if self.log.exists() else 0
        write_atomically(self._announcement, f"{os.getpid()} {_start_time(os.getpid())} {log_size}")
        with contextlib.suppress(OSError):  # the disk may be full already
            self._reserve.write_bytes(b" " * _RESERVED_BYTES)

    def report_error(self, error: BaseException) -> None:
        """Reports the error with which this rank ends."""
        text = " ".join(str(error).split())
        facts = {
            "kind": kind_of(error),
            "message": f"{type(error).__name__}: {text}" if text else type(error).__name__,
            "peer_stopped": isinstance(error, PeerStopped),
            "time": time.time(),
        }
        try:
            write_atomically(self._error, json.dumps(facts))
        except OSError:  # the disk may be full
            facts["message"] = str(facts["message"])[:_MOST_CHARACTERS]
            with contextlib.suppress(OSError):
                with self._reserve.open("r+b") as file:
                    file.write(json.dumps(facts).encode())
                self._reserve.replace(self._error)

    def report_success(self) -> None:
        """Reports that this rank has finished its work."""
        write_atomically(self._success, "")

    def position(self) -> Position | None:
        """Returns the last position of this rank; None before the first."""
        return read_position(self.heartbeat)

    def started(self) -> bool:
        """Returns whether this rank has announced itself."""
        return self._announcement.exists()

    def running_pid(self) -> int | None:
        """Returns the process number of this rank; None before it has started and after it has ended."""
        pid, start_time, _ = self._announced()
        if not pid.isdecimal():  # damaged, or not there yet
            return None
        # The number may meanwhile belong to another process, which then started later.
        return int(pid) if _start_time(int(pid)) == start_time else None

    def state(self) -> str:
        """Returns the state of its main thread: R on a processor or waiting for one, S asleep, T stopped.

        The letters are those of proc_pid_stat(5); the text is empty where there is no process.
        """
        pid = self.running_pid()
        return (_process_state(pid) or [""])[0].upper() if pid is not None else ""

    def queued_seconds(self) -> dict[str, float]:
        """Returns how long each of its threads has waited for a processor, in seconds; empty if not counted."""
        found = {}
        for thread in Path(f"/proc/{self.running_pid()}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                found[thread.parent.name] = int(thread.read_text().split()[1]) / 1e9
        return found

    def succeeded(self) -> bool:
        """Returns whether this rank has finished its work."""
        return self._success.exists()

    def ended_silently(self) -> bool:
        """Returns whether it started, but reported neither success nor error and was not ended by SIGTERM."""
        terminated = self.sigterm.exists() and self.sigterm.stat().st_size > 0
        return self.started() and not (self.succeeded() or self._error.exists() or terminated)

    def crash(self) -> str | None:
        """Returns the name that the interpreter wrote for a signal such as SIGBUS or SIGSEGV that ended this rank."""
        found: list[str] = _CRASH.findall(self._printed())
        return found[-1] if found else None

    def last_words(self) -> str:
        """Returns what this rank wrote directly before it crashed, as far as a library says why; "" if it did not."""
        if self.crash() is None:
            return ""
        before, _, _ = self._printed().rpartition("Fatal Python error: ")
        return "\n".join(before.splitlines()[-_NUM_LAST_LINES:])

    def _printed(self) -> str:
        """Returns what this process has written into its log, without what earlier ones in its place have."""
        if not self.log.exists():
            return ""
        *_, log_size = self._announced()
        return self.log.read_bytes()[log_size:].decode(errors="replace")

    def _announced(self) -> tuple[str, str, int]:
        """Returns the number of this process, when it started, and how large its log was when it announced itself.

        What is missing or damaged is "" or 0.
        """
        text = self._announcement.read_text(errors="replace") if self.started() else ""
        pid, start_time, log_size, *_ = (*text.split(), "", "", "")
        return pid, start_time, int(log_size) if log_size.isdecimal() else 0

    def failure(self) -> RankFailure | None:
        """Returns the error that this rank reported, if any."""
        if not self._error.exists():
            return None
        facts = json.loads(self._error.read_text())
        return RankFailure(rank=self.rank, **{**facts, "kind": FailureKind(facts["kind"])})


def started_ranks(run_directory: Path) -> list[RankFiles]:
    """Returns the ranks that have announced themselves on this machine, in order."""
    names = [re.fullmatch(r"rank(\d+)\.pid", path.name) for path in (run_directory / LOGS_NAME).glob("rank*.pid")]
    return [RankFiles(run_directory, number) for number in sorted(int(name[1]) for name in names if name)]


@contextlib.contextmanager
def reporting(run_directory: Path, rank_variable: str | None) -> Iterator[int]:
    """Yields the rank of this process, and reports to the launcher how the work inside ends.

    Everything printed goes to the rank's log. The process ends at once when the work is over, with
    code 0, or with code 1 after an error.

    Args:
        run_directory: The directory of the run.
        rank_variable: The environment variable in which the starter passes the rank; None for rank 0.
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
        # The work is done, and cleanup of torch and gloo at the end of the interpreter sometimes aborts it.
        os._exit(0)
    except BaseException as error:
        _report_and_exit(files, error)


def _report_and_exit(files: RankFiles, error: BaseException) -> NoReturn:
    """Ends this process; the name of this function tells the watchdog that it does."""
    try:
        # The starter ends this rank as soon as another one has ended, which must not cost the checkpoint that is being
        # written. The launcher kills it some seconds later.
        with contextlib.suppress(ValueError):  # only a main thread decides about signals
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(OSError):  # the log may lie on a full disk
            traceback.print_exception(error)
        files.report_error(error)
        _wait_for_writers()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Not a normal exit: once other ranks are gone, destroying a process group may never return.
        os._exit(1)


def _wait_for_writers() -> None:
    """Gives the thread that writes a checkpoint a moment to end."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            with contextlib.suppress(OSError):  # only the superuser may take its lowest priority off: setpriority(2)
                os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, 0)
            thread.join(timeout=_SECONDS_TO_WRITE)


def _start_time(pid: int) -> str | None:
    """Returns when a process started, in clock ticks since boot; None if it has ended."""
    fields = _process_state(pid)
    return None if fields is None or fields[0] == "Z" else fields[19]


def _process_state(pid: int) -> list[str] | None:
    """Returns the fields of proc_pid_stat(5) from the state on; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
