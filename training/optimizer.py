"""The optimizer, and the learning rate as a function of the updates taken so far."""

from __future__ import annotations

import contextlib
import importlib
import math

import torch

from records.config import RunConfig


def import_compiler() -> None:
    """Imports what torch imports for the first optimizer of a process, which takes as long as the rest of torch.

    A process whose copies will be ranks calls it, so that they need not (torch._compile._disable_dynamo imports it).
    """
    with contextlib.suppress(ModuleNotFoundError):  # its name is torch's own
        importlib.import_module("torch._dynamo")


def build_optimizer(config: RunConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Builds the optimizer of a run.

    Args:
        config: Names the optimizer and its hyper-parameters.
        model: Its trainable parameters are updated. Those with fewer than two dimensions, which are biases and the
            weights of LayerNorm, are not decayed.

    Returns:
        An optimizer with up to two parameter groups: decayed and not decayed.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    # The fused step is several times faster on a CPU. Under fp16 it would take over the skipping
    # from the loss scaler, and then not every library notices that a step was skipped.
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=config.precision != "fp16")


def learning_rate_factor(name: str, *, step: int, num_steps: int, num_warmup_steps: int) -> float:
    """Returns the factor of the learning rate for the update after `step` updates.

    The curves are those of transformers.get_scheduler: a linear warm-up from 0, then constant ("constant"),
    linear down to 0 ("linear"), or half a cosine down to 0 ("cosine").
    """
    if step < num_warmup_steps:
        return step / num_warmup_steps
    if name == "constant":
        return 1.0
    progress = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    if name == "linear":
        return max(0.0, 1.0 - progress)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
