"""DeepSpeed's ZeRO-1 and ZeRO-2 move a parameter that no rank used; DDP and a single process leave it alone.

    torchrun --standalone --nproc-per-node=2 docs/findings/deepspeed_unused_parameter.py

Three steps of SGD with weight decay, in which the loss depends on the weight and never on the bias.
"""

import os
import sys

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["LOCAL_WORLD_SIZE"]}

import deepspeed
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def bias_after_training(stage: int | None) -> float:
    """Trains a layer whose bias is not used, with DDP where there is no stage; returns the bias, 1 at first."""
    layer = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(layer.bias)
    layer.forward = lambda inputs: inputs @ layer.weight
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.1)
    if stage is None:
        model = DistributedDataParallel(layer, find_unused_parameters=True)
        backward, step = torch.Tensor.backward, sgd.step
    else:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,  # by default it clips to a norm of 1
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        model, *_ = deepspeed.initialize(model=layer, optimizer=sgd, config=config)
        backward, step = model.backward, model.step
    for _ in range(3):
        backward(model(torch.ones(1, 1)).sum())
        step()
        layer.zero_grad()
    return layer.bias.item()


# It would first build a library for memory that ranks share, which takes a compiler and a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", verbose=False)
ddp, *zero = [bias_after_training(stage) for stage in (None, 1, 2)]
as_described = ddp == 1 and all(bias != 1 for bias in zero)
if dist.get_rank() == 0:
    print(f"unused parameter after 3 steps: DDP {ddp:.4f}, ZeRO-1 {zero[0]:.4f}, ZeRO-2 {zero[1]:.4f}")
    print("as described" if as_described else "changed: DeepSpeed alone should have moved it")
dist.barrier()
sys.stdout.flush()
os._exit(0 if as_described else 1)  # leaving Python normally after Gloo aborts now and then
