"""What ranks tell each other apart from training."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training import world
from training.world import gather_facts


class _Ranks:
    """Threads that stand for ranks, and sum what they bring."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._brought: dict[int, torch.Tensor] = {}
        self.backends = [
            SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"), all_reduce=self._of(rank))
            for rank in range(world_size)
        ]

    def _of(self, rank: int) -> Any:
        def all_reduce(values: torch.Tensor) -> torch.Tensor:
            self._brought[rank] = values
            self._barrier.wait()
            total = torch.stack(list(self._brought.values())).sum(dim=0, dtype=values.dtype)
            self._barrier.wait()
            return total

        return all_reduce


@pytest.mark.parametrize("most", [4 * 1024 * 1024, 0], ids=["at once", "one after the other"])
def test_facts_of_all_ranks_come_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(world, "_MATRIX_BYTES", most)
    monkeypatch.setattr(world, "_BROADCAST_BYTES", 8)
    facts = [{"rank": rank, "text": "é" * 10 * rank, "values": [0.1, None]} for rank in range(3)]
    ranks = _Ranks(3)
    with ThreadPoolExecutor(3) as threads:
        gathered = list(threads.map(gather_facts, ranks.backends, facts))  # type: ignore[arg-type]
    assert gathered == [facts] * 3
