"""The work of one rank that runs a hand-written loop: everything around the loop, as for an adapter of its backend.

The loop gets the initial weights and the batches that Lockstep's own loop would get on this rank. It is observed in the
same way: at the end of each step both clocks are read, and the rank rests where its turn ends. All that is not part of
a step happens without the loop: the shares of all ranks are put together through a file, and rank 0 evaluates alone,
if the run asks for it.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import islice
from typing import NamedTuple

import torch
from pydantic import BaseModel
from torch.distributed import FileStore  # type: ignore[attr-defined]

from backends.interface import BackendOptions
from backends.registry import reference_backend
from compare.bare.job import BareJob, Outcome, Settings, Step
from compare.race.messages import Hello
from compare.race.turns import Turns
from records.config import RunConfig
from records.names import LOGS_NAME
from records.notice import prepare_notice
from records.record import EvaluationRecord, RankRecord, StepRecord, World
from tasks.interface import Task
from tasks.registry import load_task
from training.batch_norm import batch_norms
from training.data import Loaded, MicroBatches, RankPlan, collate_function, data_loader
from training.ending import Results, save_results
from training.evaluation import Evaluator
from training.hooks import Hooks
from training.losses import finite
from training.measurements import Measurements
from training.plan import Plan, SampleIds
from training.rank import RankStart
from training.rank_record import Place, rank_record
from training.seeds import WEIGHTS, random_seed
from training.state import Trajectory
from training.world import weights_digest


class _Taken(NamedTuple):
    """A step that was taken: its epoch, the size of its global batch, and what the loop says of it."""

    epoch: int
    num_samples: int
    outcome: Outcome


class _Share(BaseModel):
    """What one rank has of the results: its record, and what it adds to the loss of each step."""

    record: RankRecord
    losses: list[float]


class BareWork:
    """What one rank does around a hand-written loop."""

    def __init__(self, start: RankStart, address: str) -> None:
        """Prepares the task.

        Args:
            start: What this rank has before.
            address: The path of the entrant's socket.
        """
        config = start.config
        torch.set_num_threads(config.threads_per_rank)
        self._start, self._address, self._config = start, address, config
        self._task = _prepared(config)
        self._plan = Plan.of(config, self._task)
        self._num_steps = config.num_steps(self._plan.steps_per_epoch)
        self._measurements = Measurements(start.heartbeat, start.clock)
        self._turns: Turns | None = None
        self._place_in_plan = (0, 0)  # the epoch, and the size of the global batch
        self._taken: list[_Taken] = []

    def run(self) -> None:
        """Runs the loop of the backend, and has rank 0 save the model and write the record."""
        config, directory = self._config, self._start.directory
        if self._start.rank == 0:
            prepare_notice(directory)
        train: Callable[[BareJob], Mapping[str, torch.Tensor] | None] = import_module(
            f"compare.bare.{config.backend}"
        ).train
        torch.manual_seed(random_seed(config.seed, WEIGHTS))
        model = self._task.build_model()
        gc.freeze()  # as ranks of other runs do, see training/rank_work.py
        gc.enable()
        whole = train(BareJob(model, self._steps(), self._task.loss_sum, self._end_step, self._settings()))
        if whole is not None:
            model = self._task.build_model()
            model.load_state_dict(whole)
        self._start.heartbeat.enter("end")
        gc.collect()  # the wrappers of the loop
        shares = self._shares(model)
        if self._start.rank == 0:
            evaluations = [self._evaluation(model)] if config.evaluate else []
            trajectory = Trajectory(self._step_records(shares), evaluations)
            results = Results(
                config=config,
                task=self._task,
                model=model,
                trajectory=trajectory,
                worlds=[World(first_step=1, num_processes=config.num_processes)],
                first_step_at=self._measurements.first_step_at,
                ranks=[share.record for share in shares],
                resumption=None,
                failed_saves=[],
                warnings=[],
                disagreement=None,
                differing_buffers=[],
                num_batch_norms=len(batch_norms(model.train())),
            )
            save_results(results, directory, self._start.heartbeat)

    def _settings(self) -> Settings:
        config = self._config
        return Settings(
            device=config.device,
            precision=config.precision,
            accumulation_steps=len(self._plan.micro_batches(self._plan.epoch(0)[0], 0)),
            num_steps=self._num_steps,
            num_warmup_steps=config.num_warmup_steps(self._num_steps),
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm or math.inf,
            init_loss_scale=config.init_loss_scale,
        )

    def _steps(self) -> Iterator[Step]:
        """Yields what this rank computes in each step; the first is asked for when the loop has set everything up."""
        hello = Hello(self._start.rank, os.getpid(), self._plan.steps_per_epoch)
        on_gpu = self._config.device == "cuda"
        self._turns = Turns(self._address, hello, self._measurements, on_gpu=on_gpu)
        epoch = 0
        while len(self._taken) < self._num_steps:
            yield from self._steps_of_epoch(epoch)
            epoch += 1

    def _steps_of_epoch(self, epoch: int) -> Iterator[Step]:
        assert self._turns is not None
        task, plan, measurements = self._task, self._plan, self._measurements
        global_batches = plan.epoch(epoch)[: self._num_steps - len(self._taken)]
        batches = self._load(global_batches)
        measurements.on_epoch_begin()
        self._turns.on_epoch_begin()
        for global_batch in global_batches:
            self._place_in_plan = (epoch, len(global_batch))
            # Where ranks wait for each other is up to the loop, so this is the phase of the whole step.
            measurements.on_phase("update", len(self._taken) + 1)
            measurements.on_step_begin(global_batch)
            micro_batches = []
            for micro_batch, batch, _ in islice(batches, plan.num_micro_steps(global_batch)):
                measurements.on_micro_batch(micro_batch, batch)
                micro_batches.append((batch, micro_batch.weight))
            yield Step(micro_batches, max(1, task.num_targets("train", global_batch.tolist())))

    def _load(self, global_batches: list[SampleIds]) -> Iterator[Loaded]:
        """Returns the micro-batches of the steps that come next, which are those of Lockstep's own loop."""
        config = self._config
        of_rank = RankPlan(self._plan, self._start.rank, len(self._taken) + 1, global_batches)
        micro_batches = MicroBatches(collate_function(self._task, config), of_rank)
        return iter(data_loader(micro_batches, config.dataloader_num_workers, for_gpu=config.device == "cuda"))

    def _end_step(self, outcome: Outcome) -> None:
        assert self._turns is not None
        self._taken.append(_Taken(*self._place_in_plan, outcome))
        self._measurements.on_step_end(len(self._taken))
        self._turns.on_step_end(len(self._taken))

    def _shares(self, model: torch.nn.Module) -> list[_Share]:
        """Returns the shares of all ranks to rank 0, and to another rank its own."""
        start = self._start
        device = next(model.parameters()).device
        num_updates = sum(not one.outcome.skipped for one in self._taken)
        # Loops by hand race on one node, whose ranks share a directory. What is in force is in the loop's text, and not
        # read back from its library.
        place = Place(start.rank, start.rank, device, {})
        record = rank_record(place, self._measurements, weights_sha256=weights_digest(model), num_updates=num_updates)
        losses = [float(sum(loss.double() for loss in one.outcome.losses)) for one in self._taken]
        store = FileStore(str(start.directory / LOGS_NAME / "shares"), self._config.num_processes)
        store.set(str(start.rank), _Share(record=record, losses=losses).model_dump_json())
        ranks = range(self._config.num_processes) if start.rank == 0 else [start.rank]
        return [_Share.model_validate_json(store.get(str(rank))) for rank in ranks]

    def _step_records(self, shares: list[_Share]) -> list[StepRecord]:
        losses = [sum(of_ranks) for of_ranks in zip(*(share.losses for share in shares), strict=True)]
        return [
            StepRecord(
                step=number,
                epoch=one.epoch,
                num_samples=one.num_samples,
                loss=finite(loss),
                grad_norm=finite(float(one.outcome.grad_norm)),
                learning_rate=one.outcome.learning_rate,
                skipped=one.outcome.skipped,
            )
            for number, (one, loss) in enumerate(zip(self._taken, losses, strict=True), start=1)
        ]

    def _evaluation(self, model: torch.nn.Module) -> EvaluationRecord:
        """Evaluates the model in this process alone."""
        config = self._config
        alone = reference_backend(BackendOptions(precision=config.precision, device=config.device))
        began = time.perf_counter()
        found = Evaluator(config, self._task, alone, Hooks()).evaluate(model, self._num_steps)
        seconds = time.perf_counter() - began
        return EvaluationRecord(step=self._num_steps, epoch=self._taken[-1].epoch, seconds=seconds, **found._asdict())


def _prepared(config: RunConfig) -> Task:
    task_class = load_task(config.task)
    task = task_class(task_class.Settings.model_validate(config.task_settings))
    task.prepare()
    return task
