"""How exactly each backend goes on from what each other one saved: ``python -m tests.resume_table DIRECTORY``.

Each backend trains six steps and saves; every backend goes on from the third step of each. A cell says how far the
final weights are from those of the run that saved and was not interrupted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file

from launch.starters.environment import command_environment
from launch.starters.interface import PROJECT_DIRECTORY
from records.checkpoint import checkpoint_path

BACKENDS = ("single", "ddp", "fsdp2", "deepspeed", "horovod", "accelerate", "fabric")
# In float32, with accumulation on two ranks; the resumed step is in the middle of the second epoch. Without dropout,
# whose masks depend in this task on how a batch is split, so that one process would draw others.
OPTIONS = ("--task", "token-tagging", "--num-train-epochs", "3", "--dtype", "float32")
SAVED = ("--save-every", "1", "--keep", "100")
RESUMED_AFTER = 3


def main(arguments: Sequence[str]) -> None:
    """Makes the runs that are missing, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.resume_table", description=__doc__)
    parser.add_argument("directory", type=Path, help="where the runs are kept")
    directory: Path = parser.parse_args(arguments).directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    print(f"| saved by | {' | '.join(BACKENDS)} |")
    print("| --- |" + " --- |" * len(BACKENDS))
    for saver in BACKENDS:
        whole = directory / saver
        _train(saver, whole, *OPTIONS, "--micro-batch-size", "8" if saver != "single" else "16", *SAVED)
        cells = []
        for resumer in BACKENDS:
            run = directory / f"{saver}-{resumer}"
            ranks = () if _num_ranks(saver) == _num_ranks(resumer) else ("--num-processes", _num_ranks(resumer))
            _train(resumer, run, "--resume", str(checkpoint_path(whole, RESUMED_AFTER)), *ranks)
            cells.append(_distance(run, whole))
        print(f"| {saver} | {' | '.join(cells)} |", flush=True)


def _num_ranks(backend: str) -> str:
    return "1" if backend == "single" else "2"


def _train(backend: str, run: Path, *options: str) -> None:
    if (run / "record.json").exists():
        return
    command = [sys.executable, "-m", "launch", backend, *options, "--output-dir", str(run), "--overwrite"]
    environment = {**command_environment(), "PYTHONPATH": str(PROJECT_DIRECTORY)}
    done = subprocess.run(command, cwd=PROJECT_DIRECTORY, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")


def _distance(run: Path, whole: Path) -> str:
    """Returns "same bits", or the largest difference of a weight in units of the largest weight of its tensor."""
    ours, theirs = (load_file(one / "model.safetensors") for one in (run, whole))
    largest = max(float((ours[name] - other).abs().max() / other.abs().max()) for name, other in theirs.items())
    return f"{largest:.0e}" if largest else "same bits"


if __name__ == "__main__":
    main(sys.argv[1:])
