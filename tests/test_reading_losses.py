"""When the losses of steps are read, and what comes of the numbers that are summed together."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training import losses
from training.losses import OpenStep, OpenSteps

NUM_RANKS = 3


class _Ranks:
    """Ranks that are threads of this process."""

    world_size = NUM_RANKS

    def __init__(self) -> None:
        self._barrier = Barrier(NUM_RANKS, timeout=30)
        self._given: dict[int, torch.Tensor] = {}

    def backend(self, rank: int) -> Any:
        return SimpleNamespace(
            rank=rank, world_size=NUM_RANKS, all_reduce=lambda tensor: self._all_reduce(rank, tensor)
        )

    def _all_reduce(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self._given[rank] = tensor
        self._barrier.wait()
        # Each rank adds in another order, as some libraries do.
        total = sum(self._given[(rank + shift) % NUM_RANKS] for shift in range(NUM_RANKS))
        self._barrier.wait()
        assert isinstance(total, torch.Tensor)
        return total


def _step(number: int, *shares: float, dtype: torch.dtype = torch.float32) -> OpenStep:
    return OpenStep(
        step=number,
        epoch=0,
        num_samples=8,
        learning_rate=0.1,
        skipped=False,
        losses=[torch.tensor(share, dtype=dtype) for share in shares],
        grad_norm=torch.tensor(2.0),
    )


def _numbers_of_reading(seconds: list[float], logging_steps: int | None, num_steps: int) -> list[list[int]]:
    """Returns, for each rank, the steps after which it reads, if its steps take so many seconds."""
    ranks = _Ranks()

    def train(rank: int) -> list[int]:
        steps, read = OpenSteps(ranks.backend(rank), None, logging_steps), []  # type: ignore[arg-type]
        for number in range(1, num_steps + 1):
            steps.add(_step(number, 1.0), seconds[rank])
            if number == 1 or steps.are_due(number):
                steps.read([])
                steps.clear()
                read.append(number)
        return read

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        return list(threads.map(train, range(NUM_RANKS)))


def test_losses_are_read_about_once_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 0.07 s in the mean of the ranks, which is known from the second reading on."""
    monkeypatch.setattr(losses, "time", SimpleNamespace(perf_counter=lambda: 0.0))  # reading takes no time
    of_ranks = _numbers_of_reading([0.06, 0.0701, 0.08], None, 60)
    assert of_ranks == [of_ranks[0]] * NUM_RANKS
    assert of_ranks[0] == [1, 2, 16, 30, 44, 58]


def test_losses_of_long_steps_are_read_after_each() -> None:
    assert _numbers_of_reading([3.0, 3.0, 3.0], None, 5)[0] == [1, 2, 3, 4, 5]


def test_losses_are_read_when_the_user_says() -> None:
    assert _numbers_of_reading([0.001, 0.001, 0.001], 4, 12)[0] == [1, 4, 8, 12]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float16, torch.float32)])
def test_each_step_gets_its_own_losses(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Steps have different numbers of micro-batches, and votes travel along."""
    ranks = _Ranks()

    def read(rank: int) -> tuple[list[Any], list[float]]:
        steps = OpenSteps(ranks.backend(rank), None, None)  # type: ignore[arg-type]
        steps.add(_step(1, 1.0, 2.0, dtype=dtypes[0]), 0.1)
        steps.add(_step(2, math.nan, dtype=dtypes[1]), 0.1)
        steps.add(_step(3, 0.5, 0.25, float(rank), dtype=dtypes[1]), 0.1)
        return steps.read([rank == 1, True])

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        for records, votes in threads.map(read, range(NUM_RANKS)):
            assert [record.loss for record in records] == [9.0, None, 5.25]
            assert votes == [1.0, 3.0]
