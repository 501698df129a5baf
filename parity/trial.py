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
from launch.errors import one_line
from parity.judge import approximate_parity, diagnosed_parity, normalised_otherwise, parity_in_equal_parts
from parity.verdict import SAME, Parity
from records.config import RunConfig, RunOptions
from records.names import RECORD_NAME
from records.record import RunRecord, read_record
from tasks.interface import Task
from training.plan import Plan

# Options of a run that its reference does not have: how many ranks there are, and what starts them where.
_OF_THE_RANKS = {
    *("num_processes", "micro_batch_size", "start_method", "threads_per_rank", "bind_ranks", "scheduling"),
    "grad_compression",
    "sync_batchnorm",
    *("num_nodes", "min_nodes", "node_rank", "master_addr", "master_port"),
}
# Options that change nothing of what is computed, or that ask for what a trial does not keep.
_LEFT_OUT = {
    *("output_dir", "overwrite", "resume", "max_restarts", "trace", "tracker", "diagnose", "max_steps"),
    *("save_every", "keep", "on_save_error", "metric_for_best_model", "greater_is_better"),
    *("early_stopping_patience", "torch_compile"),
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
    plan = Plan.of(config, task)
    asked = config.num_steps(plan.steps_per_epoch)
    settings, left_out = dict(config.task_settings), []
    if asked > num_steps:
        left_out.append(
            f"all but the first {num_steps} of {asked} steps; the learning rate runs through its whole curve in them"
        )
    rest = plan.num_samples % plan.global_batch_size
    if rest and num_steps < plan.steps_per_epoch <= asked:
        left_out.append(
            f"the last step of an epoch, which has only {rest} of {plan.global_batch_size} samples; "
            f"--verify-steps {plan.steps_per_epoch} would reach it"
        )
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
        parity = self._parity(trial, run)
        if parity.verdict == "rounding" and parity.num_steps is not None and 2 * parity.num_steps < trial.num_steps:
            detail = f"only {parity.num_steps} of {trial.num_steps} steps could be compared ({parity.detail})"
            parity = parity.model_copy(update={"verdict": "unknown", "detail": detail})
        return Outcome(parity, run.warnings)

    def _parity(self, trial: Trial, run: RunRecord) -> Parity:
        config = trial.config
        if run.status == "diverged":
            return Parity(verdict="not comparable", detail=one_line(run.error))
        options = {name: value for name, value in _options(trial).items() if name not in _OF_THE_RANKS}
        # BatchNorm computes something else from other parts of a batch.
        in_equal_parts = bool(run.num_batch_norms) and (config.sync_batchnorm or config.num_processes == 1)
        whole = config.micro_batch_size * config.num_processes if in_equal_parts else config.global_batch_size
        reference = self._alone(options, whole)
        if config.grad_compression != "none":
            return approximate_parity(run, reference)
        if (otherwise := normalised_otherwise(run, reference)) is not None:
            return otherwise
        if in_equal_parts:
            return parity_in_equal_parts(run, reference)
        smaller = _smaller_part(config, run.steps[0].num_samples)
        return diagnosed_parity(run, reference, self._alone(options, smaller) if smaller else None)

    def _alone(self, options: Mapping[str, Any], micro_batch_size: int) -> RunRecord:
        """Returns the record of one process that takes micro-batches of this size."""
        words = f"one process, micro-batches of {micro_batch_size}"
        own = {"num_processes": 1, "micro_batch_size": micro_batch_size}
        try:
            return self._record(REFERENCE, {**options, **own}, words)
        except TrialFailed as failure:
            hint = "one process takes a whole global batch at once, so a smaller --global-batch-size needs less memory"
            raise TrialFailed(f"{failure} ({hint})") from failure

    def _record(self, backend: str, options: Mapping[str, Any], words: str) -> RunRecord:
        """Returns the record of a training, which is made when it is first asked for."""
        text = json.dumps(options, sort_keys=True, ensure_ascii=False)
        if (key := backend + text) not in self._records:
            self._say(f"training: {backend}: {words}")
            place = self._directory / f"run-{len(self._records) + 1}"
            file = place.with_suffix(".json")
            file.write_text(text, encoding="utf-8")
            done = own_command.run_command([backend, f"--config={file}", f"--output-dir={place}"])
            why = own_command.why_it_failed(done, place)
            if why is not None and not _has_diverged(place):
                raise TrialFailed(f"the training under {backend} ({words}) did not complete: {why}")
            self._records[key] = read_record(place / RECORD_NAME)
        return self._records[key]


def _has_diverged(place: Path) -> bool:
    """Whether a training came to its end with ranks that differ, which is a result."""
    return (place / RECORD_NAME).exists() and read_record(place / RECORD_NAME).status == "diverged"


def _smaller_part(config: RunConfig, num_samples: int) -> int:
    """Returns the size of micro-batches that really split the first global batch of so many samples; 0 if none does."""
    most = config.micro_batch_size if config.micro_batch_size < num_samples else num_samples // 2
    sizes = [size for size in range(1, most + 1) if config.global_batch_size % size == 0]
    return max(sizes, default=0)


def _options(trial: Trial) -> dict[str, Any]:
    """Returns the options of a trial's run, by name, without those of its backend alone."""
    asked = trial.config.model_dump(mode="json", include=set(RunOptions.model_fields) - _LEFT_OUT)
    of_a_trial = {"diagnose": True, "save_every": "never", "max_steps": trial.num_steps}
    return {**_set(asked), **_set(trial.task_settings), **of_a_trial}


def _set(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out what has no value: a file of options gives each of them one."""
    return {name: value for name, value in options.items() if value is not None}
