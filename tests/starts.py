"""How long a job takes until its first step, under each way to start it: ``python -m tests.starts``.

The ways take turns. A job is ``launch/run.sh``, as a user calls it, and trains for two steps of the default task,
without evaluation. The seconds to the end of the first step are those of the run record, from when the script began;
CPU seconds are those of all processes of the job. A backend that is not set up yet in the environment that the script
uses is set up by its first job, which then takes minutes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from backends.registry import BACKENDS
from launch.starters.interface import PROJECT_DIRECTORY

WAYS = ("ddp torchrun", "ddp fork", "ddp spawn", "accelerate accelerate", "horovod horovodrun")


class Started(NamedTuple):
    """One job.

    Attributes:
        first_step: Seconds from the start of launch/run.sh to the end of the first step.
        whole: Seconds that the whole command took.
        cpu: CPU seconds of all its processes.
    """

    first_step: float
    whole: float
    cpu: float


def start(backend: str, start_method: str, num_processes: int, directory: Path) -> Started:
    """Starts one job and waits for its end."""
    options = ["--start-method", start_method, "--num-processes", str(num_processes), "--max-steps", "2"]
    command = [str(PROJECT_DIRECTORY / "launch" / "run.sh"), backend, *options]
    begin, before = time.monotonic(), cpu_seconds()
    subprocess.run(
        [*command, "--no-evaluate", "--output-dir", str(directory)],
        cwd=PROJECT_DIRECTORY,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    whole, cpu = time.monotonic() - begin, cpu_seconds() - before
    record = json.loads((directory / "record.json").read_bytes())
    return Started(record["seconds_to_first_step"], whole, cpu)


def main(arguments: Sequence[str]) -> None:
    """Starts jobs and prints the median of each way."""
    parser = argparse.ArgumentParser(prog="python -m tests.starts", description=__doc__)
    parser.add_argument("--ways", default=",".join(WAYS), help="backends and start methods (default: %(default)s)")
    parser.add_argument("--num-processes", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is tried (default: 5)")
    asked = parser.parse_args(arguments)
    ways = [tuple(way.split()) for way in asked.ways.split(",")]
    for way in ways:
        if len(way) != 2 or way[0] not in BACKENDS:
            parser.error(f"--ways {' '.join(way)!r}: write a backend and a start method, such as 'ddp torchrun'")
    if asked.rounds < 1:
        parser.error(f"--rounds {asked.rounds}: there must be at least one")
    for backend in sorted({backend for backend, _ in ways}):
        if (reason := BACKENDS[backend].unavailable_reason()) is not None:
            print(f"{backend} is left out: {reason}")
            ways = [way for way in ways if way[0] != backend]
    seen: dict[tuple[str, ...], list[Started]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(asked.rounds):
            for way in ways:
                place = Path(directory) / f"{'-'.join(way)}-{number}"
                seen[way].append(start(way[0], way[1], asked.num_processes, place))
    print(f"{asked.num_processes} ranks, medians of {asked.rounds} rounds: seconds to the first step, in all, of CPU")
    for way, jobs in seen.items():
        medians = (statistics.median(values) for values in zip(*jobs, strict=True))
        print(f"{' '.join(way):24}{''.join(f'{value:8.1f}' for value in medians)}")


def cpu_seconds() -> float:
    """Returns the CPU seconds of the processes that this one has started and that have ended, with all of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(sys.argv[1:])
