"""DeepSpeed's ZeRO-1 and ZeRO-2 forget all micro-batches but the last, unless they are told which one ends a step.

    torchrun --standalone --nproc-per-node=2 docs/findings/deepspeed_accumulation.py

One step of SGD with a learning rate of 1, on weights of 0, after three backward passes with gradients of 1, 2 and 4.
"""

import os
import sys

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["LOCAL_WORLD_SIZE"]}

import deepspeed
import torch
import torch.distributed as dist

GRADIENTS = (1.0, 2.0, 4.0)


def weight_after_a_step(*, stage: int, tells: bool) -> float:
    """Trains a layer for a step and returns one of its weights, which are equal."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # by default it clips to a norm of 1
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    for gradient in GRADIENTS:
        if tells:
            engine.set_gradient_accumulation_boundary(gradient == GRADIENTS[-1])
        engine.backward(engine(torch.full((1, 4), gradient)).sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(model.weight, enabled=stage == 3):
        return model.weight.flatten()[0].item()


# It would first build a library for memory that ranks share, which takes a compiler and a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", verbose=False)
found = {}
for stage in (1, 2, 3):
    found[stage] = tuple(weight_after_a_step(stage=stage, tells=tells) for tells in (True, False))
    if dist.get_rank() == 0:
        told, not_told = found[stage]
        print(f"ZeRO-{stage}: the weight is {told} if it is told which micro-batch is the last, {not_told} if not")
as_described = found == {1: (-7.0, -4.0), 2: (-7.0, -4.0), 3: (-7.0, -7.0)}
if dist.get_rank() == 0:
    print("as described" if as_described else "changed: expected -7, and -4 where ZeRO-1 and ZeRO-2 are not told")
dist.barrier()
sys.stdout.flush()
os._exit(0 if as_described else 1)  # leaving Python normally after Gloo aborts now and then
