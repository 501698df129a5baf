"""DDP under other names: as it is, slower by a known share, and with settings that no option offers."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
from pydantic import Field
from torch.nn.parallel import DistributedDataParallel

from backends.ddp import DDPBackend
from backends.ddp_settings import DDPSettings
from backends.interface import StepResult

# How many times as long as the shortest step one may be; what is longer holds a rest between two turns.
_LONGEST_STEP = 3.0


class SameDDP(DDPBackend):
    """The same again."""

    name = "ddp again"


class Slowdown(DDPSettings):
    """By how much a backend is slowed."""

    planted_slowdown: float = Field(0.1, ge=0, le=1, description="wait after a step, as a share of it")


class SlowedDDP(DDPBackend):
    """Waits after each step for a share of what the step took.

    It spins: a sleep of a millisecond ends a tenth of one too late, which would plant more than was asked for.
    """

    name = "ddp slowed"
    Settings = Slowdown
    _ended: float | None = None
    _shortest = math.inf

    def step(self, max_grad_norm: float) -> StepResult:
        result = super().step(max_grad_norm)
        if self._ended is not None:
            assert isinstance(self.options.settings, Slowdown)
            now = time.perf_counter()
            self._shortest = min(self._shortest, now - self._ended)
            took = min(now - self._ended, _LONGEST_STEP * self._shortest)
            end = now + self.options.settings.planted_slowdown * took
            while time.perf_counter() < end:
                pass
        self._ended = time.perf_counter()
        return result


class Error(DDPSettings):
    """By how much gradients are wrong."""

    planted_error: float = Field(0.01, ge=0, le=1, description="how much larger gradients are, as a share of them")


class StrayingDDP(DDPBackend):
    """Puts one percent too much into every gradient, or as much as it is told to."""

    name = "ddp straying"
    Settings = Error

    def backward(self, loss: torch.Tensor) -> None:
        assert isinstance(self.options.settings, Error)
        super().backward(loss * (1 + self.options.settings.planted_error))


class FailingDDP(DDPBackend):
    """Fails in the third step."""

    name = "ddp failing"
    _steps = 0

    def step(self, max_grad_norm: float) -> StepResult:
        self._steps += 1
        if self._steps == 3:
            raise RuntimeError("planted failure")
        return super().step(max_grad_norm)


class StaticGraphDDP(DDPBackend):
    """Tells DDP that all steps compute the same graph (``static_graph=True``)."""

    name = "ddp static graph"

    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        wrapped, optimizer = super().setup(model, optimizer)
        assert isinstance(wrapped, DistributedDataParallel)
        wrapped._set_static_graph()
        return wrapped, optimizer


class WastefulDDP(DDPBackend):
    """Also averages the optimizer's state over ranks after each step, which is the same on all of them."""

    name = "ddp wasteful"

    def step(self, max_grad_norm: float) -> StepResult:
        result = super().step(max_grad_norm)
        for state in self.optimizer.state.values():
            for value in state.values():
                if value.ndim:
                    dist.all_reduce(value.div_(self.world_size))
        return result
