"""Starts one entrant of a race: ``python -m compare.race.entrant RANK_PROGRAM ADDRESS BACKEND OPTIONS``.

It is the command line of any run, but its ranks run another program, which rests while other entrants race
(compare/race/rank.py, compare/race/bare_rank.py, compare/race/peers/rank.py). A peer whose address is "-" trains alone.
If an engine starts the ranks on other machines, a keeper runs each node (compare/race/keeper.py).
"""

from __future__ import annotations

import sys

from compare.race.messages import is_of_network
from compare.race.peers.table import PEER_PROGRAM, PEERS
from engines import other_ranks


def main(rank_program: str, address: str, backend: str, *options: str) -> int:
    """Runs the entrant to its end; returns the exit code."""
    row = PEERS[backend].row if rank_program == PEER_PROGRAM else None
    program = (rank_program, address)
    of_nodes = "compare.race.keeper" if is_of_network(address) else "compare.race.entrant"
    return other_ranks.run((of_nodes, *program), program, backend, options, row)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
