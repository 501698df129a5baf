"""``launch/run.sh forecast profile BACKEND``: measures what forecasts need, on this machine alone."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from backends.registry import BackendRow, find_backend
from engines.command import planned
from forecast.measuring import not_in_the_model
from forecast.profile import PROFILE_NAME, Profile, write_profile
from forecast.runs import ProfileFailed, Request, make_profile
from launch.arguments import Parser, command_line
from launch.comma_lists import Numbers
from launch.display import console, saying
from launch.errors import UsageError, refused_path, tell
from launch.options import Options, add_options, read_options, validated
from launch.resolve import Resolved, resolve
from launch.resume import Finished
from launch.signals import Interrupted, signals_raised
from records.config import RunOptions

_NUM_STEPS = 30


class ProfileOptions(BaseModel):
    """What is measured."""

    model_config = ConfigDict(extra="forbid")

    processes: Numbers[Annotated[int, Field(ge=1, le=64)]] = Field(
        [2],
        description="measure so many processes at once, too, without and with communication; give the number of ranks "
        "that a node will have, or that share this machine",
    )
    profile_steps: int = Field(
        _NUM_STEPS, ge=6, le=1000, description="steps of each start that are timed, after the warm-up"
    )
    starts: int = Field(
        3,
        ge=1,
        le=100,
        description="how often each run is started, each time with as many steps: starts differ, above all where ranks "
        "share cores; 2 say little of how far",
    )
    engine: Literal["netns"] | None = Field(
        None,
        description="netns: have ranks that communicate on hosts that this machine makes, without a limit, as those of "
        "python -m forecast.validation are (default: on this host)",
    )
    collectives: bool = Field(True, description="also measure the library's all-reduce, over as many ranks")
    output_dir: Path | None = Field(None, description=f"receives {PROFILE_NAME} (default: runs/profile-TIME)")


def run(arguments: list[str]) -> int:
    """Runs the command; returns 0, or 1 if a run failed, or 128 plus the number of the signal that ended it.

    Raises:
        UsageError, UnsupportedError, TaskInputError: The request cannot be served.
    """
    parser = Parser("forecast profile", operands="BACKEND", argument_default=argparse.SUPPRESS)
    parser.description = (
        "Trains some steps in one process, in several that do not communicate, and on ranks of BACKEND, and notes "
        "when each gradient is ready. All other options are those of the training (launch/run.sh BACKEND --help); the "
        "work of a rank is that of --global-batch-size over --num-processes."
    )
    add_options(parser, {"profile": ProfileOptions})
    namespace, rest = parser.parse_known_args(arguments)
    if not rest or rest[0].startswith("-"):
        raise UsageError("name a backend first, then the options of the training; see forecast profile --help")
    options: ProfileOptions = validated(ProfileOptions, vars(namespace))
    target = _target(options.output_dir)
    resolved, asked = _resolve(rest[0], rest[1:])
    if options.engine is not None:
        _check_hosts(options.engine, rest[0], max(options.processes), asked)
    request = Request(
        config=resolved.config,
        asked=asked,
        hosts=options.engine,
        num_samples=resolved.task.num_samples("train"),
        processes=options.processes,
        num_steps=options.profile_steps,
        num_starts=options.starts,
        with_collectives=options.collectives,
        command=command_line(["forecast", "profile", *arguments], without="--output-dir"),
    )
    return _profile(request, target)


def _resolve(backend: str, arguments: list[str]) -> tuple[Resolved, RunOptions]:
    """Settles the training whose work is measured; returns it, and the options that the user gave.

    Raises:
        UsageError, UnsupportedError, TaskInputError: It could not start, or is not in the model.
    """
    row = find_backend(backend)
    try:
        asked = read_options(backend, row.settings, arguments)
        _refuse(backend, row, asked)
        return resolve(backend, row, asked, started_at=time.time()), asked.run
    except Finished as finished:
        raise UsageError(f"--resume: a profile needs no earlier run; leave it out ({finished})") from finished
    except OSError as error:  # any path among the options may be one that the system refuses
        raise refused_path(error) from error


def _refuse(backend: str, row: BackendRow, asked: Options) -> None:
    """Refuses what the model does not know."""
    if row.capabilities.max_world_size == 1:
        raise UsageError(f"{backend}: it has no ranks to forecast; choose a backend that runs several")
    if row.capabilities.shards_state:
        raise UsageError(f"{backend}: ranks hold parts, and what gathers them is not in the model; choose another")
    if asked.run.resume is not None:
        raise UsageError(f"--resume {asked.run.resume}: a profile needs no earlier run; leave it out")
    if asked.run.num_nodes > 1:
        raise UsageError(f"--num-nodes {asked.run.num_nodes}: a profile is measured on this node alone; leave it out")
    if asked.run.logging_steps is not None:
        raise UsageError(
            f"--logging-steps {asked.run.logging_steps}: how often ranks sum up losses is not in the model; leave it "
            "out"
        )
    if (why := not_in_the_model(asked.run, asked.backend_settings.model_dump())) is not None:
        raise UsageError(f"{why}; leave it out")


def _check_hosts(engine: str, backend: str, num_hosts: int, asked: RunOptions) -> None:
    """Refuses hosts on this machine where it cannot make them, or the backend does not run on them.

    Raises:
        UsageError, UnsupportedError: The text says why.
    """
    if asked.start_method is not None:
        raise UsageError(
            f"--start-method {asked.start_method}: --engine {engine} has its own; leave one of the two out"
        )
    sizes = [f"{option}={max(2, num_hosts)}" for option in ("--num-nodes", "--num-processes", "--global-batch-size")]
    hosts, _ = planned([backend, f"--engine={engine}", *sizes])
    hosts.check()
    hosts.check_here()


def _target(asked: Path | None) -> Path:
    """Settles the output directory, which may exist, but holds no profile."""
    target = (asked or Path("runs") / f"profile-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()
    shown = f"--output-dir {asked or target}"
    try:
        parent = next(path for path in (target, *target.parents) if path.exists())
        if not parent.is_dir():
            raise UsageError(f"{shown}: {parent} is a file; name a directory")
        if (target / PROFILE_NAME).exists():
            raise UsageError(f"{shown}: holds {PROFILE_NAME} already; choose another directory")
    except OSError as error:
        raise UsageError(f"{shown}: {error.strerror}; choose another directory") from error
    if not os.access(parent, os.W_OK):
        raise UsageError(f"{shown}: {parent} is not writable; choose another directory")
    return target


def _profile(request: Request, target: Path) -> int:
    """Makes the profile, says what it holds, and returns the exit code."""
    terminal = console()
    directory, keeps = Path(tempfile.mkdtemp(prefix="lockstep-profile-")), True
    try:
        with signals_raised(), saying(terminal) as say:
            profile = make_profile(request, directory, say)
        keeps = False
    except ProfileFailed as failure:
        tell(f"{failure}; the logs of its ranks are in {directory}")
        return 1
    except Interrupted as interruption:
        keeps = False
        tell(f"interrupted by {interruption}; all ranks have been ended")
        return 128 + interruption.signal_number
    finally:
        if not keeps:
            shutil.rmtree(directory, ignore_errors=True)
    target.mkdir(parents=True, exist_ok=True)
    path = write_profile(profile, target)
    for line in _summary(profile):
        terminal.print(line)
    terminal.print(f"profile in {path}")
    return 0


def _summary(profile: Profile) -> list[str]:
    """Says what was measured."""
    work = profile.work
    size = sum(one.num_bytes for one in profile.gradients)
    lines = [
        f"one rank: {1e3 * work.seconds:.4g} ms a step, of which the last backward pass takes "
        f"{1e3 * work.backward:.4g}; {len(profile.gradients)} gradients, {size / 1e6:.4g} MB"
    ]
    alone = profile.computing[0].step_seconds.estimate
    for one in profile.computing[1:]:
        slow = one.step_seconds.estimate / alone
        lines.append(f"{one.num_processes} processes that do not communicate: {slow:.3g} times as long")
    if profile.overlap_slow_down is not None:
        lines.append(f"backward pass while two ranks send: {profile.overlap_slow_down.estimate:.3g} times as long")
    for ranks in profile.together:
        lines.append(
            f"{ranks.num_processes} ranks of {profile.name} on this machine: "
            f"{1e3 * ranks.step_seconds.estimate:.4g} ms a step"
        )
    for found in profile.collectives:
        lines.append(
            f"all-reduce over {found.num_processes} ranks ({found.transport}): "
            f"{1e6 * found.latency_seconds.estimate:.3g} us + size / {found.bytes_per_second.estimate / 1e6:.4g} MB/s"
        )
    return [*lines, *profile.remarks]
