"""A scheduler prepared by Accelerate takes as many steps as there are processes, per optimizer step.

    ACCELERATE_USE_CPU=true torchrun --standalone --nproc-per-node=2 docs/findings/accelerate_scheduler.py

A learning rate planned to fall from 1 to 0 in six optimizer steps.
"""

import os
import sys

import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=6)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

rates = []
for _ in range(6):
    rates.append(round(scheduler.get_last_lr()[0], 2))
    accelerator.backward(model(torch.ones(1, 1)).mean())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()

planned = [round(1 - step / 6, 2) for step in range(6)]
twice_as_fast = [round(max(0, 1 - 2 * step / 6), 2) for step in range(6)]
accelerator.print(f"{accelerator.num_processes} processes, planned: {planned}")
accelerator.print(f"{accelerator.num_processes} processes, used:    {rates}")
accelerator.print("as described" if rates == twice_as_fast else f"changed: expected {twice_as_fast}")
accelerator.end_training()
sys.stdout.flush()
os._exit(0 if rates == twice_as_fast else 1)  # leaving Python normally after Gloo aborts now and then
