"""The command line: ``BACKEND [options]`` trains, other words compare, prove, measure, or tell what runs here.

Everything is checked before anything is created. Bad input ends with one line and exit code 2,
a failed run with 1, a trained one whose ranks came to differ with 3, one whose results had to go into another
directory with 4, one that was asked to stop and saved its state with 75, one that was ended at once with 128 plus
the signal's number. A run that has finished has nothing to resume: 0, or 3 where its ranks had come to differ.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from backends.interface import UnsupportedError
from backends.registry import BACKENDS, find_backend
from launch.arguments import from_home
from launch.engines import EXACT_FLOAT32, PROJECT_DIRECTORY, Ranks, engine_command, engine_environment
from launch.errors import UsageError, one_line, refused_path
from launch.nodes import settle_nodes
from launch.options import read_options
from launch.resolve import resolve
from launch.resume import Finished, Start
from launch.run_directory import locked, prepare_directory, restarted
from launch.supervisor import Interrupted, JobFailure, run_job, signals_raised
from records.checkpoint import checkpoint_step, list_checkpoints
from records.config import STARTED_AT_VARIABLE, RunConfig
from records.environment import describe_environment
from records.names import LOGS_NAME, RECORD_NAME
from records.notice import read_notice, record_directory
from records.progress import ProgressReader
from records.record import EvaluationRecord, Resumption, RunRecord, StepRecord, read_record, write_record
from tasks.interface import TaskInputError
from tasks.text.prepared import cache_directory
from training.stopping import has_stopped, request_stop
from watch.watchdog import Watchdog

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

_ERRORS_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)

# How far a clock may be set back, and on, between launch/run.sh and this process.
_MOST_SECONDS_OFF = 60.0
_MOST_SECONDS_AGO = 3600.0

# Modules with a function `run` that takes the remaining arguments and returns the exit code.
_COMMANDS = {
    "doctor": "launch.doctor",
    "contract": "contract.command",
    "compare": "compare.race.command",
    "report": "compare.report.command",
    "allreduce": "compare.collectives.command",
}


def main() -> None:
    """Entry point of the command line, which launch/__main__.py calls."""
    os.environ.update(EXACT_FLOAT32)  # the contract computes references in this process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may have letters that the terminal lacks
    sys.exit(_answer([from_home(argument) for argument in sys.argv[1:]]))


def _answer(arguments: list[str]) -> int:
    """Runs a command and returns the exit code; what ends it early is told in a line."""
    code = 0
    try:
        with signals_raised(repeatedly=True):
            _settle_environment()
            try:
                code = _dispatch(arguments)
            finally:
                sys.stdout.flush()
        return code
    except (UsageError, UnsupportedError, TaskInputError) as error:
        _tell(one_line(error))
        return 2
    except BaseException as error:
        # A library that was interrupted while it was loaded may have made another error of it.
        interruption = _interruption_behind(error)
        if interruption is not None:
            _tell(f"interrupted by {interruption}")
            return 128 + interruption.signal_number
        if not isinstance(error, OSError):
            raise
        if (lost := _lost_output(error)) is not None:
            _give_up_output(lost)
        else:
            _tell(one_line(error))
        return code or 1


def _interruption_behind(error: BaseException | None) -> Interrupted | None:
    while error is not None and not isinstance(error, Interrupted):
        error = error.__cause__ or error.__context__
    return error


def _settle_environment() -> None:
    """Makes LOCKSTEP_CACHE an absolute path, for all that is started in other directories.

    Raises:
        UsageError: There is no working directory.
    """
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(f"the working directory is gone ({error.strerror}); change to another directory") from error
    if os.environ.get("LOCKSTEP_CACHE"):
        os.environ["LOCKSTEP_CACHE"] = str(cache_directory())


def _lost_output(error: OSError) -> OSError | None:
    """Why what was printed cannot be written; None if it can be, and the error is another one."""
    # Without a buffer (python -u) nothing is left to be tried again: there the kind of error must tell.
    is_unbuffered = getattr(sys.stdout, "write_through", False) and error.filename is None
    if isinstance(error, BrokenPipeError) or (is_unbuffered and error.errno in _ERRORS_OF_WRITING):
        return error
    try:
        sys.stdout.flush()
    except OSError as lost:
        return lost
    return None


def _give_up_output(error: OSError) -> None:
    """Says that what was to be shown could not be written, unless nobody wanted to read it any more."""
    # What is still in its buffer goes nowhere, instead of into an error at the end of the interpreter.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        _tell(f"the output cannot be written ({error.strerror})")


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] in _COMMANDS:
        try:
            command = importlib.import_module(_COMMANDS[arguments[0]])
        except ModuleNotFoundError as error:
            raise UsageError(
                f"{arguments[0]}: needs the package {error.name}; pip install 'lockstep[compare]', "
                "or use launch/run.sh, which does"
            ) from error
        return int(command.run(arguments[1:]))
    return train(arguments[0], arguments[1:])


def _overview() -> str:
    backends = "\n".join(f"  {name:12}{row.summary}" for name, row in BACKENDS.items())
    return (
        "usage: launch/run.sh BACKEND [options]    train; BACKEND --help lists the options\n"
        "       launch/run.sh contract BACKEND     prove that it computes what one process computes\n"
        "       launch/run.sh compare              let backends race each other, and report\n"
        "       launch/run.sh report RECORD ...    the same report of records, wherever they were made\n"
        "       launch/run.sh allreduce            measure each library's collectives\n"
        "       launch/run.sh doctor               which backends run here\n\n"
        f"backends (or your own, as package.module:Class):\n{backends}"
    )


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
        config, task = resolve(backend, row, asked, started_at=started_at)
        ranks = Ranks(
            num_processes=config.num_processes,
            module=("training.rank", str(config.output_dir)),
            device=config.device,
            num_threads=config.threads_per_rank,
            master_port=config.master_port,
            timeout_seconds=config.timeout,
            log_directory=config.output_dir / LOGS_NAME,
            nodes=settle_nodes(config.num_nodes, config.node_rank, config.master_addr),
        )
        command = engine_command(config.start_method, ranks)
        lock = contextlib.ExitStack()
        lock.enter_context(locked(config.output_dir))
        config = prepare_directory(config, asked.start)
    except OSError as error:  # any path among the options may be one that the system refuses
        raise refused_path(error) from error
    with lock:
        return _run_to_the_end(config, ranks, command, asked.start, task)


def _run_to_the_end(config: RunConfig, ranks: Ranks, command: list[str], start: Start | None, task: Task) -> int:
    """Runs the job, again from the latest checkpoint after a failure, if that was asked for; returns the exit code."""
    from launch.display import RunDisplay, console, show_overview, show_start

    terminal = console()
    show_start(config, start, terminal)
    show_overview(task.overview(), terminal)
    positive_label = task.describe().get("positive_label")
    while True:
        try:
            failure, was_asked_to_stop = _run_once(config, ranks, command, RunDisplay(config, terminal, positive_label))
        except Interrupted as interruption:
            _tell(f"interrupted by {interruption}; all ranks have been ended")
            _record_end(config, "interrupted", f"interrupted by {interruption}")
            return 128 + interruption.signal_number
        except OSError as error:  # as where the system lets nobody start another process
            _record_end(config, "failed", one_line(error))
            raise
        if failure is None:
            break
        if not config.output_dir.exists():
            return _conclude_elsewhere(config)
        _tell(f"{config.backend} failed: {one_line(failure)}\n  more in {failure.log}")
        if record_directory(config.output_dir) is not None:
            _tell("training was over: rank 0 has saved the model and the record all the same")
            _tell_refuge(config)
            return 1
        _record_end(config, "failed", str(failure))
        # What computed a loss that is not finite would compute it again.
        is_hopeless = failure.message.startswith(FloatingPointError.__name__)
        if config.num_restarts == config.max_restarts or was_asked_to_stop or is_hopeless:
            return 1
        try:
            config, damaged = restarted(config)
        except (UsageError, OSError) as error:
            _tell(f"cannot start again: {one_line(error)}")
            return 1
        for damage in damaged:
            _tell(f"passed over: {damage}")
        where = f"step {checkpoint_step(config.resume_from)}" if config.resume_from else "the beginning"
        _tell(f"restart {config.num_restarts} of {config.max_restarts}, from {where}")
    return _conclude(config, terminal)


def _conclude(config: RunConfig, terminal: Console) -> int:
    """Shows what came of a run without a failure, and returns its exit code; says why that is not 0."""
    from launch.display import describe_diverged_model, show_summary

    if (place := record_directory(config.output_dir)) is not None:
        record = read_record(place / RECORD_NAME)
        show_summary(record, place, terminal)
        is_rescued = _tell_refuge(config)
        if record.status == "diverged":
            _tell(f"{describe_diverged_model(record)}: {one_line(record.error)}")
            return DIVERGED
        return RESCUED if is_rescued else 0
    if has_stopped(config.output_dir):
        _record_end(config, "interrupted", "stopped as asked, after a checkpoint")
        saved = list_checkpoints(config.output_dir)
        where = f"after step {checkpoint_step(saved[0])}; --resume goes on from there" if saved else "as asked"
        _tell(f"stopped {where}")
        return STOPPED
    terminal.print(f"node {config.node_rank} is done; model and record are on the node of rank 0")
    return 0


def _conclude_elsewhere(config: RunConfig) -> int:
    """Says what came of a run whose directory somebody has moved or removed, and returns its exit code."""
    from training.keeping import find_rescued

    place = find_rescued(config.output_dir, config.started_at)
    if place is None:
        _tell(f"{config.output_dir} has gone, and the run did not end well; leave its directory in place while it runs")
        return 1
    _tell(f"{config.output_dir} has gone; training was over, and model and record are in {place}")
    return RESCUED


def _tell_refuge(config: RunConfig) -> bool:
    """Says where results lie that could not be saved in the run's directory; whether there are any."""
    refuge = read_notice(config.output_dir).refuge
    if refuge is not None:
        _tell(f"not all results could be saved in {config.output_dir}; the others are in {refuge}")
    return refuge is not None


