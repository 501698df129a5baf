"""torch's FSDP2 (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from compare.bare.job import BareJob, Outcome
from compare.bare.parts import autocast, make_optimizer, make_scheduler


def train(job: BareJob) -> dict[str, torch.Tensor]:
    """Takes all steps of the training, and returns the whole weights."""
    settings, device = job.settings, torch.device(job.settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = job.model.to(device).train()
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    for layer in (layer for layers in lists for layer in layers):
        fully_shard(layer)
    sharded = fully_shard(model, reshard_after_forward=False)
    for module in (module for module in model.modules() if isinstance(module, FSDPModule)):
        module.set_force_sum_reduction_for_comms(device.type == "cpu")
    optimizer = make_optimizer(model, settings)
    scheduler = make_scheduler(optimizer, settings)
    world_size = dist.get_world_size()
    for step in job.steps:
        losses = []
        for number, (batch, weight) in enumerate(step.micro_batches, start=1):
            sharded.set_requires_gradient_sync(number == len(step.micro_batches))
            with autocast(settings):
                loss = job.loss_sum(model, batch.to(device)) * weight / step.num_targets
            (loss * world_size).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        learning_rate = float(scheduler.get_last_lr()[0])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        job.end_step(Outcome(losses, norm.full_tensor(), learning_rate, False))  # type: ignore[attr-defined]
    whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in model.state_dict().items()}
    dist.barrier()
    dist.destroy_process_group()
    return whole
