"""The options of a run, and the configuration of a run in which no option is left open.

Options have the names of the Hugging Face Trainer where it has the same option.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from backends.capabilities import BackendSettings
from backends.interface import BackendOptions

DEFAULT_CPU_PROCESSES = 2
# The variable in which launch/run.sh notes when the user called it.
STARTED_AT_VARIABLE = "LOCKSTEP_STARTED_AT"

# In which an engine describes the network that it has made between nodes.
NETWORK_VARIABLE = "LOCKSTEP_NETWORK"
# What a starter wants the user to know of how it has started the ranks.
START_WARNING_VARIABLE = "LOCKSTEP_START_WARNING"

# Upper bounds turn a typing error into a message instead of an overloaded machine.
_MAX_PROCESSES = 2**20
# What one node starts at most: ranks, threads of a rank, processes that load data.
MOST_ON_A_NODE = 1024
_MAX_COUNT = 10**9
_MAX_TIMEOUT = 10**6
# A step of a small model is a few thousand events, which stay in memory until they are written.
_MAX_TRACED_STEPS = 100
# Training computes in float32, where larger numbers are infinite.
_MAX_FLOAT = 3e38

Precision = Literal["fp32", "bf16", "fp16"]
Batching = Literal["packed", "sorted", "padded"]
GradCompression = Literal["none", "fp16", "bf16", "powersgd"]

# The bounds of options that a user may leave open, for these and for a run that has settled them.
ProcessCount = Annotated[int, Field(ge=1, le=_MAX_PROCESSES)]
ThreadCount = Annotated[int, Field(ge=1, le=MOST_ON_A_NODE)]
BatchSize = Annotated[int, Field(ge=1, le=_MAX_COUNT)]
LearningRate = Annotated[float, Field(gt=0, le=_MAX_FLOAT)]


class SaveInterval(NamedTuple):
    """How often to save: after so many optimizer steps, or else after so many seconds."""

    steps: int | None
    seconds: float


class RunOptions(BaseModel):
    """The options that all backends and tasks share. None means that the value is chosen when the run is resolved."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    task: str = Field("text-classification", description="what to train, or package.module:Class")
    num_processes: ProcessCount | None = Field(
        None, description="ranks on all nodes together (default: one per GPU; 2 without a GPU)"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to compute")
    start_method: str | None = Field(
        None, description="what starts the ranks (default: the backend's first starter that can start them there)"
    )
    num_nodes: int = Field(
        1, ge=1, le=_MAX_PROCESSES, description="number of nodes; each runs this command with its own --node-rank"
    )
    min_nodes: int | None = Field(
        None,
        ge=1,
        le=_MAX_PROCESSES,
        description="nodes may leave and return; ranks go on while so many are there (default: all must stay)",
    )
    node_rank: int = Field(0, ge=0, lt=_MAX_PROCESSES, description="number of this node, from 0")
    master_addr: str | None = Field(None, min_length=1, description="address of node 0, where several nodes meet")
    master_port: int | None = Field(
        None, ge=1, le=65535, description="rendezvous port (default: a free one; with several nodes 29500)"
    )
    timeout: float = Field(
        300.0, gt=0, le=_MAX_TIMEOUT, description="seconds that a collective may wait before it fails"
    )
    hang_timeout: float = Field(
        20.0,
        ge=0,
        le=_MAX_TIMEOUT,
        description="seconds without progress after which the ranks of a node count as hanging (0: never)",
    )
    max_restarts: int = Field(
        0, ge=0, le=1000, description="restarts from the latest checkpoint after a failure, at most"
    )
    threads_per_rank: ThreadCount | None = Field(None, description="CPU threads of a rank (default: cores / ranks)")
    allocator: Literal["auto", "glibc", "tcmalloc", "jemalloc"] = Field(
        "auto", description="what ranks take memory with; auto: tcmalloc or jemalloc, if one of them is installed"
    )
    bind_ranks: bool = Field(False, description="bind each rank to as many cores of its own as it has threads")
    scheduling: Literal["batch", "normal"] | None = Field(
        None,
        description="how Linux schedules the threads of a rank; batch: one that wakes up does not interrupt another; "
        "normal: as it schedules this command (default: batch on CPUs; normal on GPUs, and for Horovod that spins "
        "under mpirun or with more ranks than cores)",
    )

    precision: Precision = Field("fp32", description="autocast precision")
    global_batch_size: BatchSize = Field(32, description="samples of one optimizer step on all ranks together")
    micro_batch_size: BatchSize | None = Field(
        None,
        description="samples of one forward pass of one rank at most; as a mean where they are packed or sorted "
        "(default: no accumulation)",
    )
    batching: Batching | None = Field(
        None,
        description="packed: samples in one row without padding; sorted: each forward pass has samples of similar "
        "lengths; padded: as they come (default: packed where the model allows it, else sorted where the task tells "
        "the lengths of its samples, else padded, also with --torch-compile)",
    )
    eval_batch_size: BatchSize = Field(64, description="samples of one evaluation pass of one rank")
    max_grad_norm: float = Field(
        1.0, ge=0, le=_MAX_FLOAT, description="clip the global gradient norm to this (0: do not clip)"
    )
    init_loss_scale: float = Field(65536.0, ge=1, le=_MAX_FLOAT, description="initial loss scale under fp16")
    find_unused_parameters: bool = Field(False, description="allow parameters without a gradient")
    grad_compression: GradCompression = Field(
        "none",
        description="what gradients travel as; fp16, bf16: in 2 bytes an element; powersgd: as matrices of rank 4. "
        "What is trained is then an approximation",
    )
    sync_batchnorm: bool = Field(False, description="statistics of BatchNorm over all ranks, not over each alone")
    torch_compile: bool = Field(False, description="train a model compiled with torch.compile (Inductor)")

    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="AdamW (decoupled decay) or SGD")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD (0: none; not for AdamW)")
    learning_rate: LearningRate | None = Field(None, description="peak learning rate (default: the task's)")
    lr_scheduler: Literal["linear", "cosine", "constant"] = Field("linear", description="decay after the warm-up")
    warmup_ratio: float = Field(0.1, ge=0, le=1, description="share of the steps spent warming up")
    weight_decay: float = Field(
        0.01, ge=0, le=_MAX_FLOAT, description="decay of weights; biases and LayerNorm have none"
    )
    num_train_epochs: int = Field(4, ge=1, le=_MAX_COUNT, description="passes over the training samples")
    max_steps: int = Field(
        -1, le=_MAX_COUNT, description="optimizer steps, overriding --num-train-epochs (-1: not set)"
    )
    logging_steps: int | None = Field(
        None,
        ge=1,
        le=_MAX_COUNT,
        description="optimizer steps between two reports of the loss (default: those of about a second, at most 64)",
    )
    on_nan: Literal["stop", "skip"] = Field(
        "stop", description="on a loss or gradient that is not finite: end the run, or skip the update"
    )
    diagnose: bool = Field(False, description="measure each step: its time, its communication and its weights; slow")
    trace: int = Field(
        0, ge=0, le=_MAX_TRACED_STEPS, description="steps of which each rank leaves a trace in traces/ (0: none)"
    )
    tracker: Literal["none", "tensorboard"] = Field(
        "none", description="write event files for this program into the output directory"
    )
    dataloader_num_workers: int = Field(
        0, ge=0, le=MOST_ON_A_NODE, description="processes that prepare batches, for each rank"
    )
    seed: int = Field(42, ge=0, lt=2**32, description="seed of initial weights, sample order and dropout")

    save_every: str = Field(
        "500", description="interval between checkpoints: optimizer steps (500), minutes (10min), or never"
    )
    keep: int = Field(3, ge=1, le=_MAX_COUNT, description="checkpoints to keep, besides that of the best model")
    on_save_error: Literal["continue", "stop"] = Field(
        "continue", description="what to do if a checkpoint cannot be written, for example on a full disk"
    )
    resume: str | None = Field(
        None,
        min_length=1,
        description="checkpoint to resume from, or a run's directory; latest: the newest in --output-dir",
        json_schema_extra={"alone": "latest"},
    )
    evaluate: bool = Field(True, description="evaluate after each epoch and at the end")
    metric_for_best_model: str | None = Field(
        None, min_length=1, description="keep the weights of the best evaluation by this metric (default: the last)"
    )
    greater_is_better: bool | None = Field(
        None, description="of that metric, greater values are better (default: unless its name ends with loss)"
    )
    early_stopping_patience: int | None = Field(
        None, ge=1, le=_MAX_COUNT, description="stop after so many evaluations in a row without improvement"
    )
    output_dir: Path | None = Field(None, description="receives model, record and logs (default: runs/BACKEND-TIME)")
    overwrite: bool = Field(False, description="replace the run in --output-dir")

    @field_validator("max_steps")
    @classmethod
    def _positive_or_unlimited(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise ValueError("give a positive number, or -1 for as many steps as --num-train-epochs takes")
        return value

    @field_validator("save_every", mode="before")
    @classmethod
    def _number_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, (int, float)) else value

    @field_validator("save_every")
    @classmethod
    def _is_interval(cls, value: str) -> str:
        _parse_interval(value)
        return value

    @property
    def save_interval(self) -> SaveInterval | None:
        """How often to save; None for never."""
        return _parse_interval(self.save_every)

    @model_validator(mode="after")
    def _patience_needs_metric(self) -> RunOptions:
        if self.early_stopping_patience and not self.metric_for_best_model:
            raise ValueError(
                f"--early-stopping-patience {self.early_stopping_patience}: --metric-for-best-model is missing; "
                "name the metric to judge by"
            )
        if self.greater_is_better is not None and not self.metric_for_best_model:
            raise ValueError(
                f"--{'' if self.greater_is_better else 'no-'}greater-is-better: --metric-for-best-model is missing; "
                "name the metric, or leave the option out"
            )
        if self.metric_for_best_model and not self.evaluate:
            raise ValueError(
                f"--metric-for-best-model {self.metric_for_best_model} needs evaluations, "
                "which --no-evaluate turns off; leave out one of the two"
            )
        if self.metric_for_best_model and self.save_interval is None:
            raise ValueError(
                f"--metric-for-best-model {self.metric_for_best_model} needs checkpoints, "
                "which --save-every never turns off; change one of the two"
            )
        return self

    @model_validator(mode="after")
    def _nodes_may_leave(self) -> RunOptions:
        if self.min_nodes is None:
            return self
        if self.num_nodes == 1:
            raise ValueError(
                f"--min-nodes {self.min_nodes}: has no effect on one node; add --num-nodes, or leave it out"
            )
        if self.min_nodes > self.num_nodes:
            raise ValueError(
                f"--min-nodes {self.min_nodes}: there are at most --num-nodes {self.num_nodes}; choose at most as many"
            )
        if not self.max_restarts:
            raise ValueError(
                f"--min-nodes {self.min_nodes}: each loss of a node takes one restart; give --max-restarts a number"
            )
        if self.save_interval is None:
            raise ValueError(
                f"--min-nodes {self.min_nodes}: ranks go on from a checkpoint, which --save-every never turns off; "
                "change one of the two"
            )
        return self._nothing_follows_from_world_size()

    def _nothing_follows_from_world_size(self) -> RunOptions:
        """Refuses what would make the training another one when nodes leave or return."""
        spoils = {"--sync-batchnorm": self.sync_batchnorm, "--grad-compression": self.grad_compression != "none"}
        option = next((option for option, is_on in spoils.items() if is_on), None)
        if option is not None:
            raise ValueError(
                f"{option}: what is trained then depends on the number of ranks, which --min-nodes lets change; "
                "leave out one of the two"
            )
        return self

    @model_validator(mode="after")
    def _no_diagnosis_of_part(self) -> RunOptions:
        if self.diagnose and (self.resume or self.max_restarts):
            raise ValueError("--diagnose measures whole runs; leave it out, or leave out --resume and --max-restarts")
        return self

    @model_validator(mode="after")
    def _no_diagnosis_of_compiled(self) -> RunOptions:
        if self.diagnose and self.torch_compile:
            raise ValueError("--diagnose cannot measure a compiled model; leave out --diagnose or --torch-compile")
        return self

    @model_validator(mode="after")
    def _no_sync_batchnorm_of_compiled(self) -> RunOptions:
        if self.sync_batchnorm and self.torch_compile:
            raise ValueError(
                "--sync-batchnorm communicates in the middle of the model, which --torch-compile cannot compile; "
                "leave out one of the two"
            )
        return self

    @model_validator(mode="after")
    def _no_sync_batchnorm_of_unused(self) -> RunOptions:
        if self.sync_batchnorm and self.find_unused_parameters:
            raise ValueError(
                "--sync-batchnorm needs all ranks to use the same layers in the same order, which "
                "--find-unused-parameters does not promise; leave out one of the two"
            )
        return self

    @model_validator(mode="after")
    def _no_trace_of_diagnosis(self) -> RunOptions:
        if self.trace and self.diagnose:
            raise ValueError(
                f"--trace {self.trace} would show the steps that --diagnose adds, too; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _error_feedback_is_sound(self) -> RunOptions:
        skips = "a step that is skipped leaves an infinite remainder behind"
        spoils = {
            "--precision fp16": self.precision == "fp16" and skips,
            "--on-nan skip": self.on_nan == "skip" and skips,
            "--find-unused-parameters": self.find_unused_parameters and "a gradient that is not used takes one away",
        }
        option, why = next(((option, why) for option, why in spoils.items() if why), ("", ""))
        if self.grad_compression == "powersgd" and why:
            raise ValueError(
                f"--grad-compression powersgd adds what a step leaves out to the next, and with {option} {why}; "
                "change one of the two"
            )
        return self

    @model_validator(mode="after")
    def _momentum_is_of_sgd(self) -> RunOptions:
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"--momentum {self.momentum:g} is an option of --optimizer sgd, not of {self.optimizer}")
        return self


