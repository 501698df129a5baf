"""``launch/run.sh BACKEND``: trains, again from the newest checkpoint after a failure if that was asked for."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from backends.registry import find_backend
from launch.errors import UsageError, one_line, refused_path, tell
from launch.job import Job
from launch.options import read_options
from launch.resolve import resolve
from launch.resume import Finished, Start
from launch.run_directory import locked, prepare_directory, restarted
from launch.signals import Interrupted
from launch.supervisor import run_job
from launch.unfinished import record_end
from records.checkpoint import checkpoint_step, list_checkpoints, remove_unfinished
from records.config import STARTED_AT_VARIABLE, RunConfig
from records.names import RECORD_NAME
from records.notice import read_notice, record_directory
from records.record import read_record
from training.stopping import has_stopped, request_stop
from watch.failures import FailureKind, JobFailure
from watch.watchdog import Limits, Watchdog

if TYPE_CHECKING:
    from rich.console import Console

    from launch.display import RunDisplay
    from tasks.interface import Task

# The exit code of a run that was asked to stop and has saved where it was: EX_TEMPFAIL of sysexits(3), try again.
STOPPED = 75

# That of a run whose model is that of rank 0, since the ranks' parameters differ.
DIVERGED = 3

# That of a run whose directory had no room for its results.
RESCUED = 4

# How far a clock may be set back, and on, between launch/run.sh and this process.
_MOST_SECONDS_OFF = 60.0

_MOST_SECONDS_AGO = 3600.0


def train(backend: str, arguments: list[str]) -> int:
    """Runs one training job from the command line; returns the exit code."""
    started_at = _started_at()
    try:
        row = find_backend(backend)
        try:
            asked = read_options(backend, row.settings, arguments)
        except Finished as finished:
            print(finished)
            return DIVERGED if finished.has_diverged else 0
        resolved = resolve(backend, row, asked, started_at=started_at)
        lock = contextlib.ExitStack()
        lock.enter_context(locked(resolved.config.output_dir))
        config = prepare_directory(resolved.config, asked.start)
    except OSError as error:  # any path among the options may be one that the system refuses
        raise refused_path(error) from error
    with lock:
        return _run_to_the_end(config, resolved.job, asked.start, resolved.task)


def _run_to_the_end(config: RunConfig, job: Job, start: Start | None, task: Task) -> int:
    """Runs the job, again from the latest checkpoint after a failure, if that was asked for; returns the exit code."""
    from launch.display import RunDisplay, console, show_overview, show_start

    terminal = console()
    show_start(config, start, terminal)
    show_overview(task.overview(), terminal)
    positive_label = task.describe().get("positive_label")
    while True:
        try:
            failure, was_asked_to_stop = _run_once(config, job, RunDisplay(config, terminal, positive_label))
        except Interrupted as interruption:
            tell(f"interrupted by {interruption}; all ranks have been ended")
            record_end(config, "interrupted", f"interrupted by {interruption}")
            return 128 + interruption.signal_number
        except OSError as error:  # as where the system lets nobody start another process
            record_end(config, "failed", one_line(error))
            raise
        if failure is None:
            break
        if not config.output_dir.exists():
            return _conclude_elsewhere(config)
        if config.node_rank == 0:  # where rank 0 was, whose thread may have been ended while it wrote a checkpoint
            remove_unfinished(config.output_dir)
        tell(f"{config.backend} failed: {one_line(failure)}\n  more in {failure.log}")
        if record_directory(config.output_dir) is not None:
            tell("training was over: rank 0 has saved the model and the record all the same")
            _tell_refuge(config)
            return 1
        record_end(config, "failed", str(failure))
        # What computed a loss that is not finite would compute it again.
        is_hopeless = failure.kind is FailureKind.NONFINITE
        next_config = None if was_asked_to_stop or is_hopeless else _start_again(config)
        if next_config is None:
            return 1
        config = next_config
    return _conclude(config, terminal)


def _start_again(config: RunConfig) -> RunConfig | None:
    """Makes a failed run ready to start again, and says from where; returns None where it may not, or cannot."""
    if config.num_restarts == config.max_restarts:
        return None
    try:
        config, damaged = restarted(config)
    except (UsageError, OSError) as error:
        tell(f"cannot start again: {one_line(error)}")
        return None
    for damage in damaged:
        tell(f"passed over: {damage}")
    where = f"step {checkpoint_step(config.resume_from)}" if config.resume_from else "the beginning"
    tell(f"restart {config.num_restarts} of {config.max_restarts}, from {where}")
    return config


def _conclude(config: RunConfig, terminal: Console) -> int:
    """Shows what came of a run without a failure, and returns its exit code; says why that is not 0."""
    from launch.display import describe_diverged_model, show_summary

    if (place := record_directory(config.output_dir)) is not None:
        record = read_record(place / RECORD_NAME)
        show_summary(record, place, terminal)
        is_rescued = _tell_refuge(config)
        if record.status == "diverged":
            tell(f"{describe_diverged_model(record)}: {one_line(record.error)}")
            return DIVERGED
        return RESCUED if is_rescued else 0
    if has_stopped(config.output_dir):
        record_end(config, "interrupted", "stopped as asked, after a checkpoint")
        saved = list_checkpoints(config.output_dir)
        where = f"after step {checkpoint_step(saved[0])}; --resume goes on from there" if saved else "as asked"
        tell(f"stopped {where}")
        return STOPPED
    terminal.print(f"node {config.node_rank} is done; model and record are on the node of rank 0")
    return 0


def _conclude_elsewhere(config: RunConfig) -> int:
    """Says what came of a run whose directory somebody has moved or removed, and returns its exit code."""
    from training.keeping import find_rescued

    place = find_rescued(config.output_dir, config.started_at)
    if place is None:
        tell(f"{config.output_dir} has gone, and the run did not end well; leave its directory in place while it runs")
        return 1
    tell(f"{config.output_dir} has gone; training was over, and model and record are in {place}")
    return RESCUED


def _tell_refuge(config: RunConfig) -> bool:
    """Says where results lie that could not be saved in the run's directory; whether there are any."""
    refuge = read_notice(config.output_dir).refuge
    if refuge is not None:
        tell(f"not all results could be saved in {config.output_dir}; the others are in {refuge}")
    return refuge is not None


