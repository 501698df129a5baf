"""Trackers, which hand the news of a run to another program; rank 0 feeds them in the same way for every backend."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from records.news import Evaluated, LossesRead, News, Resumed

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Event files for TensorBoard (https://docs.pytorch.org/docs/stable/tensorboard.html)."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Each report is written to the disk at once, so that a run that is killed loses no part of its curves.
        self._open = partial(SummaryWriter, str(directory), max_queue=1)
        self._writer: SummaryWriter | None = None
        self._first_step = 1

    def write(self, news: News) -> None:
        """Adds losses, gradient norms, learning rates and metrics; other news have no curve."""
        match news:
            case Resumed():
                self._first_step = news.origin.step + 1
            case LossesRead():
                for step in news.steps:
                    self._add("train/loss", step.loss, step.step)
                    self._add("train/grad_norm", step.grad_norm, step.step)
                    self._add("train/learning_rate", step.learning_rate, step.step)
            case Evaluated():
                for name, value in news.evaluation.metrics.items():
                    self._add(f"validation/{name}", value, news.evaluation.step)
        if self._writer is not None:
            self._writer.flush()

    def _add(self, name: str, value: float | None, step: int) -> None:
        if value is None:
            return
        if self._writer is None:
            # Ranks that were started again repeat steps whose values the directory already has: those are hidden.
            self._writer = self._open(purge_step=self._first_step)
        self._writer.add_scalar(name, value, step)


TRACKERS = {"tensorboard": TensorBoard}
