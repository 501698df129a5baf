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
from torch.utils._python_dispatch import _disable_current_modes

from backends.interface import BackendOptions, UnsupportedError
from backends.traffic import count_for_this_thread

# Of the matrices that PowerSGD sends in place of gradients.
POWERSGD_RANK = 4
# Where torch makes columns orthogonal one after the other, as it does in half precision, it divides by their norms.
_NOT_ZERO = 1e-8
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
        scalars = [name for name, one in wrapped.module.named_parameters() if one.requires_grad and not one.ndim]
        if scalars:
            raise UnsupportedError(
                f"--grad-compression powersgd: torch's hook cannot send {scalars[0]}, which has no dimension; choose "
                "fp16 or bf16"
            )
        state = PowerSGDState(
            None,
            matrix_approximation_rank=POWERSGD_RANK,
            start_powerSGD_iter=POWERSGD_EXACT_STEPS,
            orthogonalization_epsilon=_NOT_ZERO,
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
    if state.iter < state.start_powerSGD_iter:
        return powerSGD_hook(state, bucket)
    before = state.total_numel_after_compression
    # Which of its collectives this thread would see depends on chance: they are counted together.
    with _disable_current_modes():
        average: torch.futures.Future[torch.Tensor] = powerSGD_hook(state, bucket)
        average.wait()
    num_elements = state.total_numel_after_compression - before
    count_for_this_thread("allreduce", bucket.buffer().new_empty(num_elements, device="meta"))
    return average
