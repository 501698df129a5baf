"""The work of one rank of a peer: its library trains, and rests while others race; rank 0 writes the record.

Model, samples, optimizer and the seed of the first weights are those of any run. Everything else is the library's own.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from backends.capabilities import BackendSettings
from backends.registry import reference_backend
from compare.race.messages import Hello
from compare.race.peers.table import PEERS
from compare.race.turns import Turns
from records.config import RunConfig
from records.environment import describe_environment
from records.record import EvaluationRecord, RankRecord, RunRecord, StepRecord, write_record
from tasks.interface import HuggingFaceData, Task, facts_of
from tasks.registry import load_task
from training.evaluation import Evaluator
from training.measurements import Measurements
from training.optimizer import build_optimizer
from training.plan import Plan
from training.rank import RankStart
from training.rank_record import Place, rank_record
from training.seeds import WEIGHTS, random_seed
from training.world import weights_digest

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import DataCollatorWithPadding


class PeerSteps:
    """What a peer tells of its steps, from within its library's loop.

    Attributes:
        measurements: The times of its steps.
        masks: For each step, the real tokens, the positions and the samples of each micro-batch.
        learning_rates: The learning rate before each step.
    """

    def __init__(self, measurements: Measurements, turns: Turns | None, optimizer: torch.optim.Optimizer) -> None:
        self.measurements = measurements
        self.masks: list[list[tuple[torch.Tensor, int, int]]] = [[]]
        self.learning_rates: list[float] = []
        self._turns, self._optimizer = turns, optimizer

    def begin(self) -> None:
        """The first step is about to begin."""
        self.measurements.on_epoch_begin()
        if self._turns is not None:
            self._turns.on_epoch_begin()
        self._note_learning_rate()

    def count(self, attention_mask: torch.Tensor) -> None:
        """A micro-batch is computed.

        Args:
            attention_mask: 1 for a token and 0 for padding, [samples, length]. It is summed where it is, and read
                after the training, since reading it would wait for a GPU.
        """
        self.masks[-1].append((attention_mask.sum(), attention_mask.numel(), len(attention_mask)))

    def end_step(self) -> None:
        """A step is complete; rests if the turn is over."""
        step = len(self.masks)
        self.masks.append([])
        self.measurements.on_phase("update", step)
        self.measurements.on_step_end(step)
        if self._turns is not None:
            self._turns.on_step_end(step)
        self._note_learning_rate()

    def _note_learning_rate(self) -> None:
        self.learning_rates.append(float(self._optimizer.param_groups[0]["lr"]))


@dataclass(frozen=True)
class PeerJob:
    """What a library is to train.

    Attributes:
        config: The configuration of the run.
        num_steps: How many optimizer steps it takes.
        num_warmup_steps: In how many of them the learning rate grows.
        model: The model, with its first weights.
        optimizer: Its optimizer.
        dataset: The training samples.
        collate: Makes a batch of samples.
        steps: What the library's loop tells of its steps.
    """

    config: RunConfig
    num_steps: int
    num_warmup_steps: int
    model: Any
    optimizer: torch.optim.Optimizer
    dataset: Dataset
    collate: DataCollatorWithPadding
    steps: PeerSteps


class PeerWork:
    """What one rank of a peer does: it trains, and rank 0 writes the record of the run."""

    def __init__(self, start: RankStart, address: str) -> None:
        """Notes what to do.

        Args:
            start: What the rank has; the backend of its configuration is the peer.
            address: The path of the socket of the race; "-" if the peer trains alone.
        """
        # The library makes the batches.
        self._start = start._replace(config=start.config.model_copy(update={"batching": "padded"}))
        self._address = address

    def run(self) -> None:
        """Trains, and writes the record."""
        config, rank = self._start.config, self._start.rank
        torch.set_num_threads(config.threads_per_rank)
        task_class = load_task(config.task)
        task = task_class(task_class.Settings.model_validate(config.task_settings))
        task.prepare()
        job = _make_job(config, task, rank, self._address, Measurements(self._start.heartbeat, self._start.clock))
        module, _, function = PEERS[config.backend].row.adapter.partition(":")
        train = getattr(importlib.import_module(module), function)
        gc.freeze()  # as ranks of other runs do, see training/rank_work.py
        gc.enable()
        train(job)
        self._start.heartbeat.enter("end")
        ranks: list[Any] = [_rank_record(job, rank)]
        if dist.is_initialized():
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, _rank_record(job, rank))
        if rank == 0:
            write_record(_record(job, task, ranks), config.output_dir)


def _make_job(config: RunConfig, task: Task, rank: int, address: str, measurements: Measurements) -> PeerJob:
    from transformers import DataCollatorWithPadding

    assert isinstance(task, HuggingFaceData)
    plan = Plan.of(config, task)
    num_steps = config.num_steps(plan.steps_per_epoch)
    torch.manual_seed(random_seed(config.seed, WEIGHTS))
    model = task.hugging_face_model()
    optimizer = build_optimizer(config, model)
    turns = None
    if address != "-":
        hello = Hello(rank, os.getpid(), plan.steps_per_epoch)
        turns = Turns(address, hello, measurements, on_gpu=config.device == "cuda")
    return PeerJob(
        config=config,
        num_steps=num_steps,
        num_warmup_steps=config.num_warmup_steps(num_steps),
        model=model,
        optimizer=optimizer,
        dataset=task.hugging_face_dataset("train"),
        collate=DataCollatorWithPadding(task.hugging_face_tokenizer()),
        steps=PeerSteps(measurements, turns, optimizer),
    )


def _rank_record(job: PeerJob, rank: int) -> RankRecord:
    """Returns what this rank measured; what its batches held is counted in the library's own loop."""
    measurements, masks = job.steps.measurements, job.steps.masks[: job.num_steps]
    measurements.samples = [sum(samples for _, _, samples in step) for step in masks]
    measurements.tokens = [sum(int(tokens) for tokens, _, _ in step) for step in masks]
    measurements.positions = [sum(positions for _, positions, _ in step) for step in masks]
    measurements.work = []  # no plan says what the library computes
    settings = {"transport": dist.get_backend() if dist.is_initialized() else "none"}
    # A race takes place on one node.
    place = Place(rank, rank, next(job.model.parameters()).device, settings)
    return rank_record(place, measurements, weights_sha256=weights_digest(job.model), num_updates=job.num_steps)


