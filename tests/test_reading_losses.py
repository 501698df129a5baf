"""When the losses of steps are read, and what comes of the numbers that are summed together."""

from __future__ import annotations

import math
from collections.abc import Callable
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

    def __init__(self) -> None:
        self._barrier = Barrier(NUM_RANKS, timeout=30)
        self._given: dict[int, torch.Tensor] = {}

    def backend(self, rank: int) -> Any:
        return SimpleNamespace(rank=rank, all_reduce=lambda tensor: self._all_reduce(rank, tensor))

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


@pytest.fixture(autouse=True)
def _reading_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "time", SimpleNamespace(perf_counter=lambda: 0.0))


def _numbers_of_reading(
    seconds: Callable[[int, int], float], num_steps: int, logging_steps: int | None = None
) -> list[int]:
    """Returns the steps after which all ranks read, if each step takes so many seconds, by rank and number."""
    ranks = _Ranks()

    def train(rank: int) -> list[int]:
        steps, read = OpenSteps(ranks.backend(rank), None, logging_steps), []  # type: ignore[arg-type]
        for number in range(1, num_steps + 1):
            steps.add(_step(number, 1.0), seconds(rank, number))
            if number == 1 or steps.are_due(number):
                steps.read([])
                steps.clear()
                read.append(number)
        return read

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        first, *others = threads.map(train, range(NUM_RANKS))
    assert others == [first] * (NUM_RANKS - 1)
    return first


def test_losses_are_read_about_once_in_a_second() -> None:
    """A step takes 0.07 s in the mean of the ranks, so that eight of them take less than a second, and sixteen more."""
    assert _numbers_of_reading(lambda rank, number: 0.06 + 0.01 * rank, 40) == [1, 9, 17, 25, 33]


def test_losses_of_long_steps_are_read_after_each() -> None:
    assert _numbers_of_reading(lambda rank, number: 3.0, 5) == [1, 2, 3, 4, 5]


def test_the_losses_of_at_most_64_steps_are_read_at_once() -> None:
    assert _numbers_of_reading(lambda rank, number: 1e-7, 200) == [1, 65, 129, 193]


def test_steps_that_become_slow_are_noticed_at_the_next_reading() -> None:
    assert _numbers_of_reading(lambda rank, number: 0.01 if number < 70 else 0.4, 135) == [1, 65, 129, 131, 133, 135]


def test_losses_are_read_when_the_user_says() -> None:
    assert _numbers_of_reading(lambda rank, number: 0.001, 12, logging_steps=4) == [1, 4, 8, 12]


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
