"""Faults that concern some tensors only: large ones, small gradients, other layouts and dtypes, buffers that change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from contract import cases
from tests.mutants.changes import around_step, hooked_gradients, left_local, when_reduced
from tests.mutants.mutant import mutant


@mutant("C45", cases.VARIED, words="gradients in step 1, row 0 of words.weight")
def large_embedding_of_rank_0_alone(backend: Any) -> Iterator[None]:
    factor = backend.world_size if backend.rank == 0 else 0
    with hooked_gradients(backend, lambda parameter: len(parameter) > 1000, lambda gradient: gradient * factor):
        yield


@mutant("C45", cases.WIDE, words="gradients in step 1, row 508 of mixer.weight (and ")
def elements_beyond_a_million_lost(backend: Any) -> Iterator[None]:
    """A buffer of 2**20 elements is sent, and what does not fit into it is not."""

    def act(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.grad.view(-1)[2**20 :] = 0

    with when_reduced(backend, act):
        yield


@mutant(
    "C45",
    cases.VARIED,
    words="row 2 of faint (and 1 more), within 1e-06 of the reference, saw a difference of 1 (0 times",
)
def small_elements_sent_as_zero(backend: Any) -> Iterator[None]:
    """Those below a millionth of the largest."""

    def act(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.grad[parameter.grad.abs() < 1e-6 * parameter.grad.abs().max()] = 0

    with when_reduced(backend, act):
        yield


_AVERAGES_LAST = "averages in step, after this fault has had its effect"


@mutant(
    "C45",
    cases.VARIED,
    words="gradients in step 1, row 0 of turned",
    horovod="makes every parameter contiguous",
    by_hand=_AVERAGES_LAST,
)
def average_lost_in_a_contiguous_copy(backend: Any) -> Iterator[None]:
    with left_local(backend, lambda parameter: not parameter.is_contiguous()):
        yield


@mutant(
    "C23",
    cases.MIXED,
    words="gradients in step 1 within 0.0001 of the reference, saw a difference of ",
    by_hand=_AVERAGES_LAST,
)
def other_dtype_not_reduced(backend: Any) -> Iterator[None]:
    """One vector holds all gradients of the dtype that the first parameter has."""
    with left_local(backend, lambda parameter: parameter.dtype == torch.float32):
        yield


@mutant("C46", cases.VARIED, words="the buffers of its own forward passes after step 1: {'total': ")
def running_buffers_averaged(backend: Any) -> Iterator[None]:
    def after(optimizer: Any) -> None:
        for buffer in backend.model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(backend.all_reduce(buffer) / backend.world_size)

    with around_step(backend, lambda optimizer: None, after):
        yield


@mutant(
    "C16",
    cases.MANY,
    words="gradients in step 1 within 1e-12 of the reference, saw a difference of ",
    by_hand=_AVERAGES_LAST,
)
def tensors_after_the_hundredth_not_reduced(backend: Any) -> Iterator[None]:
    numbers = itertools.count()
    with left_local(backend, lambda parameter: next(numbers) >= 100):
        yield
