"""torch's DataParallel on a CPU: stand-ins for the copies between GPUs, and our adapter on top.

How batches are cut, replicas are made of the model, threads compute and outputs are put together is torch's own code,
unchanged. What a GPU would do is to copy a tensor to another one and back: broadcast, scatter and gather, whose
gradients are a sum, a concatenation and a cut.

PYTHONPATH=. launch/run.sh contract tests.dp_on_cpu:DPOnCpu
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch.autograd import Function

from backends.capabilities import PRECISIONS
from backends.dp import DPBackend
from backends.interface import Backend, BackendOptions
from backends.single import SingleBackend

NUM_DEVICES = 3


class _Broadcast(Function):
    """Copies tensors to each device; as torch's, it makes gradients of zeros of those that are missing."""

    @staticmethod
    def forward(ctx: Any, devices: Sequence[int], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.num_tensors = len(tensors)
        copies = [tensor.clone() for _ in devices for tensor in tensors]
        needs = ctx.needs_input_grad[1:] * len(devices)
        ctx.mark_non_differentiable(*(copy for copy, is_needed in zip(copies, needs, strict=True) if not is_needed))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sums = [torch.stack(gradients[place :: ctx.num_tensors]).sum(0) for place in range(ctx.num_tensors)]
        return None, *sums


class _Scatter:
    """Cuts a tensor into a share for each device; there are fewer shares where it has fewer rows than that."""

    @staticmethod
    def apply(devices: Sequence[int], sizes: None, dim: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.chunk(len(devices), dim)


class _Gather:
    @staticmethod
    def apply(device: int, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.cat(tensors, dim)


def _broadcast_coalesced(tensors: Sequence[torch.Tensor], devices: Sequence[int]) -> list[list[torch.Tensor]]:
    """Copies buffers; the first device has the tensors themselves."""
    return [[tensor if device == 0 else tensor.clone() for tensor in tensors] for device in devices]


class _Stream:
    """What a device computes. One device is after another, since they have one generator of random numbers."""

    turn = threading.Condition()
    next_device = 0

    def __init__(self, device: int) -> None:
        self.device = device
        if device == 0:
            _Stream.next_device = 0

    def __enter__(self) -> None:
        with self.turn:
            assert self.turn.wait_for(lambda: _Stream.next_device == self.device, timeout=60)

    def __exit__(self, *_: object) -> None:
        with self.turn:
            _Stream.next_device += 1
            self.turn.notify_all()


class _Accelerator:
    """What torch.accelerator says where there are devices."""

    def __init__(self, *, take_turns: bool) -> None:
        self.current_stream: Any = _Stream if take_turns else nullcontext

    def is_available(self) -> bool:
        return True

    def current_accelerator(self) -> torch.device:
        return torch.device("cpu")

    def device_index(self, device: int) -> Any:
        return nullcontext()


class _Torch:
    """torch for one module, but for one of its names."""

    def __init__(self, **replaced: Any) -> None:
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def devices_on_cpu(*, take_turns: bool = True) -> Iterator[None]:
    """Has DataParallel find as many devices as `NUM_DEVICES`, which are all this CPU."""
    names = ("data_parallel", "replicate", "scatter_gather", "parallel_apply", "_functions", "comm")
    modules = {name: sys.modules[f"torch.nn.parallel.{name}"] for name in names}
    generators = tuple(torch.Generator() for _ in range(NUM_DEVICES))
    changes: dict[str, dict[str, Any]] = {
        "data_parallel": {
            "torch": _Torch(device=lambda *_: torch.device("cpu")),
            "_get_available_device_type": lambda: "cpu",
            "_get_all_device_indices": lambda: list(range(NUM_DEVICES)),
            "_get_device_index": lambda device, *_: device,
        },
        "replicate": {"_get_device_index": lambda device, *_: device},
        "scatter_gather": {"Scatter": _Scatter, "Gather": _Gather},
        "parallel_apply": {
            "torch": _Torch(accelerator=_Accelerator(take_turns=take_turns)),
            "_get_device_index": lambda device, *_: device,
        },
        "_functions": {"Broadcast": _Broadcast},
        "comm": {"broadcast_coalesced": _broadcast_coalesced},
    }
    with ExitStack() as stack:
        for name, change in changes.items():
            stack.enter_context(mock.patch.multiple(modules[name], **change))
        stack.enter_context(mock.patch.object(torch.cuda, "default_generators", generators))
        yield


class DPOnCpu(DPBackend):
    """The adapter, from its construction to its end."""

    name = "dp on CPU"
    capabilities = replace(DPBackend.capabilities, precisions={"cpu": PRECISIONS})

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        self.device = torch.device("cpu")
        self._devices = ExitStack()
        self._devices.enter_context(devices_on_cpu())

    def shutdown(self) -> None:
        super().shutdown()
        self._devices.close()


class ZerosForUnused(DPOnCpu):
    """A fault: parameters that no replica has used keep the gradients of zeros that DataParallel gives them."""

    name = "dp with zeros for unused parameters"
    has_gradient = Backend.has_gradient
    step = SingleBackend.step


class MeanOfReplicas(DPOnCpu):
    """A fault: what is added up over replicas is divided by their number, as an average over ranks is."""

    name = "dp with the mean of replicas"

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss / NUM_DEVICES)
