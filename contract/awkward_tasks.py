"""Tasks that are awkward or faulty on purpose, for the checks of unused parameters and of failures."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launch.engines.environment import rank_of_process
from tasks.interface import Batch, Split
from tasks.token_tagging import NUM_TAGS, TokenTagging

if TYPE_CHECKING:
    import torch

FAULT_VARIABLE = "LOCKSTEP_FAULT"
_FAULTY_CALL = 5


class FaultyTask(TokenTagging):
    """Does what the variable says when the last rank asks for its fifth batch, after noting the time on its output."""

    _calls = 0

    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        self._calls += 1
        kind, faulty_rank = os.environ[FAULT_VARIABLE].split()
        if self._calls == _FAULTY_CALL and rank_of_process() == int(faulty_rank):
            print(f"fault at {time.time()}", flush=True)
            if kind == "raises":
                raise ArithmeticError("the planted error")
            if kind == "exits":
                sys.exit(3)
            if kind == "is-killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "hangs":
                time.sleep(600)
        return super().collate(split, sample_ids)


class UnusedParameterTask(TokenTagging):
    """Has a parameter that no forward uses."""

    def build_model(self) -> torch.nn.Module:
        import torch

        model = super().build_model()
        model.register_parameter("idle", torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64)))
        return model


class DisusedParameterTask(UnusedParameterTask):
    """Uses that parameter in the first training forward, and never again."""

    def build_model(self) -> torch.nn.Module:
        import torch

        model = super().build_model()
        model.register_buffer("is_used", torch.ones((), dtype=torch.bool))
        model.register_forward_hook(_use_idle_once)
        return model


def _use_idle_once(model: Any, arguments: tuple[torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
    if model.training and model.is_used:
        model.is_used.fill_(False)
        scores = scores * (1 + model.idle.mean())
    return scores


class RareParameterTask(UnusedParameterTask):
    """Uses that parameter for few sentences only, so that it gets a gradient in some micro-batches, on some ranks."""

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        model.register_forward_hook(_use_idle)
        return model


def _use_idle(model: Any, arguments: tuple[torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
    is_rare = arguments[0][:, 0] == NUM_TAGS - 1
    return scores * (1 + is_rare[:, None, None] * model.idle.mean()) if is_rare.any() else scores
