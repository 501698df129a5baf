"""Hugging Face Accelerate.

After the section on samples of variable size in
https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation: the loss is divided by what the whole step
has, and so multiplied by what Accelerate divides by.
"""

from __future__ import annotations

from contextlib import nullcontext

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradScalerKwargs

from compare.bare.job import BareJob, Outcome
from compare.bare.parts import make_optimizer, make_scheduler


def train(job: BareJob) -> None:
    """Takes all steps of the training."""
    settings = job.settings
    accelerator = Accelerator(
        cpu=settings.device == "cpu",
        mixed_precision="no" if settings.precision == "fp32" else settings.precision,
        gradient_accumulation_steps=settings.accumulation_steps,
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            GradScalerKwargs(init_scale=settings.init_loss_scale),
        ],
    )
    model, optimizer = accelerator.prepare(job.model.train(), make_optimizer(job.model, settings))
    scheduler = make_scheduler(optimizer, settings)
    divisor = accelerator.num_processes * accelerator.gradient_accumulation_steps
    for step in job.steps:
        losses = []
        for number, (batch, weight) in enumerate(step.micro_batches, start=1):
            is_last = number == len(step.micro_batches)
            with nullcontext() if is_last else accelerator.no_sync(model):
                with accelerator.autocast():
                    loss = job.loss_sum(model, batch.to(accelerator.device)) * weight / step.num_targets
                accelerator.backward(loss * divisor)
            losses.append(loss.detach())
        norm = accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        learning_rate = float(scheduler.get_last_lr()[0])
        optimizer.step()
        optimizer.zero_grad()
        if not (skipped := accelerator.optimizer_step_was_skipped):
            scheduler.step()
        job.end_step(Outcome(losses, norm, learning_rate, skipped))
    accelerator.end_training()
