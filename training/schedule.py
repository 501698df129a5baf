"""The learning rate as a function of the optimizer steps taken so far."""

from __future__ import annotations

import math


def learning_rate_factor(name: str, *, step: int, num_steps: int, num_warmup_steps: int) -> float:
    """Returns what to multiply the learning rate by in the optimizer step after `step` successful ones.

    The curves are those of transformers.get_scheduler: a linear warm-up from 0, then constant,
    linear down to 0, or half a cosine down to 0.
    """
    if step < num_warmup_steps:
        return step / num_warmup_steps
    if name == "constant":
        return 1.0
    progress = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    if name == "linear":
        return max(0.0, 1.0 - progress)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
