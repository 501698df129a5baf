"""DeepSpeed (https://deepspeed.readthedocs.io), ZeRO stage 1."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from compare.bare.job import BareJob, Outcome
from compare.bare.parts import autocast, make_optimizer, make_scheduler


def train(job: BareJob) -> dict[str, torch.Tensor]:
    """Takes all steps of the training, and returns the weights."""
    settings = job.settings
    os.environ |= {"DS_ACCELERATOR": settings.device, "LOCAL_SIZE": os.environ["LOCAL_WORLD_SIZE"]}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    optimizer = make_optimizer(job.model, settings)
    scheduler = make_scheduler(optimizer, settings)
    in_bf16 = {"enabled": settings.precision == "bf16", "dtype": "bfloat16", "lower_precision_safe_modules": []}
    engine, *_ = deepspeed.initialize(
        model=job.model.train(),
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": settings.max_grad_norm,
            "zero_optimization": {"stage": 1},
            "torch_autocast": in_bf16,
        },
    )
    world_size = dist.get_world_size()
    for step in job.steps:
        losses = []
        for number, (batch, weight) in enumerate(step.micro_batches, start=1):
            engine.set_gradient_accumulation_boundary(number == len(step.micro_batches))
            with autocast(settings):
                loss = job.loss_sum(engine, batch) * weight / step.num_targets
            engine.backward(loss * world_size)
            losses.append(loss.detach())
        learning_rate = float(scheduler.get_last_lr()[0])
        engine.step()
        scheduler.step()
        job.end_step(Outcome(losses, engine.get_global_grad_norm(), learning_rate, False))
    dist.barrier()
    dist.destroy_process_group()
    return job.model.state_dict()
