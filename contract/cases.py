"""The cases: small trainings and other scenes that an adapter goes through, each with a name.

Ranks look up a case by its name, run it and write what they observe. Checks, which run later in
another process, name the cases whose evidence they judge.

Most trainings use the token-tagging task, which makes mistakes show: shards differ tenfold in tokens
and in their mix of labels, some targets are masked, a weight is tied, and a buffer holds integers.
An epoch consists of three global batches and one sample, so that in its last step only one rank has a sample.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from backends.capabilities import PRECISIONS
from records.config import RunConfig

NUM_VALIDATION_SAMPLES = 23
_MOST_ACCUMULATION = 4
# Small enough that no gradient of these trainings overflows in fp16, unless a case makes it.
INIT_LOSS_SCALE = 1024.0
# After so many steps without an overflow, the loss scale doubles (https://docs.pytorch.org/docs/stable/amp.html).
GROWTH_INTERVAL = 2000
# Numbers with more digits than a narrower dtype has; sums of a few of them are exact.
LARGE_INT64, FINE_FLOAT64 = 2**55 + 1, 1 + 2.0**-40
# The groups whose ranks are told to skip an update that is not finite. Under fp16 they must do so unasked, and under
# bf16 they must not.
SKIPPING_PRECISIONS = ("fp32",)


def global_batch_size(world_size: int) -> int:
    """Returns the smallest size of at least 16 that four accumulation steps of `world_size` ranks divide."""
    return -(-16 // (_MOST_ACCUMULATION * world_size)) * _MOST_ACCUMULATION * world_size


@dataclass(frozen=True)
class Overflow:
    """Multiplies the loss of one micro-batch on one rank, or on the last rank if there are fewer.

    With `of_gradient`, the loss stays as it is, and one element of its gradient is infinite.
    """

    rank: int
    step: int
    micro_step: int
    factor: float = float("inf")
    of_gradient: bool = False

    @property
    def place(self) -> tuple[int, int, int]:
        """The rank, the step and the micro-step."""
        return self.rank, self.step, self.micro_step


@dataclass(frozen=True)
class Training:
    """One training of a case.

    Attributes:
        options: The options that differ from plain SGD at a constant learning rate without clipping.
        settings: The settings of the task.
        accumulation: The number of micro-batches of each rank in a full step.
        task: The name of the task.
        overflow: The micro-batch whose loss is made infinite, or so large that its gradients overflow, if any.
        count_traffic: Whether to count every collective.
        save_after: The step after which the state of the training is kept, if any.
        resume: The state to begin with: "own" is the one that the previous training of the case has kept, "reference"
            is that of the single-process backend in the same training.
        clip_just_above: Whether the threshold is slightly above the largest norm of the previous training.
        good_steps: How many steps without an overflow the state to begin with claims, if other than it does.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    task: str = "token-tagging"
    overflow: Overflow | None = None
    count_traffic: bool = False
    save_after: int | None = None
    resume: Literal["own", "reference"] | None = None
    clip_just_above: bool = False
    good_steps: int | None = None

    def config(
        self,
        *,
        world_size: int,
        precision: str,
        device: str,
        find_unused_parameters: bool,
        batch_for: int | None = None,
        float64: bool = True,
    ) -> RunConfig:
        """Returns the configuration of this training at one world size.

        Args:
            world_size: The number of ranks.
            precision: The precision to compute in.
            device: "cpu" or "cuda".
            find_unused_parameters: Whether the adapter is told to expect unused parameters.
            batch_for: The world size that the size of the global batch is made for, if it is another one.
            float64: Whether the adapter can average float64; otherwise, float32 takes its place.
        """
        batch_size = global_batch_size(batch_for or world_size)
        defaults: dict[str, Any] = {
            "backend": "",
            "task": self.task,
            "task_settings": {
                "num_train_samples": 3 * batch_size + 1,
                "num_validation_samples": NUM_VALIDATION_SAMPLES,
                **({} if float64 else _FLOAT32),
                **self.settings,
            },
            "num_processes": world_size,
            "precision": precision,
            "device": device,
            "find_unused_parameters": find_unused_parameters,
            "start_method": "",
            "threads_per_rank": 1,
            "init_loss_scale": INIT_LOSS_SCALE,
            "global_batch_size": batch_size,
            "micro_batch_size": batch_size // (world_size * self.accumulation),
            "eval_batch_size": 5,
            "optimizer": "sgd",
            "learning_rate": 0.5,
            "lr_scheduler": "constant",
            "warmup_ratio": 0.0,
            "weight_decay": 0.01,
            "max_grad_norm": 0.0,
            "num_train_epochs": 2,
            "logging_steps": 3,
            # A user's run would stop at a value that is not finite; here it is judged.
            "on_nan": "skip",
            "seed": 3,
            "output_dir": Path(),
            "launch_command": "",
            "started_at": time.time(),
        }
        return RunConfig.model_validate(defaults | dict(self.options))


