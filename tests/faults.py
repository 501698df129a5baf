"""Tasks and backends that go wrong on purpose, for the tests of failures."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from backends.ddp import DDPBackend
from backends.interface import StepResult
from launch.rank_files import rank_from_environment
from tasks.interface import Batch, Split
from tasks.text_classification import TextClassification
from tasks.token_tagging import TokenTagging

_FAULTY_RANK = 1
_FAULTY_CALL = 5


class FaultyTask(TokenTagging):
    """Does what the variable FAULT says when rank 1 asks for its fifth batch."""

    _calls = 0

    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        self._calls += 1
        if self._calls == _FAULTY_CALL and rank_from_environment(os.environ) == _FAULTY_RANK:
            fault = os.environ["FAULT"]
            if fault == "raise":
                raise ArithmeticError("the planted error")
            if fault == "exit":
                sys.exit(3)
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hang":
                time.sleep(600)
        return super().collate(split, sample_ids)


class UnsavableTask(TokenTagging):
    """Cannot write its model, after having written half of it."""

    def save(self, model: torch.nn.Module, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left on device")


class UnusedParameterTask(TokenTagging):
    """Has a parameter that no forward uses."""

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        model.register_parameter("idle", torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64)))
        return model


class UnevenParameterTask(UnusedParameterTask):
    """Uses that parameter on rank 0 alone."""

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        if rank_from_environment(os.environ) == 0:
            model.register_forward_hook(lambda module, arguments, scores: scores + scores.sum() * module.idle.mean())
        return model


class OverflowingTask(TextClassification):
    """Has an infinite loss on rank 1 in the first of two micro-batches of the third step."""

    _calls = 0

    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        self._calls += 1
        overflows = self._calls == 5 and rank_from_environment(os.environ) == _FAULTY_RANK
        loss: torch.Tensor = super().loss_sum(model, batch) * (math.inf if overflows else 1.0)
        return loss


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
