"""A process group of one process, which stands for rank 0 of a world of any size: for dry runs.

Nothing is sent. A collective counts its bytes and returns at once, as if all other ranks had what this one has; sums
are those of this rank alone. torch has such a group for its own tests (torch.testing._internal.distributed.fake_pg),
but the futures of its collectives hold no tensors, which DistributedDataParallel refuses. This one is a ProcessGroup
in Python, as https://docs.pytorch.org/docs/stable/distributed.html#third-party-backends describes.
"""

# torch declares each method several times, in forms that it calls no Python class by.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from typing_extensions import override

_NAME = "pretended"
_THREADS_OF_GLOO = 2  # torch/csrc/distributed/c10d/ProcessGroupGloo.hpp


class PretendedGroup(dist.ProcessGroup):
    """Rank 0 of a world whose other ranks do not exist.

    Attributes:
        entered: How many bytes have entered each operation: those of the whole, where ranks hold parts.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(0, world_size)  # type: ignore[call-arg,arg-type]
        self.entered = Counter[str]()
        self._threads = cycle([ThreadPoolExecutor(1) for _ in range(_THREADS_OF_GLOO)])

    def getBackendName(self) -> str:
        """Returns what effective settings call the transport."""
        return _NAME

    @property
    @override
    def group_name(self) -> Any:
        return distributed_c10d._get_process_group_name(self)

    @override
    def allreduce(self, tensors: Any, options: Any = None) -> dist.Work:
        return self._done("allreduce", tensors, tensors)

    @override
    def allreduce_coalesced(self, tensors: Any, options: Any = None) -> dist.Work:
        return self._done("allreduce", tensors, tensors)

    @override
    def broadcast(self, tensors: Any, options: Any = None) -> dist.Work:
        return self._done("broadcast", tensors, tensors)

    @override
    def barrier(self, options: Any = None) -> dist.Work:
        return self._done("barrier", [], [])

    @override
    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> dist.Work:
        for parts, own in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(own)
        return self._done("allgather", [part for parts in outputs for part in parts], outputs)

    @override
    def _allgather_base(self, whole: Any, part: Any, options: Any = None) -> dist.Work:
        parts = whole.view(self.size(), -1)
        parts[0].copy_(part.view(-1))  # which may be its own place
        parts[1:].copy_(parts[0])
        # gloo makes the copy in one of its threads in turn, each of which has memory of its own to take it from. To a
        # profiler, which sees this thread alone, as much is shown; it is never written to, and so takes no memory.
        copy = next(self._threads).submit(_copy_of_gloo, whole).result()
        seen = torch.empty_like(whole) if copy is not None else None
        return self._done("allgather_base", [whole], [whole, copy, seen])

    @override
    def _reduce_scatter_base(self, part: Any, whole: Any, options: Any = None) -> dist.Work:
        copy = _copy_of_gloo(whole)
        part.view(-1).copy_(whole.view(-1)[: part.numel()])
        return self._done("reduce_scatter_base", [whole], [part, copy])

    # As torch calls them since 2.13.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def _done(self, operation: str, tensors: Any, result: Any) -> dist.Work:
        self.entered[operation] += sum(one.numel() * one.element_size() for one in tensors)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(result)
        return cast(dist.Work, _distributed_c10d._create_work_from_future(future))  # type: ignore[attr-defined]


def _copy_of_gloo(whole: torch.Tensor) -> torch.Tensor | None:
    """Returns what gloo takes besides: it gathers into a copy of the whole, and scatters from one; NCCL needs none.

    Memory that nobody has written to is not resident, so the copy is written. Whoever holds the work of the collective
    holds the copy, too.
    """
    return whole.clone() if whole.device.type == "cpu" else None


def pretend_group(world_size: int) -> PretendedGroup:
    """Makes this process rank 0 of so many ranks; the group is torch's default group from then on."""
    group = PretendedGroup(world_size)
    dist.Backend.register_backend(_NAME, lambda store, rank, size, timeout: group, devices=["cpu", "cuda"])
    store = _distributed_c10d.HashStore()
    dist.init_process_group(_NAME, store=store, rank=0, world_size=world_size)
    return group
