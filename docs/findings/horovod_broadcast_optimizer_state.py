"""Horovod's broadcast_optimizer_state trains: on a fresh optimizer it takes a step with zero gradients.

horovodrun -np 2 --gloo --network-interfaces lo python docs/findings/horovod_broadcast_optimizer_state.py
"""

import sys

import horovod.torch as hvd
import torch

hvd.init()
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1)

hvd.broadcast_optimizer_state(optimizer, root_rank=0)

steps = int(optimizer.state[weight]["step"]) if optimizer.state else 0
as_described = weight.item() != 1 and steps == 1
if hvd.rank() == 0:
    print(f"weight 1 became {weight.item():.4f}, Adam's counter stands at {steps}, the gradient is {weight.grad}")
    print("as described" if as_described else "changed: weight and counter should be 0.9990 and 1")
sys.exit(0 if as_described else 1)
