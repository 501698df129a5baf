"""An unnamed hvd.allreduce deadlocks when ranks have started different numbers of operations before it.

    horovodrun -np 2 --gloo --network-interfaces lo python docs/findings/horovod_unnamed_allreduce.py

Rank 0 uses both layers, rank 1 only the first, so one backward pass starts two reductions of
gradients here and one there. The loss, reduced next, gets its name from a counter of operations.
"""

import sys
import time

import horovod.torch as hvd
import torch

hvd.init()
layers = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
parameters = [(f"layer{i}", layer.weight) for i, layer in enumerate(layers)]
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in parameters]), named_parameters=parameters)


def returns(handle: int, seconds: float) -> bool:
    """Waits up to `seconds` for an operation to complete."""
    deadline = time.monotonic() + seconds
    while not hvd.poll(handle) and time.monotonic() < deadline:
        time.sleep(0.01)
    return hvd.poll(handle)


loss = sum(layer(torch.ones(1, 1)).sum() for layer in layers[: 2 - hvd.rank()])
loss.backward()
named = returns(hvd.allreduce_async(loss.detach(), name="loss"), 3)
handle = hvd.allreduce_async(loss.detach())
unnamed = returns(handle, 3)
print(f"rank {hvd.rank()}: named returned: {named}; unnamed, operation {handle}, returned: {unnamed}", flush=True)
verdict = torch.tensor(float(named and not unnamed))
as_described = bool(hvd.allreduce(verdict, name="verdict", op=hvd.Min))  # also keeps each until the other is here
if hvd.rank() == 0:
    print("as described" if as_described else "changed: named should return within 3 s, unnamed should not")
sys.exit(0 if as_described else 1)
