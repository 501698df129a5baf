"""What the ranks of a group do in one case; every function returns plain data and tensors."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from backends.interface import Backend, UnsupportedError
from contract.case import FINE_FLOAT64, LARGE_INT64, Case, Training
from contract.observe import ObservedBackend, ObservedTask, Watch
from contract.patience import stretched
from records.config import RunConfig
from tasks.interface import Task
from tasks.registry import load_task
from training.hooks import Hooks
from training.loop import Trainer
from training.optimizer import build_optimizer
from training.state import TrainingState
from training.world import gather_facts

# How long the other ranks look, in seconds, until rank 0 has returned from a call that takes no time.
_LONGEST_LOOK = 3.0


@dataclasses.dataclass(frozen=True)
class Scenery:
    """What a scene may need besides the backend.

    Attributes:
        world_size: The number of ranks that were asked for.
        batch_for: The number of ranks that the size of the global batch is made for; it differs from `world_size`
            where a single process computes what a group computes.
        rank: The number that the launcher gave this process, whatever the backend says.
        directory: A directory for files that the ranks of the group share.
        single_states: For each case with a training that resumes from "reference", the file of that state.
        float64: Whether the adapter under test can average float64.
    """

    world_size: int
    batch_for: int
    rank: int
    directory: Path
    single_states: Mapping[str, Path]
    float64: bool


def world(backend: Backend, case: Case, scenery: Scenery) -> dict[str, Any]:
    """Reads the numbers of this rank, and exchanges them with all ranks."""
    total = backend.all_reduce(torch.tensor(float(backend.rank), device=backend.device))
    facts = {"rank": backend.rank, "local_rank": backend.local_rank, "device": str(backend.device)}
    return {
        **facts,
        "launched_as": scenery.rank,
        "world_size": backend.world_size,
        "sum_of_ranks": float(total),
        "gathered": gather_facts(backend, facts),
    }


def collectives(backend: Backend, case: Case, scenery: Scenery) -> dict[str, Any]:
    """Reduces [rank + 1, -rank] in several dtypes, all digits of a dtype, a 0-d tensor, and many elements twice."""
    results = []
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
        for operation in ("sum", "min", "max"):
            given = torch.tensor([backend.rank + 1, -backend.rank], dtype=dtype, device=backend.device)
            kept = given.clone()
            reduced = backend.all_reduce(given, operation)
            facts = {"dtype": str(reduced.dtype), "result": reduced.tolist(), "untouched": torch.equal(given, kept)}
            results.append({"asked_dtype": str(dtype), "operation": operation, **facts})
    digits = {
        str(number.dtype): backend.all_reduce(number.to(backend.device) + backend.rank).tolist()
        for number in (
            torch.tensor([LARGE_INT64], dtype=torch.int64),
            torch.tensor([FINE_FLOAT64], dtype=torch.float64),
        )
    }
    scalar = backend.all_reduce(torch.ones((), dtype=torch.float64, device=backend.device))
    many = torch.arange(300_000, dtype=torch.float64, device=backend.device).reshape(300, 1000)
    first = backend.all_reduce(many + backend.rank)
    kept = first.clone()
    for _ in range(4):
        backend.all_reduce(many)
    offset = backend.world_size * (backend.world_size - 1) / 2
    return {
        "results": results,
        "digits": digits,
        "strided": torch.equal(backend.all_reduce(many.t()), many.t() * backend.world_size),
        "scalar": float(scalar),
        "scalar_shape": list(scalar.shape),
        "many": torch.equal(kept, many * backend.world_size + offset),
        "kept": torch.equal(first, kept),
    }


def barrier(backend: Backend, case: Case, scenery: Scenery) -> dict[str, Any]:
    """Each rank in turn is late and writes a file just before it enters; every rank looks for it afterwards."""
    found = []
    for late_rank in range(scenery.world_size):
        late = scenery.directory / f"late-{late_rank}"
        if scenery.rank == late_rank:
            late.unlink(missing_ok=True)  # an earlier case of this group may have left it
        backend.all_reduce(torch.zeros(1, device=backend.device))
        if scenery.rank == late_rank:
            time.sleep(0.3)
            late.touch()
        backend.barrier()
        found.append(late.exists())
    return {"found": found}


def prepared_optimizer(backend: Backend, case: Case, scenery: Scenery) -> dict[str, Any]:
    """Passes an optimizer to `setup` that has taken a step and has momentum."""
    config, task = _prepared(Training({"momentum": 0.9}), case, scenery, backend)
    torch.manual_seed(1)
    model = task.build_model().to(backend.device)
    optimizer = build_optimizer(config, model)
    task.loss_sum(model, task.collate("train", [0, 1]).to(backend.device)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    watch = Watch()
    ObservedBackend(backend, watch).setup(model, optimizer)
    return {"setup": dataclasses.asdict(watch.seen)["setup"]}


def weights_of_rank_0(backend: Backend, case: Case, scenery: Scenery) -> dict[str, Any]:
    """Rank 0 alone asks for what it saves; the others ask, too, if it waits for them, so that the group goes on."""
    config, task = _prepared(Training(), case, scenery, backend)
    model = task.build_model().to(backend.device)
    wrapped, _ = backend.setup(model, build_optimizer(config, model))
    has_returned = scenery.directory / "rank-0-has-returned"
    if scenery.rank == 0:
        has_returned.unlink(missing_ok=True)  # an earlier case of this group may have left it
    backend.barrier()
    end = time.monotonic() + stretched(_LONGEST_LOOK, scenery.world_size)
    while scenery.rank != 0 and not has_returned.exists() and time.monotonic() < end:
        time.sleep(0.01)
    is_alone = scenery.rank == 0 or has_returned.exists()
    if scenery.rank == 0 or not is_alone:
        backend.weights(wrapped)
        backend.state_dict()
    if scenery.rank == 0:
        has_returned.touch()
    backend.barrier()
    return {"is_alone": is_alone}


def train(backend: Backend, case: Case, scenery: Scenery) -> list[dict[str, Any]] | dict[str, str]:
    """Runs the trainings of the case, one after the other, unless the backend refuses a model that it may refuse."""
    seen: list[dict[str, Any]] = []
    for training in case.trainings:
        options: dict[str, Any] = {}
        state = None
        if training.clip_just_above:
            options["max_grad_norm"] = max(step["grad_norm"] for step in seen[-1]["steps"]) * 1.0001
        if training.resume == "own":
            state = seen[-1]["state"]
        elif training.resume == "reference":
            state = torch.load(scenery.single_states[case.name], map_location="cpu")
        if state is not None and training.good_steps is not None:
            state = {**state, "backend": {**state["backend"], "_growth_tracker": training.good_steps}}
        try:
            seen.append(train_once(backend, case, training, scenery, options, state))
        except UnsupportedError as refusal:
            if not case.may_be_refused:
                raise
            return {"refused": str(refusal)}
    return seen


def train_once(
    backend: Backend,
    case: Case,
    training: Training,
    scenery: Scenery,
    options: Mapping[str, Any],
    state: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Runs one training, from `state` if it is given, and returns a TrainingSeen as a dictionary."""
    config, task = _prepared(training, case, scenery, backend)
    config = config.model_copy(update=dict(options))
    watch = Watch()
    overflow = training.overflow
    if overflow is not None:
        overflow = dataclasses.replace(overflow, rank=min(overflow.rank, scenery.world_size - 1))
    observed_task = cast(Task, ObservedTask(task, watch, scenery.rank, overflow))
    observed_backend = ObservedBackend(backend, watch)
    trainer = Trainer(config, observed_task, cast(Backend, observed_backend))
    trainer.observe(_StepEnds(watch, observed_backend, trainer.state, training.save_after))
    if state is not None:
        trainer.rehearse()  # as a run does that goes on from a checkpoint
        watch.forget_step()
        # An optimizer changes the tensors that it is given.
        trainer.state.load_state_dict(copy.deepcopy(dict(state)))
    with watch.counting(backend, training.count_traffic):
        trajectory = trainer.train()
    watch.seen.losses = [step.loss for step in trajectory.steps]
    watch.seen.evaluations = [evaluation.metrics for evaluation in trajectory.evaluations]
    watch.seen.buffers = observed_backend.named(observed_backend.model.named_buffers())
    watch.seen.settings = _as_json(backend.effective_settings())
    return dataclasses.asdict(watch.seen)


