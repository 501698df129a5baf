"""Membership in a torch.distributed process group, shared by the adapters that communicate through one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from typing_extensions import override

from backends.interface import Backend, BackendOptions

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def transport_for(device: str) -> str:
    """Returns the transport for tensors: NCCL refuses two ranks on one GPU; gloo accepts CUDA tensors, but is slow."""
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "nccl" if device == "cuda" and num_local_ranks <= torch.cuda.device_count() else "gloo"


def all_reduce_in_group(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """Reduces a copy of `tensor` over the default group, which must exist."""
    reduced = tensor.clone(memory_format=torch.contiguous_format)  # NCCL refuses any other
    dist.all_reduce(reduced, op=_REDUCE_OPS[op])
    return reduced


def broadcast_from_first(tensors: Iterable[torch.Tensor]) -> None:
    """Gives all ranks the values of rank 0, in place, over the default group, which must exist."""
    for tensor in tensors:
        values = tensor.detach().contiguous()  # NCCL refuses any other
        dist.broadcast(values, src=0)
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values)


class TorchGroupBackend(Backend):
    """The part of an adapter that joins and leaves the group which RANK, LOCAL_RANK and WORLD_SIZE describe."""

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device(options.device)
        if options.device == "cuda":
            self.device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():  # a dry run has made a group that is only pretended
            transport = transport_for(options.device)
            dist.init_process_group(
                transport,
                timeout=timedelta(seconds=options.timeout_seconds),
                device_id=self.device if transport == "nccl" else None,
            )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    @classmethod
    @override
    def can_pretend(cls, options: BackendOptions) -> bool:
        return True

    @override
    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return all_reduce_in_group(tensor, op)

    @override
    def barrier(self) -> None:
        dist.barrier()

    def leave_group(self) -> None:
        """Destroys the group; a wrapper that is still left then sometimes aborts the process."""
        dist.barrier()
        dist.destroy_process_group()
