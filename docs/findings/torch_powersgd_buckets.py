"""PowerSGD's hook calls collectives from threads of gloo, so that ranks call them in different orders.

    python docs/findings/torch_powersgd_buckets.py

Two ranks with twelve buckets take twelve steps, three times with torch's hook as it is, and once with one that waits
for each bucket.
"""

import multiprocessing
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def _waiting(state, bucket):
    average = powerSGD_hook(state, bucket)
    average.wait()
    return average


def _train(rank, port, hook):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=10))
    torch.set_num_threads(1)
    layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)))
    model = DistributedDataParallel(layers, bucket_cap_mb=1)
    model.register_comm_hook(PowerSGDState(None, 4, start_powerSGD_iter=2), hook)
    for _ in range(12):
        model.zero_grad()
        model(torch.randn(16, 512)).square().mean().backward()
    dist.barrier()
    os._exit(0)


def _ends_well(hook):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [multiprocessing.get_context("spawn").Process(target=_train, args=(rank, port, hook)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(40)
        rank.kill()
        rank.join()
    return all(rank.exitcode == 0 for rank in ranks)


if __name__ == "__main__":
    as_it_is = [_ends_well(powerSGD_hook) for _ in range(3)]
    waited = _ends_well(_waiting)
    print(f"as it is: {sum(as_it_is)} of 3 trainings ended; waiting for each bucket: {int(waited)} of 1")
    print("as described" if waited and not all(as_it_is) else "changed: expected trainings that abort or hang")
