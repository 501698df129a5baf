"""Starts an entrant of a race whose ranks run a loop written by hand, with the arguments of compare/race/entrant.py."""

from __future__ import annotations

import sys

from launch.cli import answer
from launch.train_command import train


def main(address: str, backend: str, *options: str) -> int:
    """Runs the entrant to its end; returns the exit code."""
    sys.argv = [sys.argv[0], backend, *options]  # what the record calls its command
    return answer(lambda: train(backend, list(options), rank_program=("compare.race.bare_rank", address)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
