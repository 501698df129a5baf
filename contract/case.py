"""What a case is: a small training or another scene that an adapter goes through, with a name."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from records.config import RunConfig

NUM_VALIDATION_SAMPLES = 23
_MOST_ACCUMULATION = 4
# Small enough that no gradient of these trainings overflows in fp16, unless a case makes it.
INIT_LOSS_SCALE = 1024.0
# After so many steps without an overflow, the loss scale doubles (https://docs.pytorch.org/docs/stable/amp.html).
GROWTH_INTERVAL = 2000
# Numbers with more digits than a narrower dtype has; sums of a few of them are exact.
LARGE_INT64, FINE_FLOAT64 = 2**55 + 1, 1 + 2.0**-40
# The groups whose ranks are told to skip an update that is not finite, unless a case is about what they do unasked.
# Under fp16 they must skip it unasked, and under bf16 they must not.
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
                **({} if float64 else {"dtype": "float32"}),
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
        keeps_nonfinite: Whether the adapter is not told to skip an update that is not finite, in whatever precision.
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
    keeps_nonfinite: bool = False
    is_job: bool = False

    def sizes_among(self, asked: Sequence[int] | None) -> Sequence[int]:
        """Returns the world sizes to run it at: its own, or those of `asked` that make sense for it."""
        if asked is None or self.world_sizes == (1,):
            return self.world_sizes
        return [size for size in asked if size in self.world_sizes or (size > 1 and max(self.world_sizes) > 1)]
