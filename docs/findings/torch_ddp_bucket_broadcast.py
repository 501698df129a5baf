"""DDP communicates once where nobody asked it to: it broadcasts its bucket layout in the second forward.

    torchrun --standalone --nproc-per-node=2 docs/findings/torch_ddp_bucket_broadcast.py

Three steps, the collectives of each noted where the dispatcher sees them, also those made in C++.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Notes every collective with the number of elements of its first argument."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            noted.append((function.__name__.split(".")[0].strip("_"), sum(tensor.numel() for tensor in args[0])))
        return function(*args, **(kwargs or {}))


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 2), forward_sync_buffers=False)
in_forwards = []
for step in range(1, 4):
    noted = []
    with Collectives():
        loss = model(torch.ones(1, 2)).sum()
        in_forwards.append([name for name, _ in noted])
        loss.backward()
    if dist.get_rank() == 0:
        print(f"step {step}: {noted}, of these in the forward: {len(in_forwards[-1])}")

as_described = in_forwards == [[], ["broadcast", "broadcast"], []]
if dist.get_rank() == 0:
    print("as described" if as_described else "changed: expected two broadcasts in the second forward alone")
del model
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0 if as_described else 1)  # leaving Python normally after Gloo aborts now and then
