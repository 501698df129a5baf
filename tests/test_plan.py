"""The plan, the schedule and the optimizer's groups, without any process."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from records.config import Batching
from tests.launching import run_config
from training.data import RankPlan
from training.optimizer import build_optimizer, learning_rate_factor
from training.plan import Layout, Plan, evaluation_batches
from training.seeds import DATA, DROPOUT, random_seed, seed_all

SIZES = list(product((1, 7, 16, 23, 64), (1, 2, 4), (1, 2)))


@pytest.mark.parametrize(("num_samples", "world_size", "micro_batch_size"), SIZES)
def test_every_sample_is_consumed_once_an_epoch(num_samples: int, world_size: int, micro_batch_size: int) -> None:
    plan = Plan(
        num_samples=num_samples, global_batch_size=8, micro_batch_size=micro_batch_size, world_size=world_size, seed=5
    )
    batches = plan.epoch(0)
    assert len(batches) == plan.steps_per_epoch
    for batch in batches:
        shares = [plan.micro_batches(batch, rank) for rank in range(world_size)]
        assert len({len(share) for share in shares}) == 1, "ranks would take unequal numbers of micro-steps"
        micro_batches = [micro_batch for share in shares for micro_batch in share]
        used = [int(i) for micro_batch in micro_batches if micro_batch.weight for i in micro_batch.sample_ids]
        assert sorted(used) == sorted(batch.tolist())
        assert all(1 <= len(micro_batch.sample_ids) <= micro_batch_size for micro_batch in micro_batches)
        if len(batch) >= len(micro_batches):
            assert all(micro_batch.weight for micro_batch in micro_batches), "an empty micro-batch without need"


@pytest.mark.parametrize("batching", ["padded", "packed", "sorted"])
def test_steps_are_laid_out_some_at_a_time_as_all_at_once(batching: Batching) -> None:
    """In order, at random, and from a step within the epoch; the last batch is short."""
    costs = np.random.default_rng(1).integers(3, 60, 3001)
    layout = Layout(batching, costs)
    plan = Plan(num_samples=3001, global_batch_size=8, micro_batch_size=2, world_size=2, seed=5, layout=layout)
    batches = plan.epoch(0)[7:]
    expected = [
        (
            micro_batch.sample_ids.tolist(),
            random_seed(5, DATA, 1, step, micro_step),
            random_seed(5, DROPOUT, 1, step - 1, micro_step),
            random_seed(5, DROPOUT, step),
        )
        for step, batch in enumerate(batches, start=8)
        for micro_step, micro_batch in enumerate(plan.micro_batches(batch, 1))
    ]
    of_rank = RankPlan(plan, 1, 7, batches)
    assert len(of_rank) == len(expected) > 500

    def seen(index: int) -> tuple[list[int], int, int, int]:
        item = of_rank[index]
        return item.micro_batch.sample_ids.tolist(), item.making, item.forward, item.of_step

    assert [seen(index) for index in range(len(expected))] == expected
    for index in random.Random(0).sample(range(len(expected)), 20):
        assert seen(index) == expected[index]
    assert len(RankPlan(plan, 1, 7, [])) == 0


def test_the_plan_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int, world_size: int) -> list[int]:
        plan = Plan(num_samples=50, global_batch_size=8, micro_batch_size=1, world_size=world_size, seed=seed)
        return [int(i) for batch in plan.epoch(epoch) for i in batch]

    assert order(1, 0, 1) == order(1, 0, 4)
    assert order(1, 0, 1) != order(1, 1, 1)
    assert order(1, 0, 1) != order(2, 0, 1)


@pytest.mark.parametrize(("num_samples", "world_size"), list(product((1, 3, 9, 64), (1, 2, 4))))
def test_evaluation_neither_pads_nor_repeats(num_samples: int, world_size: int) -> None:
    for costs in (None, np.arange(num_samples)[::-1]):
        shares = [
            evaluation_batches(num_samples, batch_size=4, share=(rank, world_size), costs=costs)
            for rank in range(world_size)
        ]
        seen = [sample_id for share in shares for batch in share for sample_id in batch.tolist()]
        assert sorted(seen) == list(range(num_samples))


def test_random_streams_differ_and_repeat() -> None:
    keys = list(product(range(3), range(3), range(3)))
    assert len({random_seed(*key) for key in keys}) == len(keys)
    assert random_seed(1, 2, 3) == random_seed(1, 2, 3)


def test_all_generators_are_seeded_by_the_key() -> None:
    """Numbers of numpy are keys as good as Python's, and digits do not run into each other."""
    draws = []
    for key in ((7, DROPOUT, 1, 23), (7, DROPOUT, 12, 3), (7, DROPOUT, np.int64(1), np.int32(23))):
        seed_all(random_seed(*key))
        draws.append((float(torch.rand(())), float(np.random.random()), random.random()))
    assert draws[0] == draws[2]
    assert all(one != other for one, other in zip(draws[0], draws[1], strict=True))


@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("num_warmup_steps", [0, 10])
def test_schedules_are_those_of_transformers(name: str, num_warmup_steps: int) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs_name = "constant_with_warmup" if name == "constant" else name
    theirs = get_scheduler(theirs_name, optimizer, num_warmup_steps=num_warmup_steps, num_training_steps=100)
    for step in range(100):
        ours = learning_rate_factor(name, step=step, num_steps=100, num_warmup_steps=num_warmup_steps)
        assert ours == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_biases_and_layer_norms_are_not_decayed(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    config = run_config("single", 1, tmp_path, optimizer="adamw", weight_decay=0.1, micro_batch_size=32)
    decayed, plain = build_optimizer(config, model).param_groups
    assert [parameter.shape for parameter in decayed["params"]] == [torch.Size([3, 3])]
    assert decayed["weight_decay"] == 0.1
    assert plain["weight_decay"] == 0.0
