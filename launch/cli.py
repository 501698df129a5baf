"""The command line: ``BACKEND [options]`` trains; other commands compare, check, measure, or show what runs here.

Everything is checked before anything is created. The exit code is 2 for bad input, after one line that says why; 1
for a run that failed; 3 for a run whose ranks diverged, and for a race that does not pass beside its baseline; 4 for
a run whose results had to go into another directory; 75 for a run that was asked to stop and has saved a checkpoint;
and 128 plus the number of the signal for a run that a signal ended at once. For --resume of a run that has finished,
it is 0, or 3 if the ranks had diverged.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from backends.capabilities import UnsupportedError
from backends.registry import BACKENDS
from launch.arguments import from_home
from launch.errors import UsageError, give_up_output, one_line, tell
from launch.signals import Interrupted, signals_raised
from launch.starters.environment import EXACT_FLOAT32
from tasks.cache import cache_directory
from tasks.interface import TaskInputError

_ERRORS_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)


# Modules with a function `run` that takes the remaining arguments and returns the exit code.
COMMANDS = {
    "doctor": "launch.doctor",
    "contract": "contract.command",
    "verify": "parity.command",
    "compare": "compare.race.command",
    "report": "compare.race.report_command",
    "allreduce": "compare.collectives.command",
    "forecast": "forecast.command",
}

# Trains on nodes that an engine starts; it has the same function.
ENGINE_COMMAND = "engines.command"


def main() -> None:
    """Entry point of the command line, which launch/__main__.py calls."""
    arguments = [from_home(argument) for argument in sys.argv[1:]]
    sys.exit(answer(lambda: _dispatch(arguments)))


def answer(command: Callable[[], int]) -> int:
    """Runs a command and returns the exit code; an error ends it with one line."""
    os.environ.update(EXACT_FLOAT32)  # the contract computes references in this process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may have letters that the terminal cannot show
    code = 0
    try:
        with signals_raised(repeatedly=True):
            _settle_environment()
            try:
                code = command()
            finally:
                sys.stdout.flush()
        return code
    except BaseException as error:
        # A library that was interrupted while it was loaded may have raised another error in its place.
        interruption = _interruption_behind(error)
        if interruption is not None:
            tell(f"interrupted by {interruption}")
            return 128 + interruption.signal_number
        if isinstance(error, (UsageError, UnsupportedError, TaskInputError)):
            tell(one_line(error))
            return 2
        if not isinstance(error, OSError):
            raise
        if (lost := _lost_output(error)) is not None:
            give_up_output(lost)
        else:
            tell(one_line(error))
        return code or 1


def _interruption_behind(error: BaseException | None) -> Interrupted | None:
    while error is not None and not isinstance(error, Interrupted):
        error = error.__cause__ or error.__context__
    return error


def _settle_environment() -> None:
    """Makes LOCKSTEP_CACHE an absolute path, for processes that are started in other directories.

    Raises:
        UsageError: There is no working directory.
    """
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(
            f"the working directory no longer exists ({error.strerror}); change to another directory"
        ) from error
    if os.environ.get("LOCKSTEP_CACHE"):
        os.environ["LOCKSTEP_CACHE"] = str(cache_directory())


def _lost_output(error: OSError) -> OSError | None:
    """Returns why the output cannot be written; None if it can, and the error has another cause."""
    # Without a buffer (python -u), nothing is left to write again, so the kind of the error decides.
    is_unbuffered = getattr(sys.stdout, "write_through", False) and error.filename is None
    if isinstance(error, BrokenPipeError) or (is_unbuffered and error.errno in _ERRORS_OF_WRITING):
        return error
    try:
        sys.stdout.flush()
    except OSError as lost:
        return lost
    return None


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] in COMMANDS:
        try:
            command = importlib.import_module(COMMANDS[arguments[0]])
        except ModuleNotFoundError as error:
            raise UsageError(
                f"{arguments[0]}: needs the package {error.name}; run pip install '.[compare]' in the repository, "
                "or use launch/run.sh, which does"
            ) from error
        return int(command.run(arguments[1:]))
    if any(word.partition("=")[0] == "--engine" for word in arguments[1:]):
        return int(importlib.import_module(ENGINE_COMMAND).run(arguments))
    from launch.train_command import train

    return train(arguments[0], arguments[1:])


def _overview() -> str:
    backends = "\n".join(f"  {name:12}{row.summary}" for name, row in BACKENDS.items())
    return (
        "usage: launch/run.sh BACKEND [options]    train; BACKEND --help lists the options\n"
        "       launch/run.sh BACKEND --engine E   train on nodes that slurm, mpi, netns ... starts\n"
        "       launch/run.sh contract BACKEND     check that it computes the same as one process\n"
        "       launch/run.sh verify BACKEND       check that a run trains what one process trains\n"
        "       launch/run.sh compare              race backends against each other and write a report\n"
        "       launch/run.sh report RECORD ...    write the same report from any records\n"
        "       launch/run.sh allreduce            measure the collectives of each library\n"
        "       launch/run.sh forecast             say how long a step takes on other ranks and networks\n"
        "       launch/run.sh doctor               show which backends run on this machine\n\n"
        f"backends (or your own, as package.module:Class):\n{backends}"
    )
