"""Lightning Fabric (https://lightning.ai/docs/fabric/stable/), in a loop as its documentation has it."""

from __future__ import annotations

from itertools import count

import torch
from lightning_fabric import Fabric, seed_everything
from torch.utils.data import DataLoader
from transformers import get_scheduler

from compare.race.peers.work import PeerJob

_PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def train(job: PeerJob) -> None:
    """Trains the model of a job."""
    config, num_micro_steps = job.config, job.config.gradient_accumulation_steps
    fabric = Fabric(accelerator=config.device, devices=config.num_processes, precision=_PRECISIONS[config.precision])
    fabric.launch()
    seed_everything(config.seed, verbose=False)
    compiled = torch.compile(job.model) if config.torch_compile else job.model
    model, optimizer = fabric.setup(compiled, job.optimizer)
    schedule = get_scheduler(config.lr_scheduler, job.optimizer, job.num_warmup_steps, job.num_steps)
    loader = fabric.setup_dataloaders(
        DataLoader(
            job.dataset,
            batch_size=config.micro_batch_size,
            shuffle=True,
            collate_fn=job.collate,
            num_workers=config.dataloader_num_workers,
        )
    )
    model.train()
    job.steps.begin()
    step = 0
    for _ in count():
        for number, batch in enumerate(loader, start=1):
            is_last = number % num_micro_steps == 0 or number == len(loader)
            job.steps.count(batch["attention_mask"])
            with fabric.no_backward_sync(model, enabled=not is_last):
                fabric.backward(model(**batch).loss / num_micro_steps)
            if not is_last:
                continue
            if config.max_grad_norm > 0:
                fabric.clip_gradients(model, optimizer, max_norm=config.max_grad_norm, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            job.steps.end_step()
            step += 1
            if step == job.num_steps:
                return
