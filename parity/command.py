"""``launch/run.sh verify BACKEND``: does this very run train what one process trains?"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from backends.registry import find_backend
from launch.arguments import Parser, named_path, require_new_file
from launch.display import console, describe_world, saying
from launch.errors import UsageError, refused_path, tell
from launch.options import Options, add_options, read_options, validated
from launch.resolve import Resolved, resolve
from launch.resume import Finished
from launch.signals import Interrupted, signals_raised
from parity.report import as_facts, describe
from parity.trial import NUM_STEPS, Outcome, Trial, TrialFailed, Trials, trial_of
from records.environment import describe_environment
from records.files import write_atomically
from records.processor import SLOW_BF16, is_slow

# A loss scale under which hardly any gradient overflows.
_SMALL_SCALE = 1024.0


class VerifyOptions(BaseModel):
    """How long a run is compared with one process."""

    model_config = ConfigDict(extra="forbid")

    verify_steps: int = Field(NUM_STEPS, ge=3, le=1000, description="optimizer steps to compare, at most")


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
        try:
            asked = read_options(backend, row.settings, arguments)
        except Finished as finished:
            raise UsageError(f"--resume: verify trains from the beginning; leave it out ({finished})") from finished
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
    from parity.causes import causes_of, in_view_of  # it imports torch, which takes seconds

    terminal = console()
    terminal.print(f"verify: {resolved.config.backend}: {describe_world(resolved.config)}, {trial.num_steps} steps")
    if is_slow(resolved.config.precision, resolved.config.device):
        terminal.print(f"bf16: {SLOW_BF16}")
    for left_out in trial.left_out:
        terminal.print(f"left out: {left_out}")
    directory, keeps = Path(tempfile.mkdtemp(prefix="lockstep-verify-")), True
    try:
        with signals_raised(), saying(terminal) as say:
            outcome = Trials(directory, say).outcome(trial)
        causes = causes_of(trial, resolved.task)
        outcome = in_view_of(outcome, causes)
        keeps = not outcome.is_same
    except TrialFailed as failure:
        tell(f"{failure}; the logs of its ranks are in {directory}")
        _write(target, {"verdict": "failed", "detail": str(failure)}, resolved)
        return 1
    except Interrupted as interruption:
        keeps = False
        tell(f"interrupted by {interruption}; all ranks have been ended")
        return 128 + interruption.signal_number
    finally:
        if not keeps:
            shutil.rmtree(directory, ignore_errors=True)
    for line in [*describe(trial, outcome, [] if outcome.is_same else causes), *_advice(trial, outcome)]:
        terminal.print(line)
    _write(target, as_facts(trial, outcome, causes), resolved)
    if outcome.is_same:
        return 0
    tell(f"the records and logs of its trainings are in {directory}")
    return 1


def _advice(trial: Trial, outcome: Outcome) -> list[str]:
    """Says what to do where too many steps overflowed."""
    scale = trial.config.init_loss_scale
    if outcome.parity.verdict != "unknown" or trial.config.precision != "fp16" or scale <= _SMALL_SCALE:
        return []
    return [
        "what overflows depends on how a batch is split; give a smaller --init-loss-scale than "
        f"{scale:g}, such as {_SMALL_SCALE:g}"
    ]


def _write(target: Path | None, facts: dict[str, Any], resolved: Resolved) -> None:
    if target is None:
        return
    content = {
        "schema_version": 1,
        "command": resolved.config.launch_command,
        **facts,
        "environment": describe_environment(with_torch=True).model_dump(mode="json"),
    }
    write_atomically(target.absolute(), json.dumps(content, indent=1) + "\n")
