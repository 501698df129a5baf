"""Accelerate divides a short last accumulation window by the full configured length.

    python docs/findings/accelerate_short_window.py

Six equal micro-batches in windows of four: both windows should end with the same gradient.
"""

import sys

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
batches = torch.utils.data.DataLoader(torch.ones(6, 1), batch_size=1)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

gradients = []
for batch in batches:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).mean())
        if accelerator.sync_gradients:
            gradients.append(model.weight.grad.item())
        optimizer.step()
        optimizer.zero_grad()

as_described = gradients == [1.0, 0.5]
print(f"gradients that the optimizer steps with (4 micro-batches, then 2): {gradients}")
print("as described" if as_described else "changed: expected [1.0, 0.5]")
sys.exit(0 if as_described else 1)
