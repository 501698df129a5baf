"""The program of each rank of a race: ``python -m compare.race.rank ADDRESS RUN_DIRECTORY [RANK_VARIABLE]``.

It is the rank of any run (training/rank.py), which also rests while other entrants race.
"""

from __future__ import annotations

import os
import sys

from training.rank import run_rank


def main(address: str, run_directory: str, rank_variable: str | None = None) -> None:
    """Runs this rank to its end; on an error, exits with code 1 at once."""

    def make_turns(trainer, measurements):  # type: ignore[no-untyped-def]
        from compare.race.turns import Hello, Turns

        hello = Hello(trainer.backend.rank, os.getpid(), trainer.plan.steps_per_epoch)
        on_gpu = trainer.backend.device.type == "cuda"
        return Turns(address, hello, measurements, num_steps=trainer.num_steps, on_gpu=on_gpu)

    run_rank(run_directory, rank_variable, make_observer=make_turns)


if __name__ == "__main__":
    main(*sys.argv[1:])
