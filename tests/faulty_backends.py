"""Backends that go wrong on purpose, for the tests of failures."""

from __future__ import annotations

import weakref

import torch

from backends.ddp import DDPBackend
from backends.interface import StepResult


class WatchedBackend(DDPBackend):
    """Fails if its wrapper is still referred to when the process group is about to go."""

    name = "watched"

    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        wrapped, optimizer = super().setup(model, optimizer)
        self._wrapped = weakref.ref(wrapped)
        return wrapped, optimizer

    def leave_group(self) -> None:
        if self._wrapped() is not None:
            raise RuntimeError("the wrapper outlives the process group")
        super().leave_group()


class DivergingBackend(DDPBackend):
    """Lets rank 1 go its own way."""

    name = "diverging"

    def step(self, max_grad_norm: float) -> StepResult:
        result = super().step(max_grad_norm)
        if self.rank == 1:
            with torch.no_grad():
                next(self.model.parameters()).add_(1e-6)
        return result
