"""What all-reducing takes in training, beside the same between steps: ``python -m tests.all_reduce_in_training``.

In each step, ranks first wait for each other, and then all-reduce a bucket, so that neither the wait for the slower
rank nor DDP's own copies are counted. After the step they do the same again with buffers that are in their caches. The
command trains the default job of a race on two ranks and prints, for each --scheduling, the medians and their ratio.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from backends.ddp import DDPBackend
from backends.interface import StepResult
from launch.starters.interface import PROJECT_DIRECTORY

_FILE = "ALL_REDUCE_TIMES"
_NUM_ROUNDS = 3
_JOB = ("--num-processes", "2", "--global-batch-size", "32", "--threads-per-rank", "1", "--vocab-size", "1000")
_LIMITS = ("--max-steps", "120", "--no-evaluate", "--bind-ranks")


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
        self._sizes, self._in_step = [], 0.0
        return result

    def shutdown(self) -> None:
        if self.rank == 0:
            np.savetxt(os.environ[_FILE], self._times)
        super().shutdown()


def _seconds(tensor: torch.Tensor) -> float:
    dist.all_reduce(torch.zeros(1))
    began = time.perf_counter()
    dist.all_reduce(tensor)
    return time.perf_counter() - began


def main() -> None:
    """Trains with each scheduling in turn, and prints what was seen."""
    seen: dict[str, list[Any]] = {"batch": [], "normal": []}
    for _ in range(_NUM_ROUNDS):
        for scheduling, rounds in seen.items():
            rounds.append(_train(scheduling))
    for scheduling, rounds in seen.items():
        in_step, warm = (1e3 * median(column) for column in np.concatenate(rounds).T)
        ratio = in_step / warm
        print(f"--scheduling {scheduling}: {in_step:.2f} ms in a step, {warm:.2f} ms after it, ratio {ratio:.2f}")


def _train(scheduling: str) -> Any:
    """Returns the seconds of each step that is not the warm-up: in training, and after it."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "times"
        options = (*_JOB, *_LIMITS, "--scheduling", scheduling, "--output-dir", str(Path(directory) / "run"))
        subprocess.run(
            [sys.executable, "-m", "launch", "tests.all_reduce_in_training:AlignedDDP", *options],
            cwd=PROJECT_DIRECTORY,
            env={**os.environ, _FILE: str(file)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return np.loadtxt(file)[20:]


if __name__ == "__main__":
    main()
