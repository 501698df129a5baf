"""PyTorch's oldest answer to several GPUs: torch.nn.DataParallel, one process that drives all of them.

Idioms from https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html. Each forward pass copies the
model to every GPU, cuts the batch along its first dimension, computes each share in a thread of its own, and gathers
the outputs on the first GPU, where the loss is computed. The backward pass adds up the gradients of the copies there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch.nn.parallel import DataParallel
from typing_extensions import override

from backends.interface import BackendOptions, KnownFailure, StepResult
from backends.registry import BACKENDS
from backends.single import SingleBackend


class DPBackend(SingleBackend):
    """For the loop this is one rank, and what it computes is what one process computes."""

    name = "dp"
    capabilities = BACKENDS["dp"].capabilities
    known_failures: ClassVar = {
        "C46": KnownFailure(
            "buffers that change in a forward pass are those of the first replica, which sees a share of the batch",
            "https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html",
        )
    }

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        self.device = torch.device(options.device, 0)

    @override
    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        self._replicas = _Replicas(model, self.autocast)
        self.prepare_amp(self._replicas, optimizer)
        return self._replicas, optimizer

    @override
    def has_gradient(self, parameter: torch.nn.Parameter) -> bool:
        return parameter in self._replicas.used

    @override
    def step(self, max_grad_norm: float) -> StepResult:
        for parameter in self.model.parameters():
            if not self.has_gradient(parameter):
                parameter.grad = None
        result = super().step(max_grad_norm)
        self._replicas.used.clear()
        return result

    @override
    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return cast(torch.nn.Module, model.module)

    @property
    @override
    def num_devices(self) -> int:
        return len(self._replicas.device_ids)

    @override
    def effective_settings(self) -> dict[str, Any]:
        # torch copies and adds up through NCCL where it has it, and otherwise from device to device.
        transport = "nccl" if torch.distributed.is_nccl_available() else "copies"
        return {"transport": transport, "num_devices": self.num_devices}


class _Replicas(DataParallel[torch.nn.Module]):
    """DataParallel, put right where it does not compute what one process computes.

    - Its threads are told that autocast is on, but not in which dtype. Under bf16 they would compute in fp16, with
      which each thread begins (https://docs.pytorch.org/docs/stable/notes/amp_examples.html).
    - Parameters that no replica has used get gradients of zeros, and weight decay and momentum would move them.
    - A seed is given to all GPUs, which would then drop the same units, each in its share of a batch.

    Attributes:
        used: The parameters that a replica has used since the last step.
    """

    def __init__(self, module: torch.nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__(module)
        self.used: set[torch.nn.Parameter] = set()
        self._autocast = autocast

    @override
    def replicate(self, module: torch.nn.Module, device_ids: Sequence[int | torch.device]) -> list[torch.nn.Module]:
        replicas = super().replicate(module, device_ids)
        parts = cast("Sequence[Any]", [*replicas[0].modules()])
        # One node of the graph has made all copies, so the gradients that reach it are those of the copies.
        nodes = {copy.grad_fn for part in parts for copy in part._former_parameters.values()} - {None}
        for node in nodes:
            node.register_prehook(partial(self._note_used, [*module.parameters()]))
        return replicas

    def _note_used(self, parameters: list[torch.nn.Parameter], gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Notes whose copies got a gradient; after all copies on one device come those on the next."""
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                self.used.add(parameters[place % len(parameters)])

    @override
    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        for number, device in enumerate(self.device_ids[1 : len(replicas)], start=1):
            generator = torch.cuda.default_generators[device]
            generator.manual_seed(generator.initial_seed() + number)
        computations: list[Any] = [partial(self._compute, replica) for replica in replicas]
        return super().parallel_apply(computations, inputs, kwargs)

    def _compute(self, replica: torch.nn.Module, *inputs: Any, **kwargs: Any) -> Any:
        with self._autocast():
            return replica(*inputs, **kwargs)