def _prepared(training: Training, case: Case, scenery: Scenery, backend: Backend) -> tuple[RunConfig, Task]:
    """Returns the configuration of a training on this backend, and its task."""
    config = training.config(
        world_size=scenery.world_size,
        precision=case.precision,
        device=backend.device.type,
        find_unused_parameters=case.find_unused_parameters,
        batch_for=scenery.batch_for,
        float64=scenery.float64,
    )
    task_class = load_task(config.task)
    task = task_class(task_class.Settings.model_validate(config.task_settings))
    task.prepare()
    return config, task


class _StepEnds(Hooks):
    """Writes down weights and buffers after each step, and the whole state after one of them."""

    def __init__(self, watch: Watch, backend: ObservedBackend, state: TrainingState, save_after: int | None) -> None:
        self._watch, self._backend, self._state, self._save_after = watch, backend, state, save_after

    def on_step_end(self, step: int) -> None:
        model, named = self._backend.model, self._backend.named
        self._watch.close_step(named(model.named_parameters()), named(model.named_buffers()))
        if step == self._save_after:
            with self._watch.looking():
                self._watch.seen.state = _copied(self._state.state_dict(), self._backend.whole)


def _as_json(settings: dict[str, Any]) -> str:
    """Returns the settings as text, so that a value that is not a plain fact does not spoil the other evidence."""
    try:
        return json.dumps(settings, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        return f"not JSON: {error}"


def refused_training(backend: Backend, case: Case, scenery: Scenery) -> dict[str, Any]:
    """Runs a training that must be refused, and returns the error."""
    try:
        train_once(backend, case, case.trainings[0], scenery, {}, None)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def _copied(value: Any, whole: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return whole(value.detach()).cpu().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item, whole) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(item, whole) for item in value]
    return value
