"""What each rank runs: ``python -m launch.rank RUN_DIRECTORY``, started N times by an engine.

The run directory holds the resolved configuration. Everything a rank prints goes to its own log
there; a rank that fails writes its error beside it, for the launcher to name.
"""

from __future__ import annotations

import gc
import resource
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from launch.config import RunConfig
from launch.rank_files import reporting

if TYPE_CHECKING:
    from torch import nn

    from tasks.interface import Task

CONFIG_NAME = "run.json"


def main(run_directory: str) -> None:
    """Runs this rank to its end; on an error, exits with code 1 at once."""
    directory = Path(run_directory)
    with reporting(directory):
        config = RunConfig.model_validate_json((directory / CONFIG_NAME).read_bytes())
        run(config, directory)


def run(config: RunConfig, directory: Path) -> None:
    """Trains, then has rank 0 save the model and write the record."""
    # Collecting garbage among the objects that large imports create takes half a second of them.
    gc.disable()
    import torch

    from backends.registry import load_backend
    from launch.diagnosis import DiagnosedTrainer
    from launch.loop import Trainer
    from launch.progress import ProgressLog
    from launch.record import RankRecord, RunRecord, describe_environment, write_record
    from launch.world import gather_facts, prove_same_job, prove_world, weights_digest
    from tasks.registry import load_task

    torch.set_num_threads(config.threads_per_rank)
    task_class = load_task(config.task)
    task = task_class(task_class.Settings.model_validate(config.task_settings))
    task.prepare()
    adapter = load_backend(config.backend)
    backend = adapter(config.backend_options(adapter.Settings))
    prove_world(backend, world_size=config.num_processes)
    if config.num_nodes > 1:
        # What nodes may differ in: how they are reached, how many cores they have, where their results go.
        of_one_node = {"node_rank", "master_addr", "threads_per_rank", "output_dir", "overwrite"}
        of_one_node |= {"launch_command", "started_at"}
        prove_same_job(backend, {**config.model_dump(mode="json", exclude=of_one_node), "data": task.describe()})

    kind = DiagnosedTrainer if config.diagnose else Trainer
    trainer = kind(config, task, backend, ProgressLog(directory, rank=backend.rank, tracker=config.tracker))
    gc.enable()
    trajectory = trainer.train()
    model = backend.unwrap(trainer.model)
    on_gpu = backend.device.type == "cuda"
    usage = resource.getrusage(resource.RUSAGE_SELF)
    mine = RankRecord(
        rank=backend.rank,
        local_rank=backend.local_rank,
        hostname=socket.gethostname(),
        device=str(backend.device),
        num_threads=torch.get_num_threads(),
        step_seconds=trajectory.step_seconds,
        samples=trajectory.samples,
        tokens=trajectory.tokens,
        positions=trajectory.positions,
        peak_memory_bytes=usage.ru_maxrss * 1024,
        peak_cuda_memory_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        schedule_steps=trainer.num_updates,
        effective_settings=backend.effective_settings(),
        weights_sha256=weights_digest(model),
        diagnosis=trainer.diagnosis() if isinstance(trainer, DiagnosedTrainer) else None,
    )
    ranks = [RankRecord.model_validate(facts) for facts in gather_facts(backend, mine.model_dump(mode="json"))]
    for other in ranks:
        if other.weights_sha256 != ranks[0].weights_sha256:
            raise RuntimeError(f"the weights of rank {other.rank} differ from those of rank 0 after training")

    # The wrappers must be gone before the group is. What follows needs no other rank: nobody
    # waits, within a timeout, for rank 0 to write to a slow disk.
    del trainer
    gc.collect()
    backend.shutdown()
    if backend.rank == 0:
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
                quality=trajectory.evaluations[-1].metrics,
                ranks=ranks,
            ),
            directory,
        )


def _save_model(task: Task, model: nn.Module, directory: Path) -> None:
    """Saves beside the target and moves file by file, so that no file is ever there by half."""
    with tempfile.TemporaryDirectory(prefix=".model.", dir=directory) as unfinished:
        task.save(model, Path(unfinished))
        for file in Path(unfinished).iterdir():
            file.replace(directory / file.name)


if __name__ == "__main__":
    main(sys.argv[1])
