"""The state of a training: all that changes from step to step, and its conversion to and from checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from backends.interface import Backend
from records.checkpoint import (
    BestModel,
    Checkpoint,
    CheckpointState,
    flatten_optimizer,
    unflatten_optimizer,
    with_prefix,
    without_prefix,
)
from records.config import RunConfig
from records.record import EvaluationRecord, StepRecord, World
from tasks.interface import Task, facts_of
from training.losses import finite
from training.receiving import IncomingCheckpoint

_VALUES = attrgetter(*StepRecord.model_fields)


@dataclass
class Trajectory:
    """The steps and evaluations of a training so far, the same on all ranks."""

    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)


class TrainingState:
    """Model, optimizer and position of a training.

    Attributes:
        model: What the backend's `setup` returned, which may be a wrapper around the task's module.
        optimizer: Likewise.
        step: The number of the current step, from 1, which is the position in the plan; 0 before the first.
        num_updates: How many updates were taken, which is the position in the schedule of the learning rate.
        evaluated_step: The step after which the last evaluation took place; 0 before the first.
        best: The best evaluation so far, by the metric that was chosen.
        evaluations_since_best: What early stopping counts.
        trajectory: The steps and evaluations so far.
        worlds: How many ranks there were so far, and are now.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        backend: Backend,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._config = config
        self._task = task
        self.backend = backend
        self.model = model
        self.optimizer = optimizer
        self.step = 0
        self.num_updates = 0
        self.evaluated_step = 0
        self.best: BestModel | None = None
        self.evaluations_since_best = 0
        self.trajectory = Trajectory()
        self.worlds = [World(first_step=1, num_processes=backend.world_size)]
        self._history = _as_matrix([])  # the steps up to the last checkpoint

    @property
    def module(self) -> torch.nn.Module:
        """The task's own module."""
        return self.backend.unwrap(self.model)

    def add_steps(self, steps: list[StepRecord]) -> None:
        """Adds the records of the last steps."""
        self.trajectory.steps += steps

    def add_evaluation(self, evaluation: EvaluationRecord) -> None:
        """Adds the record of an evaluation after the current step."""
        self.trajectory.evaluations.append(evaluation)
        self.evaluated_step = self.step

    def judge(self, value: float | None) -> bool:
        """Compares the last evaluation with the best one so far, by the metric that models are compared by.

        Args:
            value: Its value, the same on all ranks; None if it is undefined.

        Returns:
            Whether it is the best so far; of equal ones, the first is.
        """
        sign = 1 if self._config.prefers_greater else -1
        if value is not None and (self.best is None or sign * value > sign * self.best.value):
            self.best = BestModel(step=self.step, value=value)
            self.evaluations_since_best = 0
            return True
        self.evaluations_since_best += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """Returns what the training itself needs to go on after this step, in the form of torch's own state_dicts.

        "model" has the weights of the task's own module, whatever wraps it. Where ranks hold parts of tensors, so does
        this; `Backend.whole` makes the rest of them.
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
        self._restore(
            state["step"],
            state["num_updates"],
            weights=lambda: state["model"],
            optimizer=lambda: state["optimizer"],
            backend=state["backend"],
        )

    def _restore(
        self,
        step: int,
        num_updates: int,
        *,
        weights: Callable[[], dict[str, torch.Tensor]],
        optimizer: Callable[[], dict[str, Any]],
        backend: dict[str, Any],
    ) -> None:
        """Restores one part after the other, each when the one before is in its place, to save memory."""
        self.backend.load_weights(self.model, weights())
        self.optimizer.state.clear()  # what comes takes its place
        self.optimizer.load_state_dict(self._own_parts(optimizer()))
        self.backend.load_state_dict(backend)
        self.step, self.num_updates = step, num_updates

    def _own_parts(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """Returns a whole state_dict of the optimizer with what this rank holds of its tensors."""
        numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        by_number = dict(zip(numbers, parameters, strict=True))
        state = {
            number: {name: self._own_part(value, by_number[number]) for name, value in values.items()}
            for number, values in optimizer["state"].items()
        }
        return {**optimizer, "state": state}

    def _own_part(self, value: Any, parameter: torch.Tensor) -> Any:
        if not (isinstance(value, torch.Tensor) and value.shape == parameter.shape):
            return value
        own = self.backend.shard(value, parameter)
        # A fused optimizer reads parameter and state in the order of memory, and would take other elements for these.
        return own if own.stride() == parameter.stride() else torch.empty_like(parameter, dtype=own.dtype).copy_(own)

    def checkpoint(self, *, keeps: bool) -> Checkpoint | None:
        """Copies what another run, on whatever backend and world size, needs to go on after this step.

        Where ranks hold parts of tensors, all of them must call it. Only a rank that `keeps` it gets a checkpoint.
        """
        state = self.state_dict()
        tensors, scalars, groups = flatten_optimizer(state["optimizer"])
        tensors = with_prefix("model", state["model"]) | with_prefix("optimizer", tensors)
        self._history = torch.cat([self._history, _as_matrix(self.trajectory.steps[len(self._history) :])])
        tensors["history"] = self._history
        tensors |= with_prefix("buffer", self._hidden_buffers(state["model"]))
        copies = {name: self._copied(tensor, keeps=keeps) for name, tensor in tensors.items()}
        if not keeps:
            return None
        return Checkpoint(
            CheckpointState(
                config=self._config,
                data=facts_of(self._task),
                step=self.step,
                num_updates=self.num_updates,
                evaluated_step=self.evaluated_step,
                best=self.best,
                evaluations_since_best=self.evaluations_since_best,
                evaluations=self.trajectory.evaluations,
                worlds=self.worlds,
                backend=state["backend"],
                optimizer_groups=groups,
                optimizer_scalars=scalars,
            ),
            {name: copy for name, copy in copies.items() if copy is not None},
        )

    def _copied(self, tensor: torch.Tensor, *, keeps: bool) -> torch.Tensor | None:
        """Copies a tensor, since training goes on; a file can hold only contiguous ones."""
        whole = self.backend.whole(tensor.detach())
        if not keeps:
            return None
        return whole.to("cpu", copy=True).contiguous()

    def _hidden_buffers(self, weights: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Finds the buffers that are in no state_dict."""
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in weights}

    def require_fitting_optimizer(self, checkpoint: IncomingCheckpoint) -> None:
        """Makes sure that the optimizer's state of a checkpoint is of this model.

        Raises:
            ValueError: It is not. Fused kernels would not notice it, and would read and write past the end of a tensor.
        """
        own = self.optimizer.state_dict()["param_groups"]
        if [group.get("params") for group in checkpoint.state.optimizer_groups] != [group["params"] for group in own]:
            raise ValueError("the checkpoint is of another model (its optimizer has other parameters)")
        shapes = [parameter.shape for group in self.optimizer.param_groups for parameter in group["params"]]
        for name, facts in without_prefix("optimizer", checkpoint.facts).items():
            number, _, what = name.partition(".")
            fits = number.isdecimal() and int(number) < len(shapes) and facts.empty("meta").is_floating_point()
            if not fits or facts.shape != (() if what == "step" else tuple(shapes[int(number)])):
                raise ValueError(f"the checkpoint is of another model (its optimizer state {name} does not fit)")

    def load_checkpoint(self, checkpoint: IncomingCheckpoint) -> None:
        """Restores what `checkpoint` returned, on every rank, one part after the other to save memory.

        The optimizer's hyper-parameters are those of this run's configuration, which has been checked.

        Raises:
            ValueError: The checkpoint is of another model.
        """
        state = checkpoint.state
        groups = self.optimizer.state_dict()["param_groups"]
        own = self.module.state_dict()
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

        def weight(name: str, whole: torch.Tensor) -> torch.Tensor:
            return self.backend.shard(whole, own[name]) if name in own and own[name].shape == whole.shape else whole

        def moment(key: str, whole: torch.Tensor) -> torch.Tensor:
            parameter = parameters[int(key.partition(".")[0])]
            return self.backend.shard(whole, parameter) if whole.shape == parameter.shape else whole

        try:
            hidden, history = checkpoint.take("buffer"), checkpoint.take("history")[""]
            self._restore(
                state.step,
                state.num_updates,
                weights=lambda: checkpoint.take("model", weight),
                optimizer=lambda: unflatten_optimizer(
                    checkpoint.take("optimizer", moment), state.optimizer_scalars, groups
                ),
                backend=state.backend,
            )
            buffers = dict(self.module.named_buffers())
            for name, content in hidden.items():
                # A buffer that is in no state_dict may come, go or grow in training, such as a cache.
                if name in buffers and buffers[name].shape == content.shape:
                    buffers[name].copy_(content)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"the checkpoint is of another model ({' '.join(str(error).split())[:300]})") from error
        checkpoint.finish()
        self.evaluated_step = state.evaluated_step
        self.best = state.best
        self.evaluations_since_best = state.evaluations_since_best
        self._history = history
        self.trajectory = Trajectory(_from_matrix(history), list(state.evaluations))
        self._add_world(state)

    def _add_world(self, before: CheckpointState) -> None:
        """Notes from which step on there are as many ranks as now, if there were more or fewer."""
        # A checkpoint of an earlier version tells of the last world only.
        worlds = before.worlds or [World(first_step=1, num_processes=before.config.num_processes)]
        (now,) = self.worlds
        if worlds[-1].num_processes != now.num_processes:
            worlds = [*worlds, World(first_step=before.step + 1, num_processes=now.num_processes)]
        self.worlds = worlds


def _as_matrix(steps: list[StepRecord]) -> torch.Tensor:
    """Converts records to one float64 matrix [steps, fields of a StepRecord]; None becomes NaN."""
    rows = [[math.nan if value is None else value for value in _VALUES(step)] for step in steps]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, len(StepRecord.model_fields))


def _from_matrix(matrix: torch.Tensor) -> list[StepRecord]:
    rows = [[finite(value) for value in row] for row in matrix.tolist()]
    return [StepRecord.model_validate(dict(zip(StepRecord.model_fields, row, strict=True))) for row in rows]
