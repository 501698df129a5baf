"""One process (https://docs.pytorch.org/docs/stable/notes/amp_examples.html)."""

from __future__ import annotations

import torch

from compare.bare.job import BareJob, Outcome
from compare.bare.parts import autocast, make_optimizer, make_scaler, make_scheduler


def train(job: BareJob) -> None:
    """Takes all steps of the training."""
    settings, device = job.settings, torch.device(job.settings.device)
    model = job.model.to(device).train()
    optimizer = make_optimizer(model, settings)
    scheduler = make_scheduler(optimizer, settings)
    scaler = make_scaler(settings)
    for step in job.steps:
        losses = []
        for batch, weight in step.micro_batches:
            with autocast(settings):
                loss = job.loss_sum(model, batch.to(device)) * weight / step.num_targets
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        scale, learning_rate = scaler.get_scale(), float(scheduler.get_last_lr()[0])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not (skipped := scaler.get_scale() < scale):
            scheduler.step()
        job.end_step(Outcome(losses, norm, learning_rate, skipped))
