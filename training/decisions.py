"""What all ranks decide together between two steps: to stop, to save, and that their weights agree."""

from __future__ import annotations

import torch

from backends.interface import Backend
from records.config import RunConfig
from training.agreement import Agreement
from training.saving import CheckpointSaver
from training.state import TrainingState
from training.stopping import StopRequest


class Decisions:
    """The decisions of one training, each of which is the same on all ranks.

    A part that is left out is never decided and costs no communication: without a `stop_request` nobody can ask the
    training to stop, without a `saver` it saves nothing, without an `agreement` the weights are not compared.

    Attributes:
        stop: Whether all ranks stop after the current step.
    """

    def __init__(
        self,
        config: RunConfig,
        backend: Backend,
        *,
        agreement: Agreement | None = None,
        stop_request: StopRequest | None = None,
        saver: CheckpointSaver | None = None,
    ) -> None:
        self._interval = config.save_interval
        self._backend = backend
        self._agreement = agreement
        self._stop_request = stop_request
        self._saver = saver
        self._save_is_agreed = False
        self.stop = False

    def begin(self, model: torch.nn.Module) -> None:
        """Notes the model as it is before the first step."""
        if self._agreement is not None:
            self._agreement.begin(model)

    def note_first_step(self, model: torch.nn.Module) -> None:
        """Warns of what the first step has changed."""
        if self._agreement is not None:
            self._agreement.warn_of_changed_buffers(model)

    def after_step(self, step: int, *, is_last: bool) -> None:
        """Decides whether to stop after a step, unless that is voted on together with the losses.

        After the last step (`is_last`), what is left takes no longer than to save and start again.
        """
        self._save_is_agreed = False
        request = self._stop_request
        if request is not None and not request.travels_with_loss and not is_last:
            self.stop = request.is_agreed(step)

    def votes(self) -> list[bool]:
        """Returns what this rank asks for, to be summed over all ranks together with the losses."""
        votes = []
        if self._stop_request is not None and self._stop_request.travels_with_loss:
            votes.append(self._stop_request.is_asked())
        if self._saver is not None and self._saver.goes_by_clock:
            votes.append(self._saver.minutes_have_passed())
        return votes

    def count(self, votes: list[float], *, is_last: bool) -> None:
        """Takes the sums of all ranks' votes, in the order of `votes`."""
        sums = iter(votes)
        if self._stop_request is not None and self._stop_request.travels_with_loss:
            self.stop = next(sums) > 0 and not is_last
        if self._saver is not None and self._saver.goes_by_clock:
            self._save_is_agreed = next(sums) > 0

    def stop_before_evaluation(self, *, is_last: bool) -> bool:
        """Decides whether to stop before an evaluation, which may take long and is left to the run that goes on."""
        request = self._stop_request
        if request is not None and not (self.stop or request.travels_with_loss or is_last):
            asked = torch.tensor(float(request.is_asked()), device=self._backend.device)
            self.stop = bool(self._backend.all_reduce(asked, "max") > 0)
        return self.stop

    def require_agreement(self, model: torch.nn.Module, step: int, *, may_be_last: bool) -> None:
        """Makes sure that the weights which are about to be evaluated or saved are the same on all ranks.

        Raises:
            RuntimeError: They differ, and training was to go on (not `may_be_last`).
        """
        if self._agreement is not None:
            self._agreement.check(model, step, may_be_last=may_be_last)
            if self._agreement.disagreement is not None and not may_be_last:
                self.finish()  # the last checkpoint in which ranks agreed
                self._backend.barrier()  # the first rank that leaves ends all others
                self._agreement.end_run()

    def saves_after(self, step: int) -> bool:
        """Returns whether the interval of checkpoints, where it is one of steps, ends with this step."""
        interval = self._interval
        return interval is not None and interval.steps is not None and step % interval.steps == 0

    def save_is_due(self, step: int, *, is_over: bool) -> bool:
        """Returns whether a checkpoint is due after a step; the end of training (`is_over`) needs none."""
        if self._saver is None or self._interval is None:
            return False
        return self.stop or (not is_over and (self.saves_after(step) or self._save_is_agreed))

    def saves_here(self, *, is_over: bool) -> bool:
        """Returns whether this rank has a part in saving, which no rank has in weights that ranks do not agree on.

        Raises:
            RuntimeError: Ranks do not agree on their weights, and training was to go on (not `is_over`).
        """
        if self._saver is not None and is_over:
            self._saver.note_end_of_training()
        if self._agreement is not None and self._agreement.disagreement is not None:
            if not is_over:
                self._agreement.end_run()
            return False
        return self._saver is not None and self._saver.is_on

    def save(self, state: TrainingState) -> None:
        """Saves a checkpoint; waits until it is on the disk if the ranks are about to stop.

        Raises:
            OSError: This or the last checkpoint cannot be written, and that is to stop the run.
        """
        saver = self._saver
        if saver is not None:
            saver.save(lambda: state.checkpoint(keeps=saver.keeps), wait=self.stop)

    def finish(self) -> None:
        """Waits until the last checkpoint is on the disk.

        Raises:
            OSError: It cannot be written, and that is to stop the run.
        """
        if self._saver is not None:
            self._saver.finish()
