"""An adapter that cannot average float64, and declares it: each gradient that reaches it in float64 is an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from backends.interface import StepResult
from tests.by_hand import ByHandBackend


class Float32OnlyBackend(ByHandBackend):
    name = "float32-only"
    capabilities = replace(ByHandBackend.capabilities, float64=False)

    def step(self, max_grad_norm: float) -> StepResult:
        gradients: list[Any] = [parameter.grad for parameter in self.model.parameters()]
        if any(gradient is not None and gradient.dtype == torch.float64 for gradient in gradients):
            raise TypeError("there is no float64 here")
        return super().step(max_grad_norm)


class DishonestBackend(Float32OnlyBackend):
    """The same, declared as able to average float64."""

    capabilities = ByHandBackend.capabilities


class SlightlyWrongBackend(Float32OnlyBackend):
    """Puts a thousandth too much into every gradient, which the rounding of float32 does not explain."""

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss * 1.001)
