"""What every task promises: the loss of a batch is the sum of the losses of its parts."""

from __future__ import annotations

import pytest
import torch

from tasks.registry import TASKS, load_task


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_of_scores_in_half_precision_is_computed_in_float32(name: str) -> None:
    """On a GPU, autocast computes cross-entropy in the precision of the scores."""
    task_class = load_task(name)
    task = task_class(task_class.Settings())
    task.prepare()
    model = task.build_model().bfloat16()
    assert task.loss_sum(model, task.collate("train", list(range(7)))).dtype == torch.float32


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_adds_up_over_the_parts_of_a_batch(name: str) -> None:
    task_class = load_task(name)
    task = task_class(task_class.Settings())
    task.prepare()
    torch.manual_seed(1)
    model = task.build_model().double().eval()

    def loss(sample_ids: list[int]) -> float:
        with torch.no_grad():
            return float(task.loss_sum(model, task.collate("train", sample_ids)))

    samples = list(range(7))
    whole = loss(samples)
    for cut in (1, 3, 6):
        assert loss(samples[:cut]) + loss(samples[cut:]) == pytest.approx(whole, rel=1e-5)
    assert task.num_targets("train", samples) == sum(task.num_targets("train", [sample]) for sample in samples)