def _record(job: PeerJob, task: Task, ranks: list[RankRecord]) -> RunRecord:
    config, first_step_at = job.config, job.steps.measurements.first_step_at
    epoch_of = _epochs(job)
    evaluations = [_evaluate(job, task, epoch_of[-1])] if config.evaluate else []
    environment = describe_environment(with_torch=True)
    environment.packages.update({name: version(name) for name in PEERS[config.backend].row.packages})
    return RunRecord(
        status="completed",
        error=None,
        config=config,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        task=facts_of(task),
        environment=environment,
        seconds_to_first_step=first_step_at - config.started_at if first_step_at else None,
        seconds=time.time() - config.started_at,
        steps=[
            StepRecord(
                step=number + 1,
                epoch=epoch_of[number],
                num_samples=sum(one.samples[number] for one in ranks),
                loss=None,
                grad_norm=None,
                learning_rate=job.steps.learning_rates[number],
                skipped=False,
            )
            for number in range(job.num_steps)
        ],
        evaluations=evaluations,
        quality=evaluations[-1].metrics if evaluations else {},
        ranks=ranks,
    )


def _epochs(job: PeerJob) -> list[int]:
    steps_per_epoch = -(-len(job.dataset) // job.config.global_batch_size)
    return [step // steps_per_epoch for step in range(job.num_steps)]


def _evaluate(job: PeerJob, task: Task, epoch: int) -> EvaluationRecord:
    """Evaluates as any run does, in this process alone."""
    config = job.config.model_copy(update={"backend_settings": {}})
    backend = reference_backend(config.backend_options(BackendSettings))
    began = time.perf_counter()
    found = Evaluator(config, task, backend, job.steps.measurements).evaluate(job.model, job.num_steps)
    return EvaluationRecord(step=job.num_steps, epoch=epoch, seconds=time.perf_counter() - began, **found._asdict())
