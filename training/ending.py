"""The end of a run: rank 0 saves the model and writes the record, wherever there is room."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import nn

from records.balance import imbalance, positions_per_token
from records.checkpoint import CheckpointError, CheckpointFile, checkpoint_path
from records.config import RunConfig
from records.environment import describe_environment
from records.files import sync_file
from records.notice import Notice, give_notice
from records.record import (
    Disagreement,
    EvaluationRecord,
    RankRecord,
    Resumption,
    RunRecord,
    World,
    by_merit,
    write_record,
)
from records.run_files import model_files, note_model_files
from tasks.interface import Task, facts_of
from training.agreement import describe
from training.keeping import UNFINISHED_MODEL, Keeper
from training.room import MIB, SLACK_BYTES, model_bytes
from training.state import Trajectory
from watch.heartbeat import Heartbeat
from watch.stragglers import find_stragglers

# The file of the weights alone, for a task that fails to save its model.
WEIGHTS_NAME = "weights.safetensors"


@dataclass(frozen=True)
class Results:
    """The results of a training on one rank."""

    config: RunConfig
    task: Task
    model: nn.Module
    trajectory: Trajectory
    worlds: list[World]
    first_step_at: float | None
    ranks: list[RankRecord]
    resumption: Resumption | None
    failed_saves: list[int]
    warnings: list[str]
    disagreement: Disagreement | None
    differing_buffers: list[str]
    num_batch_norms: int


def save_results(results: Results, directory: Path, heartbeat: Heartbeat) -> None:
    """Saves the model and writes the record.

    Raises:
        RuntimeError: The task cannot save its model; the message says where the weights alone are.
    """
    config, trajectory = results.config, results.trajectory
    metric, best_step = config.metric_for_best_model, None
    if metric is not None:
        best_step = _load_best(results.model, directory, trajectory.evaluations, config)
    keeper = Keeper(directory, heartbeat, spare=best_step or trajectory.steps[-1].step)
    place = _keep_model(keeper, results)
    record = _record(results, best_step, keeper.dropped)

    def write(beside: Path) -> None:
        is_here = place == beside == directory
        write_record(record.model_copy(update={"model_directory": None if is_here else str(place)}), beside)

    keeper.keep("the record", MIB, write)
    if keeper.refuge is None:
        give_notice(directory, Notice())


def _load_best(model: nn.Module, directory: Path, evaluations: list[EvaluationRecord], config: RunConfig) -> int | None:
    """Loads the best weights that can be read into the model, which has those of the last step.

    Returns:
        The step of these weights, which may be the second best if a disk was full or a file is damaged. None if the
        metric was undefined in all evaluations.
    """
    for evaluation in by_merit(evaluations, config):
        if evaluation.step == evaluations[-1].step:
            return evaluation.step
        try:
            weights = CheckpointFile(checkpoint_path(directory, evaluation.step)).tensors("model")
        except (CheckpointError, OSError) as error:
            with contextlib.suppress(OSError):  # the log may be on a full disk
                print(f"the next best weights are saved: {error}")
            continue
        model.load_state_dict(weights)
        return evaluation.step
    return None


def _keep_model(keeper: Keeper, results: Results) -> Path:
    """Saves the model and returns the directory it is in."""
    task, model = results.task, results.model
    num_bytes = model_bytes(model) + SLACK_BYTES
    try:
        return keeper.keep(
            "the model",
            num_bytes,
            lambda place: _save(lambda inner: task.save(model, inner), place, keeper.progress.note),
            has_substitute=True,
        )
    except Exception as error:  # a task's code may raise any exception
        # They are copied, since a file cannot hold two tensors that share memory.
        weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
        place = keeper.keep(
            "the weights",
            num_bytes,
            lambda place: _save(lambda inner: save_file(weights, inner / WEIGHTS_NAME), place, keeper.progress.note),
        )
        raise RuntimeError(
            f"the task cannot save its model ({type(error).__name__}: {error}); its weights are in "
            f"{place / WEIGHTS_NAME}, by the names of its state_dict"
        ) from error


def _save(write: Callable[[Path], None], directory: Path, progressed: Callable[[], None]) -> None:
    """Has files written beside their place, and moves each of them when it is complete.

    The names are noted before, so that a later run can tell these files from those of the user.

    Args:
        write: Writes them into the directory that it is given.
        directory: Where they are to be.
        progressed: Called for each piece of them that has reached the disk.

    Raises:
        FileExistsError: A file that no run wrote is in the way.
    """
    with tempfile.TemporaryDirectory(prefix=UNFINISHED_MODEL, dir=directory) as unfinished:
        mode = _mode_of_new_files(Path(unfinished))
        write(Path(unfinished))
        files = sorted(path for path in Path(unfinished).rglob("*") if path.is_file())
        names = [str(file.relative_to(unfinished)) for file in files]
        known = model_files(directory)
        for name in names:
            if name not in known and os.path.lexists(directory / name):
                raise FileExistsError(f"{directory / name} is not of this run, and the model has a file of this name")
        note_model_files(directory, names)
        for file, name in zip(files, names, strict=True):
            file.chmod(mode)  # safetensors makes files that only their owner can read
            sync_file(file, progressed)
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            file.replace(directory / name)


def _mode_of_new_files(directory: Path) -> int:
    """Returns the permissions that a new file gets in a directory, by making one.

    They follow from the umask of the process, which os.umask() can tell only by setting another one for a moment, in
    which other threads may make files.
    """
    probe = directory / "probe"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    return mode


def _record(results: Results, best_step: int | None, dropped: list[int]) -> RunRecord:
    config, trajectory, disagreement = results.config, results.trajectory, results.disagreement
    quality = trajectory.evaluations[-1].metrics if trajectory.evaluations else {}
    if best_step is not None:
        quality = next(one.metrics for one in trajectory.evaluations if one.step == best_step)
    warnings = list(results.warnings)
    if dropped:
        warnings.append(f"checkpoint(s) of step {', '.join(map(str, dropped))} removed to make room for the model")
    return RunRecord(
        status="diverged" if disagreement is not None else "completed",
        error=describe(disagreement) if disagreement is not None else None,
        config=config,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        task=facts_of(results.task),
        environment=describe_environment(with_torch=True),
        seconds_to_first_step=results.first_step_at - config.started_at if results.first_step_at else None,
        seconds=time.time() - config.started_at,
        steps=trajectory.steps,
        evaluations=trajectory.evaluations,
        quality=quality,
        ranks=results.ranks,
        resumed_from=results.resumption,
        worlds=results.worlds,
        restarts=config.num_restarts,
        best_step=best_step,
        failed_saves=results.failed_saves,
        stragglers=find_stragglers(results.ranks),
        warnings=warnings,
        disagreement=disagreement,
        differing_buffers=results.differing_buffers,
        num_batch_norms=results.num_batch_norms,
        positions_per_token=positions_per_token(results.ranks),
        imbalance=imbalance(results.ranks),
    )
