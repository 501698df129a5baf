"""One process, no communication: what every other backend is compared with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from typing_extensions import override

from backends.interface import BackendOptions
from backends.registry import BACKENDS
from backends.torch_amp import TorchAmpBackend


class SingleBackend(TorchAmpBackend):
    name = "single"
    capabilities = BACKENDS["single"].capabilities

    @classmethod
    @override
    def can_pretend(cls, options: BackendOptions) -> bool:
        return True  # it has no others

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        self.rank, self.local_rank, self.world_size = 0, 0, 1
        self.device = torch.device(options.device)

    @override
    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        self.prepare_amp(model, optimizer)
        return model, optimizer

    @override
    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return tensor

    @override
    def barrier(self) -> None:
        pass

    @override
    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    @override
    def effective_settings(self) -> dict[str, Any]:
        return {"transport": "none"}

    @override
    def shutdown(self) -> None:
        pass
