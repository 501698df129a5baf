"""Adapters that must read no number of a tensor in `backward` and `step`: ``tests.unread:ddp``, and so on.

A GPU gives a number away only when it has finished all work. A CPU has nothing to wait for, so that methods which read
one are replaced meanwhile, and raise an error. What C++ reads is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from backends.interface import Backend, StepResult
from backends.registry import BACKENDS, load_backend

_READING = (
    *("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"),
    *("nonzero", "is_nonzero", "equal", "masked_select", "unique"),
)


def __getattr__(name: str) -> type[Backend]:
    """Makes the adapter when it is asked for, so that no other library must be installed."""
    if name not in BACKENDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _unread(load_backend(name))


@contextmanager
def reading_nothing() -> Iterator[None]:
    """Makes it a RuntimeError that this thread reads a number of a tensor inside."""
    with ExitStack() as stack:
        for name in _READING:
            stack.enter_context(mock.patch.object(torch.Tensor, name, _refusing(name, threading.get_ident())))
        yield


def _refusing(name: str, thread: int) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise RuntimeError(f"a number of a tensor is read by {name}")
        return method(tensor, *args, **kwargs)

    return read


def _unread(adapter: type[Backend]) -> type[Backend]:
    def backward(self: Backend, loss: torch.Tensor) -> None:
        with reading_nothing():
            adapter.backward(self, loss)

    def step(self: Backend, max_grad_norm: float) -> StepResult:
        with reading_nothing():
            return adapter.step(self, max_grad_norm)

    return type(f"Unread{adapter.__name__}", (adapter,), {"backward": backward, "step": step})
