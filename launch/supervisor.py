"""Runs one job: starts the engine, passes on news while it works, ends it whole, and says what went wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from launch.engines import launcher_name
from launch.guardian import guarded
from records.names import LOGS_NAME
from watch import shared_memory
from watch.heartbeat import Position
from watch.rank_files import RankFailure, RankFiles, started_ranks
from watch.watchdog import Hang, Watchdog

_POLL_SECONDS = 0.1
# How long a launcher may take to end the other ranks once one has failed, before we do it.
_SECONDS_TO_END = 5.0
# And how long it may take when it is asked to end itself.
_SECONDS_TO_TERMINATE = 3.0
# A process that is killed takes a while to be gone, and its children may notice before its parent does.
_SECONDS_TO_DIE = 1.0
# Where rank 0 may be while it saves what was trained.
_PHASES_OF_SAVING = ("saving", "end")

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The user, or the system, asked the job to end; like KeyboardInterrupt, no handler of errors may take it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


@dataclass(frozen=True)
class JobFailure:
    """Which rank failed first (None: the launcher itself did), why, and where to read more."""

    rank: int | None
    message: str
    log: Path
    position: Position | None = None

    def __str__(self) -> str:
        if self.rank is None:
            return self.message
        where = f" ({socket.gethostname()}, {self.position})" if self.position else ""
        return f"rank {self.rank}{where}: {self.message}"


def run_job(
    command: list[str],
    *,
    environment: Mapping[str, str],
    working_directory: Path,
    run_directory: Path,
    num_processes: int,
    spans_nodes: bool = False,
    on_poll: Callable[[], None],
    on_first_signal: Callable[[signal.Signals], None] | None = None,
    watchdog: Watchdog | None = None,
    must_end_cleanly: bool = False,
) -> JobFailure | None:
    """Runs an engine's command to its end and returns None, or why it failed.

    However it ends, and even if this process is killed, no process of the job is left on this machine, whose
    `num_processes` ranks are known by the files they write in `run_directory`. That a launcher ends with an error
    although all ranks succeeded is only mentioned, unless `must_end_cleanly`.

    Raises:
        Interrupted: SIGINT, SIGTERM or SIGHUP arrived; the job has been ended. With `on_first_signal`, that is
            called for the first, and only a second one ends the job.
    """
    engine_log = run_directory / LOGS_NAME / "engine.log"
    failed_at: float | None = None
    outlived: set[int] = set()  # the ranks that were running when the first failure was seen
    hang: Hang | None = None
    with engine_log.open("ab") as log, signals_raised(on_first_signal), guarded() as mark:
        engine = subprocess.Popen(
            command,
            env={**environment, **mark},
            cwd=working_directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while engine.poll() is None:
                time.sleep(_POLL_SECONDS)
                on_poll()
                hang = watchdog.look() if watchdog is not None and failed_at is None else None
                if hang is not None:
                    break
                if failed_at is None and any(_has_failed(rank) for rank in started_ranks(run_directory)):
                    failed_at, outlived = time.monotonic(), _running(run_directory)
                if failed_at is not None and time.monotonic() - failed_at > _SECONDS_TO_END:
                    break
            is_first = failed_at is None or time.monotonic() - failed_at < _SECONDS_TO_DIE
            killed_by = _killed_by(engine) if is_first else None
            if watchdog is not None and hang is None:
                _let_rank_0_save(run_directory, watchdog.long_seconds, on_poll)
        finally:
            ended_by_us = _end(engine, run_directory)
    on_poll()
    ranks = started_ranks(run_directory)
    if hang is not None:
        culprit = next((rank for rank in ranks if rank.rank == hang.rank), None)
        if culprit is None:
            return JobFailure(hang.rank, hang.message, ranks[0].stacks if ranks else engine_log)
        return JobFailure(culprit.rank, hang.message, culprit.stacks, hang.position)
    if len(ranks) == num_processes and all(rank.succeeded() for rank in ranks):
        if engine.returncode:
            message = f"all ranks finished, but their launcher ended with code {engine.returncode}"
            if must_end_cleanly:
                return JobFailure(None, message, engine_log)
            print(f"lockstep: {message}; see {engine_log}")
        return None
    launcher = launcher_name(command)
    if killed_by is not None and launcher is not None:
        return JobFailure(None, f"the launcher ({launcher}) was killed ({killed_by})", engine_log)
    # A launcher, too, may have killed a rank that did not heed it; the one that went first is the one to name.
    silent_ranks = [rank for rank in ranks if rank.ended_silently() and rank.rank not in ended_by_us]
    silent = min(silent_ranks, key=lambda rank: rank.rank in outlived, default=None)
    failure = _explain(
        ranks, silent, engine.returncode, engine_log, num_processes=num_processes, spans_nodes=spans_nodes
    )
    advice = shared_memory.advice(
        failure.message,
        _content(engine_log),
        ended_silently=silent is not None and silent.rank == failure.rank,
    )
    return replace(failure, message=failure.message + advice)


def _killed_by(engine: subprocess.Popen[bytes]) -> str | None:
    """Names the signal that has ended the engine, if one has."""
    code = engine.poll()
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


def _let_rank_0_save(run_directory: Path, most_seconds: float, on_poll: Callable[[], None]) -> None:
    """Waits while rank 0 has left the training and saves: until it ends, or is silent for too long."""
    while True:
        rank = next((one for one in started_ranks(run_directory) if one.rank == 0), None)
        position = rank.position() if rank is not None and rank.running_pid() is not None else None
        if position is None or position.phase not in _PHASES_OF_SAVING:
            return
        if time.monotonic() - position.time > most_seconds:
            return
        time.sleep(_POLL_SECONDS)
        on_poll()


def _end(engine: subprocess.Popen[bytes], run_directory: Path) -> set[int]:
    """Ends the engine, politely first, then every rank that outlived it; returns the ranks that were still running."""
    running = _running(run_directory)
    if engine.poll() is None:
        engine.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            engine.wait(timeout=_SECONDS_TO_TERMINATE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)
    # Before the engine is waited for: ranks that spin (Horovod's do) may keep it from a processor for a minute.
    _kill_ranks(run_directory)
    engine.wait()
    _kill_ranks(run_directory)  # a rank may have begun meanwhile
    return running


def _kill_ranks(run_directory: Path) -> None:
    for rank in started_ranks(run_directory):
        pid = rank.running_pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _explain(
    ranks: list[RankFiles],
    silent: RankFiles | None,
    return_code: int,
    engine_log: Path,
    *,
    num_processes: int,
    spans_nodes: bool,
) -> JobFailure:
    """Finds the failure that the others follow from.

    An error that a rank reported comes first, unless it only tells that a peer has gone or does not
    answer: then the rank to name is the one that ended without a word (`silent`), or else never complained.
    """
    failed = sorted(((failure, rank) for rank in ranks if (failure := rank.failure())), key=lambda pair: pair[0].time)
    causes = [(failure, rank) for failure, rank in failed if not failure.is_consequence]
    if causes:
        failure, rank = causes[0]
        return _failure_of(rank, failure.message, rank.log)
    missing = sorted(set(range(num_processes)) - {rank.rank for rank in ranks}) if not spans_nodes else []
    if silent is not None:
        others = f"; rank {missing[0]} had not begun" if missing else ""
        crash = silent.crash()
        how = f"crashed ({crash})" if crash else "ended without a word: killed, crashed or out of memory"
        return _failure_of(silent, how + others, silent.log)
    if failed and spans_nodes:
        # Whoever went first is not here: a rank that says nothing was ended by its launcher.
        failure, rank = failed[0]
        return _failure_of(rank, f"{failure.message} (the cause may lie on another node)", rank.log)
    if failed:
        return _explain_wait(*failed[0], ranks, missing, engine_log)
    lines = _content(engine_log).strip().splitlines()
    reason = f": {lines[-1].strip()[:300]}" if lines else ""
    return JobFailure(None, f"the launcher ended with code {return_code}{reason}", engine_log)


def _content(log: Path) -> str:
    """What a log says; nothing if somebody has moved it away with the run's directory."""
    with contextlib.suppress(OSError):
        return log.read_text(errors="replace")
    return ""


