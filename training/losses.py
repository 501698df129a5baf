"""Losses of steps: left on the device at first, then summed over ranks for several steps at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

import torch

from backends.interface import Backend
from records.record import StepRecord
from training.plan import Plan
from watch.failures import FailureKind, PeerStopped

_MOST_SAMPLES_NAMED = 16


@dataclass(frozen=True)
class OpenStep:
    """A step whose loss and gradient norm are still on the device.

    Attributes:
        step: Its number, from 1.
        epoch: Its epoch, from 0.
        num_samples: The size of its global batch.
        learning_rate: The learning rate of its update.
        skipped: Whether all ranks skipped the update.
        losses: What each micro-batch of this rank adds to the loss of the global batch, 0-d each.
        grad_norm: The norm of the averaged gradient before clipping, 0-d.
    """

    step: int
    epoch: int
    num_samples: int
    learning_rate: float
    skipped: bool
    losses: list[torch.Tensor]
    grad_norm: torch.Tensor

    def loss_of_rank(self) -> torch.Tensor:
        """Returns what this rank adds to the loss of the global batch: 0-d float64."""
        # Each loss is converted before they are stacked: functions that Apex O1 replaces refuse to mix dtypes.
        return torch.stack([loss.double() for loss in self.losses]).sum()

    def close(self, loss: float, grad_norm: float) -> StepRecord:
        """Returns the record of the step, with the loss of all ranks."""
        return StepRecord(
            step=self.step,
            epoch=self.epoch,
            num_samples=self.num_samples,
            loss=finite(loss),
            grad_norm=finite(grad_norm),
            learning_rate=self.learning_rate,
            skipped=self.skipped,
        )


class OpenSteps:
    """The steps since the losses were last read. Reading them makes the rank wait for its device and for all ranks."""

    def __init__(self, backend: Backend, plan: Plan) -> None:
        self._backend = backend
        self._plan = plan
        self._steps: list[OpenStep] = []

    def add(self, step: OpenStep) -> None:
        """Adds the step that was just taken."""
        self._steps.append(step)

    def read(self, votes: list[bool]) -> tuple[list[StepRecord], list[float]]:
        """Sums the losses of the open steps over all ranks, with one reduction for all of them.

        Args:
            votes: What else is to be summed in the same reduction; equally many on all ranks.

        Returns:
            The records of the open steps, and the sum of each vote.
        """
        shares = torch.stack([step.loss_of_rank() for step in self._steps])
        if votes:
            shares = torch.cat([shares, shares.new_tensor(votes)])
        sums = self._backend.all_reduce(shares).tolist()
        losses, counted = sums[: len(self._steps)], sums[len(self._steps) :]
        norms = torch.stack([step.grad_norm.double() for step in self._steps]).tolist()
        records = [step.close(loss, norm) for step, loss, norm in zip(self._steps, losses, norms, strict=True)]
        return records, counted

    def require_finite(self, records: list[StepRecord]) -> None:
        """Makes sure that the losses and gradients of the open steps are finite.

        Gradients that overflow under fp16 are not an error: the loss scaler skips the update and lowers the scale.

        Args:
            records: What `read` returned.

        Raises:
            FloatingPointError: Some are not; all ranks raise it, and each says whether it was the cause.
        """
        for step, record in zip(self._steps, records, strict=True):
            if record.loss is None or (record.grad_norm is None and not record.skipped):
                self._explain(step, record)

    def clear(self) -> None:
        """Forgets the steps that were read."""
        self._steps.clear()

    def _explain(self, step: OpenStep, record: StepRecord) -> NoReturn:
        global_batch = self._plan.epoch(step.epoch)[(step.step - 1) % self._plan.steps_per_epoch]
        micro_batches = self._plan.micro_batches(global_batch, self._backend.rank)
        for micro_step, (micro_batch, loss) in enumerate(zip(micro_batches, step.losses, strict=True)):
            if not loss.isfinite():
                samples = ", ".join(map(str, micro_batch.sample_ids[:_MOST_SAMPLES_NAMED].tolist()))
                more = " ..." if len(micro_batch.sample_ids) > _MOST_SAMPLES_NAMED else ""
                raise FloatingPointError(
                    f"the loss of step {step.step} is {loss.item()} in micro-step {micro_step + 1}, "
                    f"training samples {samples}{more}; lower the learning rate, look at these samples, "
                    "or pass --on-nan skip"
                )
        if record.loss is not None:
            raise FloatingPointError(
                f"the gradient of step {step.step} is not finite, though its loss is; "
                "lower the learning rate, or pass --on-nan skip"
            )
        raise PeerStopped(f"its loss of step {step.step} is not finite", FailureKind.NONFINITE)


def finite(value: float | None) -> float | None:
    """Returns the value, or None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None
