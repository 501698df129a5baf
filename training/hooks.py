"""How a training is observed: one set of hooks for the heartbeat, measurements, news, diagnosis and the contract."""

from __future__ import annotations

from typing_extensions import override

from records.record import EvaluationRecord, StepRecord
from tasks.interface import Batch
from training.plan import MicroBatch, SampleIds


class Hooks:
    """Methods that the training loop calls on every rank; an observer overrides those that it needs.

    In each step they come in this order: `on_step_begin`, `on_micro_batch` for each micro-batch, `on_update`,
    `on_losses_read` (in some steps), `on_step_end`. An observer changes nothing in the training.
    """

    def on_phase(self, phase: str, step: int) -> None:
        """The rank enters a phase of `step`: one of `watch.heartbeat.PHASES`.

        A resumed run first takes a rehearsal step, which it discards. `on_phase` (with step 0) and `on_micro_batch`
        are the only hooks that are called in it.
        """

    def on_epoch_begin(self) -> None:
        """The steps of an epoch begin, or the rest of them in a resumed run."""

    def on_step_begin(self, global_batch: SampleIds) -> None:
        """A step on these samples begins; the batches have not been loaded."""

    def on_micro_batch(self, micro_batch: MicroBatch, batch: Batch) -> None:
        """The samples of a micro-batch have been loaded and are still on the CPU."""

    def on_update(self) -> None:
        """The optimizer has taken the update of the step, or all ranks have skipped it."""

    def on_losses_read(self, steps: list[StepRecord]) -> None:
        """The losses of all steps since the last call have been summed over ranks."""

    def on_step_end(self, step: int) -> None:
        """The step is complete. An evaluation or a checkpoint after it comes later."""

    def on_evaluation_begin(self, step: int) -> None:
        """The evaluation after `step` begins."""

    def on_evaluation_end(self, evaluation: EvaluationRecord) -> None:
        """An evaluation is complete."""


class Observers(Hooks):
    """Passes each call on to several observers, in the order in which they were added."""

    def __init__(self) -> None:
        self._observers: list[Hooks] = []

    def add(self, observer: Hooks) -> None:
        """Adds an observer after those that are there."""
        self._observers.append(observer)

    @override
    def on_phase(self, phase: str, step: int) -> None:
        for observer in self._observers:
            observer.on_phase(phase, step)

    @override
    def on_epoch_begin(self) -> None:
        for observer in self._observers:
            observer.on_epoch_begin()

    @override
    def on_step_begin(self, global_batch: SampleIds) -> None:
        for observer in self._observers:
            observer.on_step_begin(global_batch)

    @override
    def on_micro_batch(self, micro_batch: MicroBatch, batch: Batch) -> None:
        for observer in self._observers:
            observer.on_micro_batch(micro_batch, batch)

    @override
    def on_update(self) -> None:
        for observer in self._observers:
            observer.on_update()

    @override
    def on_losses_read(self, steps: list[StepRecord]) -> None:
        for observer in self._observers:
            observer.on_losses_read(steps)

    @override
    def on_step_end(self, step: int) -> None:
        for observer in self._observers:
            observer.on_step_end(step)

    @override
    def on_evaluation_begin(self, step: int) -> None:
        for observer in self._observers:
            observer.on_evaluation_begin(step)

    @override
    def on_evaluation_end(self, evaluation: EvaluationRecord) -> None:
        for observer in self._observers:
            observer.on_evaluation_end(evaluation)
