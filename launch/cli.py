"""The command line: ``BACKEND [options]`` trains, other words compare, prove, measure, or tell what runs here.

Everything is checked before anything is created. Bad input ends with one line and exit code 2,
a failed run with 1, one that was asked to stop and saved its state with 75, one that was ended
at once with 128 plus the signal's number.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Literal

from backends.interface import UnsupportedError
from backends.registry import BACKENDS, find_backend
from launch.checkpoint import checkpoint_step, list_checkpoints
from launch.config import RACE_VARIABLE, RaceContext, RunConfig, UsageError, one_line
from launch.engines import EXACT_FLOAT32, PROJECT_DIRECTORY, Ranks, engine_command, engine_environment
from launch.nodes import settle_nodes
from launch.options import read_options
from launch.progress import ProgressReader
from launch.rank_files import LOGS_NAME
from launch.record import (
    RECORD_NAME,
    EvaluationRecord,
    Resumption,
    RunRecord,
    StepRecord,
    describe_environment,
    read_record,
    write_record,
)
from launch.resolve import resolve
from launch.resume import Start, locked, prepare_directory, restarted
from launch.stopping import has_stopped, request_stop
from launch.supervisor import Interrupted, JobFailure, run_job
from launch.watchdog import Watchdog
from tasks.interface import TaskInputError

if TYPE_CHECKING:
    from rich.console import Console

# The exit code of a run that was asked to stop and has saved where it was: EX_TEMPFAIL of sysexits(3), try again.
STOPPED = 75

# Modules with a function `run` that takes the remaining arguments and returns the exit code.
_COMMANDS = {
    "contract": "contract.command",
    "compare": "compare.race_command",
    "report": "compare.report_command",
    "allreduce": "compare.collectives_command",
}


def main() -> None:
    """Entry point of the `lockstep` command, which launch/run.sh calls."""
    os.environ.update(EXACT_FLOAT32)  # the contract computes references in this process
    try:
        sys.exit(_dispatch(sys.argv[1:]))
    except (UsageError, UnsupportedError, TaskInputError) as error:
        print(f"lockstep: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] == "doctor":
        if len(arguments) > 1:
            raise UsageError(f"doctor takes no options, but got {arguments[1]}")
        from launch.doctor import examine

        return examine()
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
    started_at = float(os.environ.get("LOCKSTEP_STARTED_AT") or time.time())
    try:
        row = find_backend(backend)
        asked = read_options(backend, row.settings, arguments)
        config = resolve(backend, row, asked, started_at=started_at, race=_race())
        ranks = Ranks(
            num_processes=config.num_processes,
            module=("launch.rank", str(config.output_dir)),
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
        raise UsageError(str(error)) from error
    with lock:
        return _run_to_the_end(config, ranks, command, asked.start)


def _run_to_the_end(config: RunConfig, ranks: Ranks, command: list[str], start: Start | None) -> int:
    """Runs the job, again from the latest checkpoint after a failure, if that was asked for; returns the exit code."""
    from launch.display import console, show_start, show_summary

    terminal = console()
    show_start(config, start, terminal)
    while True:
        try:
            failure, was_asked_to_stop = _run_once(config, ranks, command, terminal)
        except Interrupted as interruption:
            _tell(f"interrupted by {interruption}; all ranks have been ended")
            _record_end(config, "interrupted", f"interrupted by {interruption}")
            return 128 + interruption.signal_number
        if failure is None:
            break
        _tell(f"{config.backend} failed: {one_line(failure)}\n  more in {failure.log}")
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
    if (config.output_dir / RECORD_NAME).exists():
        show_summary(read_record(config.output_dir / RECORD_NAME), config.output_dir, terminal)
        return 0
    if has_stopped(config.output_dir):
        _record_end(config, "interrupted", "stopped as asked, after a checkpoint")
        saved = list_checkpoints(config.output_dir)
        where = f"after step {checkpoint_step(saved[0])}; --resume goes on from there" if saved else "as asked"
        _tell(f"stopped {where}")
        return STOPPED
    terminal.print(f"node {config.node_rank} is done; model and record are on the node of rank 0")
    return 0


def _tell(text: str) -> None:
    """Says something of a run on the terminal; whether anybody is there to read it changes nothing."""
    with contextlib.suppress(OSError):
        print(f"lockstep: {text}", file=sys.stderr, flush=True)


def _run_once(config: RunConfig, ranks: Ranks, command: list[str], terminal: Console) -> tuple[JobFailure | None, bool]:
    """Runs the job once; returns why it failed, if it did, and whether somebody asked it to stop."""
    from launch.display import RunDisplay

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
    with RunDisplay(config, terminal) as display:
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


def _race() -> RaceContext | None:
    """What a race says of the run that it has just started."""
    text = os.environ.get(RACE_VARIABLE)
    return RaceContext.model_validate_json(text) if text else None


def _record_end(config: RunConfig, status: Literal["failed", "interrupted"], error: str) -> None:
    """Writes the record of a run that did not complete, with the steps and evaluations it reported."""
    if (config.output_dir / RECORD_NAME).exists():
        return
    steps: list[StepRecord] = []
    evaluations: list[EvaluationRecord] = []
    origin: Resumption | None = None
    for fact in ProgressReader(config.output_dir).news():
        if fact["event"] == "resumed":
            origin = Resumption.model_validate(fact["origin"])
            evaluations += [EvaluationRecord.model_validate(one) for one in fact["evaluations"]]
        if fact["event"] in ("resumed", "closed"):
            steps += [StepRecord.model_validate(step) for step in fact["steps"]]
        elif fact["event"] == "evaluation":
            evaluations.append(EvaluationRecord.model_validate(fact["evaluation"]))
    with contextlib.suppress(OSError):  # on a full disk, what was said must do
        _write_end(config, status, error, steps, evaluations, origin)


def _write_end(
    config: RunConfig,
    status: Literal["failed", "interrupted"],
    error: str,
    steps: list[StepRecord],
    evaluations: list[EvaluationRecord],
    origin: Resumption | None,
) -> None:
    write_record(
        RunRecord(
            status=status,
            error=error,
            config=config.model_dump(mode="json"),
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            task={},
            environment=describe_environment(with_torch=False),
            seconds_to_first_step=None,
            seconds=time.time() - config.started_at,
            steps=steps,
            evaluations=evaluations,
            quality={},
            ranks=[],
            resumed_from=origin,
            restarts=config.num_restarts,
        ),
        config.output_dir,
    )


if __name__ == "__main__":
    main()
