"""DDP under other names: as it is, and slower by a known share. What the statistics are tried on."""

from __future__ import annotations

import time

import torch

from backends.ddp import DDPBackend
from backends.interface import StepResult

PLANTED_SLOWDOWN = 0.1


class SameDDP(DDPBackend):
    """The same again."""

    name = "ddp again"


class SlowedDDP(DDPBackend):
    """Sleeps after each step, for a tenth of what the step took."""

    name = "ddp slowed"
    _ended: float | None = None

    def step(self, max_grad_norm: float) -> StepResult:
        result = super().step(max_grad_norm)
        if self._ended is not None:
            time.sleep(PLANTED_SLOWDOWN * (time.perf_counter() - self._ended))
        self._ended = time.perf_counter()
        return result


class StrayingDDP(DDPBackend):
    """Puts one percent too much into every gradient."""

    name = "ddp straying"

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss * 1.01)


class FailingDDP(DDPBackend):
    """Fails in the third step."""

    name = "ddp failing"
    _steps = 0

    def step(self, max_grad_norm: float) -> StepResult:
        self._steps += 1
        if self._steps == 3:
            raise RuntimeError("planted failure")
        return super().step(max_grad_norm)
