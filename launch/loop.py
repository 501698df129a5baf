"""The training loop that every rank runs, whatever the backend and the task.

The loop owns the mathematics. With N targets in a global batch over W ranks, a micro-batch
contributes sum(loss) * W / N: backends average over ranks, so the gradient is that of the mean
loss over the N targets, however they are spread over ranks and micro-steps.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from backends.interface import Backend
from launch.config import RunConfig
from launch.plan import MicroBatch, Plan, SampleIds, evaluation_batches, random_seed
from launch.progress import ProgressLog
from launch.record import EvaluationRecord, StepRecord
from launch.schedule import learning_rate_factor
from tasks.interface import Batch, Task

# What a random stream is for, so that no two share a seed.
_WEIGHTS, _DATA, _DROPOUT = range(3)


@dataclass
class Trajectory:
    """What a run went through: `steps` and `evaluations` are equal on all ranks, the rest is this rank's."""

    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    first_step_at: float | None = None


@dataclass
class _OpenStep:
    """A step whose loss and gradient norm still lie on the device, the loss not yet summed over ranks."""

    record: StepRecord
    loss_share: torch.Tensor
    grad_norm: torch.Tensor


class Trainer:
    """Trains one task on one backend."""

    def __init__(self, config: RunConfig, task: Task, backend: Backend, progress: ProgressLog) -> None:
        self.config = config
        self.task = task
        self.backend = backend
        self.progress = progress
        self.plan = Plan(
            num_samples=task.num_samples("train"),
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            world_size=config.num_processes,
            seed=config.seed,
        )
        epochs_steps = config.num_train_epochs * self.plan.steps_per_epoch
        self.num_steps = config.max_steps if config.max_steps > 0 else epochs_steps
        self.num_warmup_steps = math.ceil(config.warmup_ratio * self.num_steps)
        torch.manual_seed(random_seed(config.seed, _WEIGHTS))
        model = task.build_model().to(backend.device)
        if config.torch_compile:
            # In place: no name of a weight changes, and DDP, which calls the module, still gets a graph
            # cut at its buckets (https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design).
            model.compile()
        self.model, self.optimizer = backend.setup(model, build_optimizer(config, model))
        self.trajectory = Trajectory()
        self.step = 0
        self.num_updates = 0
        self._open_steps: list[_OpenStep] = []

    def train(self) -> Trajectory:
        """Trains to the last step, evaluating after every epoch and at the end."""
        while self.step < self.num_steps:
            self.model.train()
            epoch, first = divmod(self.step, self.plan.steps_per_epoch)
            global_batches = self.plan.epoch(epoch)[first : first + self.num_steps - self.step]
            step_began = time.perf_counter()
            batches = self._load(global_batches)
            for global_batch in global_batches:
                self.step += 1
                self.train_step(epoch, global_batch, batches)
                if (
                    self.step % self.config.logging_steps == 0
                    or self._is_first_step
                    or global_batch is global_batches[-1]
                ):
                    self._close_steps()
                if self._is_first_step:
                    self.trajectory.first_step_at = time.time()
                step_ended = time.perf_counter()
                self.trajectory.step_seconds.append(step_ended - step_began)
                step_began = step_ended
                self.progress.beat(step=self.step, num_steps=self.num_steps, loss=self.trajectory.steps[-1].loss)
            self.evaluate(epoch)
        return self.trajectory

    def state_dict(self) -> dict[str, Any]:
        """Returns what another trainer, on whatever backend, needs to go on after this optimizer step.

        The weights are those of the task's own module, the optimizer's state is in torch's format,
        `step` is the position in the plan and `num_updates` that in the schedule.
        """
        return {
            "model": self.backend.weights(self.model),
            "optimizer": self.optimizer.state_dict(),
            "backend": self.backend.state_dict(),
            "step": self.step,
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned, on every rank."""
        self.backend.load_weights(self.model, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.backend.load_state_dict(state["backend"])
        self.step = state["step"]
        self.num_updates = state["num_updates"]

    @property
    def _is_first_step(self) -> bool:
        """Whether this process has not yet completed a step; a resumed run, too, has a first one."""
        return self.trajectory.first_step_at is None

    def train_step(self, epoch: int, global_batch: SampleIds, batches: Iterator[Batch]) -> None:
        """Takes one optimizer step on this rank's share of a global batch."""
        config, backend = self.config, self.backend
        learning_rate = self._set_learning_rate()
        micro_batches = self.plan.micro_batches(global_batch, backend.rank)
        num_targets = self.task.num_targets("train", global_batch.tolist())
        loss_share = torch.zeros((), dtype=torch.float64, device=backend.device)
        samples = tokens = positions = 0
        for micro_step, micro_batch in enumerate(micro_batches):
            batch = next(batches).to(backend.device)
            torch.manual_seed(random_seed(config.seed, _DROPOUT, backend.rank, self.step, micro_step))
            is_last = micro_step == len(micro_batches) - 1
            with nullcontext() if is_last else backend.no_sync():
                with backend.autocast():
                    loss = self.task.loss_sum(self.model, batch) * (micro_batch.weight / num_targets)
                backend.backward(loss * backend.world_size)
            # Converted by hand: functions that Apex O1 replaces refuse to mix dtypes.
            loss_share += loss.detach().double()
            if micro_batch.weight:
                samples += len(micro_batch.sample_ids)
                tokens += batch.num_tokens
                positions += batch.num_positions
        if not config.find_unused_parameters:
            _require_gradients(backend.unwrap(self.model))

        result = backend.step(config.max_grad_norm)
        self.num_updates += not result.skipped

        record = StepRecord(
            step=self.step,
            epoch=epoch,
            num_samples=len(global_batch),
            loss=None,
            grad_norm=None,
            learning_rate=learning_rate,
            skipped=result.skipped,
        )
        self._open_steps.append(_OpenStep(record, loss_share, result.grad_norm))
        self.trajectory.samples.append(samples)
        self.trajectory.tokens.append(tokens)
        self.trajectory.positions.append(positions)

    def evaluate(self, epoch: int) -> None:
        """Evaluates the whole validation split, each sample once, on all ranks together.

        Every rank fills its own rows of a zero matrix; the sum over ranks is the single-process
        result, from which all ranks compute the same metrics.
        """
        began = time.perf_counter()
        task, backend = self.task, self.backend
        num_samples = task.num_samples("validation")
        rows = torch.zeros(num_samples, task.num_evaluation_columns, dtype=torch.float64, device=backend.device)
        # Not the wrapper, whose forward may communicate: ranks have unequal numbers of batches.
        model = backend.unwrap(self.model)
        model.eval()
        batches = evaluation_batches(
            num_samples,
            batch_size=self.config.eval_batch_size,
            rank=backend.rank,
            world_size=backend.world_size,
        )
        with torch.no_grad(), self._uncompiled():
            for sample_ids in batches:
                batch = task.collate("validation", sample_ids).to(backend.device)
                with backend.autocast():
                    rows[sample_ids.start : sample_ids.stop] = task.evaluation_rows(model, batch)
        metrics = task.metrics(backend.all_reduce(rows).cpu())
        metrics = {name: _finite(value) for name, value in metrics.items()}
        evaluation = EvaluationRecord(step=self.step, epoch=epoch, seconds=time.perf_counter() - began, metrics=metrics)
        self.trajectory.evaluations.append(evaluation)
        self.progress.write("evaluation", evaluation=evaluation.model_dump())

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """Compiling once more, for the shapes of the validation split, would take longer than it saves."""
        return torch.compiler.set_stance("force_eager") if self.config.torch_compile else nullcontext()

    def _load(self, global_batches: list[SampleIds]) -> Iterator[Batch]:
        config = self.config
        dataset = _MicroBatches(self.task, self.plan, global_batches, self.backend.rank, self.step, config.seed)
        return iter(
            DataLoader(
                dataset,
                batch_size=None,
                num_workers=config.dataloader_num_workers,
                pin_memory=self.backend.device.type == "cuda",
                # Forking a process that communicates in background threads may deadlock.
                multiprocessing_context="forkserver" if config.dataloader_num_workers else None,
            )
        )

    def _set_learning_rate(self) -> float:
        """Sets the rate that follows from the number of updates taken; a skipped step does not count."""
        learning_rate = self.config.learning_rate * learning_rate_factor(
            self.config.lr_scheduler,
            step=self.num_updates,
            num_steps=self.num_steps,
            num_warmup_steps=self.num_warmup_steps,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate

    def _close_steps(self) -> None:
        """Completes the records of the steps since the last call with one reduction for all of them."""
        losses = self.backend.all_reduce(torch.stack([step.loss_share for step in self._open_steps]))
        norms = torch.stack([step.grad_norm.double() for step in self._open_steps])
        closed = [
            open_step.record.model_copy(update={"loss": _finite(loss), "grad_norm": _finite(norm)})
            for open_step, loss, norm in zip(self._open_steps, losses.tolist(), norms.tolist(), strict=True)
        ]
        self._open_steps.clear()
        self.trajectory.steps += closed
        self.progress.write("closed", steps=[step.model_dump() for step in closed])


class _MicroBatches(Dataset[Batch]):
    """This rank's micro-batches of consecutive global batches, in order."""

    def __init__(
        self, task: Task, plan: Plan, global_batches: list[SampleIds], rank: int, steps_before: int, seed: int
    ) -> None:
        self._task = task
        self._items: list[tuple[MicroBatch, tuple[int, ...]]] = [
            (micro_batch, (seed, _DATA, rank, steps_before + index + 1, micro_step))
            for index, global_batch in enumerate(global_batches)
            for micro_step, micro_batch in enumerate(plan.micro_batches(global_batch, rank))
        ]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Batch:
        # A task that augments its samples at random gets the same ones in any worker.
        micro_batch, key = self._items[index]
        seed = random_seed(*key)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return self._task.collate("train", micro_batch.sample_ids.tolist())


def build_optimizer(config: RunConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Builds the optimizer; vectors, which are biases and LayerNorm weights, are not decayed."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    # The fused step is several times faster on CPU. Under fp16 it would take over the skipping
    # from the loss scaler, and then not every library notices that a step was skipped.
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=config.precision != "fp16")


def _require_gradients(model: torch.nn.Module) -> None:
    missing = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    if missing:
        raise ValueError(
            f"{len(missing)} parameter(s) got no gradient: {', '.join(missing[:5])}; backends treat such "
            "parameters differently, so freeze them or pass --find-unused-parameters"
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
