"""Starts one entrant of a race: ``python -m compare.race.entrant ADDRESS BACKEND OPTIONS``.

It is the command line of any run, but its ranks rest while other entrants race (compare/race/rank.py). A peer has
ranks of its own (compare/race/peers/rank.py), and with "-" as the address it trains alone.
"""

from __future__ import annotations

import sys

from compare.race.peers.table import PEERS
from launch.cli import answer
from launch.train_command import train


def main(address: str, backend: str, *options: str) -> int:
    """Runs the entrant to its end; returns the exit code."""
    sys.argv = [sys.argv[0], backend, *options]  # what the record calls its command
    program, row = ("compare.race.rank", address), None
    if backend in PEERS:
        program, row = ("compare.race.peers.rank", address), PEERS[backend].row
    return answer(lambda: train(backend, list(options), rank_program=program, row=row))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
