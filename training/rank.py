"""What each rank runs: ``python -m training.rank RUN_DIRECTORY [RANK_VARIABLE]``, started N times by an engine.

The run directory holds the resolved configuration. Everything a rank prints goes to its own log
there; a rank that fails writes its error beside it, for the launcher to name.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from records.config import RunConfig
from records.names import CONFIG_NAME
from watch.heartbeat import Heartbeat
from watch.rank_files import RankFiles, reporting

if TYPE_CHECKING:
    from backends.interface import Backend
    from records.record import RankRecord, Resumption
    from tasks.interface import Task
    from training.loop import Trainer


def main(run_directory: str, rank_variable: str | None = None) -> None:
    """Runs this rank to its end; on an error, exits with code 1 at once."""
    directory = Path(run_directory)
    with reporting(directory, rank_variable) as rank:
        heartbeat = Heartbeat(RankFiles(directory, rank).heartbeat)
        config = RunConfig.model_validate_json((directory / CONFIG_NAME).read_bytes())
        run(config, directory, heartbeat)


def run(config: RunConfig, directory: Path, heartbeat: Heartbeat) -> None:
    """Trains, then has rank 0 save the model and write the record."""
    # Collecting garbage among the objects that large imports create takes half a second of them.
    gc.disable()
    import torch

    from records.notice import prepare_notice
    from records.progress import ProgressLog
    from training.agreement import Agreement
    from training.diagnosis import DiagnosedTrainer
    from training.ending import Results, save_results
    from training.loop import Trainer
    from training.room import require_room
    from training.saving import CheckpointSaver
    from training.stopping import StopRequest

    torch.set_num_threads(config.threads_per_rank)
    task, backend = _join(config)
    progress = ProgressLog(directory, rank=backend.rank, tracker=config.tracker)
    saver = CheckpointSaver(config, directory, progress, rank=backend.rank)
    kind = DiagnosedTrainer if config.diagnose else Trainer
    with_loss = config.num_nodes > 1 or config.device == "cuda"
    stop_request = StopRequest(directory, rank=backend.rank, travels_with_loss=with_loss)
    agreement = Agreement(backend, progress)
    trainer = kind(
        config,
        task,
        backend,
        progress,
        heartbeat=heartbeat,
        saver=saver,
        stop_request=stop_request,
        agreement=agreement,
    )
    if backend.rank == 0:
        prepare_notice(directory)
        warning = require_room(config, directory, backend.unwrap(trainer.model), num_steps=trainer.num_steps)
        if warning is not None:
            progress.warn(warning)
    resumption = _resume(trainer, config)
    gc.enable()
    trajectory = trainer.train()
    heartbeat.enter("end")
    model, was_stopped = backend.unwrap(trainer.model), trainer.was_stopped
    if was_stopped and trainer.step in saver.failed_steps:
        raise OSError(f"asked to stop, but the checkpoint of step {trainer.step} could not be saved")
    if backend.rank == 0 and not was_stopped:
        # Should another rank die now, its launcher ends this one, too: the model is saved before.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ranks = [] if was_stopped else _rank_records(trainer)

    # The wrappers must be gone before the group is. What follows needs no other rank: nobody
    # waits, within a timeout, for rank 0 to write to a slow disk.
    del trainer
    gc.collect()
    _leave(backend, must_succeed=was_stopped or backend.rank != 0)
    if was_stopped:
        stop_request.note_stopped()
    elif backend.rank == 0:
        results = Results(
            config=config,
            task=task,
            model=model,
            trajectory=trajectory,
            ranks=ranks,
            resumption=resumption,
            failed_saves=saver.failed_steps,
            warnings=progress.warnings,
            disagreement=agreement.disagreement,
            differing_buffers=agreement.differing_buffers,
        )
        save_results(results, directory, heartbeat)


def _rank_records(trainer: Trainer) -> list[RankRecord]:
    """What all ranks measured; on rank 0, what it measured itself if another one is lost."""
    from records.record import RankRecord
    from training.world import gather_facts

    own = _rank_record(trainer)
    try:
        facts = gather_facts(trainer.backend, own.model_dump(mode="json"))
    except Exception as error:  # each library has errors of its own
        if trainer.backend.rank != 0:
            raise
        text = " ".join(str(error).split())[:300]
        trainer.progress.warn(f"the record lacks the ranks that were lost after the last step ({text})")
        return [own]
    return [RankRecord.model_validate(fact) for fact in facts]


def _leave(backend: Backend, *, must_succeed: bool) -> None:
    """Leaves the group; where a model is still to be saved, whether or not another rank is lost."""
    try:
        backend.shutdown()
    except Exception as error:
        if must_succeed:
            raise
        with contextlib.suppress(OSError):  # the log may lie on a full disk
            print(f"the group could not be left: {error}")


def _join(config: RunConfig) -> tuple[Task, Backend]:
    """Prepares the data, then joins the other ranks and makes sure that they are who they should be."""
    from backends.registry import load_backend
    from tasks.registry import load_task
    from training.world import prove_same_job, prove_world

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
    from records.checkpoint import checkpoint_step, read_checkpoint
    from records.record import Resumption
    from training.world import broadcast_bytes, newest_of

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

    from records.record import RankRecord
    from training.diagnosis import DiagnosedTrainer
    from training.world import weights_digest

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


if __name__ == "__main__":
    main(*sys.argv[1:])
