"""Starts one entrant of a race: ``python -m compare.race.entrant RANK_PROGRAM ADDRESS BACKEND OPTIONS``.

It is the command line of any run, but its ranks run another program, which rests while other entrants race
(compare/race/rank.py, compare/race/bare_rank.py, compare/race/peers/rank.py). A peer whose address is "-" trains alone.
"""

from __future__ import annotations

import sys

from compare.race.peers.table import PEERS
from engines.command import run as start_nodes
from launch.cli import answer
from launch.train_command import train


def main(rank_program: str, address: str, backend: str, *options: str) -> int:
    """Runs the entrant to its end; returns the exit code."""
    sys.argv = [sys.argv[0], backend, *options]  # what the record calls its command
    if any(option.startswith("--engine=") for option in options):
        program = (sys.executable, "-m", "compare.race.entrant", rank_program, address)
        return answer(lambda: start_nodes([backend, *options], program=program))
    row = PEERS[backend].row if backend in PEERS else None
    return answer(lambda: train(backend, list(options), rank_program=(rank_program, address), row=row))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
