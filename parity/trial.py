"""Trials: a short training under a backend, the same in one process, and whether both compute the same.

Each of them is a run of Lockstep's own command with --diagnose, which notes the weights after every step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from backends.registry import REFERENCE
from launch import own_command
from launch.display import describe_world
from parity.judge import approximate_parity, diagnosed_parity, normalised_otherwise
from parity.verdict import SAME, Parity
from records.config import RunConfig, RunOptions
from records.names import RECORD_NAME
from records.record import RunRecord, read_record
from tasks.interface import Task
from training.plan import Plan

# Options of a run that its reference does not have: how many ranks there are, and what starts them where.
_OF_THE_RANKS = {
    *("num_processes", "micro_batch_size", "start_method", "threads_per_rank", "bind_ranks"),
    "grad_compression",
    "sync_batchnorm",
    *("num_nodes", "node_rank", "master_addr", "master_port"),
}
# Options that change nothing of what is computed, or that ask for what a trial does not keep.
_LEFT_OUT = {
    *("output_dir", "overwrite", "resume", "max_restarts", "trace", "tracker", "diagnose", "max_steps"),
    *("save_every", "keep", "on_save_error", "metric_for_best_model", "early_stopping_patience", "torch_compile"),
}


# Enough for momentum, warm-up and several roundings; each costs two forward passes of its own.
NUM_STEPS = 20


class TrialFailed(Exception):
    """A training of a trial did not complete; the message says which one, and why."""


class Trial(NamedTuple):
    """A training that is short enough to be compared step by step.

    Attributes:
        config: What was asked for.
        num_steps: How many of its steps are compared.
        task_settings: The task's options, without dropout where its masks depend on how a batch is split.
        left_out: What it leaves out of what was asked for, in a few words each.
    """

    config: RunConfig
    num_steps: int
    task_settings: Mapping[str, Any]
    left_out: list[str]


class Outcome(NamedTuple):
    """What came of a trial.

    Attributes:
        parity: Whether the training computes what one process computes.
        warnings: What the ranks had to say of it.
    """

    parity: Parity
    warnings: list[str]

    @property
    def is_same(self) -> bool:
        """Whether it is proven that both compute the same, up to rounding at most."""
        return self.parity.verdict in SAME


def trial_of(config: RunConfig, task: Task, *, num_steps: int) -> Trial:
    """Returns the trial of a run that could start.

    Args:
        config: The run.
        task: Its task, prepared.
        num_steps: How many steps to compare at most.
    """
    asked = config.num_steps(Plan.of(config, task).steps_per_epoch)
    settings, left_out = dict(config.task_settings), []
    if asked > num_steps:
        left_out.append(f"all but {num_steps} of {asked} steps, so that the learning rate changes faster")
    if config.torch_compile:
        left_out.append("--torch-compile, since no step of a compiled model can be observed")
    if settings.get("dropout") and not task.describe().get("dropout_by_sample"):
        settings["dropout"] = 0.0
        left_out.append("dropout, whose masks depend on how a batch is split")
    return Trial(config, min(asked, num_steps), settings, left_out)


class Trials:
    """Runs trainings, each of them once, and judges them.

    Args:
        directory: An empty directory, which receives what the runs leave.
        say: Is told what runs now.
    """

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._say = say
        self._records: dict[str, RunRecord] = {}

    def outcome(self, trial: Trial) -> Outcome:
        """Trains under the backend and in one process, and compares weights, losses and metrics after every step.

        The reference computes each global batch as one micro-batch. How large rounding errors are is measured by a
        second reference, whose micro-batches are those of a rank.

        Raises:
            TrialFailed: One of the trainings did not complete.
            Interrupted: A signal asked to stop; what was running has been ended.
        """
        config = trial.config
        run = self._record(config.backend, {**_options(trial), **_set(config.backend_settings)}, describe_world(config))
        options = {name: value for name, value in _options(trial).items() if name not in _OF_THE_RANKS}
        whole = config.global_batch_size
        if run.num_batch_norms and config.sync_batchnorm:
            # BatchNorm computes something else from other micro-batches, so these are the only ones to compare with.
            reference = self._alone(options, config.micro_batch_size * config.num_processes)
            return Outcome(diagnosed_parity(run, reference, None), run.warnings)
        reference = self._alone(options, whole)
        if (otherwise := normalised_otherwise(run, reference)) is not None:
            return Outcome(otherwise, run.warnings)
        if config.grad_compression != "none":
            return Outcome(approximate_parity(run, reference), run.warnings)
        smaller = config.micro_batch_size if config.micro_batch_size < whole else whole // 2
        yardstick = self._alone(options, smaller) if smaller else None
        return Outcome(diagnosed_parity(run, reference, yardstick), run.warnings)

    def _alone(self, options: Mapping[str, Any], micro_batch_size: int) -> RunRecord:
        """Returns the record of one process that takes micro-batches of this size."""
        words = f"one process, micro-batches of {micro_batch_size}"
        return self._record(REFERENCE, {**options, "num_processes": 1, "micro_batch_size": micro_batch_size}, words)

    def _record(self, backend: str, options: Mapping[str, Any], words: str) -> RunRecord:
        """Returns the record of a training, which is made when it is first asked for."""
        text = json.dumps(options, sort_keys=True)
        if (key := backend + text) not in self._records:
            self._say(f"training: {backend}: {words}")
            place = self._directory / f"run-{len(self._records) + 1}"
            file = place.with_suffix(".json")
            file.write_text(text)
            done = own_command.run_command([backend, f"--config={file}", f"--output-dir={place}"])
            why = own_command.why_it_failed(done, place)
            if why is not None:
                raise TrialFailed(f"the training under {backend} ({words}) did not complete: {why}")
            self._records[key] = read_record(place / RECORD_NAME)
        return self._records[key]


def _options(trial: Trial) -> dict[str, Any]:
    """Returns the options of a trial's run, by name, without those of its backend alone."""
    asked = trial.config.model_dump(mode="json", include=set(RunOptions.model_fields) - _LEFT_OUT)
    of_a_trial = {"diagnose": True, "save_every": "never", "max_steps": trial.num_steps}
    return {**_set(asked), **_set(trial.task_settings), **of_a_trial}


def _set(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out what has no value: a file of options gives each of them one."""
    return {name: value for name, value in options.items() if value is not None}
