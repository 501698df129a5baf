"""What each rank runs: ``python -m launch.rank RUN_DIRECTORY``, started N times by an engine.

The run directory holds the resolved configuration. Everything a rank prints goes to its own log
there; a rank that fails writes its error beside it, for the launcher to name.
"""

from __future__ import annotations

import gc
import os
import resource
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from launch.config import RunConfig
from launch.heartbeat import Heartbeat
from launch.rank_files import RankFiles, reporting

if TYPE_CHECKING:
    from torch import nn

    from backends.interface import Backend
    from launch.loop import Trainer, Trajectory
    from launch.record import EvaluationRecord, RankRecord, Resumption
    from tasks.interface import Task

CONFIG_NAME = "run.json"

# It can only be read by setting it, which is no thing to do while other threads make files.
_UMASK = os.umask(0o022)
os.umask(_UMASK)


def main(run_directory: str) -> None:
    """Runs this rank to its end; on an error, exits with code 1 at once."""
    directory = Path(run_directory)
    with reporting(directory) as rank:
        heartbeat = Heartbeat(RankFiles(directory, rank).heartbeat)
        config = RunConfig.model_validate_json((directory / CONFIG_NAME).read_bytes())
        run(config, directory, heartbeat)


def run(config: RunConfig, directory: Path, heartbeat: Heartbeat) -> None:
    """Trains, then has rank 0 save the model and write the record."""
    # Collecting garbage among the objects that large imports create takes half a second of them.
    gc.disable()
    import torch

    from launch.diagnosis import DiagnosedTrainer
    from launch.loop import Trainer
    from launch.progress import ProgressLog
    from launch.record import RankRecord
    from launch.saving import CheckpointSaver
    from launch.stopping import StopRequest
    from launch.world import gather_facts

    torch.set_num_threads(config.threads_per_rank)
    task, backend = _join(config)
    progress = ProgressLog(directory, rank=backend.rank, tracker=config.tracker)
    saver = CheckpointSaver(config, directory, progress, rank=backend.rank)
    kind = DiagnosedTrainer if config.diagnose else Trainer
    with_loss = config.num_nodes > 1 or config.device == "cuda"
    stop_request = StopRequest(directory, rank=backend.rank, travels_with_loss=with_loss)
    trainer = kind(
        config,
        task,
        backend,
        progress,
        heartbeat=heartbeat,
        saver=saver,
        stop_request=stop_request,
    )
    resumption = _resume(trainer, config)
    gc.enable()
    trajectory = trainer.train()
    heartbeat.enter("end")
    if trainer.was_stopped and trainer.step in saver.failed_steps:
        raise OSError(f"asked to stop, but the checkpoint of step {trainer.step} could not be saved")
    model, was_stopped = backend.unwrap(trainer.model), trainer.was_stopped
    ranks: list[RankRecord] = []
    if not was_stopped:
        facts = gather_facts(backend, _rank_record(trainer).model_dump(mode="json"))
        ranks = [RankRecord.model_validate(fact) for fact in facts]
        for other in ranks:
            if other.weights_sha256 != ranks[0].weights_sha256:
                raise RuntimeError(f"the weights of rank {other.rank} differ from those of rank 0 after training")

    # The wrappers must be gone before the group is. What follows needs no other rank: nobody
    # waits, within a timeout, for rank 0 to write to a slow disk.
    del trainer
    gc.collect()
    backend.shutdown()
    if was_stopped:
        stop_request.note_stopped()
    elif backend.rank == 0:
        metric = config.metric_for_best_model
        best_step = _load_best(model, directory, trajectory.evaluations, metric) if metric is not None else None
        _save(config, directory, task, model, trajectory, ranks, resumption, best_step, saver.failed_steps)


def _join(config: RunConfig) -> tuple[Task, Backend]:
    """Prepares the data, then joins the other ranks and makes sure that they are who they should be."""
    from backends.registry import load_backend
    from launch.world import prove_same_job, prove_world
    from tasks.registry import load_task

    task_class = load_task(config.task)
    task = task_class(task_class.Settings.model_validate(config.task_settings))
    task.prepare()
    adapter = load_backend(config.backend)
    backend = adapter(config.backend_options(adapter.Settings))
    prove_world(backend, world_size=config.num_processes)
    if config.num_nodes > 1:
        # What nodes may differ in: how they are reached, how many cores they have, where their results go,
        # and where a checkpoint lies, which only the node of rank 0 needs to have.
        of_one_node = {"node_rank", "master_addr", "threads_per_rank", "output_dir", "overwrite"}
        of_one_node |= {"launch_command", "started_at", "resume", "resume_from", "num_restarts"}
        prove_same_job(backend, {**config.model_dump(mode="json", exclude=of_one_node), "data": task.describe()})
    return task, backend


