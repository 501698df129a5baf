"""What saving and resuming take of memory: ``python -m tests.checkpoint_memory DIRECTORY [--model bert-base]``.

It trains the same model four times on two ranks of DDP: without and with checkpoints, and, from one of these, resumed.
It prints how much higher the largest resident set of a rank is while it saves, as a multiple of the state that is
saved (weights and the two moments of AdamW), and while it resumes, as a multiple of a rank that trains.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from records.checkpoint import checkpoint_path
from tests.launching import train

_STEPS = 6
_SAVED_AFTER = 3


def main(arguments: list[str]) -> None:
    """Trains, and prints a line for saving and one for resuming."""
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint_memory", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="bert-base")
    asked = parser.parse_args(arguments)
    common = ["--model", asked.model, "--num-processes", "2", "--global-batch-size", "8", "--no-evaluate"]
    common += ["--max-steps", str(_STEPS), "--logging-steps", "1"]
    plain = train("ddp", asked.directory / "plain", *common, "--save-every", "never")
    saving = train("ddp", asked.directory / "saving", *common, "--save-every", str(_SAVED_AFTER))
    saved = checkpoint_path(asked.directory / "saving", _SAVED_AFTER)
    options = ("--resume", saved, "--num-processes", "2", "--no-evaluate", "--save-every", "never")
    resumed = train("ddp", asked.directory / "resumed", *options)
    state, own = saved.stat().st_size, _peak(plain, 0)
    print(f"{asked.model}: state {state / 2**20:.0f} MiB, a rank that trains {own / 2**20:.0f} MiB")
    print(f"saving adds {(_peak(saving, 0) - own) / state:.2f} times the state to rank 0")
    for rank in range(2):
        print(f"resuming takes {_peak(resumed, rank) / _peak(plain, rank):.2f} times rank {rank}")


def _peak(record: dict[str, Any], rank: int) -> int:
    return int(record["ranks"][rank]["peak_memory_bytes"])


if __name__ == "__main__":
    main(sys.argv[1:])
