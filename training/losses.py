"""Losses of steps: left on the device at first, then summed over ranks for several steps at once."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import islice
from typing import NoReturn

import torch

from backends.interface import Backend
from records.record import StepRecord
from training.plan import Plan
from watch.failures import FailureKind, PeerStopped

_MOST_SAMPLES_NAMED = 16
# Without --logging-steps. If steps become slower, the losses of so many are read late.
_MOST_STEPS_BETWEEN = 64


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
    """The steps since the losses were last read. Reading them makes the rank wait for its device and for all ranks.

    Args:
        backend: What sums over ranks.
        plan: Which samples a step has.
        logging_steps: After how many steps the losses are read; None for as many as take about a second, 64 at most.
    """

    def __init__(self, backend: Backend, plan: Plan, logging_steps: int | None) -> None:
        self._backend = backend
        self._plan = plan
        self._logging_steps = logging_steps
        self._steps: list[OpenStep] = []
        self._seconds = 0.0  # of the open steps
        self._seconds_before = 0.0  # of one of the steps that were read last
        self._interval = 1

    def add(self, step: OpenStep, seconds: float) -> None:
        """Adds the step that was just taken, and how long this rank took for it."""
        self._steps.append(step)
        self._seconds += seconds

    def are_due(self, step: int) -> bool:
        """Whether the losses are to be read after this step because of its number or of the time, on all ranks."""
        if self._logging_steps is not None:
            return step % self._logging_steps == 0
        return len(self._steps) >= self._interval

    def read(self, votes: list[bool]) -> tuple[list[StepRecord], list[float]]:
        """Sums the losses of the open steps over all ranks, with one reduction for all of them.

        Args:
            votes: What else is to be summed in the same reduction; equally many on all ranks.

        Returns:
            The records of the open steps, and the sum of each vote.
        """
        began, steps = time.perf_counter(), self._steps
        shares = _in_one([loss for step in steps for loss in step.losses])
        seconds = max(self._seconds_before, self._seconds / len(steps))
        # In whole microseconds, whose sum is exact, so that all ranks agree on what follows from it.
        shares = torch.cat([shares, shares.new_tensor([*votes, round(1e6 * seconds), 1])])
        *sums, microseconds, num_ranks = self._backend.all_reduce(shares).tolist()
        self._interval = _steps_in_a_second(1e-6 * microseconds / num_ranks)
        left = iter(sums)
        losses = [sum(islice(left, len(step.losses))) for step in steps]
        norms = _in_one([step.grad_norm for step in steps]).tolist()
        records = [step.close(loss, norm) for step, loss, norm in zip(steps, losses, norms, strict=True)]
        # What a GPU still had to do for these steps was waited for here.
        self._seconds_before = (self._seconds + time.perf_counter() - began) / len(steps)
        return records, list(left)

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
        self._seconds = 0.0

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


def _steps_in_a_second(seconds: float) -> int:
    """Returns how many steps of so many seconds take at most a second: a power of two, and few enough to see a change.

    There are few powers of two, and Horovod negotiates each length of a tensor once.
    """
    return 1 << (int(min(_MOST_STEPS_BETWEEN, max(1.0, 1 / max(seconds, 1e-6)))).bit_length() - 1)


def _in_one(numbers: list[torch.Tensor]) -> torch.Tensor:
    """Returns tensors of one element in one of float64, on their device."""
    if len({number.dtype for number in numbers}) > 1:  # functions that Apex O1 replaces refuse to mix dtypes
        numbers = [number.double() for number in numbers]
    return torch.stack(numbers).double().reshape(-1)


def finite(value: float | None) -> float | None:
    """Returns the value, or None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None
