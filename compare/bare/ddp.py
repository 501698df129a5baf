"""torch's DistributedDataParallel (https://docs.pytorch.org/docs/stable/notes/ddp.html)."""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from compare.bare.job import BareJob, Outcome
from compare.bare.parts import autocast, make_optimizer, make_scaler, make_scheduler


def train(job: BareJob) -> None:
    """Takes all steps of the training."""
    settings, device = job.settings, torch.device(job.settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = DistributedDataParallel(job.model.to(device).train(), broadcast_buffers=False, gradient_as_bucket_view=True)
    optimizer = make_optimizer(model, settings)
    scheduler = make_scheduler(optimizer, settings)
    scaler = make_scaler(settings)
    world_size = dist.get_world_size()
    for step in job.steps:
        losses = []
        for number, (batch, weight) in enumerate(step.micro_batches, start=1):
            is_last = number == len(step.micro_batches)
            with nullcontext() if is_last else model.no_sync():
                with autocast(settings):
                    loss = job.loss_sum(model, batch.to(device)) * weight / step.num_targets
                scaler.scale(loss * world_size).backward()  # type: ignore[no-untyped-call]
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
    dist.barrier()
    dist.destroy_process_group()
