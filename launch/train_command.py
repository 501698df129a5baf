"""``launch/run.sh BACKEND``: trains, and restarts a failed run from its newest checkpoint if that is allowed."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from backends.registry import BackendRow, find_backend
from launch.allocator import describe_allocator
from launch.batching import describe_imbalance, describe_padding
from launch.errors import UsageError, one_line, refused_path, say, tell
from launch.finished import tell_other_nodes
from launch.job import Job
from launch.meeting import MeetingFailed, NothingToStart, meet
from launch.options import read_options
from launch.other_nodes import OtherNodes
from launch.resolve import RANK_PROGRAM, resolve
from launch.resume import Finished, Start
from launch.run_directory import locked, prepare_directory, restarted
from launch.signals import Interrupted, signals_raised
from launch.supervisor import run_job
from launch.unfinished import record_end
from records.checkpoint import checkpoint_step, list_checkpoints, remove_unfinished
from records.config import STARTED_AT_VARIABLE, RunConfig
from records.names import RECORD_NAME
from records.notice import read_notice, record_directory
from records.record import read_record
from training.stopping import has_stopped, request_stop
from watch.failures import FailureKind, JobFailure
from watch.heartbeat import own_phases
from watch.watchdog import Limits, Watchdog

if TYPE_CHECKING:
    from rich.console import Console

    from launch.display import RunDisplay
    from tasks.interface import Task

# Exit code of a run that was asked to stop and has saved a checkpoint: EX_TEMPFAIL of sysexits(3), try again.
STOPPED = 75

# Exit code of a run whose ranks diverged, so that the model is that of rank 0.
DIVERGED = 3

# Exit code of a run whose results did not fit into its directory and are in another one.
RESCUED = 4

# How far the clock may have been set back, or forward, between launch/run.sh and this process.
_MOST_SECONDS_OFF = 60.0

_MOST_SECONDS_AGO = 3600.0


def train(
    backend: str,
    arguments: list[str],
    *,
    rank_program: tuple[str, ...] = RANK_PROGRAM,
    row: BackendRow | None = None,
) -> int:
    """Runs one training job from the command line.

    Args:
        backend: The backend.
        arguments: The options.
        rank_program: The module that each rank runs, and its first arguments; the run's directory follows them.
        row: What is known of the backend; None to look it up by its name.

    Returns:
        The exit code.
    """
    started_at = _started_at()
    try:
        row = row or find_backend(backend)
        try:
            asked = read_options(backend, row.settings, arguments)
        except Finished as finished:
            code = say_finished(finished)
            tell_other_nodes(backend, arguments)
            return code
        if asked.is_dry_run:
            from launch.dry_run import dry_run

            return dry_run(backend, row, asked, started_at=started_at)
        resolved = resolve(backend, row, asked, started_at=started_at, rank_program=rank_program)
        lock = contextlib.ExitStack()
        lock.enter_context(locked(resolved.config.output_dir))
        config = prepare_directory(resolved.config, asked.start)
    except OSError as error:  # any path among the options may be one that the system refuses
        raise refused_path(error) from error
    cuts_batches = row.capabilities.cuts_batches
    said = (
        describe(config, resolved.task, cuts_batches=cuts_batches)
        for describe in (describe_padding, describe_imbalance)
    )
    remarks = [remark for remark in (*said, describe_allocator(asked.run.allocator)) if remark]
    with lock:
        try:
            return _run_to_the_end(config, resolved.job, asked.start, resolved.task, remarks)
        except NothingToStart:
            tell("node 0 says that this run has finished, so nothing was started here; model and record are on node 0")
            return 0


def say_finished(finished: Finished) -> int:
    """Says that the run to resume has finished; returns the exit code of a command that has nothing left to do."""
    say(str(finished))
    return DIVERGED if finished.has_diverged else 0


def _run_to_the_end(config: RunConfig, job: Job, start: Start | None, task: Task, remarks: list[str]) -> int:
    """Runs the job, and after a failure restarts it as often as --max-restarts allows; returns the exit code."""
    from launch.display import RunDisplay, console, show_overview, show_start

    terminal = console()
    show_start(config, start, terminal)
    show_overview(task.overview(), terminal)
    for remark in remarks:
        terminal.print(remark)
    positive_label = task.describe().get("positive_label")
    while True:
        try:
            failure, was_asked_to_stop = _run_once(config, job, RunDisplay(config, terminal, positive_label))
        except Interrupted as interruption:
            tell(f"interrupted by {interruption}; all ranks have been ended")
            record_end(config, "interrupted", f"interrupted by {interruption}")
            return 128 + interruption.signal_number
        except (OSError, UsageError) as error:  # the system allows no further process; another node refuses this one
            record_end(config, "failed", one_line(error))
            raise
        if failure is None:
            break
        if not config.output_dir.exists():
            return _conclude_elsewhere(config)
        if (
            config.node_rank == 0 or config.min_nodes is not None
        ):  # where a rank was that saves, whose thread may have been ended while it wrote a checkpoint
            remove_unfinished(config.output_dir)
        tell(f"{config.backend} failed: {one_line(failure)}{failure.where_to_read_more}")
        if record_directory(config.output_dir) is not None:
            tell("the training had ended before, and rank 0 saved the model and the record")
            _tell_refuge(config)
            return 1
        record_end(config, "failed", str(failure))
        # A restart would compute the same loss that is not finite.
        is_hopeless = failure.kind is FailureKind.NONFINITE
        next_config = None if was_asked_to_stop or is_hopeless else _start_again(config)
        if next_config is None:
            return 1
        config = next_config
    return _conclude(config, terminal)


def _start_again(config: RunConfig) -> RunConfig | None:
    """Makes a failed run ready for a restart and says from where; returns None if it may not or cannot restart."""
    # Where nodes may leave, the starter's agents have restarted as often as they may.
    if config.num_restarts == config.max_restarts or config.min_nodes is not None:
        return None
    try:
        config, damaged = restarted(config)
    except (UsageError, OSError) as error:
        tell(f"the run cannot be restarted: {one_line(error)}")
        return None
    for damage in damaged:
        tell(f"skipped an unusable checkpoint: {damage}")
    where = f"step {checkpoint_step(config.resume_from)}" if config.resume_from else "the beginning"
    tell(f"restart {config.num_restarts} of {config.max_restarts}, from {where}")
    return config


def _conclude(config: RunConfig, terminal: Console) -> int:
    """Shows the result of a run that did not fail and returns its exit code, with the reason if it is not 0."""
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
        record_end(config, "interrupted", "stopped as requested, after saving a checkpoint")
        saved = list_checkpoints(config.output_dir)
        where = f"after step {checkpoint_step(saved[0])}; continue with --resume" if saved else "as requested"
        tell(f"stopped {where}")
        return STOPPED
    terminal.print(f"node {config.node_rank} has finished; the model and the record are on the node of rank 0")
    return 0


def _conclude_elsewhere(config: RunConfig) -> int:
    """Reports the result of a run whose directory was moved or removed, and returns its exit code."""
    from training.keeping import find_rescued

    place = find_rescued(config.output_dir, config.started_at)
    if place is None:
        tell(
            f"{config.output_dir} was moved or removed, and the run failed; leave the output directory in place "
            "during a run"
        )
        return 1
    tell(
        f"{config.output_dir} was moved or removed after the training had ended; "
        f"the model and the record are in {place}"
    )
    return RESCUED


def _tell_refuge(config: RunConfig) -> bool:
    """Says where results are that could not be saved in the run's directory; returns whether there are any."""
    refuge = read_notice(config.output_dir).refuge
    if refuge is not None:
        tell(f"not all results could be saved in {config.output_dir}; the rest are in {refuge}")
    return refuge is not None


