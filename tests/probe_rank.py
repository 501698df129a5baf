"""What the ranks of a trajectory test run: several trainings in one group, everything observed written down.

``python -m tests.probe_rank DIRECTORY``: reads cases.json there, writes one file a case and rank.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from backends.interface import Backend
from backends.registry import load_backend
from launch.config import RunConfig
from launch.loop import Trainer
from launch.progress import ProgressLog
from launch.rank_files import RankFiles, rank_from_environment
from launch.world import prove_world
from tasks.registry import load_task


class Observations:
    """Collects what one training consumed, reduced and computed on one rank."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.consumed: list[list[int]] = []
        self.gradients: dict[int, dict[str, torch.Tensor]] = {}
        self.reduced_elements: list[int] = []
        self.num_other_reductions = 0

    def watch(self, trainer: Trainer, *, count_reductions: bool) -> ExitStack:
        stack = ExitStack()
        model = self.backend.unwrap(trainer.model)
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)

        def before_step(*_: Any) -> None:
            # Keyed by step: Horovod's optimizer is a subclass whose step calls the other's, hooks and all.
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            self.gradients[trainer.step] = gradients

        optimizer.register_step_pre_hook(before_step)
        collate = trainer.task.collate

        def observed_collate(split: Any, sample_ids: Any) -> Any:
            if split == "train":
                self.consumed.append([int(sample_id) for sample_id in sample_ids])
            return collate(split, sample_ids)

        stack.enter_context(mock.patch.object(trainer.task, "collate", observed_collate))
        all_reduce = self.backend.all_reduce

        def observed_all_reduce(*arguments: Any, **options: Any) -> torch.Tensor:
            self.num_other_reductions += 1
            return all_reduce(*arguments, **options)

        stack.enter_context(mock.patch.object(self.backend, "all_reduce", observed_all_reduce))
        stack.enter_context(mock.patch.object(self.backend, "barrier", side_effect=AssertionError("a barrier")))
        if count_reductions:
            stack.enter_context(self._count_reductions(trainer))
        return stack

    def _count_reductions(self, trainer: Trainer) -> AbstractContextManager[Any]:
        """Counts gradient elements where the library hands them to its all-reduce."""
        if hasattr(trainer.model, "register_comm_hook"):
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            def reduce(bucket: Any) -> Any:
                self.reduced_elements.append(bucket.buffer().numel())
                return allreduce_hook(None, bucket)

            # A lambda, since the annotations of a named hook would have to be types, not strings.
            trainer.model.register_comm_hook(None, lambda state, bucket: reduce(bucket))
            return ExitStack()
        import horovod.torch.optimizer

        original = horovod.torch.optimizer.allreduce_async_

        def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            self.reduced_elements.append(tensor.numel())
            return original(tensor, *arguments, **options)

        return mock.patch.object(horovod.torch.optimizer, "allreduce_async_", counted)


def run_case(backend: Backend, case: dict[str, Any], directory: Path) -> None:
    config = RunConfig.model_validate(case["config"])
    task_class = load_task(config.task)
    task = task_class(task_class.Settings.model_validate(config.task_settings))
    task.prepare()
    # Ranks are seeded apart, so that only the adapter can make them equal.
    original_seed = torch.manual_seed
    with mock.patch("torch.manual_seed", lambda seed: original_seed((seed + 7919 * backend.rank) % 2**63)):
        trainer = Trainer(config, task, backend, ProgressLog(directory, rank=1))
    model = backend.unwrap(trainer.model)
    initial = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    observed = Observations(backend)
    with observed.watch(trainer, count_reductions=case["count_reductions"]):
        trajectory = trainer.train()
    torch.save(
        {
            "initial": initial,
            "buffers": buffers,
            "consumed": observed.consumed,
            "gradients": observed.gradients,
            "reduced_elements": observed.reduced_elements,
            "num_other_reductions": observed.num_other_reductions,
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "final": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
            "steps": [step.model_dump() for step in trajectory.steps],
            "evaluations": [evaluation.model_dump() for evaluation in trajectory.evaluations],
        },
        directory / f"{case['name']}.rank{backend.rank}.pt",
    )


def main(directory: Path) -> None:
    files = RankFiles(directory, rank_from_environment(os.environ))
    files.redirect_output()
    files.announce()
    specification = json.loads((directory / "cases.json").read_text())
    torch.set_num_threads(1)
    first = RunConfig.model_validate(specification["cases"][0]["config"])
    backend = load_backend(specification["backend"])(first.backend_options())
    prove_world(backend, world_size=specification["world_size"])
    for case in specification["cases"]:
        run_case(backend, case, directory)
    backend.shutdown()
    files.report_success()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
