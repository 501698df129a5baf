"""Trainings whose ranks run another program: ``python -m engines.other_ranks "MODULE ARGUMENTS" BACKEND OPTIONS``.

It is the command line of any training, and that of each node if an engine starts several.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from backends.registry import BackendRow
from engines.command import run as start_nodes
from launch.cli import answer
from launch.train_command import train


def run(
    this_module: Sequence[str],
    rank_program: tuple[str, ...],
    backend: str,
    options: Sequence[str],
    row: BackendRow | None = None,
) -> int:
    """Runs a training to its end; returns the exit code.

    Args:
        this_module: The module that was started, and its arguments before the backend: nodes run the same.
        rank_program: The module that each rank runs, and its first arguments; the run's directory follows them.
        backend: The backend.
        options: The options, with those of an engine.
        row: What is known of the backend; None to look it up by its name.
    """
    sys.argv = [sys.argv[0], backend, *options]  # what the record calls its command
    if any(option.startswith("--engine=") for option in options):
        program = (sys.executable, "-m", *this_module)
        return answer(lambda: start_nodes([backend, *options], program=program))
    return answer(lambda: train(backend, list(options), rank_program=rank_program, row=row))


def main(rank_program: str, backend: str, *options: str) -> int:
    """Runs a training whose ranks run a program that is given as one word of a shell."""
    return run(("engines.other_ranks", rank_program), tuple(shlex.split(rank_program)), backend, options)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
