"""The program of each rank that is profiled: ``python -m forecast.rank RUN_DIRECTORY [RANK_VARIABLE]``.

It is the rank of any run (training/rank.py), which also notes when each gradient is ready.
"""

from __future__ import annotations

import sys

from training.rank import RankStart, Work, run_rank
from training.rank import load_libraries as load_libraries_of_run


def main(run_directory: str, rank_variable: str | None = None) -> None:
    """Runs this rank to its end; on an error, exits with code 1 at once."""

    def make_work(start: RankStart) -> Work:
        from forecast.gradient_clock import GradientClock
        from training.rank_work import RankWork

        return RankWork(start, lambda trainer, _: GradientClock(trainer, start.directory))

    run_rank(run_directory, rank_variable, make_work)


def load_libraries(run_directory: str, rank_variable: str | None = None) -> None:
    """As in training/rank.py."""
    load_libraries_of_run(run_directory, rank_variable)


if __name__ == "__main__":
    main(*sys.argv[1:])