@dataclass(frozen=True)
class Case:
    """One scene in a group of ranks, or one job of its own.

    Attributes:
        name: The name by which ranks look it up.
        trainings: Its trainings, in order; empty for other scenes.
        scene: What the ranks do: a function of contract.scenes or, for a job, of contract.jobs.
        precision: The precision of the group that runs it.
        world_sizes: The numbers of ranks that run it, unless the user asks for others.
        find_unused_parameters: Whether the adapter is told to expect unused parameters.
        may_be_refused: Whether `setup` may refuse its model, with an UnsupportedError.
        grad_compression: In what the adapter is told to send gradients.
        is_job: Whether it is a process tree of its own instead of a scene in a group.
    """

    name: str
    trainings: tuple[Training, ...] = ()
    scene: str = "train"
    precision: str = "fp32"
    world_sizes: tuple[int, ...] = (1, 2, 3)
    find_unused_parameters: bool = False
    may_be_refused: bool = False
    grad_compression: str = "none"
    is_job: bool = False

    def sizes_among(self, asked: Sequence[int] | None) -> Sequence[int]:
        """Returns the world sizes to run it at: its own, or those of `asked` that make sense for it."""
        if asked is None or self.world_sizes == (1,):
            return self.world_sizes
        return [size for size in asked if size in self.world_sizes or (size > 1 and max(self.world_sizes) > 1)]


def _saved_and_resumed(training: Training, *, overflow: Overflow | None = None) -> tuple[Training, ...]:
    """Returns a training that keeps its state after step 3, and two that resume: from it, and from the reference's."""
    whole = replace(training, save_after=3, overflow=overflow)
    return whole, replace(training, resume="own"), replace(training, resume="reference")


def _counted(options: Mapping[str, Any], accumulation: int = 2) -> Training:
    """Returns a training in which every collective is counted: optimizer state and clipping need none of their own."""
    return Training(options, accumulation=accumulation, count_traffic=True)


_FLOAT32 = {"dtype": "float32"}
_ADAMW = {"optimizer": "adamw", "learning_rate": 0.01, "lr_scheduler": "linear", "warmup_ratio": 0.25}
_SEVERAL = (2, 3)
_PAIR = (1, 2)
# Of a power of two and of none. Where four ranks show nothing that three do not, a case runs on one to three.
_FOUR = (1, 2, 3, 4)

WORLD = Case("world", scene="world", world_sizes=_FOUR)
COLLECTIVES = Case("collectives", scene="collectives", world_sizes=_FOUR)
BARRIER = Case("barrier", scene="barrier", world_sizes=_SEVERAL)
PREPARED_OPTIMIZER = Case("prepared-optimizer", scene="prepared_optimizer", world_sizes=_PAIR)
WEIGHTS_OF_RANK_0 = tuple(
    Case(f"weights-of-rank-0-{precision}", scene="weights_of_rank_0", precision=precision, world_sizes=(2,))
    for precision in PRECISIONS
)
SHUTDOWN = Case("shutdown", scene="shutdown", world_sizes=_FOUR)

