"""Counting what enters a communication library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Of the functional collectives, what sends nothing.
_SEND_NOTHING = ("wait_tensor", "wrap_tensor_autograd")

Count = Callable[[str, int], None]
"""Takes the name of an operation and its number of elements, those of the whole where ranks hold parts."""


def count_torch_traffic(count: Count) -> TorchDispatchMode:
    """Counts every collective of torch.distributed: those of DDP's reducer, too, pass through the dispatcher."""
    return _TorchTraffic(count)


def counted(function: Callable[..., Any], operation: str, count: Count) -> Callable[..., Any]:
    """Wraps a function of a library whose first argument holds the tensors that it sends."""

    def call(tensors: Any, *arguments: Any, **options: Any) -> Any:
        count(operation, _num_elements(tensors))
        return function(tensors, *arguments, **options)

    return call


class _TorchTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, count: Count) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0].strip("_")
        if function.namespace in ("c10d", "_c10d_functional") and name not in _SEND_NOTHING:
            # The whole is the input of a reduce-scatter and the output of an all-gather.
            whole = max(_num_elements(argument) for argument in args[:2])
            if function.namespace == "_c10d_functional" and name.startswith("all_gather"):
                whole *= args[1]  # the number of ranks; the output is no argument
            self._count(name, whole)
        return function(*args, **(kwargs or {}))


def _num_elements(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.numel()
    return sum(_num_elements(item) for item in argument) if isinstance(argument, (list, tuple)) else 0
