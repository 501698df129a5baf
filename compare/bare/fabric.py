"""Lightning Fabric (https://lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html)."""

from __future__ import annotations

import os

import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.strategies import DDPStrategy

from compare.bare.job import BareJob, Outcome
from compare.bare.parts import make_optimizer, make_scaler, make_scheduler


def train(job: BareJob) -> None:
    """Takes all steps of the training."""
    settings = job.settings
    scaler = make_scaler(settings)
    precision = []
    if settings.precision == "bf16":
        precision = [MixedPrecision("bf16-mixed", settings.device)]
    elif settings.precision == "fp16":
        precision = [MixedPrecision("16-mixed", settings.device, scaler)]
    fabric = Fabric(
        accelerator=settings.device,
        devices=int(os.environ["WORLD_SIZE"]),
        plugins=[TorchElasticEnvironment(), *precision],
        strategy=DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True),
    )
    fabric.launch()
    model, optimizer = fabric.setup(job.model.train(), make_optimizer(job.model, settings))
    scheduler = make_scheduler(optimizer, settings)
    for step in job.steps:
        losses = []
        for number, (batch, weight) in enumerate(step.micro_batches, start=1):
            with fabric.no_backward_sync(model, enabled=number < len(step.micro_batches)):
                loss = job.loss_sum(model, batch.to(fabric.device)) * weight / step.num_targets
                fabric.backward(loss * fabric.world_size)
            losses.append(loss.detach())
        norm = fabric.clip_gradients(model, optimizer, max_norm=settings.max_grad_norm, error_if_nonfinite=False)
        scale, learning_rate = scaler.get_scale(), float(scheduler.get_last_lr()[0])
        optimizer.step()
        optimizer.zero_grad()
        if not (skipped := scaler.get_scale() < scale):
            scheduler.step()
        job.end_step(Outcome(losses, norm, learning_rate, skipped))
    fabric.barrier()
    dist.destroy_process_group()
