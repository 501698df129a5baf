"""Faults in half precision and under overflows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch

from backends.interface import StepResult
from contract import cases
from tests.mutants.changes import changed_learning_rate, kept_local, replaced, when_reduced
from tests.mutants.mutant import BY_HAND_REDUCES, HOROVOD_SYNCHRONISES, mutant


@mutant(
    "C28",
    cases.HALF[0],
    words="gradients in step 1 within 1e-05 of the reference, saw a difference of 0.",
    by_hand=BY_HAND_REDUCES,
    horovod=HOROVOD_SYNCHRONISES,
)
def half_precision_gradients_not_reduced(backend: Any) -> Iterator[None]:
    with kept_local(backend, lambda micro_step: True):
        yield


@mutant(
    "C28",
    cases.HALF[1],
    words="gradients in step 1 within 1e-05 of the reference, saw a difference of 0.5, most in mixer.weight (0.5 times",
)
def half_precision_gradients_halved(backend: Any) -> Iterator[None]:
    with when_reduced(backend, _halve):
        yield


def _halve(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad.mul_(0.5)


@mutant(
    "C29",
    cases.HALF[0],
    words="a hidden layer in torch.bfloat16, saw torch.float32",
    accelerate="has put autocast around the model's own forward as well",
)
def precision_ignored(backend: Any) -> Iterator[None]:
    with mock.patch.object(backend, "autocast", nullcontext):
        yield


@mutant("C30", cases.OVERFLOWS[0], words="rank 0: expected skipped steps [3], saw []")
def overflow_decided_by_each_rank(backend: Any) -> Iterator[None]:
    """Rank 0 does not learn of the overflow of rank 1."""

    def act(parameters: list[torch.Tensor]) -> None:
        if backend.rank == 0:
            for parameter in parameters:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)

    with when_reduced(backend, act):
        yield


@mutant("C30", cases.INFINITE_LOSS, words="skipped steps [3], saw []")
def infinite_loss_applied(backend: Any) -> Iterator[None]:
    """The option that forbids it is not heeded."""
    with mock.patch.object(backend, "must_skip", return_value=False):
        yield


@mutant("C31", cases.OVERFLOWS[0], words="a loss scale in step 4 of 512.0, saw 256.0")
def scale_quartered(backend: Any) -> Iterator[None]:
    with replaced(
        torch.amp.GradScaler, "__init__", lambda original: lambda *a, **o: original(*a, **o, backoff_factor=0.25)
    ):
        yield


@mutant("C32", cases.OVERFLOWS[0], words="a learning rate of 0.375 in step 4, saw 0.3125")
def schedule_counts_skipped_steps(backend: Any) -> Iterator[None]:
    with changed_learning_rate(lambda trainer: trainer.state.step - 1):
        yield


@mutant(
    "C33",
    cases.CLIP_FP16,
    words={
        "*": "unclipped weights after step 2 within 1e-05 of the reference, saw a difference of 0.",
        "horovod": "unclipped weights after step 1 within 1e-05 of the reference, saw a difference of 0.",
    },
)
def scaled_gradients_clipped(backend: Any) -> Iterator[None]:
    threshold = [0.0]

    def remember(original: Any) -> Any:
        def step(max_grad_norm: float) -> StepResult:
            threshold[0] = max_grad_norm
            return original(max_grad_norm)

        return step

    def act(parameters: list[torch.Tensor]) -> None:
        if threshold[0]:
            torch.nn.utils.clip_grad_norm_(parameters, threshold[0])

    with when_reduced(backend, act), replaced(backend, "step", remember):
        yield


@mutant(
    "C28",
    cases.HALF[0],
    words="gradients in step 1 within 1e-05 of the reference, saw a difference of 0.00",
)
def gradients_sent_in_half_precision(backend: Any) -> Iterator[None]:
    def act(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.grad.copy_(parameter.grad.bfloat16())

    with when_reduced(backend, act):
        yield


@mutant(
    "C28",
    next(case for case in cases.HALF if case.name == "fp16-adamw-2"),
    words="gradients in step 1 within 1e-05 of the reference, saw a difference of 0.5, most in mixer.weight (0.5 times",
)
def gradients_of_adamw_halved(backend: Any) -> Iterator[None]:
    """Adam hides it from the weights."""

    def act(parameters: list[torch.Tensor]) -> None:
        if "AdamW" in [kind.__name__ for kind in type(backend.optimizer).__mro__]:
            _halve(parameters)

    with when_reduced(backend, act):
        yield


@mutant(
    "C29",
    cases.HALF[0],
    words="a hidden layer in an evaluation in torch.bfloat16, saw torch.float32",
    accelerate="has put autocast around the model's own forward as well",
)
def evaluation_without_autocast(backend: Any) -> Iterator[None]:
    with replaced(
        backend, "autocast", lambda original: lambda: original() if torch.is_grad_enabled() else nullcontext()
    ):
        yield


@mutant("C48", cases.UNSKIPPED, words="skipped steps [], saw [2")
def nonfinite_update_skipped_unasked(backend: Any) -> Iterator[None]:
    with mock.patch.object(backend, "must_skip", lambda grad_norm: not bool(grad_norm.isfinite())):
        yield


@mutant("C49", cases.GROWTH, words="loss scales after 1998 good steps: [{1024.0}, {1024.0}, {2048.0}")
def scale_that_never_grows(backend: Any) -> Iterator[None]:
    with replaced(
        torch.amp.GradScaler, "__init__", lambda original: lambda *a, **o: original(*a, **o, growth_interval=10**9)
    ):
        yield


@mutant("C50", cases.HALF[0], words="in step 1, since `step` returned ")
def norm_in_half_precision(backend: Any) -> Iterator[None]:
    def mutated(original: Any) -> Any:
        def step(max_grad_norm: float) -> StepResult:
            result = original(max_grad_norm)
            return StepResult(result.grad_norm.bfloat16().float(), result.skipped)

        return step

    with replaced(backend, "step", mutated):
        yield


@mutant("C30", cases.INFINITE_GRADIENT, words="skipped steps [3], saw [4, 5, 6, 7, 8]")
def infinite_gradient_applied(backend: Any) -> Iterator[None]:
    """What is looked for is NaN alone."""
    with mock.patch.object(backend, "must_skip", lambda grad_norm: bool(grad_norm.isnan())):
        yield
