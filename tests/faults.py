"""Tasks and backends that go wrong on purpose, for the tests of failures."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from backends.ddp import DDPBackend
from backends.interface import StepResult
from launch.rank_files import rank_from_environment
from tasks.interface import Batch, Split
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


class DivergingBackend(DDPBackend):
    """Lets rank 1 go its own way."""

    name = "diverging"

    def step(self, max_grad_norm: float) -> StepResult:
        result = super().step(max_grad_norm)
        if self.rank == 1:
            with torch.no_grad():
                next(self.model.parameters()).add_(1e-6)
        return result
