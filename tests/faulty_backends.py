"""Backends that go wrong on purpose, for the tests of failures."""

from __future__ import annotations

import math
import os
import signal
import time
import weakref
from typing import Literal

import torch
from pydantic import Field

from backends.capabilities import BackendSettings
from backends.ddp import DDPBackend
from backends.ddp_settings import DDPSettings
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


class DriftSettings(BackendSettings):
    drift_step: int = Field(1, description="the optimizer step after which rank 1 goes its own way")


class DriftingBackend(DDPBackend):
    """Rank 1 changes one parameter after one step."""

    name = "drifting"
    Settings = DriftSettings
    _num_steps = 0

    def step(self, max_grad_norm: float) -> StepResult:
        result = super().step(max_grad_norm)
        self._num_steps += 1
        if self.rank == 1 and self._num_steps == self.options.settings.drift_step:  # type: ignore[attr-defined]
            with torch.no_grad():
                self.unwrap(self.model).get_parameter("embedding.weight")[0, 0] += 1e-6
        return result


class Fault(DDPSettings):
    fault: Literal["hangs", "diverges", "runs-out-of-memory"] = Field("hangs", description="what goes wrong")


class FaultyDDP(DDPBackend):
    """Goes wrong in its eighth step: on rank 1, as far as ranks differ."""

    name = "faulty"
    Settings = Fault
    _num_steps = 0

    def step(self, max_grad_norm: float) -> StepResult:
        self._num_steps += 1
        if self._num_steps == 8 and self.rank == 1:
            fault = self.options.settings.fault  # type: ignore[attr-defined]
            if fault == "runs-out-of-memory":
                os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does
            while fault == "hangs":
                time.sleep(0.1)
        result = super().step(max_grad_norm)
        if self._num_steps == 8 and self.options.settings.fault == "diverges":  # type: ignore[attr-defined]
            with torch.no_grad():
                self.unwrap(self.model).get_parameter("embedding.weight").fill_(math.nan)
        return result


class LostAtTheEndBackend(DDPBackend):
    """Rank 1 dies when training is over."""

    name = "lost-at-the-end"

    def leave_group(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().leave_group()
