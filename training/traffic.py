"""Counting the collectives of torch.distributed, those started from C++ included, and of Horovod."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def count_traffic(count: Callable[[str, int], None]) -> Iterator[None]:
    """Calls `count(operation, num_elements)` for every collective that this thread starts inside the context."""
    with ExitStack() as stack:
        stack.enter_context(_TorchTraffic(count))
        if "horovod.torch" in sys.modules:
            stack.enter_context(_horovod_traffic(count))
        yield


class _TorchTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every collective of torch.distributed; those of DDP's reducer go through the dispatcher, too."""

    def __init__(self, count: Callable[[str, int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in function.__name__:
            self._count(function.__name__.split(".")[0].strip("_"), _num_elements(args[0]))
        return function(*args, **(kwargs or {}))


def _num_elements(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.numel()
    return sum(_num_elements(item) for item in argument) if isinstance(argument, (list, tuple)) else 0


@contextmanager
def _horovod_traffic(count: Callable[[str, int], None]) -> Iterator[None]:
    """Counts every collective of Horovod; all of its Python functions call one of those that are replaced here."""
    from horovod.torch import mpi_ops

    operations = {
        "_allreduce_async": "allreduce",
        "_grouped_allreduce_async": "allreduce",
        "_broadcast_async": "broadcast",
        "_allgather_async": "allgather",
        "horovod_torch_barrier": "barrier",
    }
    with ExitStack() as stack:
        for name, operation in operations.items():
            module = mpi_ops if name.startswith("_") else mpi_ops.mpi_lib
            counted = _counted(getattr(module, name), operation, count)
            stack.enter_context(mock.patch.object(module, name, counted))
        yield


def _counted(function: Callable[..., Any], operation: str, count: Callable[[str, int], None]) -> Callable[..., Any]:
    def call(tensors: Any, *arguments: Any, **options: Any) -> Any:
        count(operation, _num_elements(tensors))
        return function(tensors, *arguments, **options)

    return call
