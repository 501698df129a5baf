"""Horovod's DistributedOptimizer forgets the optimizer it was given: no state, and the defaults of its class.

    horovodrun -np 2 --gloo --network-interfaces lo python docs/findings/horovod_new_optimizer.py

The parameter groups are taken over; momentum gathered so far is not, and a group added later
gets the learning rate and momentum of torch.optim.SGD's signature.
"""

import sys

import horovod.torch as hvd
import torch

hvd.init()
weight, late = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
original = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
weight.grad = torch.ones(1)
original.step()

wrapped = hvd.DistributedOptimizer(original, named_parameters=[("weight", weight), ("late", late)])
wrapped.add_param_group({"params": [late]})

as_described = len(wrapped.state) == 0 and wrapped.defaults["lr"] != 0.5 and wrapped.defaults["momentum"] == 0
if hvd.rank() == 0:
    for name, optimizer in (("original", original), ("wrapped", wrapped)):
        defaults = {key: optimizer.defaults[key] for key in ("lr", "momentum")}
        print(f"{name}: momentum buffers of {len(optimizer.state)} parameter(s), defaults {defaults}")
    rates = [(group["lr"], group["momentum"]) for group in wrapped.param_groups]
    print(f"lr and momentum of the old group and of one added after wrapping: {rates}")
    print("as described" if as_described else "changed: state or defaults were taken over")
sys.exit(0 if as_described else 1)
