"""Faults of the plan and of evaluation, which belong to the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from contract import cases
from tasks.token_tagging import TokenTagging
from tests.mutants.changes import replaced
from tests.mutants.mutant import mutant
from training import evaluation, plan
from training.plan import Plan


@mutant(
    "C11",
    cases.PLAIN[1],
    words="the samples in step 1: [[18, 24, 25, 41], [38, 4, 3, 17]], saw [[22, 48, 32, 11], [40, 42, 35, 2]]",
)
def samples_of_the_neighbour(backend: Any) -> Iterator[None]:
    with replaced(
        Plan,
        "micro_batches",
        lambda original: lambda plan, batch, rank: original(plan, batch, (rank + 1) % plan.world_size),
    ):
        yield


@mutant("C11", cases.LAYOUTS[0], words="the samples in step 1: ")
def shortest_samples_first(backend: Any) -> Iterator[None]:
    """The rule that gives ranks equal work begins at the wrong end, and leaves the longest sample for the last."""

    def mutated(original: Any) -> Any:
        return lambda samples, costs, num_pieces: original(samples, -costs, num_pieces)

    with replaced(plan, "_of_equal_cost", mutated):
        yield


@mutant("C16", cases.LAYOUTS[0], words="gradients in step 1 within 1e-12 of the reference, saw a difference of ")
def neighbours_in_a_row(backend: Any) -> Iterator[None]:
    """In a row without padding, the first token of a sample sees the last one of the sample before."""

    def mutated(original: Any) -> Any:
        def collate_packed(task: Any, split: str, sample_ids: Any) -> Any:
            batch = original(task, split, sample_ids)
            batch.tensors["is_first"].zero_()
            return batch

        return collate_packed

    with replaced(TokenTagging, "collate_packed", mutated):
        yield


@mutant("C12", cases.PLAIN[0], words="each of 49 samples once in epoch 0, saw these counts by sample: {8: 2, 10: 2")
def short_batch_dropped(backend: Any) -> Iterator[None]:
    def whole(original: Any) -> Any:
        return lambda plan, epoch: [batch for batch in original(plan, epoch) if len(batch) == plan.global_batch_size]

    steps_per_epoch = property(lambda plan: plan.num_samples // plan.global_batch_size)
    with replaced(Plan, "epoch", whole), mock.patch.object(Plan, "steps_per_epoch", steps_per_epoch):
        yield


@mutant("C12", cases.PLAIN[0], words="another order in every epoch, saw the same order twice")
def same_order_in_every_epoch(backend: Any) -> Iterator[None]:
    with replaced(Plan, "epoch", lambda original: lambda plan, epoch: original(plan, 0)):
        yield


@mutant(
    "C13",
    cases.PLAIN[0],
    words="each of 23 validation samples once, saw these counts by sample: {5: 2, 6: 2, 7: 2, 8: 2, 9: 2}",
)
def padded_duplicates_in_evaluation(backend: Any) -> Iterator[None]:
    """Ranks with fewer batches than others repeat one."""

    def mutated(original: Any) -> Any:
        def batches(num_samples: int, **sizes: Any) -> list[range]:
            mine = list(original(num_samples, **sizes))
            most = len(original(num_samples, **(sizes | {"share": (0, sizes["share"][1])})))
            return mine + mine[: most - len(mine)]

        return batches

    with replaced(evaluation, "evaluation_batches", mutated):
        yield


def _changed_reductions(backend: Any, concerns: Callable[[torch.Tensor], bool]) -> Any:
    def mutated(original: Any) -> Any:
        def all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
            reduced = original(tensor, op)
            return tensor * backend.world_size if concerns(tensor) else reduced

        return all_reduce

    return replaced(backend, "all_reduce", mutated)


@mutant("C14", cases.PLAIN[0], words="after epoch 0, saw 1.46664943")
def metrics_of_the_rank(backend: Any) -> Iterator[None]:
    with _changed_reductions(backend, lambda tensor: tensor.ndim == 2 and tensor.is_floating_point()):
        yield


@mutant("C15", cases.PLAIN[0], words="in step 1, saw 1.82784100")
def loss_of_the_rank(backend: Any) -> Iterator[None]:
    with _changed_reductions(backend, lambda tensor: tensor.ndim == 1 and tensor.dtype == torch.float64):
        yield