def _run_once(config: RunConfig, job: Job, display: RunDisplay) -> tuple[JobFailure | None, bool]:
    """Runs the job once; returns why it failed, if it did, and whether it was asked to stop."""
    with contextlib.ExitStack() as connections:
        other_nodes = None
        if job.spans_nodes and not job.nodes.may_leave:
            try:
                with signals_raised():
                    met = meet(
                        job.nodes,
                        job.port,
                        backend=config.backend,
                        num_processes=config.num_processes,
                        seconds=config.timeout,
                    )
            except MeetingFailed as error:
                return JobFailure(FailureKind.MISSING, None, str(error), None), False
            other_nodes = connections.enter_context(met)
        return _run_beside(config, job, display, other_nodes)


def _run_beside(
    config: RunConfig, job: Job, display: RunDisplay, other_nodes: OtherNodes | None
) -> tuple[JobFailure | None, bool]:
    """Runs the part of this node; returns what `_run_once` does."""
    asked_to_stop: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        asked_to_stop.append(number)
        request_stop(config.output_dir)
        start = "\n" if sys.stderr.isatty() else ""  # the progress bar is on this line
        text = (
            f"{start}lockstep: {number.name}: finishing this step and saving a checkpoint; "
            f"a second {number.name} stops the run at once\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, text.encode())

    watchdog = Watchdog(
        job.run_directory,
        num_ranks=job.num_processes,
        # Shorter than the libraries' own timeouts, whose messages name a rank that waited, not the one that hangs.
        limits=Limits(config.hang_timeout, 0.9 * config.timeout, slow_computing=config.torch_compile),
        spans_nodes=job.spans_nodes,
        signs=job.signs,
        own_phases=own_phases(waits_in_forward=job.waits_in_forward),
    )
    with display:
        failure = run_job(
            job,
            on_poll=display.refresh,
            on_first_signal=stop if config.save_interval else None,
            watchdog=watchdog,
            other_nodes=other_nodes,
        )
    return failure, bool(asked_to_stop)


def _started_at() -> float:
    """When the user's command began, in seconds since 1970: before launch/run.sh, if that started this process.

    Raises:
        UsageError: The variable does not hold a recent time, so launch/run.sh did not set it.
    """
    text, now = os.environ.get(STARTED_AT_VARIABLE), time.time()
    if not text:
        return now
    try:
        began = float(text)
    except ValueError:
        began = math.nan
    if not now - _MOST_SECONDS_AGO <= began <= now + _MOST_SECONDS_OFF:
        raise UsageError(
            f"{STARTED_AT_VARIABLE}={text!r:.100} is not a recent time; "
            "only launch/run.sh sets this variable, so unset it"
        )
    return min(began, now)
