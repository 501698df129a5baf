"""Gradients that travel in fewer bytes, by communication hooks of torch's DistributedDataParallel.

The hooks are torch's own: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html. DDP calls one with each bucket of
gradients, and leaves the average to it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from backends.interface import BackendOptions
from backends.traffic import count_for_this_thread

# Of the matrices that PowerSGD sends in place of gradients. From 3 on, torch makes columns orthogonal by a QR
# factorization, which does not divide by the norm of a column, and so not by zero.
POWERSGD_RANK = 4
# As few as torch allows: DDP arranges its buckets anew after its first step, and errors belong to a place in a bucket.
POWERSGD_EXACT_STEPS = 2

_HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


def compress_gradients(wrapped: DistributedDataParallel, options: BackendOptions) -> None:
    """Has a wrapper average gradients as `options.grad_compression` says. One rank alone sends nothing.

    Args:
        wrapped: A wrapper that has no hook yet.
        options: What the launcher asked for.
    """
    if options.grad_compression == "none" or dist.get_world_size() == 1:
        return
    if options.grad_compression == "powersgd":
        state = PowerSGDState(
            None,
            matrix_approximation_rank=POWERSGD_RANK,
            start_powerSGD_iter=POWERSGD_EXACT_STEPS,
            random_seed=options.seed,
        )
        wrapped.register_comm_hook(state, lambda state, bucket: _finished_power_sgd(state, bucket))
        return
    hook = _HOOKS[options.grad_compression]
    # A lambda, since without CUDA, DDP refuses the hook for bf16 by its name. gloo reduces bfloat16.
    wrapped.register_comm_hook(None, lambda group, bucket: hook(group, bucket))


def compression_of(wrapped: DistributedDataParallel, options: BackendOptions) -> dict[str, str]:
    """Returns the setting of a wrapper for a record: what it compresses to, if it has a hook; nothing by default."""
    if options.grad_compression == "none":
        return {}
    return {"grad_compression": options.grad_compression if wrapped._comm_hooks else "none"}


def _finished_power_sgd(state: PowerSGDState, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Calls torch's hook for PowerSGD, and waits until the bucket is averaged.

    The hook reduces its matrices one after the other, each from a thread of gloo. With a second bucket on its way,
    ranks would call these collectives in different orders.
    """
    is_compressed = state.iter >= state.start_powerSGD_iter
    average: torch.futures.Future[torch.Tensor] = powerSGD_hook(state, bucket)
    average.wait()
    if is_compressed:
        for matrices in (state.p_memory_dict, state.q_memory_dict):
            count_for_this_thread("allreduce", matrices[bucket.index()])
    return average
