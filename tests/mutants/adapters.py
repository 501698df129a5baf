"""Adapters that are broken on purpose, for what happens before there is a group or after it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from backends import embedding_rows
from backends.ddp import DDPBackend
from backends.ddp_settings import DDPSettings
from backends.interface import StepResult
from contract.jobs import MARK_VARIABLE
from tests.by_hand import ByHandBackend


class CarelessBackend(ByHandBackend):
    """C04: accepts everything that it is asked for."""

    def __init__(self, options: Any) -> None:
        with mock.patch("backends.interface.Capabilities.check"):
            super().__init__(options)


class ClingingBackend(ByHandBackend):
    """C05: cannot leave its group."""

    def shutdown(self) -> None:
        raise RuntimeError("the group does not let go")


class AbortingBackend(ByHandBackend):
    """C05: leaves, and then crashes."""

    def shutdown(self) -> None:
        super().shutdown()
        os.abort()


class LitteringBackend(ByHandBackend):
    """C43: leaves a process behind that the launcher cannot find."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        # Without the launcher's mark, by which it finds what to end: daemons are known to clear their environment.
        environment = {name: value for name, value in os.environ.items() if name == MARK_VARIABLE}
        subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True)


class ObedientBackend(ByHandBackend):
    """C44: reads the user's accelerate configuration."""

    def autocast(self) -> Any:
        file = Path(os.environ.get("HF_HOME", "")) / "accelerate" / "default_config.yaml"
        if file.exists() and "bf16" in file.read_text():
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return super().autocast()


class SendingRows(DDPBackend):
    """Sends the used rows of embeddings, as `used_rows` of its own finds them."""

    def __init__(self, options: Any) -> None:
        super().__init__(dataclasses.replace(options, settings=DDPSettings(embedding_gradients="rows")))

    def backward(self, loss: torch.Tensor) -> None:
        with mock.patch.object(embedding_rows, "used_rows", self.used_rows):
            super().backward(loss)

    def used_rows(self, gradient: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class OverlookingBackend(SendingRows):
    """C16: leaves rows out whose first element is not positive."""

    def used_rows(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient[:, 0].gt(0).to(torch.uint8)


class SendingAllBackend(SendingRows):
    """C25: takes all rows for used ones."""

    def used_rows(self, gradient: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(gradient), dtype=torch.uint8)


class HangingBackend(ByHandBackend):
    """Hangs in its third step, on rank 1."""

    _steps = 0

    def step(self, max_grad_norm: float) -> StepResult:
        self._steps += 1
        while self._steps == 3 and self.rank == 1:
            time.sleep(1)
        return super().step(max_grad_norm)


class LonelyBackend(ByHandBackend):
    """Finds itself alone, as if another library's launcher had started it."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.rank, self.world_size = 0, 1

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return tensor.clone()


class UnstartableBackend(ByHandBackend):
    """Joins no group, so that no case ever runs."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        raise RuntimeError("there is no network here")


# The check that each of these must fail, and its words. The adapter that they are derived from passes all checks.
ADAPTERS = {
    "CarelessBackend": ("C04", "device=cpu, saw ValueError: Error initializing torch.distributed"),
    "ClingingBackend": ("C05", "the group does not let go"),
    "AbortingBackend": ("C05", "crashed (Aborted)"),
    "LitteringBackend": ("C43", "processes left behind: [], saw ["),
    "ObedientBackend": ("C44", "weights sha256"),
    "OverlookingBackend": ("C16", "of the reference, saw a difference of"),
    "SendingAllBackend": ("C25", "elements to be reduced in step 1, saw"),
}
