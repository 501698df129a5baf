"""The program of each rank that runs a hand-written loop in a race, with the arguments of compare/race/rank.py."""

from __future__ import annotations

import sys

from training.rank import RankStart, Work, run_rank


def main(address: str, run_directory: str, rank_variable: str | None = None) -> None:
    """Runs this rank to its end; on an error, exits with code 1 at once."""

    def make_work(start: RankStart) -> Work:
        from compare.race.bare_work import BareWork

        return BareWork(start, address)

    run_rank(run_directory, rank_variable, make_work)


if __name__ == "__main__":
    main(*sys.argv[1:])
