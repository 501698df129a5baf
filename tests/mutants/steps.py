"""Faults of the optimizer step, of clipping and of the schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from backends.interface import StepResult
from contract import cases
from tests.mutants.changes import around_step, changed_learning_rate, replaced, when_reduced
from tests.mutants.mutant import mutant


@mutant(
    "C17",
    cases.PLAIN[0],
    words="weights after step 1 within 1e-12 of the reference, saw a difference of 0.15, most in ",
)
def learning_rate_times_world_size(backend: Any) -> Iterator[None]:
    def scale(factor: float) -> Callable[[Any], None]:
        def act(optimizer: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= factor

        return act

    with around_step(backend, scale(backend.world_size), scale(1 / backend.world_size)):
        yield


@mutant(
    "C18",
    cases.MOMENTUM,
    words="weights after step 2 within 1e-12 of the reference, saw a difference of 0.14, most in ",
)
def momentum_forgotten(backend: Any) -> Iterator[None]:
    with around_step(backend, lambda optimizer: optimizer.state.clear(), lambda optimizer: None):
        yield


@mutant("C19", cases.CLIPPED[0], words=", saw 0.05")
def norm_after_clipping(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        def step(max_grad_norm: float) -> StepResult:
            result = original(max_grad_norm)
            return StepResult(result.grad_norm.clamp(max=max_grad_norm), result.skipped)

        return step

    with replaced(backend, "step", mutated):
        yield


@mutant(
    "C20",
    cases.CLIPPED[1],
    words={
        "*": "gradients in step 1 within 1e-12 of the reference, saw a difference of 0.33, most in ",
        "by_hand": "gradients in step 1 within 1e-12 of the reference, saw a difference of 0.37, most in ",
    },
    horovod="gradients are on their way when it would clip: see the next one",
)
def clipping_in_every_micro_step(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        def backward(loss: torch.Tensor) -> None:
            original(loss)
            torch.nn.utils.clip_grad_norm_(backend.model.parameters(), 0.05)

        return backward

    with replaced(backend, "backward", mutated):
        yield


@mutant(
    "C20",
    cases.CLIPPED[0],
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of ",
    ddp="has reduced by the time step is called",
    accelerate="has reduced by the time step is called",
)
def clipping_before_synchronise(backend: Any) -> Iterator[None]:
    """Clips what each rank has, and then has it averaged."""

    def mutated(original: Any) -> Any:
        def step(max_grad_norm: float) -> StepResult:
            norm = torch.nn.utils.clip_grad_norm_(backend.model.parameters(), max_grad_norm)
            if not hasattr(backend.optimizer, "synchronize"):
                return StepResult(norm, original(0.0).skipped)
            backend.optimizer.step()  # which synchronises
            backend.optimizer.zero_grad()
            return StepResult(norm, skipped=False)

        return step

    with replaced(backend, "step", mutated):
        yield


@mutant(
    "C20",
    cases.CLIPPED[0],
    words={
        "*": "gradients in step 1 within 1e-12 of the reference, saw a difference of 0.43, most in mixer.bias",
        "by_hand": "gradients in step 1 within 1e-12 of the reference, saw a difference of ",
    },
)
def clipping_by_group(backend: Any) -> Iterator[None]:
    def act(parameters: list[torch.Tensor]) -> None:
        for group in ([p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]):
            torch.nn.utils.clip_grad_norm_(group, 0.04)

    with when_reduced(backend, act):
        yield


@mutant(
    "C21", cases.ADAMW, words="weights after step 2 within 1e-09 of the reference, saw a difference of 0.0013, most in "
)
def adam_counter_ahead_by_one(backend: Any) -> Iterator[None]:
    """What a hidden first step leaves behind for good."""

    def after(optimizer: Any) -> None:
        for state in optimizer.state.values():
            if float(state["step"]) == 1:
                state["step"] += 1

    with around_step(backend, lambda optimizer: None, after):
        yield


@mutant("C22", cases.ADAMW, words="a learning rate of 0.005 in step 2, saw 0.01")
def schedule_per_micro_step(backend: Any) -> Iterator[None]:
    with changed_learning_rate(lambda trainer: trainer.state.num_updates * trainer.config.gradient_accumulation_steps):
        yield


@mutant("C22", cases.ADAMW, words="a learning rate of 0.005 in step 2, saw 0.01")
def schedule_per_rank(backend: Any) -> Iterator[None]:
    with changed_learning_rate(lambda trainer: trainer.state.num_updates * trainer.config.num_processes):
        yield


def _rounded(dtype: torch.dtype) -> Callable[[list[torch.Tensor]], None]:
    def act(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.grad.copy_(parameter.grad.to(dtype))

    return act


@mutant("C23", cases.FLOAT32, words="gradients in step 1 within 0.0001 of the reference, saw a difference of 0.000")
def compressed_gradients(backend: Any) -> Iterator[None]:
    with when_reduced(backend, _rounded(torch.float16)):
        yield


@mutant("C24", cases.BITS, words="the bits of averaging by hand after step 2, saw a difference of")
def one_bit_off(backend: Any) -> Iterator[None]:
    def act(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.grad.mul_(1 + 1.2e-7)

    with when_reduced(backend, act):
        yield


@mutant("C24", cases.BITS, words="the bits of averaging by hand after step 50, saw a difference of")
def every_fiftieth_step_off(backend: Any) -> Iterator[None]:
    num_steps = itertools.count(1)

    def act(parameters: list[torch.Tensor]) -> None:
        if next(num_steps) % 50 == 0:
            for parameter in parameters:
                parameter.grad.mul_(0.99)

    with when_reduced(backend, act):
        yield


@mutant("C16", cases.UNCLIPPED, words="gradients in step 1 within 1e-12 of the reference, saw a difference of ")
def clipping_that_scales_up(backend: Any) -> Iterator[None]:
    """The quotient of threshold and norm is used as it is, also where it is greater than one."""

    def act(parameters: list[torch.Tensor]) -> None:
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad.mul_(100 / norm)

    with when_reduced(backend, act):
        yield


@mutant("C18", cases.INFINITE_LOSS, words="weights after step 4 within 1e-12 of the reference, saw a difference of ")
def momentum_lost_with_a_skipped_step(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        def step(max_grad_norm: float) -> StepResult:
            result = original(max_grad_norm)
            if result.skipped:
                backend.optimizer.state.clear()
            return result

        return step

    with replaced(backend, "step", mutated):
        yield
