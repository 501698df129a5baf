"""The news of a training: what the launcher and trackers are told while it runs."""

from __future__ import annotations

from typing_extensions import override

from records.news import Evaluated, EvaluationBegan, LossesRead
from records.progress import ProgressLog
from records.record import EvaluationRecord, StepRecord
from training.hooks import Hooks


class Reporter(Hooks):
    """Writes what happens in a training into the progress log."""

    def __init__(self, progress: ProgressLog, *, num_steps: int) -> None:
        self._progress = progress
        self._num_steps = num_steps
        self._loss: float | None = None

    @override
    def on_losses_read(self, steps: list[StepRecord]) -> None:
        self._loss = steps[-1].loss
        self._progress.write(LossesRead(steps=steps))

    @override
    def on_step_end(self, step: int) -> None:
        self._progress.beat(step, self._num_steps, self._loss)

    @override
    def on_evaluation_begin(self, step: int) -> None:
        self._progress.write(EvaluationBegan(step=step, num_steps=self._num_steps))

    @override
    def on_evaluation_end(self, evaluation: EvaluationRecord) -> None:
        self._progress.write(Evaluated(evaluation=evaluation))