def _explain_wait(
    failure: RankFailure, rank: RankFiles, ranks: list[RankFiles], missing: list[int], engine_log: Path
) -> JobFailure:
    """Finds whom the first rank that complained has waited for."""
    waited = f"rank {rank.rank} waited for it in vain ({failure.message[:120]})"
    if missing:
        return JobFailure(missing[0], f"has not begun: {waited}", engine_log)
    for stuck in ranks:
        if stuck.failure() is None and not stuck.succeeded():
            return _failure_of(stuck, f"stuck: {waited}", stuck.sigterm)
    return _failure_of(rank, failure.message, rank.log)


def _failure_of(rank: RankFiles, message: str, log: Path) -> JobFailure:
    return JobFailure(rank.rank, message, log, rank.position())


@contextlib.contextmanager
def signals_raised(
    on_first: Callable[[signal.Signals], None] | None = None, *, repeatedly: bool = False
) -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into Interrupted, so that what was started is ended on the way out.

    With `on_first`, the first of them only calls it. With `repeatedly`, each raises, for where a library
    that is being loaded may swallow the first; otherwise those after the raised one are ignored.
    """
    is_first = on_first is not None

    def stop(signal_number: int, frame: FrameType | None) -> None:
        nonlocal is_first
        if is_first and on_first is not None:
            is_first = False
            on_first(signal.Signals(signal_number))
            return
        for number in () if repeatedly else before:
            signal.signal(number, signal.SIG_IGN)  # a second one must not stop us from ending the ranks
        raise Interrupted(signal_number)

    # Under nohup(1), the end of a session is no reason to end.
    numbers = [one for one in _INTERRUPTS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
