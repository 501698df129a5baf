"""What hand-written loops make in the same way: the optimizer and its schedule, and torch's mixed precision."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LambdaLR

from compare.bare.job import Settings


def make_optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Returns AdamW, which decays matrices only; fused, but for fp16, where not every library could skip a step."""
    groups = [
        {"params": [one for one in model.parameters() if one.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [one for one in model.parameters() if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, fused=settings.precision != "fp16")


def make_scheduler(optimizer: torch.optim.Optimizer, settings: Settings) -> LambdaLR:
    """Returns a linear warm-up and decay, as transformers.get_linear_schedule_with_warmup makes it."""
    warmup, num_steps = settings.num_warmup_steps, settings.num_steps

    def factor(step: int) -> float:
        return step / warmup if step < warmup else max(0.0, (num_steps - step) / max(1, num_steps - warmup))

    return LambdaLR(optimizer, factor)


def make_scaler(settings: Settings) -> torch.amp.GradScaler:
    """Returns a scaler of losses, which does nothing but under fp16."""
    is_used = settings.precision == "fp16"
    return torch.amp.GradScaler(settings.device, init_scale=settings.init_loss_scale, enabled=is_used)


def autocast(settings: Settings) -> torch.autocast:
    """Returns what computes in the precision of the job, in the thread that enters it."""
    return torch.autocast(settings.device, settings.dtype, enabled=settings.dtype is not None)