def _resume(trainer: Trainer, config: RunConfig) -> Resumption | None:
    """Restores the checkpoint, which comes from the first rank that has the newest: nodes may share no disk."""
    from launch.checkpoint import checkpoint_step, read_checkpoint
    from launch.record import Resumption
    from launch.world import broadcast_bytes, newest_of

    backend, data = trainer.backend, trainer.task.describe()
    step = checkpoint_step(config.resume_from) if config.resume_from is not None else 0
    source = newest_of(backend, step)
    if source is None:
        return None
    mine = config.resume_from if backend.rank == source else None
    received = broadcast_bytes(backend, mine.read_bytes() if mine is not None else b"", source=source)
    checkpoint = read_checkpoint(received, name=str(config.resume_from or f"the checkpoint of rank {source}"))
    state = checkpoint.state
    for name, value in state.data.items():
        # "data" says where they were, which may have changed; their digest may not.
        if name != "data" and data.get(name) != value:
            raise ValueError(
                f"the data or the model is not that of the checkpoint: {name} is {data.get(name)!r}, was {value!r}"
            )
    trainer.load_checkpoint(checkpoint)
    resumption = Resumption(
        checkpoint=str(config.resume_from or ""),
        step=state.step,
        backend=state.config.backend,
        num_processes=state.config.num_processes,
    )
    trainer.progress.write(
        "resumed",
        origin=resumption.model_dump(),
        steps=[step.model_dump() for step in trainer.trajectory.steps],
        evaluations=[evaluation.model_dump() for evaluation in trainer.trajectory.evaluations],
    )
    return resumption


def _rank_record(trainer: Trainer) -> RankRecord:
    """What this rank measured."""
    import torch

    from launch.diagnosis import DiagnosedTrainer
    from launch.record import RankRecord
    from launch.world import weights_digest

    backend, trajectory = trainer.backend, trainer.trajectory
    on_gpu = backend.device.type == "cuda"
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return RankRecord(
        rank=backend.rank,
        local_rank=backend.local_rank,
        hostname=socket.gethostname(),
        device=str(backend.device),
        num_threads=torch.get_num_threads(),
        step_seconds=trajectory.step_seconds,
        own_seconds=trajectory.own_seconds,
        samples=trajectory.samples,
        tokens=trajectory.tokens,
        positions=trajectory.positions,
        peak_memory_bytes=usage.ru_maxrss * 1024,
        peak_cuda_memory_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        schedule_steps=trainer.num_updates,
        effective_settings=backend.effective_settings(),
        weights_sha256=weights_digest(backend.unwrap(trainer.model)),
        diagnosis=trainer.diagnosis() if isinstance(trainer, DiagnosedTrainer) else None,
    )


def _load_best(model: nn.Module, directory: Path, evaluations: list[EvaluationRecord], metric: str) -> int | None:
    """Puts the best weights that there are into the model, which has the last ones, and returns their step.

    That may be the second best, where a disk was full or a file is damaged. None if no evaluation gave a value.
    """
    from launch.checkpoint import CheckpointError, checkpoint_path, read_checkpoint, without_prefix
    from launch.record import by_merit

    for evaluation in by_merit(evaluations, metric):
        if evaluation.step == evaluations[-1].step:
            return evaluation.step
        try:
            checkpoint = read_checkpoint(checkpoint_path(directory, evaluation.step))
        except CheckpointError as error:
            print(f"the next best weights are saved: {error}")
            continue
        model.load_state_dict(without_prefix("model", checkpoint.tensors))
        return evaluation.step
    return None


def _save(
    config: RunConfig,
    directory: Path,
    task: Task,
    model: nn.Module,
    trajectory: Trajectory,
    ranks: list[RankRecord],
    resumption: Resumption | None,
    best_step: int | None,
    failed_saves: list[int],
) -> None:
    """Saves the model and writes the record."""
    from launch.record import RunRecord, describe_environment, write_record
    from launch.stragglers import find_stragglers

    quality = trajectory.evaluations[-1].metrics
    if best_step is not None:
        quality = next(one.metrics for one in trajectory.evaluations if one.step == best_step)
    _save_model(task, model, directory)
    first_step_at = trajectory.first_step_at
    write_record(
        RunRecord(
            status="completed",
            error=None,
            config=config.model_dump(mode="json"),
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            task=task.describe(),
            environment=describe_environment(with_torch=True),
            seconds_to_first_step=first_step_at - config.started_at if first_step_at else None,
            seconds=time.time() - config.started_at,
            steps=trajectory.steps,
            evaluations=trajectory.evaluations,
            quality=quality,
            ranks=ranks,
            resumed_from=resumption,
            restarts=config.num_restarts,
            best_step=best_step,
            failed_saves=failed_saves,
            stragglers=find_stragglers(ranks),
        ),
        directory,
    )


def _save_model(task: Task, model: nn.Module, directory: Path) -> None:
    """Saves beside the target and moves file by file, so that no file is ever there by half."""
    with tempfile.TemporaryDirectory(prefix=".model.", dir=directory) as unfinished:
        task.save(model, Path(unfinished))
        for file in Path(unfinished).iterdir():
            file.chmod(0o666 & ~_UMASK)  # safetensors lets nobody else read its files
            file.replace(directory / file.name)


if __name__ == "__main__":
    main(sys.argv[1])
