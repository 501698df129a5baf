"""Batches that are made without random numbers, and those that are not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from typing_extensions import override

from tasks.interface import Batch, PackedData, Split
from tasks.paced import Paced
from tasks.registry import load_task
from training.data import MicroBatches, RankPlan
from training.plan import Plan
from training.seeds import seed_all


@pytest.mark.parametrize("name", ["text-classification", "image-classification", "token-tagging", "paced"])
def test_tasks_that_say_so_draw_no_random_numbers(name: str) -> None:
    task_class = load_task(name)
    task = task_class(task_class.Settings())
    task.prepare()
    methods = [task.collate, *([task.collate_packed] if isinstance(task, PackedData) else [])]
    assert all(hasattr(method, "draws_nothing") for method in methods)
    draws = []
    for collates in (False, True):
        seed_all(5)
        for method in methods if collates else ():
            method("train", [3, 1, 4])
        draws.append((float(torch.rand(())), float(np.random.random()), random.random()))
    assert draws[0] == draws[1]


def test_a_method_that_overrides_one_is_seeded_again() -> None:
    """Augmented samples are the same ones wherever they are made."""

    class Augmented(Paced):
        @override
        def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
            batch = super().collate(split, sample_ids)
            return replace(
                batch, tensors={"inputs": batch.tensors["inputs"] + torch.rand(()), "targets": torch.ones(1)}
            )

    task = Augmented(Paced.Settings())
    plan = Plan(num_samples=64, global_batch_size=8, micro_batch_size=4, world_size=2, seed=5)

    def inputs(number: int) -> torch.Tensor:
        return MicroBatches(task.collate, RankPlan(plan, 1, 0, plan.epoch(0)))[number].batch.tensors["inputs"]

    first = inputs(3)
    torch.rand(7)
    assert torch.equal(inputs(3), first)
