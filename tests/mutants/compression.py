"""Gradients that are compressed wrongly, or not at all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from backends import compression
from backends.interface import StepResult
from contract import cases
from tests.mutants.changes import replaced, when_reduced
from tests.mutants.mutant import mutant

WITH_HOOKS = ("ddp", "accelerate", "fabric")


@mutant("C52", cases.COMPRESSED_HALF[0], words="bytes to be sent in step 1, saw")
def compression_asked_for_and_not_done(backend: Any) -> Iterator[None]:
    with mock.patch.object(backend, "options", dataclasses.replace(backend.options, grad_compression="none")):
        yield


@mutant("C51", cases.COMPRESSED_HALF[0], words="an average within 3 roundings to fp16 in step 1, saw")
def gradients_compressed_twice(backend: Any) -> Iterator[None]:
    """What has travelled as fp16 is also rounded to bf16."""

    def act(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.copy_(parameter.grad.bfloat16())

    with when_reduced(backend, act):
        yield


@mutant("C51", cases.COMPRESSED_HALF[0], words="the bits of the gradients of rank 0 in step 1, saw")
def own_gradients_uncompressed(backend: Any) -> Iterator[None]:
    """A rank other than 0 adds digits that no other has."""

    def act(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(1 + backend.rank * 2.0**-30)

    with when_reduced(backend, act):
        yield


@mutant("C51", cases.COMPRESSED_HALF[0], words="a norm of")
def norm_of_something_else(backend: Any) -> Iterator[None]:
    def step(original: Any) -> Any:
        def mutated(max_grad_norm: float) -> StepResult:
            result = original(max_grad_norm)
            return StepResult(result.grad_norm * 1.001, result.skipped)

        return mutated

    with replaced(backend, "step", step):
        yield


@mutant("C30", cases.COMPRESSED_OVERFLOW, words="skipped steps [3], saw []", of=WITH_HOOKS)
def compression_that_saturates(backend: Any) -> Iterator[None]:
    """What is too large for fp16 becomes its largest number, and all ranks step with a wrong gradient."""

    def clamping(original: Any) -> Any:
        def hook(group: Any, bucket: Any) -> Any:
            bucket.buffer().clamp_(-65504, 65504)
            return original(group, bucket)

        return hook

    with mock.patch.dict(compression._HOOKS, {"fp16": clamping(compression._HOOKS["fp16"])}):
        yield


@mutant("C53", cases.POWERSGD, words="and what was left out before it, projected, in step 4", of=WITH_HOOKS)
def error_feedback_dropped(backend: Any) -> Iterator[None]:
    state = functools.partial(compression.PowerSGDState, use_error_feedback=False)
    with mock.patch.object(compression, "PowerSGDState", state):
        yield
