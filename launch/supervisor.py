"""Runs one job: starts the engine, passes on news while it works, ends it whole, and says what went wrong."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from launch.rank_files import LOGS_NAME, RankFailure, RankFiles, started_ranks

_POLL_SECONDS = 0.1
# How long a launcher may take to end the other ranks once one has failed, before we do it.
_SECONDS_TO_END = 10.0

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class Interrupted(Exception):
    """The user, or the system, asked the job to end."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


@dataclass(frozen=True)
class JobFailure:
    """Which rank failed first (None: the launcher itself did), why, and where to read more."""

    rank: int | None
    message: str
    log: Path

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}" if self.rank is not None else self.message


def run_job(
    command: list[str],
    *,
    environment: Mapping[str, str],
    working_directory: Path,
    run_directory: Path,
    num_processes: int,
    spans_nodes: bool = False,
    on_poll: Callable[[], None],
    must_end_cleanly: bool = False,
) -> JobFailure | None:
    """Runs an engine's command to its end and returns None, or why it failed.

    However it ends, no process of the job is left on this machine, whose `num_processes` ranks are
    known by the files they write in `run_directory`. That a launcher ends with an error although all ranks succeeded
    is only mentioned, unless `must_end_cleanly`.

    Raises:
        Interrupted: SIGINT, SIGTERM or SIGHUP arrived; the job has been ended.
    """
    engine_log = run_directory / LOGS_NAME / "engine.log"
    failed_at: float | None = None
    with engine_log.open("ab") as log, signals_raised():
        engine = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=working_directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 (no threads here)
        )
        try:
            while engine.poll() is None:
                time.sleep(_POLL_SECONDS)
                on_poll()
                if failed_at is None and any(_has_failed(rank) for rank in started_ranks(run_directory)):
                    failed_at = time.monotonic()
                if failed_at is not None and time.monotonic() - failed_at > _SECONDS_TO_END:
                    break
        finally:
            _end(engine, run_directory)
    on_poll()
    ranks = started_ranks(run_directory)
    if len(ranks) == num_processes and all(rank.succeeded() for rank in ranks):
        if engine.returncode:
            message = f"all ranks finished, but their launcher ended with code {engine.returncode}"
            if must_end_cleanly:
                return JobFailure(None, message, engine_log)
            print(f"lockstep: {message}; see {engine_log}")
        return None
    return _explain(ranks, engine.returncode, engine_log, spans_nodes=spans_nodes)


def _end_with_parent() -> None:
    """Asks Linux to send this process a SIGTERM when the launcher dies, even by SIGKILL: prctl(2)."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _has_failed(rank: RankFiles) -> bool:
    if rank.failure() is not None:
        return True
    # In this order: a rank may succeed and end between the two questions.
    has_ended = rank.started() and rank.running_pid() is None
    return has_ended and not rank.succeeded()


def _end(engine: subprocess.Popen[bytes], run_directory: Path) -> None:
    """Ends the engine, politely first, then every rank that outlived it."""
    if engine.poll() is None:
        engine.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            engine.wait(timeout=5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)
    engine.wait()
    for rank in started_ranks(run_directory):
        pid = rank.running_pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _explain(ranks: list[RankFiles], return_code: int, engine_log: Path, *, spans_nodes: bool) -> JobFailure:
    """Finds the failure that the others follow from.

    An error that a rank reported comes first, unless it only tells that a peer has gone or does not
    answer: then the rank to name is the one that ended without a word, or else never complained.
    """
    failures = sorted((failure for rank in ranks if (failure := rank.failure())), key=lambda failure: failure.time)
    causes = [failure for failure in failures if not failure.is_consequence]
    if causes:
        return _named(causes[0], ranks)
    for rank in ranks:
        if rank.ended_silently():
            message = "ended without a word: killed, crashed or out of memory"
            return JobFailure(rank.rank, message, rank.log)
    if failures and spans_nodes:
        # Whoever went first is not here: a rank that says nothing was ended by its launcher.
        named = _named(failures[0], ranks)
        return replace(named, message=f"{named.message} (the cause may lie on another node)")
    if failures:
        stuck = [rank for rank in ranks if rank.started() and rank.failure() is None and not rank.succeeded()]
        if not stuck:
            return _named(failures[0], ranks)
        first = failures[0]
        message = f"stuck: rank {first.rank} waited for it in vain ({first.message[:120]})"
        return JobFailure(stuck[0].rank, message, stuck[0].stacks)
    lines = engine_log.read_text(errors="replace").strip().splitlines()
    reason = f": {lines[-1].strip()[:300]}" if lines else ""
    return JobFailure(None, f"the launcher ended with code {return_code}{reason}", engine_log)


def _named(failure: RankFailure, ranks: list[RankFiles]) -> JobFailure:
    (log,) = [rank.log for rank in ranks if rank.rank == failure.rank]
    return JobFailure(failure.rank, failure.message, log)


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into Interrupted, so that what was started is ended on the way out."""

    def stop(signal_number: int, frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # a second one must not stop us from ending the ranks
        raise Interrupted(signal_number)

    before = {number: signal.signal(number, stop) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
