"""The hooks of the training loop: who is called when, and that observers change nothing."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from backends.single import SingleBackend
from tasks.token_tagging import TokenTagging, TokenTaggingSettings
from tests.launching import run_config
from training.hooks import Hooks, Observers
from training.loop import Trainer
from training.world import weights_digest

HOOKS = [name for name in vars(Hooks) if name.startswith("on_")]


class Recorder(Hooks):
    """Writes down the names of the hooks in the order in which they are called."""

    def __init__(self, calls: list[str]) -> None:
        for name in HOOKS:
            setattr(self, name, self._recording(name, calls))

    @staticmethod
    def _recording(name: str, calls: list[str]) -> Any:
        return lambda *arguments: calls.append(f"{name} {arguments[0]}" if name == "on_phase" else name)


def _trainer(directory: Path, **options: Any) -> Trainer:
    task = TokenTagging(TokenTaggingSettings())
    task.prepare()
    config = run_config("single", 1, directory, **{"micro_batch_size": 16, "num_train_epochs": 1, **options})
    return Trainer(config, task, SingleBackend(config.backend_options(SingleBackend.Settings)))


@pytest.mark.parametrize("name", HOOKS)
def test_each_hook_is_passed_on_to_all_in_order(name: str) -> None:
    calls: list[Any] = []
    observers = Observers()
    for number in range(2):
        hook = Hooks()
        setattr(hook, name, lambda *arguments, number=number: calls.append((number, *arguments)))
        observers.add(hook)
    arguments = list(inspect.signature(getattr(Hooks(), name)).parameters)
    getattr(observers, name)(*arguments)
    assert calls == [(0, *arguments), (1, *arguments)]


def test_the_order_of_a_training(tmp_path: Path) -> None:
    """Two steps, the first of two micro-batches; losses are read after the first step and at the end of the epoch."""
    trainer, calls = _trainer(tmp_path), []
    trainer.observe(Recorder(calls))
    trainer.train()
    micro_batch = ["on_phase data", "on_micro_batch", "on_phase forward", "on_phase backward"]
    end = ["on_phase update", "on_update", "on_losses_read", "on_step_end"]
    assert calls == [
        *("on_epoch_begin", "on_step_begin", *micro_batch, *micro_batch, *end),
        *("on_step_begin", *micro_batch, *end),
        *("on_phase evaluation", "on_evaluation_begin", "on_phase data", "on_phase evaluation", "on_evaluation_end"),
        "on_phase saving",
    ]


def test_an_observer_changes_nothing(tmp_path: Path) -> None:
    observed, plain = _trainer(tmp_path, logging_steps=1), _trainer(tmp_path, logging_steps=1)
    observed.observe(Recorder([]))
    assert observed.train().steps == plain.train().steps
    assert weights_digest(observed.state.module) == weights_digest(plain.state.module)
