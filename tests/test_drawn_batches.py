"""Batches that are made without random numbers, and those that are not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path

import numpy as np
import pytest
import torch
from typing_extensions import override

from backends.single import SingleBackend
from tasks.interface import Batch, PackedData, Split
from tasks.paced import Paced
from tasks.registry import load_task
from tests.launching import run_config
from training import loop
from training.data import MicroBatches, RankPlan, may_draw
from training.loop import Trainer
from training.plan import Plan
from training.seeds import DROPOUT, random_seed, seed_all


@pytest.mark.parametrize("name", ["text-classification", "image-classification", "token-tagging", "paced"])
def test_tasks_that_say_so_draw_no_random_numbers(name: str) -> None:
    task_class = load_task(name)
    task = task_class(task_class.Settings())
    task.prepare()
    methods = [task.collate, *([task.collate_packed] if isinstance(task, PackedData) else [])]
    assert not any(map(may_draw, methods))
    draws = []
    for collates in (False, True):
        seed_all(5)
        for method in methods if collates else ():
            method("train", [3, 1, 4])
        draws.append((float(torch.rand(())), float(np.random.random()), random.random()))
    assert draws[0] == draws[1]


def test_a_method_that_overrides_or_wraps_one_is_seeded_again() -> None:
    """Augmented samples are the same ones wherever they are made."""

    class Augmented(Paced):
        @override
        def collate(self, split: Split, sample_ids: Sequence[int]) -> Batch:
            return _augmented(super().collate(split, sample_ids))

    overriding, wrapped = Augmented(Paced.Settings()), Paced(Paced.Settings())
    collate = wrapped.collate

    @wraps(collate)
    def wrapping(split: Split, sample_ids: Sequence[int]) -> Batch:
        return _augmented(collate(split, sample_ids))

    plan = Plan(num_samples=64, global_batch_size=8, micro_batch_size=4, world_size=2, seed=5)
    for one in (overriding.collate, wrapping):
        assert may_draw(one)
        micro_batches = MicroBatches(one, RankPlan(plan, 1, 1, plan.epoch(0)))
        first = micro_batches[3].batch.tensors["inputs"]
        torch.rand(7)
        assert torch.equal(micro_batches[3].batch.tensors["inputs"], first)


def _augmented(batch: Batch) -> Batch:
    return replace(batch, tensors={"inputs": batch.tensors["inputs"] + torch.rand(())})


def test_a_forward_pass_draws_from_the_number_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every epoch, and on from a checkpoint: dropout masks may not change from one version to the next."""
    task = Paced(Paced.Settings(num_train_samples=40))
    options = {"global_batch_size": 16, "micro_batch_size": 8, "num_train_epochs": 2, "seed": 7, "evaluate": False}
    config = run_config("single", 1, tmp_path, **options)
    trainer = Trainer(config, task, SingleBackend(config.backend_options(SingleBackend.Settings)))
    seeds: list[int] = []
    monkeypatch.setattr(loop, "seed_all", seeds.append)
    trainer.train()
    micro_steps = [2, 2, 1] * 2  # the last batch of an epoch has eight samples
    expected = [(step, micro) for step, number in enumerate(micro_steps, start=1) for micro in range(number)]
    assert seeds == [random_seed(7, DROPOUT, 0, step, micro_step) for step, micro_step in expected]
