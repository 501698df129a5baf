"""Faults of the group of ranks, and of what the ranks send each other outside a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

from contract import cases
from tests.mutants.changes import replaced
from tests.mutants.mutant import mutant


@mutant("C01", cases.WORLD, words="a world size of 2, saw 1")
def world_size_one(backend: Any) -> Iterator[None]:
    """Each process finds itself alone."""
    with (
        mock.patch.object(backend, "world_size", 1),
        mock.patch.object(backend, "rank", 0),
        mock.patch.object(backend, "all_reduce", lambda tensor, op="sum": tensor.clone()),
    ):
        yield


@mutant("C02", cases.COLLECTIVES, words="sum in torch.float32 [3, -1], saw [1.0, 0.0]")
def reduction_dropped(backend: Any) -> Iterator[None]:
    with replaced(backend, "all_reduce", lambda original: lambda tensor, op="sum": (original(tensor, op), tensor)[1]):
        yield


@mutant("C02", cases.COLLECTIVES, words="sum in torch.float32 to leave its argument unchanged, saw a changed argument")
def reduction_in_place(backend: Any) -> Iterator[None]:
    with replaced(backend, "all_reduce", lambda original: lambda tensor, op="sum": tensor.copy_(original(tensor, op))):
        yield


@mutant("C03", cases.BARRIER, words="the file of each late rank after the barrier: [True, True], saw [")
def barrier_that_does_not_wait(backend: Any) -> Iterator[None]:
    with mock.patch.object(backend, "barrier"):
        yield


@mutant("C02", cases.COLLECTIVES, words="sums of numbers with many digits: {'torch.int64': [72057594037927939]")
def digits_lost(backend: Any) -> Iterator[None]:
    """Everything is reduced in float32."""
    with replaced(
        backend,
        "all_reduce",
        lambda original: lambda tensor, op="sum": original(tensor.float(), op).to(tensor.dtype),
    ):
        yield
