"""Runs one job: starts its starter, reports progress while it runs, ends all its processes, says what went wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from launch.guardian import guarded
from launch.job import Job
from launch.other_nodes import OtherNodes
from launch.signals import signals_raised
from launch.starters.interface import PROJECT_DIRECTORY
from records.names import LOGS_NAME
from watch.explaining import EndedJob, explain, explain_hang
from watch.failures import FailureKind, JobFailure
from watch.rank_files import RankFiles, started_ranks
from watch.watchdog import Hang, Watchdog

_POLL_SECONDS = 0.1
# How long the starter may take to end the other ranks once one has failed, before we do it.
_SECONDS_TO_END = 5.0
# How long the starter may take to end when it is asked to.
_SECONDS_TO_TERMINATE = 3.0
# A process that is killed takes a while to be gone, and its children may notice before its parent does.
_SECONDS_TO_DIE = 1.0
# How long the launcher of the node on which a failure began may take to end its ranks and to say why.
_SECONDS_TO_TELL = 15.0
# Where rank 0 may be while it saves what was trained.
_PHASES_OF_SAVING = ("saving", "end")


def run_job(
    job: Job,
    *,
    on_poll: Callable[[], None],
    on_first_signal: Callable[[signal.Signals], None] | None = None,
    watchdog: Watchdog | None = None,
    other_nodes: OtherNodes | None = None,
) -> JobFailure | None:
    """Runs a job to its end and returns None, or why it failed.

    However it ends, and even if this process is killed, no process of the job is left on this machine. Its ranks are
    known by the files that they write in its run directory. If the starter ends with an error although all ranks
    have succeeded, this is printed; it is a failure only if the job must end cleanly.

    Args:
        job: The job.
        on_poll: Is called ten times a second while the job runs, and once after its end.
        on_first_signal: Is called for the first SIGINT, SIGTERM or SIGHUP, instead of ending the job.
        watchdog: Notices that the ranks hang; without one, hanging is not noticed.
        other_nodes: The launchers of the other nodes: if one has failed, the job ends, and they are told how it ended.

    Raises:
        Interrupted: SIGINT, SIGTERM or SIGHUP arrived, for the second time with `on_first_signal`; the job has been
            ended.
    """
    starter_log = job.run_directory / LOGS_NAME / "starter.log"
    with starter_log.open("ab") as log, signals_raised(on_first_signal), guarded() as mark:
        starter = subprocess.Popen(
            job.command,
            env={**job.environment, **mark},
            cwd=PROJECT_DIRECTORY,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        course = _Course(job, starter, watchdog, other_nodes)
        try:
            course.follow(on_poll)
        finally:
            ended_by_us = _end(starter, job.run_directory)
    on_poll()
    failure = _judge(course, ended_by_us, starter_log)
    return failure if other_nodes is None else _agreed(failure, course, other_nodes)


def _agreed(failure: JobFailure | None, course: _Course, other_nodes: OtherNodes) -> JobFailure | None:
    """Tells the other nodes how the ranks of this one have ended; returns why the job has failed, here or there."""
    if failure is None:
        other_nodes.tell(None)
        return None
    is_consequence = failure.may_lie_elsewhere or (course.is_told and other_nodes.know_the_cause)
    other_nodes.tell(failure, is_cause=not is_consequence)
    if not is_consequence:
        return failure
    found = other_nodes.failure(_SECONDS_TO_TELL)
    # What another node tells that knows no cause either says no more than what was seen here, unless it came first.
    return found if found is not None and (course.is_told or not found.may_lie_elsewhere) else failure


def _judge(course: _Course, ended_by_us: set[int], starter_log: Path) -> JobFailure | None:
    """Says why the ranks of this node failed; None if they did not."""
    job, starter = course.job, course.starter
    ranks = started_ranks(job.run_directory)
    if course.hang is not None:
        return explain_hang(course.hang, ranks, starter_log, spans_nodes=job.spans_nodes)
    if len(ranks) == job.num_processes and all(rank.succeeded() for rank in ranks):
        return _judge_launcher(job, starter.returncode, starter_log)
    return explain(
        EndedJob(
            ranks=ranks,
            num_processes=job.num_processes,
            spans_nodes=job.spans_nodes,
            signs=job.signs,
            launcher=job.launcher,
            killed_by=course.killed_by,
            return_code=starter.returncode,
            outlived=course.outlived,
            ended_by_us=ended_by_us,
            starter_log=starter_log,
        )
    )


@dataclass
class _Course:
    """What is observed of a job while it runs.

    Attributes:
        job: The job.
        starter: The starter's process.
        watchdog: Notices that the ranks hang; None if nothing does.
        other_nodes: The launchers of the other nodes; None if there are none.
        outlived: The ranks that were running when the first failure was seen.
        hang: Which rank hangs, if one does.
        killed_by: The signal that ended the starter before any rank had failed.
        is_told: Whether another node told of a failure before one was seen here.
    """

    job: Job
    starter: subprocess.Popen[bytes]
    watchdog: Watchdog | None
    other_nodes: OtherNodes | None = None
    outlived: set[int] = field(default_factory=set)
    hang: Hang | None = None
    killed_by: str | None = None
    is_told: bool = False

    def follow(self, on_poll: Callable[[], None]) -> None:
        """Returns when the starter has ended or must be ended."""
        failed_at: float | None = None
        while self.starter.poll() is None:
            time.sleep(_POLL_SECONDS)
            on_poll()
            self.hang = self.watchdog.look() if self.watchdog is not None and failed_at is None else None
            if self.hang is not None:
                return
            if failed_at is None and any(self._ends_the_job(rank) for rank in started_ranks(self.job.run_directory)):
                failed_at, self.outlived = time.monotonic(), _running(self.job.run_directory)
            if failed_at is not None and time.monotonic() - failed_at > _SECONDS_TO_END:
                break
            if failed_at is None and self.other_nodes is not None and self.other_nodes.have_failed():
                self.is_told, self.outlived = True, _running(self.job.run_directory)
                break
        is_first = failed_at is None or time.monotonic() - failed_at < _SECONDS_TO_DIE
        self.killed_by = _killed_by(self.starter) if is_first else None
        if self.watchdog is not None:
            self._let_rank_0_save(self.watchdog.long_seconds, on_poll)

    def _ends_the_job(self, rank: RankFiles) -> bool:
        """Whether a rank has failed and nothing starts it again, or it would be in vain."""
        if not self.job.nodes.may_leave:
            return _has_failed(rank)
        failure = rank.failure()
        return failure is not None and failure.kind is FailureKind.NONFINITE

    def _let_rank_0_save(self, most_seconds: float, on_poll: Callable[[], None]) -> None:
        """Waits while rank 0 has left the training and saves: until it ends, or is silent for too long."""
        while True:
            rank = next((one for one in started_ranks(self.job.run_directory) if one.rank == 0), None)
            position = rank.position() if rank is not None and rank.running_pid() is not None else None
            if position is None or position.phase not in _PHASES_OF_SAVING:
                return
            if time.monotonic() - position.time > most_seconds:
                return
            time.sleep(_POLL_SECONDS)
            on_poll()


def _judge_launcher(job: Job, return_code: int, starter_log: Path) -> JobFailure | None:
    """Judges how the starter ended after all ranks have succeeded."""
    if return_code == 0:
        return None
    message = f"all ranks have finished, but their starter ended with code {return_code}"
    if job.must_end_cleanly:
        return JobFailure(FailureKind.LAUNCHER, None, message, starter_log)
    print(f"lockstep: {message}; see {starter_log}")
    return None


def _killed_by(starter: subprocess.Popen[bytes]) -> str | None:
    """Names the signal that has ended the starter, if one has."""
    code = starter.poll()
    if code is None or code >= 0:
        return None
    return next((number.name for number in signal.Signals if number == -code), f"signal {-code}")


def _has_failed(rank: RankFiles) -> bool:
    if rank.failure() is not None:
        return True
    # In this order: a rank may succeed and end between the two questions.
    has_ended = rank.started() and rank.running_pid() is None
    return has_ended and not rank.succeeded()


def _running(run_directory: Path) -> set[int]:
    return {rank.rank for rank in started_ranks(run_directory) if rank.running_pid() is not None}


def _end(starter: subprocess.Popen[bytes], run_directory: Path) -> set[int]:
    """Ends the starter, first with SIGTERM, and every rank that outlived it; returns the ranks that still ran."""
    running = _running(run_directory)
    if starter.poll() is None:
        starter.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            starter.wait(timeout=_SECONDS_TO_TERMINATE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(starter.pid, signal.SIGKILL)
    # Before the starter is waited for: ranks that spin while they wait may keep it from a processor for a minute.
    _kill_ranks(run_directory)
    starter.wait()
    _kill_ranks(run_directory)  # a rank may have started meanwhile
    return running


def _kill_ranks(run_directory: Path) -> None:
    for rank in started_ranks(run_directory):
        pid = rank.running_pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
