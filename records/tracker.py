"""Trackers: a run's news in the form that another program shows. Fed on rank 0, the same way for every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TensorBoard:
    """Event files for TensorBoard (https://docs.pytorch.org/docs/stable/tensorboard.html)."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Each report is on disk at once: a run that is killed has lost nothing of its curves.
        self._writer = SummaryWriter(str(directory), max_queue=1)

    def write(self, event: str, facts: dict[str, Any]) -> None:
        if event == "closed":
            for step in facts["steps"]:
                for name in ("loss", "grad_norm", "learning_rate"):
                    self._add(f"train/{name}", step[name], step["step"])
        elif event == "evaluation":
            evaluation = facts["evaluation"]
            for name, value in evaluation["metrics"].items():
                self._add(f"validation/{name}", value, evaluation["step"])
        self._writer.flush()

    def _add(self, name: str, value: float | None, step: int) -> None:
        if value is not None:
            self._writer.add_scalar(name, value, step)


TRACKERS = {"tensorboard": TensorBoard}
