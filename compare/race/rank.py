"""The program of each rank of a race: ``python -m compare.race.rank ADDRESS RUN_DIRECTORY [RANK_VARIABLE]``.

It is the rank of any run (training/rank.py), which also rests while other entrants race.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from training.rank import RankStart, Work, run_rank
from training.rank import load_libraries as load_libraries_of_run

if TYPE_CHECKING:
    from training.loop import Trainer
    from training.measurements import Measurements


def main(address: str, run_directory: str, rank_variable: str | None = None) -> None:
    """Runs this rank to its end; on an error, exits with code 1 at once."""

    def make_work(start: RankStart) -> Work:
        from compare.race.messages import Hello
        from compare.race.turns import Turns
        from training.rank_work import RankWork

        def make_turns(trainer: Trainer, measurements: Measurements) -> Turns:
            hello = Hello(start.rank, os.getpid(), trainer.plan.steps_per_epoch)
            on_gpu = trainer.backend.device.type == "cuda"
            return Turns(address, hello, measurements, on_gpu=on_gpu)

        return RankWork(start, make_turns)

    run_rank(run_directory, rank_variable, make_work)


def load_libraries(address: str, run_directory: str, rank_variable: str | None = None) -> None:
    """As in training/rank.py."""
    load_libraries_of_run(run_directory, rank_variable)


if __name__ == "__main__":
    main(*sys.argv[1:])
