"""Faults of parameters that get no gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from contract import cases
from tests.mutants.changes import around_step, when_reduced
from tests.mutants.mutant import mutant
from training import loop


@mutant(
    "C36",
    cases.UNANNOUNCED[1],
    words={
        "*": "the parameter idle, saw no error",
        "ddp": "the parameter idle, saw RuntimeError: Expected to have finished reduction",
        "accelerate": "the parameter idle, saw RuntimeError: Expected to have finished reduction",
    },
)
def unused_parameter_ignored(backend: Any) -> Iterator[None]:
    with mock.patch.object(loop, "require_gradients"):
        yield


@mutant("C37", cases.UNUSED, words="the unused parameter unchanged after step 1, saw a difference of 0.25 in idle")
def zeros_for_an_unused_parameter(backend: Any) -> Iterator[None]:
    def before(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    with around_step(backend, before, lambda optimizer: None):
        yield


@mutant(
    "C38",
    cases.RARE,
    words="mixer.bias, mixer.weight, output.bias, saw idle on one side only",
)
def gradient_for_users_only(backend: Any) -> Iterator[None]:
    def act(parameters: list[torch.Tensor]) -> None:
        if backend.rank == 1:
            for parameter in parameters:
                if parameter.shape == (3, 3):
                    parameter.grad = None

    with when_reduced(backend, act):
        yield
