"""Tasks that are awkward or faulty on purpose, for the checks of unused parameters and of failures."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

import torch

from launch.rank_files import rank_from_environment
from tasks.interface import Batch, Split
from tasks.token_tagging import TokenTagging

FAULT_VARIABLE = "LOCKSTEP_FAULT"
_FAULTY_CALL = 5


class FaultyTask(TokenTagging):
    """Does what the variable says when the last rank asks for its fifth batch, after noting the time on its output."""

    _calls = 0

    def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
        self._calls += 1
        kind, faulty_rank = os.environ[FAULT_VARIABLE].split()
        if self._calls == _FAULTY_CALL and rank_from_environment(os.environ) == int(faulty_rank):
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
