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
from typing import Any

from records.checkpoint import checkpoint_path
from tests.launching import DISTRIBUTED, IN_FLOAT32, train

_STEPS = 6
_SAVED_AFTER = 3


def main(arguments: list[str]) -> None:
    """Trains, and prints for each rank a line for saving and one for resuming."""
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint_memory", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--backend", default="ddp", choices=(*DISTRIBUTED, *IN_FLOAT32), help="default: ddp")
    asked = parser.parse_args(arguments)
    backend, directory = asked.backend, asked.directory
    common = ["--model", asked.model, "--num-processes", "2", "--global-batch-size", "8", "--no-evaluate"]
    common += ["--max-steps", str(_STEPS), "--logging-steps", "1"]
    plain = train(backend, directory / "plain", *common, "--save-every", "never")
    saving = train(backend, directory / "saving", *common, "--save-every", str(_SAVED_AFTER))
    saved = checkpoint_path(directory / "saving", _SAVED_AFTER)
    options = ("--resume", saved, "--num-processes", "2", "--no-evaluate", "--save-every", "never")
    resumed = train(backend, directory / "resumed", *options)
    state = saved.stat().st_size
    print(f"{asked.model} under {backend}: state {state / 2**20:.0f} MiB")
    for rank in range(2):
        own = _peak(plain, rank)
        print(f"rank {rank}: trains in {own / 2**20:.0f} MiB")
        print(f"rank {rank}: saving adds {(_peak(saving, rank) - own) / state:.2f} times the state")
        print(f"rank {rank}: resuming takes {_peak(resumed, rank) / own:.2f} times as much")


def _peak(record: dict[str, Any], rank: int) -> int:
    return int(record["ranks"][rank]["peak_memory_bytes"])


if __name__ == "__main__":
    main(sys.argv[1:])
