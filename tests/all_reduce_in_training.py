"""What all-reducing takes in training, beside the same between steps: ``python -m tests.all_reduce_in_training``.

In each step, ranks first wait for each other, and then all-reduce a bucket, so that neither the wait for the slower
rank nor DDP's own copies are counted. After the step they do the same again with buffers that are in their caches. The
command trains the default job of a race on two ranks and prints, for each --scheduling, the medians and their ratio.

After each training, the ranks of ``launch/run.sh allreduce`` measure all-reduces of the same bytes, with the same
backend, number of threads, scheduling and allocator. There, the slower rank of each repetition counts, in training
rank 0. As in that command, these ranks are not bound to cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from backends.ddp import DDPBackend
from backends.interface import StepResult
from backends.registry import find_backend
from compare.collectives.job import MeasuringJob
from compare.collectives.measurement import ELEMENT_BYTES, Measurement
from launch.starters.interface import PROJECT_DIRECTORY
from launch.starters.registry import settle_starter

_FILE = "ALL_REDUCE_TIMES"
_NUM_ROUNDS = 3
_NUM_RANKS, _NUM_THREADS = 2, 1
_RANKS = ("--num-processes", str(_NUM_RANKS), "--threads-per-rank", str(_NUM_THREADS), "--bind-ranks")
_JOB = ("--global-batch-size", "32", "--vocab-size", "1000", "--max-steps", "120", "--no-evaluate")

_Scheduling = Literal["batch", "normal"]


class AlignedDDP(DDPBackend):
    """Times each all-reduce, from when all ranks are there, in training and after the step."""

    name = "ddp aligned"

    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        wrapped, optimizer = super().setup(model, optimizer)
        self._sizes: list[int] = []
        self._in_step = 0.0
        self._times: list[tuple[float, float]] = []
        self._sizes_of_step: list[int] = []
        wrapped.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))
        return wrapped, optimizer

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer().div_(self.world_size)
        self._sizes.append(gradients.numel())
        self._in_step += _seconds(gradients)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(gradients)
        return done

    def step(self, max_grad_norm: float) -> StepResult:
        result = super().step(max_grad_norm)
        buffers = [torch.ones(size) for size in self._sizes]
        warm = [sum(map(_seconds, buffers)) for _ in range(2)][-1]
        self._times.append((self._in_step, warm))
        self._sizes_of_step = self._sizes
        self._sizes, self._in_step = [], 0.0
        return result

    def shutdown(self) -> None:
        if self.rank == 0:
            Path(os.environ[_FILE]).write_text(json.dumps({"times": self._times, "sizes": self._sizes_of_step}))
        super().shutdown()


def _seconds(tensor: torch.Tensor) -> float:
    dist.all_reduce(torch.zeros(1))
    began = time.perf_counter()
    dist.all_reduce(tensor)
    return time.perf_counter() - began


class _Round(NamedTuple):
    """What one training showed, and what was measured after it, in seconds.

    Attributes:
        of_steps: For each step that is not the warm-up, all-reduces in training and after it, [steps, 2].
        alone: What the same bytes took the ranks of the `allreduce` command.
    """

    of_steps: Any
    alone: float


def main() -> None:
    """Trains with each scheduling in turn, measures what the same bytes take alone, and prints what was seen."""
    seen: dict[_Scheduling, list[_Round]] = {"batch": [], "normal": []}
    for _ in range(_NUM_ROUNDS):
        for scheduling, rounds in seen.items():
            rounds.append(_round(scheduling))
    for scheduling, rounds in seen.items():
        in_step, warm = (1e3 * median(column) for column in np.concatenate([one.of_steps for one in rounds]).T)
        alone = 1e3 * median(one.alone for one in rounds)
        print(
            f"--scheduling {scheduling}: {in_step:.2f} ms in a step, {warm:.2f} ms after it, ratio "
            f"{in_step / warm:.2f}; {alone:.2f} ms under allreduce, ratio {in_step / alone:.2f}"
        )


def _round(scheduling: _Scheduling) -> _Round:
    """Trains, and then measures all-reduces of the same buckets."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "times"
        options = (*_RANKS, *_JOB, "--scheduling", scheduling, "--output-dir", str(Path(directory) / "run"))
        subprocess.run(
            [sys.executable, "-m", "launch", "tests.all_reduce_in_training:AlignedDDP", *options],
            cwd=PROJECT_DIRECTORY,
            env={**os.environ, _FILE: str(file)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        found = json.loads(file.read_text())
        return _Round(np.array(found["times"][20:]), _seconds_alone(found["sizes"], scheduling, Path(directory)))


def _seconds_alone(sizes: list[int], scheduling: _Scheduling, directory: Path) -> float:
    """Returns what the ranks of the `allreduce` command take for buckets of so many elements, one after the other."""
    start_methods = find_backend("ddp").capabilities.start_methods
    measurement = Measurement(
        backend="ddp",
        start_method=settle_starter("ddp", start_methods, None, device="cpu").name,
        device="cpu",
        num_processes=_NUM_RANKS,
        threads_per_rank=_NUM_THREADS,
        scheduling=scheduling,
        timeout=60.0,
        operations=["all_reduce"],
        sizes=sorted({ELEMENT_BYTES * size for size in sizes}),
        seconds_per_point=0.3,
    )
    job = MeasuringJob(measurement, directory / "alone", Console(quiet=True))
    failure = job.run()
    if failure is not None:
        raise SystemExit(failure)
    (series,) = job.series
    medians = {point.bytes: point.median_seconds for point in series.points}
    return sum(medians[ELEMENT_BYTES * size] for size in sizes)


if __name__ == "__main__":
    main()
