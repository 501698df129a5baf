"""What saving and resuming take of memory: ``python -m tests.checkpoint_memory DIRECTORY [--model bert-base]``.

It trains the same model three times on two ranks of a backend: without and with checkpoints, and, from one of these,
resumed. It prints how much higher the largest resident set of a rank is while checkpoints are saved, as a multiple of
the state that is saved (weights and the two moments of AdamW), and while it resumes, as a multiple of a rank that
trains. Where ranks hold parts of the weights, rank 0 has them whole at the end of each training, which counts, too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from records.checkpoint import checkpoint_path
from tests.launching import DISTRIBUTED, IN_FLOAT32, train

_STEPS = 6
_SAVED_AFTER = 3


class Peaks(NamedTuple):
    """The largest resident set of a rank, in bytes.

    Attributes:
        trains: Of one that neither saves nor resumes.
        saves: Of one that saves a checkpoint halfway.
        resumes: Of one that goes on from it.
    """

    trains: int
    saves: int
    resumes: int


def measure(backend: str, directory: Path, *options: str, num_processes: int = 2) -> tuple[int, list[Peaks]]:
    """Trains three times.

    Args:
        backend: The backend.
        directory: Gets the three runs.
        options: The model, and what else the trainings are to have in common.
        num_processes: The number of ranks.

    Returns:
        The size of the state that is saved, in bytes, and what each rank takes.
    """
    ranks = ("--num-processes", str(num_processes), "--no-evaluate")
    common = [*options, *ranks, "--global-batch-size", "8", "--max-steps", str(_STEPS), "--logging-steps", "1"]
    plain = train(backend, directory / "plain", *common, "--save-every", "never")
    saving = train(backend, directory / "saving", *common, "--save-every", str(_SAVED_AFTER))
    saved = checkpoint_path(directory / "saving", _SAVED_AFTER)
    resumed = train(backend, directory / "resumed", "--resume", saved, *ranks, "--save-every", "never")
    peaks = [[int(rank["peak_memory_bytes"]) for rank in record["ranks"]] for record in (plain, saving, resumed)]
    return saved.stat().st_size, [Peaks(*of_rank) for of_rank in zip(*peaks, strict=True)]


def main(arguments: list[str]) -> None:
    """Trains, and prints for each rank a line for saving and one for resuming."""
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint_memory", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--backend", default="ddp", choices=(*DISTRIBUTED, *IN_FLOAT32), help="default: ddp")
    asked = parser.parse_args(arguments)
    state, ranks = measure(asked.backend, asked.directory, "--model", asked.model)
    print(f"{asked.model} under {asked.backend}: state {state / 2**20:.0f} MiB")
    for rank, peaks in enumerate(ranks):
        print(f"rank {rank}: trains in {peaks.trains / 2**20:.0f} MiB")
        print(f"rank {rank}: saving adds {(peaks.saves - peaks.trains) / state:.2f} times the state")
        print(f"rank {rank}: resuming takes {peaks.resumes / peaks.trains:.2f} times as much")


if __name__ == "__main__":
    main(sys.argv[1:])
