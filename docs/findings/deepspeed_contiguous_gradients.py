"""Before 0.19.8, DeepSpeed's ZeRO-1 and ZeRO-2 reduce no gradient on CPUs with contiguous_gradients=False.

    torchrun --standalone --nproc-per-node=2 docs/findings/deepspeed_contiguous_gradients.py

One step of SGD with a learning rate of 1, on a weight of zeros whose gradient is 1 on rank 0 and 2 on rank 1.
"""

import os
import sys

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["LOCAL_WORLD_SIZE"]}

import deepspeed
import torch
import torch.distributed as dist


def weight_after_a_step(*, stage: int, contiguous: bool) -> list[float]:
    """Trains a layer of four weights for a step and returns them."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # by default it clips to a norm of 1
        "zero_optimization": {"stage": stage, "contiguous_gradients": contiguous},
        "zero_allow_untested_optimizer": True,
    }
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    engine.backward(engine(torch.full((1, 4), dist.get_rank() + 1.0)).sum())
    engine.step()
    return model.weight.detach().flatten().tolist()


# It would first build a library for memory that ranks share, which takes a compiler and a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", verbose=False)
average, own = [-1.5] * 4, [-1.0, -1.0, -2.0, -2.0]
is_repaired = tuple(map(int, deepspeed.__version__.split(".")[:3])) >= (0, 19, 8)
as_described = True
for stage in (1, 2):
    for contiguous in (True, False):
        weight = weight_after_a_step(stage=stage, contiguous=contiguous)
        as_described &= weight == (average if contiguous or is_repaired else own)
        if dist.get_rank() == 0:
            print(f"{deepspeed.__version__}, ZeRO-{stage}, contiguous_gradients={contiguous}: {weight}")
if dist.get_rank() == 0:
    print("as described" if as_described else f"changed: expected {average}, or {own} before 0.19.8 with False")
dist.barrier()
sys.stdout.flush()
os._exit(0 if as_described else 1)  # leaving Python normally after Gloo aborts now and then