# Neither an adaptive optimizer nor clipping: both hide a gradient that is wrong by a constant factor.
PLAIN = tuple(
    Case(f"accumulation-{steps}", (Training(accumulation=steps, count_traffic=True),), world_sizes=_FOUR)
    for steps in (1, 2, 4)
)
# The same samples in other batches: one after the other without padding, and of similar lengths together.
LAYOUTS = tuple(
    Case(f"{batching}-batches", (Training({"batching": batching}, accumulation=2),), world_sizes=_FOUR)
    for batching in ("packed", "sorted")
)
MOMENTUM = Case("momentum", (_counted({"momentum": 0.9}),))
CLIPPED = tuple(Case(f"clipped-{steps}", (_counted({"max_grad_norm": 0.05}, steps),)) for steps in (1, 2))
# A threshold that no norm reaches, under an optimizer that shows a factor.
UNCLIPPED = Case("unclipped", (_counted({"max_grad_norm": 100.0}),))
ADAMW = Case("adamw", (_counted({**_ADAMW, "max_grad_norm": 1e6}),))
ADAMW_CLIPPED = Case("adamw-clipped", (_counted({**_ADAMW, "max_grad_norm": 0.05}),))
FLOAT32 = Case("float32", (Training(settings=_FLOAT32, accumulation=2),))
# Large enough for a library to cut the gradients into several buckets, or to send a large one in pieces: one of its
# tensors has two million elements, in more than a thousand rows.
WIDE = Case(
    "wide",
    (Training({"max_steps": 2, "learning_rate": 0.001}, {"hidden_size": 1031}, accumulation=2),),
    world_sizes=_PAIR,
)
# So many that a library may put them into several groups.
MANY = Case(
    "many-tensors",
    (Training({"max_steps": 2, "learning_rate": 0.001}, {"num_layers": 70, "hidden_size": 3}),),
    world_sizes=_PAIR,
)
# Tensors of other kinds: some are not contiguous, have small gradients in some rows, change in a forward pass.
# Six steps: an evaluation lies among them.
VARIED = Case(
    "varied",
    (Training({"max_steps": 6}, accumulation=2, task="contract.awkward_tasks:VariedTask"),),
    may_be_refused=True,
)
MIXED = Case(
    "mixed-dtypes",
    (Training({"max_steps": 4}, accumulation=2, task="contract.awkward_tasks:MixedTask"),),
    world_sizes=_PAIR,
    may_be_refused=True,
)
# Layers in a list, which a library may cut and gather one by one; their rows divide evenly into no number of parts.
LAYERED = Case(
    "layers",
    (Training(settings={"num_layers": 3, "hidden_size": 11}, accumulation=2, count_traffic=True),),
    world_sizes=_FOUR,
)
BITS = Case(
    "bits",
    (Training({**_ADAMW, "max_steps": 100}, settings=_FLOAT32, accumulation=2, count_traffic=True),),
    world_sizes=(2,),
)
# Three validation samples in batches of five: all of them on rank 0, so the other ranks have none.
SMALL_EVALUATION = Case("small-evaluation", (Training({"max_steps": 2}, {"num_validation_samples": 3}),))
# Sorted by label by the task, one sentence a batch: each rank sees labels that others do not.
ONE_BY_ONE_EVALUATION = Case(
    "evaluation-one-by-one", (Training({"max_steps": 2, "eval_batch_size": 1}, {"num_validation_samples": 7}),)
)
_DROPOUT = Training({"max_steps": 4}, {**_FLOAT32, "dropout": 0.5}, accumulation=4)
DROPOUT = Case("dropout", (_DROPOUT, _DROPOUT), world_sizes=_PAIR)

_STATEFUL = Training({**_ADAMW, "max_grad_norm": 1.0}, accumulation=2)
STATE = Case("state", _saved_and_resumed(_STATEFUL), world_sizes=_PAIR)
# With buffers that change.
STATE_VARIED = Case(
    "state-of-varied-tensors",
    _saved_and_resumed(replace(_STATEFUL, task="contract.awkward_tasks:VariedTask")),
    world_sizes=_PAIR,
    may_be_refused=True,
)

HALF = tuple(
    Case(
        f"{precision}-{name}-{steps}",
        (Training(options, _FLOAT32, accumulation=steps, count_traffic=True),),
        precision=precision,
        world_sizes=_PAIR,
    )
    for precision in ("bf16", "fp16")
    for name, options, steps in (
        ("accumulation", {}, 1),
        ("accumulation", {}, 2),
        ("clipped", {"max_grad_norm": 0.05}, 2),
        ("adamw", _ADAMW, 2),
    )
)
_DECAYING_CLIPPED = Training({"lr_scheduler": "linear", "max_grad_norm": 0.5}, _FLOAT32, accumulation=2)
OVERFLOWS = tuple(
    Case(
        f"overflow-on-rank-{overflow.rank}-micro-batch-{overflow.micro_step}",
        (replace(_DECAYING_CLIPPED, overflow=overflow),),
        precision="fp16",
        world_sizes=_PAIR,
    )
    for overflow in (Overflow(1, 3, 0), Overflow(0, 3, 1))
)
# The same without a loss scale, so that no scaler skips the step.
# With momentum, which must survive the step, and in float64.
_DECAYING_MOMENTUM = _counted({**_DECAYING_CLIPPED.options, "momentum": 0.9})
INFINITE_LOSS = Case("infinite-loss", (replace(_DECAYING_MOMENTUM, overflow=Overflow(1, 3, 0)),), world_sizes=_PAIR)
INFINITE_GRADIENT = Case(
    "infinite-gradient",
    (replace(_DECAYING_MOMENTUM, overflow=Overflow(1, 3, 0, of_gradient=True)),),
    world_sizes=_PAIR,
)
# In a group whose ranks are not told to skip such an update.
UNSKIPPED = Case(
    "infinite-loss-that-counts",
    (Training({"max_steps": 3}, _FLOAT32, accumulation=2, overflow=Overflow(1, 2, 0)),),
    precision="bf16",
    world_sizes=_PAIR,
)
_FP16 = Training(settings=_FLOAT32, accumulation=2)
CLIP_FP16 = Case(
    "clip-just-above-the-norm", (_FP16, replace(_FP16, clip_just_above=True)), precision="fp16", world_sizes=_PAIR
)
STATE_BF16 = Case(
    "state-bf16",
    _saved_and_resumed(Training(_ADAMW, _FLOAT32, accumulation=2))[:2],
    precision="bf16",
    world_sizes=_PAIR,
)
STATE_FP16 = Case(
    "state-fp16",
    _saved_and_resumed(replace(_FP16, options=_ADAMW), overflow=Overflow(0, 2, 0)),
    precision="fp16",
    world_sizes=_PAIR,
)
# From a state in which the loss scale is two steps short of doubling.
GROWTH = Case(
    "loss-scale-grows",
    (replace(_FP16, save_after=3), replace(_FP16, resume="own", good_steps=GROWTH_INTERVAL - 2)),
    precision="fp16",
    world_sizes=_PAIR,
)

