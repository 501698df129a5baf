"""The cases: small trainings and other scenes that an adapter goes through, each with a name.

Ranks look up a case by its name, run it and write what they observe. Checks, which run later in
another process, name the cases whose evidence they judge.

Most trainings use the token-tagging task, which makes mistakes show: shards differ tenfold in tokens
and in their mix of labels, some targets are masked, a weight is tied, and a buffer holds integers.
An epoch consists of three global batches and one sample, so that in its last step only one rank has a sample.

A run has packed batches by default, and so have some cases of each kind; the others have padded ones, which a backend
may cut into shares for its devices. A model that depends on places in a row, as some awkward ones do, has padded ones
alone: where a sample lies in a packed row depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from backends.capabilities import PRECISIONS
from contract.case import GROWTH_INTERVAL, Case, Overflow, Training


def _saved_and_resumed(training: Training, *, overflow: Overflow | None = None) -> tuple[Training, ...]:
    """Returns a training that keeps its state after step 3, and two that resume: from it, and from the reference's."""
    whole = replace(training, save_after=3, overflow=overflow)
    return whole, replace(training, resume="own"), replace(training, resume="reference")


def _counted(options: Mapping[str, Any], accumulation: int = 2) -> Training:
    """Returns a training in which every collective is counted: optimizer state and clipping need none of their own."""
    return Training(options, accumulation=accumulation, count_traffic=True)


def _packed(training: Training) -> Training:
    """Returns the same training with packed batches."""
    return replace(training, options={**training.options, "batching": "packed"})


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
CLIPPED = (
    Case("clipped-1", (_counted({"max_grad_norm": 0.05, "batching": "packed"}, 1),)),
    Case("clipped-2", (_counted({"max_grad_norm": 0.05}, 2),)),
)
# A threshold that no norm reaches, under an optimizer that shows a factor.
UNCLIPPED = Case("unclipped", (_counted({"max_grad_norm": 100.0}),))
ADAMW = Case("adamw", (_counted({**_ADAMW, "max_grad_norm": 1e6, "batching": "packed"}),))
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
    (Training({"max_steps": 6}, accumulation=2, task="contract.awkward_tasks:VariedTask", count_traffic=True),),
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
# Padded, so that each device of a backend that cuts batches draws masks.
_DROPOUT = Training({"max_steps": 4}, {**_FLOAT32, "dropout": 0.5}, accumulation=4)
DROPOUT = Case("dropout", (_DROPOUT, _DROPOUT), world_sizes=_PAIR)

_STATEFUL = Training({**_ADAMW, "max_grad_norm": 1.0}, accumulation=2)
STATE = Case("state", _saved_and_resumed(_packed(_STATEFUL)), world_sizes=_PAIR)
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
        ("accumulation", {"batching": "packed"}, 2),
        ("clipped", {"max_grad_norm": 0.05, "batching": "packed"}, 2),
        ("adamw", _ADAMW, 2),
    )
)
_DECAYING_CLIPPED = Training({"lr_scheduler": "linear", "max_grad_norm": 0.5}, _FLOAT32, accumulation=2)
OVERFLOWS = tuple(
    Case(
        f"overflow-on-rank-{overflow.rank}-micro-batch-{overflow.micro_step}",
        (replace(training, overflow=overflow),),
        precision="fp16",
        world_sizes=_PAIR,
    )
    for training, overflow in (
        (_DECAYING_CLIPPED, Overflow(1, 3, 0)),
        (_packed(_DECAYING_CLIPPED), Overflow(0, 3, 1)),
    )
)
# The same without a loss scale, so that no scaler skips the step.
# With momentum, which must survive the step, and in float64.
_DECAYING_MOMENTUM = _counted({**_DECAYING_CLIPPED.options, "momentum": 0.9})
INFINITE_LOSS = Case("infinite-loss", (replace(_DECAYING_MOMENTUM, overflow=Overflow(1, 3, 0)),), world_sizes=_PAIR)
INFINITE_GRADIENT = Case(
    "infinite-gradient",
    (replace(_packed(_DECAYING_MOMENTUM), overflow=Overflow(1, 3, 0, of_gradient=True)),),
    world_sizes=_PAIR,
)
# Under a loss scale. Of a gradient that is cut into parts, one rank alone has the infinite element.
INFINITE_GRADIENT_FP16 = Case(
    "infinite-gradient-fp16",
    (replace(_DECAYING_CLIPPED, overflow=Overflow(1, 3, 0, of_gradient=True)),),
    precision="fp16",
    world_sizes=_PAIR,
)
# In a group whose ranks are not told to skip such an update.
UNSKIPPED = Case(
    "infinite-loss-that-counts",
    (Training({"max_steps": 3}, _FLOAT32, accumulation=2, overflow=Overflow(1, 2, 0)),),
    precision="bf16",
    world_sizes=_PAIR,
)
# An adapter may have no other precision. A group of its own takes seconds, so that there is one by default.
UNSKIPPED_FLOAT32 = replace(
    UNSKIPPED, name="infinite-loss-that-counts-fp32", precision="fp32", world_sizes=(2,), keeps_nonfinite=True
)
_FP16 = Training(settings=_FLOAT32, accumulation=2)
CLIP_FP16 = Case(
    "clip-just-above-the-norm", (_FP16, replace(_FP16, clip_just_above=True)), precision="fp16", world_sizes=_PAIR
)
# With dropout, whose masks are not those of one process: it goes on from its own state alone.
STATE_BF16 = Case(
    "state-bf16",
    _saved_and_resumed(_packed(Training(_ADAMW, {**_FLOAT32, "dropout": 0.5}, accumulation=2)))[:2],
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
# The last step is short: three samples on two ranks, eleven on three, which cannot share them evenly. Where
# micro-batches have one sample, a rank has none in the last micro-step.
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
    UNSKIPPED_FLOAT32, *OVERFLOWS, INFINITE_GRADIENT_FP16, CLIP_FP16, STATE_FP16, GROWTH, BATCH_NORM, *COMPRESSED_HALF,
    COMPRESSED_OVERFLOW, POWERSGD, UNUSED, RARE, *UNANNOUNCED, SHUTDOWN, REFUSALS, HOSTILE, *FAULTS,
)  # fmt: skip
BY_NAME = {case.name: case for case in ALL}
