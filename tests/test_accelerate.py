"""Accelerate: an adapter that serves several trainings in turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.interface import BackendOptions
from tests.launching import require_backend


class _Double(SimpleNamespace):
    """A double of Accelerate's class, with the loss scaler that it has on a GPU."""

    def __init__(self, **_: Any) -> None:
        super().__init__(gradient_accumulation_steps=1, process_index=0, local_process_index=0, num_processes=1)
        self.device = torch.device("cpu")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.optimizers: list[torch.optim.Optimizer] = []

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        self.optimizers.append(optimizer)
        return model, optimizer

    def free_memory(self) -> None:
        self.optimizers.clear()


def test_each_training_begins_with_a_fresh_loss_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    """And knows nothing of the optimizer before, whose last step may have been skipped."""
    require_backend("accelerate")
    from backends import accelerate

    monkeypatch.setattr(accelerate, "Accelerator", _Double)
    backend = accelerate.AccelerateBackend(BackendOptions())
    fresh = backend.state_dict()
    assert fresh["scale"] == 8.0
    for _ in range(2):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backend.setup(model, optimizer)
        assert backend.accelerator.optimizers == [optimizer]
        assert backend.state_dict() == fresh
        scaler = backend.accelerator.scaler
        scaler.scale(model(torch.full((1, 2), float("inf"))).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert backend.state_dict()["scale"] == 4.0
