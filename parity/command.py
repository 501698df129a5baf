"""``launch/run.sh verify BACKEND``: does this very run train what one process trains?"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from backends.registry import find_backend
from launch.arguments import Parser, named_path, require_new_file
from launch.display import console, describe_world, saying
from launch.errors import UsageError, refused_path, tell
from launch.options import Options, add_options, read_options, validated
from launch.resolve import Resolved, resolve
from launch.signals import Interrupted, signals_raised
from parity.report import as_facts, describe
from parity.trial import NUM_STEPS, Trial, TrialFailed, Trials, trial_of
from records.files import write_atomically


class VerifyOptions(BaseModel):
    """How long a run is compared with one process."""

    model_config = ConfigDict(extra="forbid")

    verify_steps: int = Field(NUM_STEPS, ge=1, le=1000, description="optimizer steps to compare, at most")


def run(arguments: list[str]) -> int:
    """Runs the command; returns 0 if the run trains what one process trains, and 1 if it does not or cannot be told.

    Raises:
        UsageError, UnsupportedError, TaskInputError: The request cannot be served.
    """
    parser = Parser("verify", operands="BACKEND", argument_default=argparse.SUPPRESS)
    parser.description = (
        "Trains a few steps under BACKEND and in one process, and compares the weights after each. All other options "
        "are those of the training (launch/run.sh BACKEND --help lists them)."
    )
    add_options(parser, {"verify": VerifyOptions})
    parser.add_argument(
        "--json", type=named_path, default=None, metavar="FILE", help="write the verdict to this file, a new one"
    )
    namespace, rest = parser.parse_known_args(arguments)
    if not rest or rest[0].startswith("-"):
        raise UsageError("name a backend first, then the options of the training; see launch/run.sh verify --help")
    options: VerifyOptions = validated(VerifyOptions, vars(namespace))
    require_new_file("--json", namespace.json)
    resolved = _resolve(rest[0], rest[1:])
    trial = trial_of(resolved.config, resolved.task, num_steps=options.verify_steps)
    return _verify(trial, resolved, namespace.json)


def _resolve(backend: str, arguments: list[str]) -> Resolved:
    """Settles the run that is to be verified.

    Raises:
        UsageError, UnsupportedError, TaskInputError: It could not start.
    """
    row = find_backend(backend)
    try:
        asked = read_options(backend, row.settings, arguments)
        _refuse(asked)
        return resolve(backend, row, asked, started_at=time.time())
    except OSError as error:  # any path among the options may be one that the system refuses
        raise refused_path(error) from error


def _refuse(asked: Options) -> None:
    """Refuses options of a run that cannot be verified, or of which nothing would remain."""
    if asked.run.resume is not None:
        raise UsageError(f"--resume {asked.run.resume}: verify trains from the beginning; leave it out")
    if asked.run.output_dir is not None:
        raise UsageError(
            f"--output-dir {asked.run.output_dir}: verify keeps nothing of its runs; leave it out, or write the "
            "verdict to --json FILE"
        )
    if asked.run.num_nodes > 1:
        raise UsageError(f"--num-nodes {asked.run.num_nodes}: verify starts all ranks on this node; leave it out")


def _verify(trial: Trial, resolved: Resolved, target: Path | None) -> int:
    """Makes the trial, shows what came of it, and returns the exit code."""
    terminal = console()
    terminal.print(f"verify: {resolved.config.backend}: {describe_world(resolved.config)}, {trial.num_steps} steps")
    for left_out in trial.left_out:
        terminal.print(f"left out: {left_out}")
    directory, keeps = Path(tempfile.mkdtemp(prefix="lockstep-verify-")), False
    try:
        with signals_raised(), saying(terminal) as say:
            outcome = Trials(directory, say).outcome(trial)
    except TrialFailed as failure:
        keeps = True
        tell(f"{failure}; the logs of its ranks are in {directory}")
        return 1
    except Interrupted as interruption:
        tell(f"interrupted by {interruption}; all ranks have been ended")
        return 128 + interruption.signal_number
    finally:
        if not keeps:
            shutil.rmtree(directory, ignore_errors=True)
    causes = [] if outcome.is_same else _causes(resolved)
    for line in describe(trial, outcome, causes):
        terminal.print(line)
    if target is not None:
        write_atomically(target.absolute(), json.dumps(as_facts(trial, outcome, causes), indent=1) + "\n")
    return 0 if outcome.is_same else 1


def _causes(resolved: Resolved) -> list[str]:
    from parity.causes import likely_causes  # it imports torch, which takes seconds

    return likely_causes(resolved.task.build_model())
