"""Ranks that do not wait for each other: what a machine gives so many processes at most.

Each rank does the work of a rank, and shares cores, caches and memory bandwidth with the others, but communicates
nothing while it trains. The difference between this and a backend is what communication and waiting cost it.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from backends.capabilities import PRECISIONS, Capabilities
from backends.registry import INDEPENDENT
from backends.single import SingleBackend
from backends.torch_group import TorchGroupBackend


class IndependentProcesses(TorchGroupBackend, SingleBackend):
    """Every rank trains alone. The learning rate is 0, so that all keep the same weights: this trains no model."""

    name = INDEPENDENT
    capabilities = Capabilities(
        {"cpu": PRECISIONS, "cuda": PRECISIONS}, start_methods=("torchrun",), ranks_may_share_gpu=True
    )

    @override
    def setup(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        optimizer.register_step_pre_hook(_keep_weights)
        return super().setup(model, optimizer)

    @override
    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        # Losses and metrics, which are real numbers, stay with their rank; what ranks tell of themselves is integers.
        is_training = hasattr(self, "optimizer") and tensor.is_floating_point()
        return tensor.clone() if is_training else super().all_reduce(tensor, op)

    @override
    def shutdown(self) -> None:
        self.release()
        self.leave_group()


def _keep_weights(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.0
