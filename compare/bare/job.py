"""What a hand-written loop is given: a model, batches, numbers, and something to call after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tasks.interface import Batch

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Step(NamedTuple):
    """This rank's share of a global batch.

    Attributes:
        micro_batches: Its micro-batches, each with the factor of its loss: 1.0, or 0.0 where this rank has no sample
            left and computes one of another rank, only to take part.
        num_targets: The number of targets of the global batch, over all ranks.
    """

    micro_batches: list[tuple[Batch, float]]
    num_targets: int


class Outcome(NamedTuple):
    """What a loop says of a step that it has taken.

    Attributes:
        losses: What each micro-batch of this rank adds to the loss of the global batch, 0-d each.
        grad_norm: The norm of the averaged gradient before clipping, 0-d.
        learning_rate: The learning rate of the update.
        skipped: Whether the update was skipped because of an overflow under fp16.
    """

    losses: list[torch.Tensor]
    grad_norm: torch.Tensor
    learning_rate: float
    skipped: bool


@dataclass(frozen=True)
class Settings:
    """The numbers of a training.

    Attributes:
        device: "cpu" or "cuda".
        precision: "fp32", or "bf16" or "fp16" for autocast.
        accumulation_steps: The micro-batches of a rank in a step; a short global batch has fewer.
        num_steps: The number of optimizer steps.
        num_warmup_steps: The steps in which the learning rate rises from 0; it then falls to 0 linearly.
        learning_rate: Its highest value.
        weight_decay: The decay of weights; biases and LayerNorm have none.
        max_grad_norm: What the norm of the gradient is clipped to; infinite to clip nothing.
        init_loss_scale: The first loss scale under fp16.
    """

    device: str
    precision: str
    accumulation_steps: int
    num_steps: int
    num_warmup_steps: int
    learning_rate: float
    weight_decay: float
    max_grad_norm: float
    init_loss_scale: float

    @property
    def dtype(self) -> torch.dtype | None:
        """What autocast computes in; None if it is off."""
        return DTYPES[self.precision]


@dataclass(frozen=True)
class BareJob:
    """The work of one rank.

    Attributes:
        model: The model, on the CPU, with the same initial weights on every rank.
        steps: The steps of the training.
        loss_sum: Returns the sum of the loss over the targets of a batch, 0-d.
        end_step: To be called after each step.
        settings: The numbers of the training.
    """

    model: torch.nn.Module
    steps: Iterable[Step]
    loss_sum: Callable[[torch.nn.Module, Batch], torch.Tensor]
    end_step: Callable[[Outcome], None]
    settings: Settings
