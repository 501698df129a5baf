"""What each rank of the benchmark of collectives runs.

``python -m compare.collectives.rank MEASUREMENT DIRECTORY [RANK_VARIABLE]``, with the file that says what to measure,
and the directory of the run.

The adapter only joins the group and keeps ranks in step. What is measured are the calls of the
library that it communicates through, on buffers that are there before the clock starts.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backends.collectives import Prepare, Prepared
from backends.interface import Backend, BackendOptions
from backends.registry import load_backend
from compare.collectives.measurement import Measurement, elements_per_rank, size_in_bytes
from launch.options import settings_in
from records.environment import describe_environment
from records.news import LibraryFound, PointMeasured
from records.progress import ProgressLog
from training.scheduling import schedule_as_batch
from training.world import prove_world
from watch.rank_files import RankFiles, reporting

MIN_REPETITIONS = 5
MAX_REPETITIONS = 100
_NUM_WARMUPS = 3
_NUM_ROUNDS = 5
# How much later than the library's own timeout this rank gives up: the library may know more.
_GRACE_SECONDS = 5.0
# A pattern of small integers, whose sums over ranks float32 holds exactly.
_PERIOD = 251


@dataclass(frozen=True)
class Deadline:
    """Ends this process when other ranks are waited for in vain: not every library's call does so by itself."""

    files: RankFiles
    seconds: float

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Ends this process with an error unless the block ends within the limit."""
        timer = threading.Timer(self.seconds, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        self.files.report_error(TimeoutError(f"Timed out waiting {self.seconds:g} s for other ranks"))
        os._exit(1)


@dataclass(frozen=True)
class Bench:
    """Measures the collectives of one library."""

    backend: Backend
    deadline: Deadline
    seconds_per_point: float

    def measure(self, operation: str, prepare: Prepare, nums_elements: list[int]) -> list[list[float]]:
        """Checks what a collective leaves at each size, then returns the slowest rank's time of every repetition.

        Sizes are measured in rounds: what disturbs the machine for a second must not fall on one of them.
        """
        points = [self._warmed_up(operation, prepare, num_elements) for num_elements in nums_elements]
        seconds: list[list[float]] = [[] for _ in points]
        for _ in range(_NUM_ROUNDS):
            for (call, num_repetitions), mine in zip(points, seconds, strict=True):
                mine.extend(self._seconds(call) for _ in range(num_repetitions))
        return [self._slowest(mine) for mine in seconds]

    def _warmed_up(self, operation: str, prepare: Prepare, num_elements: int) -> tuple[Callable[[], Any], int]:
        """A call of one size, and how often to repeat it in each round."""
        values = _contribution(self.backend, num_elements, self.backend.rank)
        prepared = prepare(values)
        self._check(operation, prepared, num_elements)
        # Else sums over sums would soon be infinite.
        values.zero_()
        warmups = [self._seconds(prepared.call) for _ in range(_NUM_WARMUPS)]
        wanted = self.seconds_per_point / self._slowest(warmups)[-1]
        num_repetitions = min(max(math.ceil(wanted), MIN_REPETITIONS), MAX_REPETITIONS)
        return prepared.call, math.ceil(num_repetitions / _NUM_ROUNDS)

    def _seconds(self, call: Callable[[], Any]) -> float:
        with self.deadline():
            self.backend.barrier()
            self._synchronize()
            began = time.perf_counter()
            call()
            self._synchronize()
            return time.perf_counter() - began

    def _slowest(self, seconds: list[float]) -> list[float]:
        """Of each repetition the slowest rank's time."""
        mine = torch.tensor(seconds, dtype=torch.float64, device=self.backend.device)
        slowest: list[float] = self.backend.all_reduce(mine, "max").tolist()
        return slowest

    def _synchronize(self) -> None:
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize()

    def _check(self, operation: str, prepared: Prepared, num_elements: int) -> None:
        with self.deadline():
            returned = prepared.call()
        result = returned if prepared.result is None else prepared.result
        expected = _expectation(operation, self.backend, num_elements)
        if result.shape != expected.shape:
            raise RuntimeError(f"{operation}: a result of {result.numel()} values instead of {expected.numel()}")
        if not torch.equal(result, expected):
            index = int((result != expected).nonzero()[0])
            raise RuntimeError(
                f"{operation} of {num_elements} values from each rank is wrong: value {index} is "
                f"{float(result[index])} instead of {float(expected[index])}"
            )


def _contribution(backend: Backend, num_elements: int, rank: int) -> torch.Tensor:
    pattern = torch.arange(float(_PERIOD), device=backend.device).repeat(math.ceil(num_elements / _PERIOD))
    return pattern[:num_elements] + rank


def _expectation(operation: str, backend: Backend, num_elements: int) -> torch.Tensor:
    """What a collective must leave on this rank; gather leaves ranks other than 0 what they contributed."""
    world_size = backend.world_size
    if operation == "all_reduce":
        return _contribution(backend, num_elements, 0) * world_size + world_size * (world_size - 1) / 2
    if operation == "all_gather" or (operation == "gather" and backend.rank == 0):
        return torch.cat([_contribution(backend, num_elements, rank) for rank in range(world_size)])
    return _contribution(backend, num_elements, backend.rank if operation == "gather" else 0)


def measure(measurement: Measurement, directory: Path, rank: int) -> None:
    """Joins the group, measures and leaves; rank 0 reports each point as it is done."""
    torch.set_num_threads(measurement.threads_per_rank)
    adapter = load_backend(measurement.backend)
    backend = adapter(
        BackendOptions(
            device=measurement.device,
            timeout_seconds=measurement.timeout,
            settings=settings_in(adapter.Settings, measurement.own_options),
        )
    )
    prove_world(backend, world_size=measurement.num_processes)
    # An adapter can tell of its library, and leave it, once it has been set up for some model.
    model = torch.nn.Linear(1, 1).to(backend.device)
    backend.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    log = ProgressLog(directory, rank=backend.rank)
    library = backend.collectives()
    operations = [operation for operation in measurement.operations if operation in library]
    transport = backend.effective_settings().get("transport", "unknown")
    if backend.rank == 0:  # the only one that reports
        environment = describe_environment(with_torch=True)
        log.write(LibraryFound(transport=transport, operations=list(operations), environment=environment))

    bench = Bench(
        backend,
        Deadline(RankFiles(directory, rank), measurement.timeout + _GRACE_SECONDS),
        measurement.seconds_per_point,
    )
    gc.freeze()  # no collection among what imports created comes in between
    for operation in operations:
        counts = [elements_per_rank(operation, size, measurement.num_processes) for size in measurement.sizes]
        for num_elements, seconds in zip(counts, bench.measure(operation, library[operation], counts), strict=True):
            num_bytes = size_in_bytes(operation, num_elements, measurement.num_processes)
            log.write(PointMeasured(operation=operation, bytes=num_bytes, seconds=seconds))
    backend.shutdown()


def main(measurement: str, run_directory: str, rank_variable: str | None = None) -> None:
    """Runs this rank to its end; on an error, exits with code 1 at once."""
    directory = Path(run_directory)
    with reporting(directory, rank_variable) as rank:
        asked = Measurement.model_validate_json(Path(measurement).read_bytes())
        if asked.scheduling == "batch":
            schedule_as_batch()
        measure(asked, directory, rank)


if __name__ == "__main__":
    main(*sys.argv[1:])
