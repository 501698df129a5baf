"""Runs of Lockstep's own command line, each in a process tree of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from launch.guardian import guarded
from launch.signals import Interrupted
from launch.starters.environment import command_environment
from records.names import RECORD_NAME
from records.record import read_record

PROGRAM = ("launch",)


def run_command(
    arguments: list[str], variables: Mapping[str, str] = MappingProxyType({}), *, module: Sequence[str] = PROGRAM
) -> subprocess.CompletedProcess[str]:
    """Runs Lockstep's own command line to its end; in any case it ends with this process.

    Args:
        arguments: The command, and its options.
        variables: What to add to its environment.
        module: The module to run, and its first arguments.

    Raises:
        Interrupted: A signal asked to stop (see signals_raised). The command has received SIGTERM and has ended.
    """
    with guarded() as mark:
        process = subprocess.Popen(
            [sys.executable, "-m", *module, *arguments],
            env={**command_environment(), **variables, **mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, errors = process.communicate()
        except Interrupted:
            process.terminate()
            process.communicate()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, "", errors)


def directory_of_record(output_dir: Path) -> Path:
    """Returns where a training has left its record: in its output directory, or in that of the node of rank 0.

    Args:
        output_dir: The output directory of the training, or of its nodes if an engine has started them.
    """
    nodes = sorted(path.parent for path in output_dir.glob(f"node*/{RECORD_NAME}"))
    with_ranks = [node for node in nodes if read_record(node / RECORD_NAME).ranks]
    return [*with_ranks, *nodes, output_dir][0]


def why_it_failed(done: subprocess.CompletedProcess[str], output_dir: Path) -> str | None:
    """Returns why a training that `run_command` has run failed, in a line; None if it completed.

    Args:
        done: What `run_command` returned.
        output_dir: The output directory of the training.
    """
    if done.returncode == 0:
        return None
    record = directory_of_record(output_dir) / RECORD_NAME
    if record.exists():
        why = read_record(record).error
    else:  # it was refused, or ended before it could write a record
        why = (done.stderr.strip().splitlines() or [""])[-1].removeprefix("lockstep: ")
    return (why or f"it ended with exit code {done.returncode}")[:500]
