"""Counting what enters a communication library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

# Of the functional collectives, what sends nothing.
_SEND_NOTHING = ("wait_tensor", "wrap_tensor_autograd")

Count = Callable[[str, int, int], None]
"""Takes the name of an operation, its number of elements and their bytes, those of the whole where ranks hold parts."""


def count_torch_traffic(count: Count) -> TorchDispatchMode:
    """Counts every collective of torch.distributed: those of DDP's reducer, too, pass through the dispatcher."""
    return _TorchTraffic(count)


def count_for_this_thread(operation: str, tensor: torch.Tensor) -> None:
    """Counts a collective that another thread has started on behalf of this one, whose own are all that is counted."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, _TorchTraffic):
            mode.count(operation, *_size(tensor))


def counted(function: Callable[..., Any], operation: str, count: Count) -> Callable[..., Any]:
    """Wraps a function of a library whose first argument holds the tensors that it sends."""

    def call(tensors: Any, *arguments: Any, **options: Any) -> Any:
        count(operation, *_size(tensors))
        return function(tensors, *arguments, **options)

    return call


class _TorchTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, count: Count) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = count

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0].strip("_")
        if function.namespace in ("c10d", "_c10d_functional") and name not in _SEND_NOTHING:
            # The whole is the input of a reduce-scatter and the output of an all-gather.
            whole = max(_size(argument) for argument in args[:2])
            # Of a functional all-gather, the output is no argument, but the number of ranks is.
            times = args[1] if function.namespace == "_c10d_functional" and name.startswith("all_gather") else 1
            self.count(name, whole[0] * times, whole[1] * times)
        return function(*args, **(kwargs or {}))


def _size(argument: Any) -> tuple[int, int]:
    """Returns the number of elements and of bytes of the tensors in an argument."""
    if isinstance(argument, torch.Tensor):
        return argument.numel(), argument.numel() * argument.element_size()
    sizes = [_size(item) for item in argument] if isinstance(argument, (list, tuple)) else []
    return sum(elements for elements, _ in sizes), sum(num_bytes for _, num_bytes in sizes)
