"""Resuming: the checkpoint that a run continues from, and the options that it takes over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.registry import find_backend
from launch.errors import UsageError
from records.checkpoint import (
    CheckpointError,
    CheckpointFile,
    CheckpointState,
    list_checkpoints,
    newest_checkpoint,
)
from records.config import RunConfig, RunOptions
from records.names import RECORD_NAME
from records.notice import record_directory
from records.record import read_record
from tasks.interface import TaskSettings
from watch.rank_files import started_ranks

LATEST = "latest"

# How a message describes a run that has finished, by its status.
_ENDS = {
    "completed": "is complete",
    "diverged": "has finished, but its ranks diverged; the model of rank 0 was saved",
}

# Options that decide the trajectory; a resumed run must have the same.
_BINDING = (
    *("task", "precision", "global_batch_size", "max_grad_norm", "optimizer", "momentum", "learning_rate"),
    *("lr_scheduler", "warmup_ratio", "weight_decay", "num_train_epochs", "max_steps", "on_nan", "seed"),
    *("metric_for_best_model", "greater_is_better", "torch_compile", "grad_compression", "sync_batchnorm"),
)
# Options that it keeps unless they are given again; all others belong to one start of a run, on one machine.
_INHERITED = (
    *("num_processes", "micro_batch_size", "batching", "eval_batch_size", "find_unused_parameters"),
    *("logging_steps", "save_every", "keep", "on_save_error", "early_stopping_patience", "hang_timeout"),
    *("evaluate", "max_restarts", "tracker"),
)


@dataclass(frozen=True)
class Start:
    """The checkpoint to resume from, and the damaged ones that were skipped."""

    path: Path
    state: CheckpointState
    damaged: tuple[str, ...] = ()

    @property
    def config(self) -> RunConfig:
        """The configuration of the run that saved it."""
        return self.state.config

    @property
    def best_path(self) -> Path | None:
        """The path of the best model so far, if that is another checkpoint; the file may be missing."""
        best = self.state.best
        if best is None or best.step == self.state.step:
            return None
        return self.path.with_name(f"step-{best.step:08d}.safetensors")


class Finished(Exception):
    """The run to resume has finished; the text says so.

    Attributes:
        has_diverged: Whether its ranks had diverged.
    """

    def __init__(self, text: str, *, has_diverged: bool) -> None:
        super().__init__(text)
        self.has_diverged = has_diverged


def find_start(resume: str, output_dir: Path | None) -> Start | None:
    """Finds the checkpoint that --resume names; None if there is none yet.

    Raises:
        Finished: Nothing is left to do.
        UsageError: It cannot be used.
    """
    if resume == LATEST:
        if output_dir is None:
            raise UsageError(
                f"--resume {LATEST}: --output-dir is missing; name the run's directory with it, or give --resume a path"
            )
        if (status := _final_status(output_dir)) is not None:
            raise Finished(
                f"the run in {output_dir} {_ENDS[status]}; there is nothing to resume",
                has_diverged=status == "diverged",
            )
        check_resumable(output_dir)
        return latest_start(output_dir)
    path = Path(resume)
    if path.is_dir():
        start = latest_start(path)
        if start is None:
            raise UsageError(f"--resume {resume}: this directory holds no checkpoint; name a run that saved one")
        return start
    if not path.exists():
        raise UsageError(f"--resume {resume}: there is no such file; name a checkpoint, a run, or {LATEST}")
    try:
        return Start(path.absolute(), CheckpointFile(path).state)
    except CheckpointError as error:
        raise UsageError(f"--resume {error}; choose another checkpoint, or {LATEST}") from error


def latest_start(run_directory: Path) -> Start | None:
    """Finds the newest checkpoint of a run that is not damaged; None if the run has no checkpoint.

    Raises:
        UsageError: All are damaged.
    """
    damaged: list[str] = []
    if (newest := newest_checkpoint(run_directory, damaged)) is not None:
        return Start(newest.path.absolute(), newest.state, tuple(damaged))
    if damaged:
        raise UsageError(f"--resume: no checkpoint of {run_directory} can be used ({damaged[0]}); start a new run")
    return None


def inherited_options(
    config: RunConfig, backend: str, given: Mapping[str, Any], most_threads: int | None = None
) -> dict[str, Any]:
    """Returns the options that a resumed run under `backend` takes over from its checkpoint, by name.

    Args:
        config: The configuration of the run that saved the checkpoint.
        backend: The backend.
        given: The options that the user gives, by name.
        most_threads: How many threads a rank may have where it will run; None for as many as this machine has cores.

    Raises:
        UsageError: The checkpoint asks for so many ranks that the user must confirm it.
    """
    names = [*_BINDING, *_INHERITED]
    if not _keeps_batching(config, backend, given):
        names.remove("batching")
    changed: dict[str, Any] = {}
    if (number := str(given.get("num_processes", config.num_processes))) != str(config.num_processes):
        names.remove("micro_batch_size")  # it fitted the old number
        together = config.micro_batch_size * config.num_processes
        if config.sync_batchnorm and number.isdecimal() and int(number) and together % int(number) == 0:
            changed["micro_batch_size"] = together // int(number)  # for the same statistics of BatchNorm
    else:
        if "num_processes" not in given:
            check_many_ranks(config)
        if config.threads_per_rank <= (most_threads or os.cpu_count() or 1):
            names.append("threads_per_rank")  # the order of sums depends on it
    before = config.model_dump(mode="json")
    own = config.backend_settings if backend == config.backend else {}
    taken = {name: before[name] for name in names if before[name] is not None}
    own = {name: value for name, value in own.items() if value is not None}
    return {**config.task_settings, **own, **taken, **changed}


def _keeps_batching(config: RunConfig, backend: str, given: Mapping[str, Any]) -> bool:
    """Returns whether a resumed run can have the layout of batches that it was begun with, which is free to change."""
    if config.batching == "packed" and find_backend(backend).capabilities.cuts_batches:
        return False
    return config.batching == "padded" or not given.get("sync_batchnorm")


def check_many_ranks(config: RunConfig) -> None:
    """Refuses to start as many ranks on this machine as a checkpoint asks for, if the user must confirm that.

    Raises:
        UsageError: They are many.
    """
    if config.num_processes > max(4, 2 * (os.cpu_count() or 1)):
        raise UsageError(
            f"--resume: the run had {config.num_processes} ranks, which is many for this machine; "
            "choose their number with --num-processes"
        )


def check_same_trajectory(start: Start, options: RunOptions, task_settings: TaskSettings) -> None:
    """Refuses options that would change the trajectory. Paths may differ: the digest of the data is compared instead.

    Raises:
        UsageError: The text names the option.
    """
    binding = set(_BINDING)
    places = {name for name, value in task_settings if isinstance(value, Path)}
    asked = options.model_dump(mode="json", include=binding) | task_settings.model_dump(mode="json", exclude=places)
    # An option that is newer than the checkpoint had its default.
    defaults = type(task_settings).model_construct().model_dump(mode="json")
    before = {**start.config.model_dump(mode="json", include=binding), **defaults, **start.config.task_settings}
    if start.config.num_processes == 1:  # its statistics were those of all ranks in any case
        del asked["sync_batchnorm"]
    for name, value in asked.items():
        if before.get(name) != value:
            option = name.replace("_", "-")
            raise UsageError(
                f"--{option} {value}: the run to resume has {before.get(name)}; leave it out, or start a new run"
            )


def goes_on_in(output_dir: Path, resume: str | None, start: Start | None) -> bool:
    """Returns whether a run continues in the directory of the run that it resumes, rather than in a new one."""
    if start is None:
        return resume == LATEST
    return start.path.resolve() in [path.resolve() for path in list_checkpoints(output_dir)]


def check_resumable(output_dir: Path) -> None:
    """Refuses to resume in a directory whose run has finished or is still running.

    Raises:
        UsageError: The text says which of the two.
    """
    running = [rank for rank in started_ranks(output_dir) if rank.running_pid() is not None]
    if running:
        raise UsageError(
            f"--output-dir {output_dir}: its run is still running (rank {running[0].rank} is process "
            f"{running[0].running_pid()}); wait for it, or stop it first"
        )
    if (status := _final_status(output_dir)) is not None:
        raise UsageError(f"--output-dir {output_dir}: its run {_ENDS[status]}; there is nothing to resume")


def _final_status(output_dir: Path) -> str | None:
    """Returns the status of a run that has finished; None if it has not finished."""
    place = record_directory(output_dir)
    try:
        status = read_record(place / RECORD_NAME).status if place is not None else None
    except (OSError, ValueError):
        return None
    return status if status in _ENDS else None