# Gradients that travel in fewer bytes. Their matrices are large enough for PowerSGD to compress them.
_COMPRESSED = Training(settings={"hidden_size": 40, "num_layers": 1}, accumulation=2, count_traffic=True)
COMPRESSED_HALF = tuple(
    Case(f"{compression}-gradients", (_COMPRESSED,), world_sizes=(2,), grad_compression=compression)
    for compression in ("fp16", "bf16")
)
POWERSGD = Case("powersgd-gradients", (_COMPRESSED,), world_sizes=(2,), grad_compression="powersgd")
# Gradients that are finite on the rank that computes them, and infinite as fp16.
COMPRESSED_OVERFLOW = Case(
    "fp16-gradients-overflow",
    (replace(_DECAYING_CLIPPED, overflow=Overflow(1, 3, 0, factor=1e9)),),
    world_sizes=(2,),
    grad_compression="fp16",
)

_NORMED = Training(
    {"sync_batchnorm": True}, {"num_train_samples": 35}, accumulation=2, task="contract.awkward_tasks:NormedTask"
)
# The last step has three samples. Two ranks cannot share them evenly; where micro-batches have one sample, a rank has
# none in the last micro-step.
BATCH_NORM = Case(
    "batch-norm",
    (_NORMED, replace(_NORMED, options={"sync_batchnorm": True, "micro_batch_size": 1})),
    world_sizes=_SEVERAL,
)

_DECAYING = {"momentum": 0.9, "weight_decay": 0.5, "max_steps": 4}
UNUSED = Case(
    "unused-parameter",
    (Training(_DECAYING, accumulation=2, task="contract.awkward_tasks:UnusedParameterTask"),),
    world_sizes=_PAIR,
    find_unused_parameters=True,
)
RARE = Case(
    "rarely-used-parameter",
    (Training(_DECAYING, accumulation=2, task="contract.awkward_tasks:RareParameterTask"),),
    world_sizes=_PAIR,
    find_unused_parameters=True,
)
# They end in the middle of a training, so they come last.
UNANNOUNCED = tuple(
    Case(
        f"unannounced-{name}",
        (Training({"max_steps": 4}, task=f"contract.awkward_tasks:{task}"),),
        scene="refused_training",
        world_sizes=_PAIR,
    )
    for name, task in (("unused-parameter", "UnusedParameterTask"), ("disused-parameter", "DisusedParameterTask"))
)

REFUSALS = Case("refusals", scene="refusals", world_sizes=(1,), is_job=True)
HOSTILE = Case("hostile-environment", scene="hostile", world_sizes=_PAIR, is_job=True)
FAULTS = tuple(
    # Only a rank that waits for it can notice a rank that hangs.
    Case(f"rank-{fault}", scene="fault", world_sizes=(2,) if fault == "hangs" else _PAIR, is_job=True)
    for fault in ("raises", "exits", "is-killed", "hangs")
)

ALL = (
    WORLD, COLLECTIVES, BARRIER, PREPARED_OPTIMIZER, *WEIGHTS_OF_RANK_0, *PLAIN, *LAYOUTS, MOMENTUM, *CLIPPED,
    UNCLIPPED, ADAMW, ADAMW_CLIPPED, FLOAT32, WIDE, MANY, VARIED, MIXED, LAYERED, BITS, SMALL_EVALUATION,
    ONE_BY_ONE_EVALUATION, DROPOUT, STATE, STATE_VARIED, INFINITE_LOSS, INFINITE_GRADIENT, STATE_BF16, *HALF, UNSKIPPED,
    *OVERFLOWS, CLIP_FP16, STATE_FP16, GROWTH, BATCH_NORM, *COMPRESSED_HALF, COMPRESSED_OVERFLOW, POWERSGD,
    UNUSED, RARE, *UNANNOUNCED, SHUTDOWN, REFUSALS, HOSTILE, *FAULTS,
)  # fmt: skip
BY_NAME = {case.name: case for case in ALL}