def _tell(text: str) -> None:
    """Says something of a run on the terminal; whether anybody is there to read it changes nothing."""
    try:
        print(f"lockstep: {text}", file=sys.stderr, flush=True)
    except OSError:
        # What is still in its buffer would change the exit code at the end of the interpreter.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _run_once(
    config: RunConfig, ranks: Ranks, command: list[str], display: RunDisplay
) -> tuple[JobFailure | None, bool]:
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
        config.output_dir,
        num_ranks=ranks.num_local_processes,
        seconds=config.hang_timeout,
        # Before the libraries give up, which name whoever waited.
        long_seconds=0.9 * config.timeout,
        slow_computing=config.torch_compile,
        spans_nodes=config.num_nodes > 1,
    )
    with display:
        failure = run_job(
            command,
            environment=engine_environment(ranks),
            working_directory=PROJECT_DIRECTORY,
            run_directory=config.output_dir,
            num_processes=ranks.num_local_processes,
            spans_nodes=config.num_nodes > 1,
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


def _record_end(config: RunConfig, status: Literal["failed", "interrupted"], error: str) -> None:
    """Writes the record of a run that did not complete, with what it reported."""
    if (config.output_dir / RECORD_NAME).exists():
        return
    steps: list[StepRecord] = []
    evaluations: list[EvaluationRecord] = []
    others: dict[str, Any] = {"failed_saves": [], "warnings": []}
    for fact in ProgressReader(config.output_dir).news():
        event = fact["event"]
        if event == "resumed":
            others["resumed_from"] = Resumption.model_validate(fact["origin"])
            evaluations += [EvaluationRecord.model_validate(one) for one in fact["evaluations"]]
        if event in ("resumed", "closed"):
            steps += [StepRecord.model_validate(step) for step in fact["steps"]]
        elif event == "evaluation":
            evaluations.append(EvaluationRecord.model_validate(fact["evaluation"]))
        elif event == "save-failed":
            others["failed_saves"].append(fact["step"])
        elif event == "warning":
            others["warnings"].append(fact["text"])
        elif event == "disagreed":
            others["disagreement"] = fact["disagreement"]
    record = RunRecord(
        status=status,
        error=error,
        config=config,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        task={},
        environment=describe_environment(with_torch=False),
        seconds_to_first_step=None,
        seconds=time.time() - config.started_at,
        steps=steps,
        evaluations=evaluations,
        quality={},
        ranks=[],
        restarts=config.num_restarts,
        **others,
    )
    with contextlib.suppress(OSError):  # on a full disk, what was said must do
        write_record(record, config.output_dir)


if __name__ == "__main__":
    main()
