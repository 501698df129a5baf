"""Mixed precision as torch.amp does it, shared by the adapters that leave precision to torch.

Autocast and loss scaling follow https://docs.pytorch.org/docs/stable/notes/amp_examples.html:
the scaler multiplies the loss, gradients are unscaled before they are clipped, and a step whose
gradients are not finite is skipped and halves the scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from typing_extensions import override

from backends.interface import Backend, StepResult

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def clip_gradients(parameters: Iterable[torch.Tensor], max_grad_norm: float) -> torch.Tensor:
    """Clips gradients in place by their global 2-norm (0: only measures it) and returns that norm, 0-d."""
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in with_gradient if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_grad_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(with_gradient, max_grad_norm, norm)
    return norm


class TorchAmpBackend(Backend):
    """The part of an adapter that handles precision; subclasses add the communication."""

    optimizer: Any  # Horovod's has methods of its own

    def prepare_amp(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Remembers what `setup` made and starts a fresh loss scaler (inert unless fp16)."""
        self.model = model
        self.parameters = list(model.parameters())  # to look for them in each step takes a tenth of a millisecond
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler(
            self.device.type, init_scale=self.options.init_loss_scale, enabled=self.options.precision == "fp16"
        )

    @override
    def autocast(self) -> AbstractContextManager[Any]:
        dtype = _AUTOCAST_DTYPES.get(self.options.precision)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    @override
    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    @override
    def step(self, max_grad_norm: float) -> StepResult:
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_gradients(self.parameters, max_grad_norm)
        skipped = self.update(grad_norm)
        self.optimizer.zero_grad()
        return StepResult(grad_norm, skipped)

    def update(self, grad_norm: torch.Tensor) -> bool:
        """Steps the optimizer unless gradients overflowed, then adapts the scale; returns whether it skipped.

        The scale falls exactly when a step was skipped. Averaged gradients carry one rank's
        overflow to all of them, so every rank sees it fall in the same step.
        """
        if not self.scaler.is_enabled() and self.must_skip(grad_norm):
            return True
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() < scale

    def release(self) -> None:
        """Drops the wrappers, which must not outlive the process group that they communicate through."""
        del self.model, self.parameters, self.optimizer, self.scaler

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)
