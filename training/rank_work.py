"""The work of one rank: it joins the others, trains, leaves them, and rank 0 saves the results."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from backends.interface import Backend
from backends.registry import load_backend
from records.checkpoint import CheckpointError, checkpoint_step, newest_checkpoint
from records.config import START_WARNING_VARIABLE, RunConfig
from records.environment import versions_in_use
from records.news import Resumed
from records.notice import prepare_notice, record_directory
from records.progress import ProgressLog
from records.record import RankRecord, Resumption
from tasks.interface import Task, TaskSettings, facts_of
from tasks.registry import load_task
from training.agreement import Agreement
from training.decisions import Decisions
from training.diagnosis import Diagnosis
from training.ending import Results, save_results
from training.energy import EnergyMeter, gpus_of_node
from training.hooks import Hooks
from training.loop import Trainer
from training.measurements import Measurements
from training.memory import MemoryMeter
from training.optimizer import import_compiler
from training.rank import RankStart
from training.rank_record import Place, rank_record
from training.receiving import IncomingCheckpoint
from training.reporter import Reporter
from training.room import require_room
from training.saving import CheckpointSaver
from training.stopping import StopRequest
from training.trace import Tracer
from training.whole import whole_model
from training.world import gather_texts, newest_of, prove_same_job, prove_world, world_size_of_process
from watch.heartbeat import own_phases

MakeObserver = Callable[[Trainer, Measurements], Hooks]

# Python looks for garbage after so many new objects. By default, after 700, it would look in about every fourth step of
# the default job, on each rank at another time, while the others wait, and find about one object for each step. It
# still looks, since a model of the user's may leave garbage that holds tensors.
_OBJECTS_BETWEEN_LOOKS_FOR_GARBAGE = 10_000


class _Observed(NamedTuple):
    """What observes a training for the record of this rank; None if it was not asked for."""

    measurements: Measurements
    memory: MemoryMeter
    energy: EnergyMeter | None
    diagnosis: Diagnosis | None
    tracer: Tracer | None


class RankWork:
    """What one rank does in a run."""

    def __init__(self, start: RankStart, make_observer: MakeObserver | None = None) -> None:
        """Joins the other ranks.

        Args:
            start: What this rank has before.
            make_observer: Makes one more observer of the training, which comes after all others.
        """
        self._make_observer = make_observer
        self._config = config = start.config
        self._directory = directory = start.directory
        self._heartbeat = start.heartbeat
        self._clock = start.clock
        torch.set_num_threads(config.threads_per_rank)
        self._task, self._backend = _join(config)
        capabilities = self._backend.capabilities
        waits_in_forward = capabilities.waits_in_forward(sync_batchnorm=config.sync_batchnorm)
        self._heartbeat.own_phases = own_phases(waits_in_forward=waits_in_forward)
        rank = self._backend.rank
        self._progress = ProgressLog(directory, rank=rank, tracker=config.tracker)
        if rank == 0 and START_WARNING_VARIABLE in os.environ:
            self._progress.warn(os.environ[START_WARNING_VARIABLE])
        # Where nodes may leave, each of them has what the others need to go on without it.
        keeps = rank == 0 or (config.min_nodes is not None and self._backend.local_rank == 0)
        self._saver = CheckpointSaver(
            config,
            directory,
            self._progress,
            self._heartbeat,
            keeps=keeps,
            takes_all_ranks=capabilities.shards_state,
        )
        travels_with_loss = config.num_nodes > 1 or config.device == "cuda"
        self._stop_request = StopRequest(directory, rank=rank, travels_with_loss=travels_with_loss)
        self._agreement = Agreement(self._backend, self._progress, sync_batchnorm=config.sync_batchnorm)

    def run(self) -> None:
        """Trains, leaves the other ranks, and has rank 0 save the model and write the record."""
        if self._is_over():
            self._build()  # a backend that was not set up cannot be left
            gc.collect()
            _leave(self._backend, must_succeed=True)
            return
        results = self._train()
        # The wrappers must be gone before the group is. What follows needs no other rank: no rank waits,
        # within a timeout, for rank 0 to write to a slow disk.
        gc.collect()
        saves_results = results is not None and self._backend.rank == 0
        _leave(self._backend, must_succeed=not saves_results)
        if results is None:
            self._stop_request.note_stopped()
        elif saves_results:
            save_results(results, self._directory, self._heartbeat)

    def _train(self) -> Results | None:
        """Builds, resumes and trains; returns the results, or None if all ranks stopped before the end."""
        trainer, rank = self._build(), self._backend.rank
        measurements = Measurements(self._heartbeat, self._clock)
        trainer.observe(measurements)
        trainer.observe(Reporter(self._progress, num_steps=trainer.num_steps))
        diagnosis = Diagnosis(trainer) if self._config.diagnose else None
        if diagnosis is not None:
            trainer.observe(diagnosis)
        self._require_room(trainer)
        resumption = self._resume(trainer)
        observed = self._observe(trainer, measurements, diagnosis)
        if self._make_observer is not None:
            trainer.observe(self._make_observer(trainer, measurements))
        gc.collect()  # here, and not in the first step
        gc.set_threshold(_OBJECTS_BETWEEN_LOOKS_FOR_GARBAGE)
        gc.enable()
        trajectory = trainer.train()
        if observed.tracer is not None:
            observed.tracer.finish()
            if observed.tracer.error is not None:
                self._progress.warn(observed.tracer.error)
        self._heartbeat.enter("end")
        if trainer.decisions.stop:
            if trainer.state.step in self._saver.failed_steps:
                raise OSError(f"asked to stop, but the checkpoint of step {trainer.state.step} could not be saved")
            return None
        if rank == 0:
            # Should another rank die now, the starter ends this one, too. The model is saved before that.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        model, digest = whole_model(self._backend, self._task, trainer.finished_model())
        return Results(
            config=self._config,
            task=self._task,
            model=model,
            trajectory=trajectory,
            worlds=trainer.state.worlds,
            first_step_at=measurements.first_step_at,
            ranks=self._gather_records(_rank_record(trainer, observed, digest)),
            resumption=resumption,
            failed_saves=self._saver.failed_steps,
            warnings=self._progress.warnings,
            disagreement=self._agreement.disagreement,
            differing_buffers=self._agreement.differing_buffers,
            num_batch_norms=trainer.num_batch_norms,
        )

    def _observe(self, trainer: Trainer, measurements: Measurements, diagnosis: Diagnosis | None) -> _Observed:
        """Adds what begins where the training begins, or goes on from a checkpoint."""
        memory, energy, tracer = MemoryMeter(trainer), None, None
        trainer.observe(memory)
        if self._config.trace:
            tracer = Tracer(trainer, self._directory, self._heartbeat)
            trainer.observe(tracer)
        if self._backend.local_rank == 0:
            num_local_ranks = self._config.num_processes // self._config.num_nodes
            energy = EnergyMeter(gpus=gpus_of_node(self._backend, num_local_ranks=num_local_ranks))
            trainer.observe(energy)
        return _Observed(measurements, memory, energy, diagnosis, tracer)

    def _build(self) -> Trainer:
        decisions = Decisions(
            self._config,
            self._backend,
            agreement=self._agreement,
            stop_request=self._stop_request,
            saver=self._saver,
        )
        return Trainer(self._config, self._task, self._backend, decisions)

    def _require_room(self, trainer: Trainer) -> None:
        """Makes sure, on rank 0, that there is room for the results.

        Raises:
            OSError: There is no room for the model.
        """
        if self._backend.rank == 0:
            prepare_notice(self._directory)
            warning = require_room(self._config, self._directory, trainer.state.module, num_steps=trainer.num_steps)
            if warning is not None:
                self._progress.warn(warning)

    def _resume(self, trainer: Trainer) -> Resumption | None:
        """Restores the checkpoint to go on from; None if there is none.

        It comes from the first rank that has the newest one, since nodes may share no disk.
        """
        path, backend, data = self._checkpoint_here(), self._backend, facts_of(self._task)
        source = newest_of(backend, checkpoint_step(path) if path is not None else 0)
        if source is None:
            return None
        checkpoint = IncomingCheckpoint(backend, path, source=source)
        state = checkpoint.state
        for name, value in state.data.items():
            # "data" is where the data were, which may have changed. Their digest may not change.
            if name != "data" and data.get(name) != value:
                raise ValueError(
                    f"the data or the model is not that of the checkpoint: {name} is {data.get(name)!r}, was {value!r}"
                )
        trainer.load_checkpoint(checkpoint)
        if self._config.grad_compression == "powersgd" and backend.rank == 0:
            self._progress.warn(
                "a checkpoint has nothing of what PowerSGD has left out of gradients so far: it is lost, and the next "
                "step is not compressed, so this run differs from one that was not interrupted"
            )
        resumption = Resumption(
            checkpoint=str(path or ""),
            step=state.step,
            backend=state.config.backend,
            num_processes=state.worlds[-1].num_processes if state.worlds else state.config.num_processes,
        )
        worlds, trajectory = trainer.state.worlds, trainer.state.trajectory
        steps, evaluations = trajectory.steps, trajectory.evaluations
        self._progress.write(Resumed(origin=resumption, steps=steps, evaluations=evaluations, worlds=worlds))
        return resumption

    def _checkpoint_here(self) -> Path | None:
        """Returns the checkpoint of this node to go on from; None if it has none.

        Raises:
            CheckpointError: All that it has are damaged.
        """
        if self._config.min_nodes is None:
            return self._config.resume_from
        # Not that with which the launcher began: its ranks may have started many times since.
        damaged: list[str] = []
        newest = newest_checkpoint(self._directory, damaged)
        if newest is None and damaged:
            raise CheckpointError(damaged[0])
        return newest.path if newest is not None else None

    def _is_over(self) -> bool:
        """Whether the training had ended when a node came and all ranks had to start again; the same on all ranks."""
        if self._config.min_nodes is None:
            return False
        has_record = record_directory(self._directory) is not None
        return newest_of(self._backend, int(has_record)) is not None

    def _gather_records(self, own: RankRecord) -> list[RankRecord]:
        """Returns the records of all ranks on rank 0, or its own alone if another rank is lost; nothing on others."""
        is_first = self._backend.rank == 0
        try:
            # The others only help: records of long runs are large.
            texts = [text for text in gather_texts(self._backend, json.dumps(own.model_dump(mode="json"))) if is_first]
        except Exception as error:  # each library has errors of its own
            if not is_first:
                raise
            text = " ".join(str(error).split())[:300]
            self._progress.warn(f"the record lacks the ranks that were lost after the last step ({text})")
            return [own]
        return [RankRecord.model_validate(json.loads(text)) for text in texts]


def load_libraries(config: RunConfig) -> tuple[type[Task], type[Backend]]:
    """Imports what a rank needs, and returns the classes of its task and its backend.

    From then on, nobody looks for garbage among the objects of the imports, which would take a fifth of a second each
    time. Copies of this process share their memory.
    """
    task, backend = load_task(config.task), load_backend(config.backend)
    import_compiler()
    for name in task.imported_modules:
        importlib.import_module(name)
    gc.freeze()
    return task, backend


def _facts_of_job(config: RunConfig, settings: TaskSettings, task: Task) -> dict[str, Any]:
    """Returns what must be the same on all nodes: options, versions and data."""
    # Nodes may differ in how they are reached, how many cores and which allocator they have and where their results
    # go, and only the node of rank 0 needs to have the checkpoint.
    of_one_node = {"node_rank", "master_addr", "threads_per_rank", "allocator", "scheduling", "output_dir"}
    of_one_node |= {"overwrite", "launch_command", "started_at", "resume", "resume_from", "num_restarts"}
    options = config.model_dump(mode="json", exclude=of_one_node | {"task_settings"})
    options |= options.pop("backend_settings")
    facts = facts_of(task)
    places: set[str] = set()
    if "data_digest" in facts:  # which says more than where the data are
        places = {name for name, value in settings if isinstance(value, Path)}
        facts.pop("data", None)
    options |= settings.model_dump(mode="json", exclude=places)
    versions = {f"the version of {name}": version for name, version in versions_in_use(config.backend).items()}
    return {**options, **versions, **{f"data ({name})": fact for name, fact in facts.items()}}


def _join(config: RunConfig) -> tuple[Task, Backend]:
    """Prepares the data, then joins the other ranks and makes sure that they are the right ones."""
    task_class, adapter = load_libraries(config)
    settings = task_class.Settings.model_validate(config.task_settings)
    task = task_class(settings)
    task.prepare()
    backend = adapter(config.backend_options(adapter.Settings))
    prove_world(backend, world_size=config.num_processes if config.min_nodes is None else world_size_of_process())
    if config.num_nodes > 1:
        prove_same_job(backend, _facts_of_job(config, settings, task))
    return task, backend


def _leave(backend: Backend, *, must_succeed: bool) -> None:
    """Leaves the group. A failure is only printed where results are still to be saved (not `must_succeed`)."""
    try:
        backend.shutdown()
    except Exception as error:
        if must_succeed:
            raise
        with contextlib.suppress(OSError):  # the log may lie on a full disk
            print(f"the group could not be left: {error}")


def _rank_record(trainer: Trainer, observed: _Observed, digest: str) -> RankRecord:
    """Returns what this rank measured."""
    backend, state = trainer.backend, trainer.state
    place = Place(backend.rank, backend.local_rank, backend.device, backend.effective_settings())
    record = rank_record(place, observed.measurements, weights_sha256=digest, num_updates=state.num_updates)
    return record.model_copy(
        update={
            "diagnosis": observed.diagnosis.record() if observed.diagnosis is not None else None,
            "trace": observed.tracer.record() if observed.tracer is not None else None,
            "memory": observed.memory.record(),
            "energy": observed.energy.record() if observed.energy is not None else None,
        }
    )