def _parse_interval(text: str) -> SaveInterval | None:
    if text == "never":
        return None
    match = re.fullmatch(r"(\d{1,9})|(\d{1,6}(?:\.\d{1,6})?)min", text)
    if match is None or float(match[1] or match[2]) == 0:
        raise ValueError("give a number of steps (500), of minutes (10min), or never")
    return SaveInterval(int(match[1]), 0.0) if match[1] else SaveInterval(None, 60 * float(match[2]))


class RunConfig(RunOptions):
    """A run in which no option is left open: every rank reads it, and the record repeats it."""

    backend: str
    backend_settings: dict[str, Any] = {}
    task_settings: dict[str, Any]
    num_processes: ProcessCount
    device: Literal["cpu", "cuda"]
    start_method: str
    threads_per_rank: ThreadCount
    micro_batch_size: BatchSize
    batching: Batching = "padded"  # a run of before there was a choice
    learning_rate: LearningRate
    output_dir: Path
    launch_command: str = Field(description="the user's command, without the directory that it wrote to")
    started_at: float = Field(ge=0, description="when the user's command began, in seconds since 1970")
    resume_from: Path | None = Field(None, description="the checkpoint that the run resumes from")
    num_restarts: int = Field(0, ge=0, description="how often the run has started again after a failure")

    @property
    def prefers_greater(self) -> bool:
        """Whether greater values of --metric-for-best-model are better, by the rule of transformers' Trainer."""
        if self.greater_is_better is None:
            return not str(self.metric_for_best_model).endswith("loss")
        return self.greater_is_better

    @property
    def gradient_accumulation_steps(self) -> int:
        """The micro-steps of a step, from the batch sizes; a short global batch takes fewer."""
        return self.global_batch_size // (self.micro_batch_size * self.num_processes)

    def num_steps(self, steps_per_epoch: int) -> int:
        """Returns the number of optimizer steps of the whole training."""
        return self.max_steps if self.max_steps > 0 else self.num_train_epochs * steps_per_epoch

    def num_warmup_steps(self, num_steps: int) -> int:
        """Returns how many of so many steps the learning rate rises in."""
        return math.ceil(self.warmup_ratio * num_steps)

    def backend_options(self, settings: type[BackendSettings]) -> BackendOptions:
        """Returns what the launcher passes to an adapter whose own options are of the type `settings`."""
        return BackendOptions(
            precision=self.precision,
            device=self.device,
            timeout_seconds=self.timeout,
            init_loss_scale=self.init_loss_scale,
            find_unused_parameters=self.find_unused_parameters,
            skip_nonfinite=self.on_nan == "skip",
            is_traced=self.trace > 0,
            grad_compression=self.grad_compression,
            seed=self.seed,
            settings=settings.model_validate(self.backend_settings),
        )
