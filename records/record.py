"""The run record: one JSON file for each run, with raw counts and seconds only, written once and atomically.

Throughput and other ratios are derived when records are compared, never stored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from records.config import RunConfig
from records.files import write_atomically
from records.names import RECORD_NAME


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


Seconds = Annotated[float, Field(ge=0)]
# What a signed integer of 64 bits holds: more was never counted, and libraries that draw or store it fail.
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]


class StepRecord(_Strict):
    """One optimizer step, the same on all ranks."""

    step: Count = Field(description="optimizer step, from 1, skipped ones counted")
    epoch: Count = Field(description="epoch, from 0")
    num_samples: Count = Field(description="samples of the global batch")
    loss: float | None = Field(description="global loss sum over global target count; null if not finite, or not known")
    grad_norm: float | None = Field(
        description="2-norm of the averaged gradient before clipping; null if not finite, or not known"
    )
    learning_rate: float
    skipped: bool = Field(description="whether all ranks skipped the update because the gradient was not finite")


class EvaluationRecord(_Strict):
    """The metrics of the whole validation split after some step."""

    step: Count
    epoch: Count
    seconds: float
    metrics: dict[str, float | None]
    positions_per_token: float | None = Field(
        default=None,
        description="token positions that were computed for each real token; null without tokens, and in older records",
    )


def by_merit(evaluations: Iterable[EvaluationRecord], config: RunConfig) -> list[EvaluationRecord]:
    """Returns the evaluations that have a value of the metric that models are compared by, the best first.

    Equal ones are in the order of time. There are none if models are not compared.
    """
    metric, sign = config.metric_for_best_model, -1 if config.prefers_greater else 1
    rated = [(value, one) for one in evaluations if metric and (value := one.metrics.get(metric)) is not None]
    return [one for _, one in sorted(rated, key=lambda pair: sign * pair[0])]


class DiagnosisRecord(_Strict):
    """What one rank measured of its own steps with `--diagnose`; lists have one entry for each step."""

    whole_seconds: list[Seconds] = Field(description="the step itself, begun by all ranks together")
    data_seconds: list[Seconds] = Field(description="within that, until forward passes: choosing and loading samples")
    first_seconds: list[Seconds] = Field(
        description="not within that: the first forward and backward pass over the micro-batches of the step, taken "
        "alone; beyond a later one, it builds what libraries need for a new shape of their input"
    )
    rehearsed_seconds: list[Seconds] = Field(
        default=[],
        description="not within that: loading the same micro-batches, and a later forward and backward pass over them "
        "alone, before the step itself; empty in records that are older than this field",
    )
    alone_seconds: dict[str, list[Seconds]] = Field(
        description="forward, backward and optimizer (clipping included) of the same micro-batches in one process "
        "without communication, on a model of its own: the mean of one before the step and one after it; in older "
        "records, the one after it"
    )
    inner_dtype: str = Field(description="of what the first linear layer of the model returned")
    reductions: list[dict[str, int]] = Field(
        description="in each of the first steps, elements by operation, as they entered a communication library"
    )
    reduced_bytes: list[dict[str, int]] = Field(
        default=[], description="the bytes of these; empty in records that are older than this field"
    )
    num_reductions: list[int] = Field(description="calls into a communication library in each of these steps")
    interface: str = Field(description="the network interface that carries what ranks send")
    sent_bytes: list[int] | None = Field(
        description="what this machine sent on it during each step, all its ranks together; null but on local rank 0"
    )
    gradient_bytes: int = Field(description="size of all gradients of the model")
    gradient_elements: int = Field(default=0, description="number of their elements; 0 in older records")
    sharded_bytes: int = Field(
        default=0, description="size of all weights, where each rank holds a part of them; 0 where it holds all"
    )
    parameters: list[str] = Field(description="names of all weights; on rank 0 only, like the two below")
    digests: list[list[str]] = Field(description="start of a SHA-256 of each weight, before and after each step")
    sketches: list[list[list[float | None]]] = Field(
        description="sums of each weight's elements with fixed random signs, eight a weight: the distance of two "
        "sketches estimates that of the weights; null if not finite"
    )

    def covers(self, num_steps: int, rank: int) -> bool:
        """Returns whether the lists have the lengths that belong to so many steps."""
        seconds = [self.whole_seconds, self.data_seconds, self.first_seconds, *self.alone_seconds.values()]
        if self.rehearsed_seconds:
            seconds.append(self.rehearsed_seconds)
        moments = num_steps + 1 if rank == 0 else 0
        return (
            set(self.alone_seconds) == {"forward", "backward", "optimizer"}
            and all(len(one) == num_steps for one in seconds)
            and (self.sent_bytes is None or len(self.sent_bytes) == num_steps)
            and 0 < len(self.reductions) == len(self.num_reductions)
            and len(self.digests) == len(self.sketches) == moments
            and all(len(digests) == len(self.parameters) for digests in self.digests)
            and all(len(sketches) == len(self.parameters) for sketches in self.sketches)
            and len({len(sketch) for sketches in self.sketches for sketch in sketches}) <= 1
        )


class TraceRecord(_Strict):
    """The trace of some steps that one rank left with `--trace`."""

    steps: list[Count] = Field(description="the steps that it shows")
    files: list[str] = Field(description="in the output directory: torch.profiler's, and the backend library's own")
    error: str | None = Field(description="why a file is missing")


class MemoryRecord(_Strict):
    """What the tensors of one rank hold; a storage that several tensors share counts once."""

    parameter_bytes: Count
    buffer_bytes: Count
    gradient_bytes: Count | None = Field(
        description="when the first update of the process began; null if the process took no step"
    )
    optimizer_bytes: Count = Field(
        description="the optimizer's state after the last step, and copies of parameters that it updates instead of "
        "the model's"
    )
    activation_bytes: Count | None = Field(
        description="what autograd kept for the backward pass, without parameters and buffers: the most of a "
        "micro-step in the first step of the process; null without --trace or --diagnose, and for compiled models"
    )


class EnergyRecord(_Strict):
    """The energy that a whole node used while it trained, other programs included."""

    seconds: Seconds = Field(description="how long it was measured, from before the first step, evaluations included")
    processor_joules: float | None = Field(description="of all processors, and memory that is counted apart (RAPL)")
    why_no_processor_joules: str | None
    gpu_joules: float | None = Field(description="of the GPUs of this node's ranks (NVML); null on CPUs")
    why_no_gpu_joules: str | None


class RankRecord(_Strict):
    """What one rank measured. Lists have one entry for each optimizer step that this process took."""

    rank: int
    local_rank: int
    hostname: str
    device: str
    num_threads: int
    scheduling: str | None = Field(
        default=None, description="the policy by which Linux scheduled its threads; null in older records"
    )
    allocator: str | None = Field(default=None, description="what it took memory with; null in older records")
    step_seconds: list[Seconds] = Field(
        description="wall time since the previous step's end, data included; a GPU may lag behind until the loss "
        "is read, see logging_steps"
    )
    own_seconds: list[Seconds] = Field(
        default=[],
        description="of that, spent where no other rank can delay this one: reading data, and computing forward unless "
        "ranks wait for each other in it, as with sharded weights or --sync-batchnorm; less the wait for a processor; "
        "on a GPU, starting to compute it",
    )
    step_cpu_seconds: list[Seconds] = Field(
        default=[],
        description="processor time of all threads of this process within step_seconds, user and system, busy waiting "
        "included; empty in records that are older than this field",
    )
    step_instructions: list[Count] | None = Field(
        default=None,
        description="instructions that all threads of this process retired in user mode within step_seconds; null "
        "where the processor did not count them all of the time",
    )
    samples: list[Count] = Field(description="samples of this rank")
    tokens: list[Count] = Field(description="real tokens of this rank; empty where samples have no tokens")
    positions: list[Count] = Field(description="token positions computed, padding included; empty, too")
    work: list[Count] = Field(
        default=[], description="work by the costs of samples, or positions, or samples; empty in older records"
    )
    peak_memory_bytes: int = Field(description="largest resident set of the process")
    peak_cuda_memory_bytes: int | None
    cpu_seconds: float = Field(description="processor time of the process, start-up included")
    schedule_steps: int = Field(description="how often the learning-rate schedule advanced")
    effective_settings: dict[str, Any] = Field(description="read back from the backend's library")
    weights_sha256: str = Field(description="of all final parameters and buffers")
    diagnosis: DiagnosisRecord | None = None
    trace: TraceRecord | None = Field(default=None, description="null without --trace")
    memory: MemoryRecord | None = None
    energy: EnergyRecord | None = Field(default=None, description="null but on local rank 0")

    def lengths(self) -> dict[str, int]:
        """Returns the length of each list that has an entry for each step; what was not measured is left out."""
        lists: dict[str, Sized] = {"step_seconds": self.step_seconds, "samples": self.samples}
        if self.tokens or self.positions:
            lists |= {"tokens": self.tokens, "positions": self.positions}
        if self.step_cpu_seconds:
            lists["step_cpu_seconds"] = self.step_cpu_seconds
        if self.work:
            lists["work"] = self.work
        if self.step_instructions is not None:
            lists["step_instructions"] = self.step_instructions
        return {name: len(values) for name, values in lists.items()}


class Environment(_Strict):
    """Where a run took place."""

    git_commit: str | None
    git_dirty: bool | None
    python: str
    platform: str
    cpu: str
    num_cpus: int
    gpus: list[str]
    cuda: str | None
    nccl: str | None
    packages: dict[str, str]
    variables: dict[str, str]
    allocator: str | None = Field(
        default=None, description="what memory is taken with: a library in LD_PRELOAD, or glibc"
    )
    boot_id: str | None = Field(
        default=None, description="random, new at each start of the machine, and the same in all of its containers"
    )
    network: str | None = Field(
        default=None, description="the network between the nodes, if the engine that started them has made it"
    )


class Resumption(_Strict):
    """The checkpoint that a run was resumed from."""

    checkpoint: str
    step: int = Field(ge=1)
    backend: str = Field(description="the backend that saved it")
    num_processes: int


class World(_Strict):
    """How many ranks there were, from one step on."""

    first_step: int = Field(ge=1)
    num_processes: int = Field(ge=1)


class Straggler(_Strict):
    """A rank that computes more slowly than the others, which wait for it."""

    rank: int
    hostname: str
    times_slower: float = Field(description="median own_seconds of its steps over the median of the other ranks'")


class Disagreement(_Strict):
    """Ranks whose parameters were not the same bits as those of rank 0."""

    step: Count = Field(description="after which this was found")
    agreed_step: int | None = Field(
        description="after which they were last found to agree; null: never compared before"
    )
    ranks: list[int] = Field(description="those that differ from rank 0")
    parameters: list[str] = Field(description="names of the parameters that differ")
    buffers: list[str] = Field(description="names of the buffers that differ, too")


class RunRecord(_Strict):
    """Everything about one run, including what happened before it was resumed, except the times of that part."""

    schema_version: Literal[3] = 3
    status: Literal["completed", "diverged", "failed", "interrupted"] = Field(
        description="diverged: trained to the end, but the parameters of the ranks differ; rank 0's were saved"
    )
    error: str | None = Field(description="why the run failed or diverged, naming the rank, or who ended it")
    config: RunConfig = Field(description="the resolved configuration")
    gradient_accumulation_steps: int
    task: dict[str, Any] = Field(description="the task's facts about its data and model")
    environment: Environment
    seconds_to_first_step: float | None = Field(description="from the user's command to the first update")
    seconds: float = Field(description="from the user's command to this record")
    steps: list[StepRecord]
    evaluations: list[EvaluationRecord]
    quality: dict[str, float | None] = Field(description="metrics of the model that was saved")
    ranks: list[RankRecord]
    resumed_from: Resumption | None = None
    worlds: list[World] = Field(
        default=[], description="how many ranks computed the steps, from which step on; empty in older records"
    )
    restarts: int = Field(default=0, ge=0, description="how often its launcher restarted it after a failure")
    best_step: int | None = Field(
        default=None, description="the step whose weights were saved; null: those of the last step"
    )
    failed_saves: list[int] = Field(default=[], description="steps whose checkpoint could not be written")
    stragglers: list[Straggler] = []
    warnings: list[str] = Field(default=[], description="warnings that the user was shown")
    disagreement: Disagreement | None = None
    differing_buffers: list[str] = Field(
        default=[], description="buffers that differed between ranks; those of rank 0 were evaluated with and saved"
    )
    num_batch_norms: int = Field(
        default=0,
        ge=0,
        description="layers of BatchNorm that take their statistics from the samples of a micro-batch: of one rank "
        "or, with --sync-batchnorm, of all ranks",
    )
    positions_per_token: float | None = Field(
        default=None, description="token positions that were computed in training, for each real token"
    )
    imbalance: float | None = Field(
        default=None, description="work of the rank that had most over the mean of all ranks; the mean over steps"
    )
    model_directory: str | None = Field(
        default=None, description="where the model was saved; null: in the output directory, like this record"
    )

    @property
    def joules(self) -> dict[str, float]:
        """The energy that all nodes used while they trained, of "processors" and of "GPUs" if all of them counted it.

        Nodes that an engine has made on one machine read the same counters of processors.
        """
        readings = [rank.energy for rank in self.ranks if rank.energy is not None]
        kinds = {
            "processors": (max if self.environment.network else sum, [one.processor_joules for one in readings]),
            "GPUs": (sum, [one.gpu_joules for one in readings]),
        }
        known = {name: (total, [one for one in counted if one is not None]) for name, (total, counted) in kinds.items()}
        return {
            name: total(counted)
            for name, (total, counted) in known.items()
            if counted and len(counted) == len(readings)
        }

    @model_validator(mode="after")
    def _fits_together(self) -> RunRecord:
        if self.status not in ("completed", "diverged"):
            return self
        num_steps = len(self.steps) - (self.resumed_from.step if self.resumed_from else 0)
        if not (self.ranks and self.steps and (self.evaluations or not self.config.evaluate)):
            raise ValueError("a completed run must have ranks, steps and, without --no-evaluate, evaluations")
        for rank in self.ranks:
            for name, length in rank.lengths().items():
                if length != num_steps:
                    raise ValueError(f"rank {rank.rank} has {length} {name} of {num_steps} steps")
            if rank.diagnosis and not rank.diagnosis.covers(len(self.steps), rank.rank):
                raise ValueError(f"the diagnosis of rank {rank.rank} does not cover {len(self.steps)} steps")
        if len({rank.diagnosis is None for rank in self.ranks}) > 1:
            raise ValueError("some ranks have a diagnosis and some have none")
        if not all(1 <= evaluation.step <= len(self.steps) for evaluation in self.evaluations):
            raise ValueError("an evaluation has the number of no step")
        return self


def write_record(record: RunRecord, directory: Path) -> None:
    """Writes the record completely or not at all.

    Raises:
        FileExistsError: The directory already has a record.
    """
    target = directory / RECORD_NAME
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    write_atomically(target, json.dumps(record.model_dump(mode="json"), indent=1, allow_nan=False) + "\n")


def read_record(path: Path) -> RunRecord:
    """Reads and validates a record.

    Raises:
        OSError, ValueError: It cannot be read, or is not a record of this schema.
    """
    return RunRecord.model_validate_json(path.read_bytes())


if __name__ == "__main__":
    # python -m records.record > records/record.schema.json
    json.dump(RunRecord.model_json_schema(), sys.stdout, indent=1)
    sys.stdout.write("\n")
