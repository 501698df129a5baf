"""Accelerate accepts mixed_precision="fp16" on the CPU, reports it, and computes in float32.

    python docs/findings/accelerate_fp16_on_cpu.py

The same layer under torch.autocast shows that torch itself can compute in fp16 there.
"""

import sys

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, mixed_precision="fp16")
layer = torch.nn.Linear(4, 4)
inner = []
layer.register_forward_hook(lambda module, inputs, output: inner.append(output.dtype))
prepared = accelerator.prepare(layer)

with accelerator.autocast():
    prepared(torch.ones(1, 4))
with torch.autocast("cpu", dtype=torch.float16):
    layer(torch.ones(1, 4))

as_described = accelerator.mixed_precision == "fp16" and inner[0] == torch.float32 and accelerator.scaler is None
print(f"Accelerate says {accelerator.mixed_precision}, its layers compute in {inner[0]}, scaler {accelerator.scaler}")
print(f"torch.autocast makes the same layer compute in {inner[-1]}")
print("as described" if as_described else "changed: fp16 is in force")
sys.exit(0 if as_described else 1)
