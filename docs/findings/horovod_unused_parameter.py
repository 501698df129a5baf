"""Horovod moves a parameter that no rank used; DDP and a single process leave it alone.

    horovodrun -np 2 --gloo --network-interfaces lo python docs/findings/horovod_unused_parameter.py

Three steps of SGD with weight decay, in which the loss depends on the weight and never on the bias.
"""

import os
import sys
import tempfile
import uuid

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def bias_after_training(wrap) -> float:
    """Trains a layer whose bias is not used and returns what became of the bias, 1 at first."""
    layer = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(layer.bias)
    layer.forward = lambda inputs: inputs @ layer.weight
    model, optimizer = wrap(layer, torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.1))
    for _ in range(3):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer.bias.item()


hvd.init()
meeting_point = hvd.broadcast_object(f"{tempfile.gettempdir()}/{uuid.uuid4()}")
dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=hvd.rank(), world_size=hvd.size())
alone = bias_after_training(lambda layer, sgd: (layer, sgd))
ddp = bias_after_training(lambda layer, sgd: (DistributedDataParallel(layer, find_unused_parameters=True), sgd))
dist.destroy_process_group()
horovod = bias_after_training(lambda layer, sgd: (layer, hvd.DistributedOptimizer(sgd, layer.named_parameters())))

as_described = alone == ddp == 1 and horovod != 1
if hvd.rank() == 0:
    print(f"unused parameter after 3 steps: alone {alone:.4f}, DDP {ddp:.4f}, Horovod {horovod:.4f}")
    print("as described" if as_described else "changed: Horovod alone should have moved it")
hvd.shutdown()
sys.stdout.flush()
os._exit(0 if as_described else 1)  # leaving Python normally after Gloo aborts now and then
