"""The command line: ``BACKEND [options]`` trains, other words compare, prove, measure, or tell what runs here.

Everything is checked before anything is created. Bad input ends with one line and exit code 2,
a failed run with 1, an interrupted one with 128 plus the signal's number.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import time

from backends.interface import UnsupportedError
from backends.registry import BACKENDS, find_backend
from launch.config import RACE_VARIABLE, RaceContext, RunConfig, UsageError
from launch.engines import EXACT_FLOAT32, PROJECT_DIRECTORY, Ranks, engine_command, engine_environment
from launch.nodes import settle_nodes
from launch.options import read_options
from launch.progress import ProgressReader
from launch.rank import CONFIG_NAME
from launch.rank_files import LOGS_NAME
from launch.record import (
    RECORD_NAME,
    EvaluationRecord,
    RunRecord,
    StepRecord,
    describe_environment,
    read_record,
    write_atomically,
    write_record,
)
from launch.resolve import resolve
from launch.supervisor import Interrupted, run_job
from tasks.interface import TaskInputError

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
        # A value from outside may hold line breaks.
        print(f"lockstep: {' '.join(str(error).split())}", file=sys.stderr)
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
        _create_run_directory(config)
    except OSError as error:  # any path among the options may be one that the system refuses
        raise UsageError(str(error)) from error

    from launch.display import RunDisplay, console, show_start, show_summary

    terminal = console()
    show_start(config, terminal)
    try:
        with RunDisplay(config, terminal) as display:
            failure = run_job(
                command,
                environment=engine_environment(ranks),
                working_directory=PROJECT_DIRECTORY,
                run_directory=config.output_dir,
                num_processes=ranks.num_local_processes,
                spans_nodes=config.num_nodes > 1,
                on_poll=display.refresh,
            )
    except Interrupted as interruption:
        _record_failure(config, f"interrupted by {interruption}")
        print(f"lockstep: interrupted by {interruption}; all ranks have been ended", file=sys.stderr)
        return 128 + interruption.signal_number
    if failure is not None:
        _record_failure(config, str(failure))
        print(f"lockstep: {backend} failed: {failure}\n  more in {failure.log}", file=sys.stderr)
        return 1
    if config.num_nodes > 1 and not (config.output_dir / RECORD_NAME).exists():
        terminal.print(f"node {config.node_rank} is done; model and record are on the node of rank 0")
        return 0
    show_summary(read_record(config.output_dir / RECORD_NAME), config.output_dir, terminal)
    return 0


def _race() -> RaceContext | None:
    """What a race says of the run that it has just started."""
    text = os.environ.get(RACE_VARIABLE)
    return RaceContext.model_validate_json(text) if text else None


def _create_run_directory(config: RunConfig) -> None:
    """Makes room for the run; with --overwrite, the run that was there is removed.

    Whoever makes the logs directory has the output directory: two runs never share one.
    """
    if config.overwrite and config.output_dir.exists():
        shutil.rmtree(config.output_dir)
    config.output_dir.mkdir(parents=True, exist_ok=True)
    try:
        (config.output_dir / LOGS_NAME).mkdir()
    except FileExistsError as error:
        raise UsageError(
            f"--output-dir {config.output_dir}: another run has just taken it; choose another directory"
        ) from error
    write_atomically(config.output_dir / CONFIG_NAME, config.model_dump_json(indent=1))


def _record_failure(config: RunConfig, error: str) -> None:
    """Writes the record of a run that did not complete, with the steps and evaluations it reported."""
    if (config.output_dir / RECORD_NAME).exists():
        return
    steps: list[StepRecord] = []
    evaluations: list[EvaluationRecord] = []
    for fact in ProgressReader(config.output_dir).news():
        if fact["event"] == "closed":
            steps += [StepRecord.model_validate(step) for step in fact["steps"]]
        elif fact["event"] == "evaluation":
            evaluations.append(EvaluationRecord.model_validate(fact["evaluation"]))
    write_record(
        RunRecord(
            status="failed",
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
        ),
        config.output_dir,
    )


if __name__ == "__main__":
    main()
