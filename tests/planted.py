"""Sleeps planted in a phase of each step, which the diagnosis has to find there and nowhere else.

``python -m tests.planted --precision bf16 --seconds 0.005`` plants one in each phase of the default task and prints
what the diagnosis finds, and which share of a step the parts told from noise were before they were brought to a sum of
1 (covered). Its clock counts the sleeps and the processor time of the training thread, so that other programs on the
machine do not change the figures.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from backends.interface import StepResult
from backends.single import SingleBackend
from compare.report.breakdown import measure_breakdown
from compare.steps import PARTS, Breakdown, parts_in
from records.record import RankRecord, RunRecord
from tasks.interface import Batch, Split, Task
from tasks.registry import load_task
from tasks.token_tagging import TokenTagging
from tests.launching import run_config
from training.diagnosis import Diagnosis
from training.loop import Trainer

# The default task, trained as it is without options.
TEXTS: dict[str, Any] = {
    "task": "text-classification",
    "optimizer": "adamw",
    "learning_rate": 5e-4,
    "max_grad_norm": 1.0,
    "micro_batch_size": 32,
}
# Where a sleep can be planted, and the part of the step that it belongs to.
PLACES = {
    "collate": "data",
    "num_targets": "data",
    "forward": "forward",
    "backward": "backward",
    "waiting in backward": "communication",
    "waiting in step": "communication",
    "optimizer": "optimizer",
    "new shapes": "building",
}


class _Sleep:
    """The sleeps of this process, and their sum in seconds."""

    total = 0.0

    @classmethod
    def take(cls, seconds: float) -> None:
        time.sleep(seconds)
        cls.total += seconds


class WaitingBackend(SingleBackend):
    """One process that waits, as if for others, where the libraries do: DDP in `backward`, Horovod in `step`."""

    place: str | None = None
    seconds = 0.0

    @override
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        self._wait("waiting in backward")

    @override
    def step(self, max_grad_norm: float) -> StepResult:
        self._wait("waiting in step")
        return super().step(max_grad_norm)

    def _wait(self, place: str) -> None:
        if place == self.place:  # a sleep of no time, too, gives the core away
            _Sleep.take(self.seconds)


class SlowRank(TokenTagging):
    """A task whose last rank sleeps in the phase that a variable of the environment names."""

    # Between this and a step, other programs may keep each wake-up of a thread waiting for a few milliseconds.
    SECONDS = 0.1

    @override
    def collate(self, split: Split, sample_ids: Any) -> Batch:
        self._sleep("data")
        return super().collate(split, sample_ids)

    @override
    def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        self._sleep("forward")
        return super().loss_sum(model, batch)

    def _sleep(self, phase: str) -> None:
        is_last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "0")) - 1
        if is_last and os.environ.get("LOCKSTEP_TEST_SLOW_PHASE") == phase:
            time.sleep(self.SECONDS)


def breakdown(place: str | None, seconds: float, task: str, **options: Any) -> Breakdown:
    """Trains in this process with a sleep in each step; returns what the diagnosis finds."""
    found = measure_breakdown(diagnosed(place, seconds, task, **options), {}, None)
    assert found is not None
    return found


def diagnosed(place: str | None, seconds: float, task: str, **options: Any) -> RunRecord:
    """Trains likewise; returns what of the record of this run a breakdown is made of."""
    config = run_config("single", 1, Path("/nowhere"), task=task, diagnose=True, **options)
    task_class = load_task(task)
    planted = task_class(task_class.Settings.model_validate(config.task_settings))
    planted.prepare()
    backend = WaitingBackend(config.backend_options(WaitingBackend.Settings))
    backend.place, backend.seconds = place, seconds
    torch.set_num_threads(config.threads_per_rank)
    with _planted(planted, place, seconds):
        trainer = Trainer(config, planted, backend)
        diagnosis = Diagnosis(trainer)
        trainer.observe(diagnosis)
        trainer.train()
    rank = RankRecord.model_construct(diagnosis=diagnosis.record())
    return RunRecord.model_construct(steps=trainer.state.trajectory.steps, ranks=[rank])


@contextmanager
def _planted(task: Task, place: str | None, seconds: float) -> Iterator[None]:
    """Plants a sleep that the step alone has, too."""
    wait = partial(_Sleep.take, seconds)
    if place == "collate":
        task.collate = _after(wait, task.collate)  # type: ignore[method-assign]
    elif place == "num_targets":
        task.num_targets = _after(wait, task.num_targets)  # type: ignore[method-assign]
    elif place in ("forward", "backward", "new shapes"):
        task.loss_sum = _slow_loss(place, wait, task.loss_sum)  # type: ignore[method-assign]
    elif place == "optimizer":
        handle = register_optimizer_step_pre_hook(lambda *arguments: wait())
        try:
            yield
        finally:
            handle.remove()
        return
    yield


def _after(wait: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def waiting(*arguments: Any) -> Any:
        wait()
        return function(*arguments)

    return waiting


def _slow_loss(place: str, wait: Callable[[], None], loss_sum: Callable[..., torch.Tensor]) -> Any:
    met: list[torch.Tensor] = []

    def waiting(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        loss = loss_sum(model, batch)
        inputs = next(iter(batch.tensors.values()))
        is_new = not any(torch.equal(inputs, one) for one in met)
        met.append(inputs)
        if place == "forward" or (place == "new shapes" and is_new):
            wait()
        elif place == "backward":
            loss.register_hook(lambda gradient: wait())
        return loss

    return waiting


def own_clock() -> AbstractContextManager[Any]:
    """Has durations count the sleeps and the processor time of this thread, which other programs do not lengthen."""
    return mock.patch.object(time, "perf_counter", _own_seconds)


def _own_seconds() -> float:
    return time.thread_time() + _Sleep.total


def main() -> None:
    """Prints a row for each place: the parts of the step in milliseconds, their share of it, and what is noise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--seconds", type=float, default=0.005)
    parser.add_argument("--steps", type=int, default=45)
    chosen = parser.parse_args()
    with own_clock():
        _print_table(chosen)


def _print_table(chosen: argparse.Namespace) -> None:
    headings = (*(part for part in PARTS if part != "waiting"), "covered")
    print(f"{'planted in':20}", *(f"{heading:>14}" for heading in headings))
    for place in (None, *PLACES):
        found = breakdown(place, chosen.seconds, **TEXTS, precision=chosen.precision, max_steps=chosen.steps)
        cells = (f"{1e3 * getattr(found, part):14.2f}" for part in parts_in([found]))
        print(f"{place or 'nothing':20}", *cells, f"{found.covered:14.3f}", found.unresolved)


if __name__ == "__main__":
    main()
