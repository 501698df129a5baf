"""Horovod (https://horovod.readthedocs.io/en/stable/pytorch.html)."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from compare.bare.job import BareJob, Outcome
from compare.bare.parts import autocast, make_optimizer, make_scaler, make_scheduler


def train(job: BareJob) -> None:
    """Takes all steps of the training."""
    settings, device = job.settings, torch.device(job.settings.device)
    hvd.init()
    if device.type == "cuda":
        torch.cuda.set_device(hvd.local_rank())
    model = job.model.to(device).train()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(model, settings),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=settings.accumulation_steps,
    )
    scheduler = make_scheduler(optimizer, settings)
    scaler = make_scaler(settings)
    for step in job.steps:
        losses = []
        if len(step.micro_batches) != optimizer.backward_passes_per_step:  # the global batch is short
            optimizer.set_backward_passes_per_step(len(step.micro_batches))
        for batch, weight in step.micro_batches:
            with autocast(settings):
                loss = job.loss_sum(model, batch.to(device)) * weight / step.num_targets
            scaler.scale(loss * hvd.size()).backward()
            losses.append(loss.detach())
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        scale, learning_rate = scaler.get_scale(), float(scheduler.get_last_lr()[0])
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not (skipped := scaler.get_scale() < scale):
            scheduler.step()
        job.end_step(Outcome(losses, norm, learning_rate, skipped))
    hvd.shutdown()
