"""Faults of BatchNorm over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from contract import cases
from tests.mutants.changes import replaced
from tests.mutants.mutant import mutant
from training import batch_norm
from training.batch_norm import StatisticsOfRanks


@mutant("C54", cases.BATCH_NORM, words="weights after step 1 within 1e-12 of the reference, saw a difference of ")
def statistics_of_the_rank(backend: Any) -> Iterator[None]:
    """Each rank normalises by its own samples, as BatchNorm does by itself."""
    with mock.patch.object(StatisticsOfRanks, "attach"):
        yield


@mutant("C54", cases.BATCH_NORM, words="weights after step 3 within 1e-12 of the reference, saw a difference of ")
def mean_of_the_ranks_means(backend: Any) -> Iterator[None]:
    """Ranks with unequal numbers of samples count equally; those without any do not."""

    def combined(original: Any) -> Any:
        def mutated(counts: torch.Tensor, means: torch.Tensor, deviations: torch.Tensor) -> Any:
            own = counts.clamp(min=1)
            _, mean, variance = original((counts > 0).double(), means, deviations / own)
            return type(original(counts, means, deviations))(counts.sum(), mean, variance)

        return mutated

    with replaced(batch_norm, "combined", combined):
        yield


@mutant("C54", cases.BATCH_NORM, words="weights after step 3 within 1e-12 of the reference, saw a difference of ")
def sample_without_weight_counts(backend: Any) -> Iterator[None]:
    """A rank that has no sample, and computes that of another, adds it to the statistics."""
    with mock.patch.object(
        StatisticsOfRanks, "counts", property(lambda self: True, lambda self, value: None), create=True
    ):
        yield


@mutant("C54", cases.BATCH_NORM, words="weights after step 1 within 1e-12 of the reference, saw a difference of ")
def gradient_stays_on_its_rank(backend: Any) -> Iterator[None]:
    """Statistics are those of all ranks in the forward pass, and constants of each rank in the backward pass."""

    def all_reduce(original: Any) -> Any:
        def mutated(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
            is_of_backward = tensor.ndim == 2 and len(tensor) == 2 and tensor.shape[1] == 6
            return tensor * backend.world_size if is_of_backward else original(tensor, op)

        return mutated

    with replaced(backend, "all_reduce", all_reduce):
        yield
