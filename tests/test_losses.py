"""What every task promises: the loss of a batch is the sum of the losses of its parts."""

from __future__ import annotations

import pytest
import torch

from tasks.registry import TASKS, load_task


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