def _run_once(config: RunConfig, job: Job, display: RunDisplay) -> tuple[JobFailure | None, bool]:
    """Runs the job once; returns why it failed, if it did, and whether somebody asked it to stop."""
    asked_to_stop: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        asked_to_stop.append(number)
        request_stop(config.output_dir)
        start = "\n" if sys.stderr.isatty() else ""  # the progress bar is on this line
        text = f"{start}lockstep: {number.name}: finishing the step and saving; again ends it at once\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())

    watchdog = Watchdog(
        job.run_directory,
        num_ranks=job.num_processes,
        # Long phases end before the libraries give up, which would name whoever waited.
        limits=Limits(config.hang_timeout, 0.9 * config.timeout, slow_computing=config.torch_compile),
        spans_nodes=job.spans_nodes,
        signs=job.signs,
    )
    with display:
        failure = run_job(
            job,
            on_poll=display.refresh,
            on_first_signal=stop if config.save_interval else None,
            watchdog=watchdog,
        )
    return failure, bool(asked_to_stop)


def _started_at() -> float:
    """When the user's command began, in seconds since 1970: before launch/run.sh, if that started this process.

    Raises:
        UsageError: It was not launch/run.sh that set the variable.
    """
    text, now = os.environ.get(STARTED_AT_VARIABLE), time.time()
    if not text:
        return now
    try:
        began = float(text)
    except ValueError:
        began = math.nan
    if not now - _MOST_SECONDS_AGO <= began <= now + _MOST_SECONDS_OFF:
        raise UsageError(f"{STARTED_AT_VARIABLE}={text!r:.100}: only launch/run.sh sets this variable; unset it")
    return min(began, now)
