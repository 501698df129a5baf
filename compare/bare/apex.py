"""NVIDIA Apex up to tag 25.04 (https://nvidia.github.io/apex/amp.html, https://nvidia.github.io/apex/parallel.html)."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from apex import amp
from apex.parallel import DistributedDataParallel

from compare.bare.job import BareJob, Outcome
from compare.bare.parts import make_optimizer, make_scheduler


def train(job: BareJob) -> None:
    """Takes all steps of the training."""
    settings, device = job.settings, torch.device(job.settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = job.model.to(device).train()
    optimizer = make_optimizer(model, settings)
    scheduler = make_scheduler(optimizer, settings)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1" if settings.precision == "fp16" else "O0")
    model = DistributedDataParallel(model)
    world_size = dist.get_world_size()
    for step in job.steps:
        losses = []
        for number, (batch, weight) in enumerate(step.micro_batches, start=1):
            is_last = number == len(step.micro_batches)
            if is_last:  # in this and every case, before the forward pass
                model.enable_allreduce()
            else:
                model.disable_allreduce()
            loss = job.loss_sum(model, batch.to(device)) * weight / step.num_targets
            with amp.scale_loss(loss * world_size, optimizer, delay_unscale=not is_last) as scaled_loss:
                scaled_loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), settings.max_grad_norm)
        learning_rate, skipped = float(scheduler.get_last_lr()[0]), settings.precision == "fp16" and not norm.isfinite()
        optimizer.step()
        optimizer.zero_grad()
        if not skipped:
            scheduler.step()
        job.end_step(Outcome(losses, norm, learning_rate, skipped))
    dist.barrier()
    dist.destroy_process_group()
