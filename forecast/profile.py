"""A profile: what one rank computes and when its gradients are ready, in a file that forecasts are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from compare.results import Interval
from compare.strict import OfBackend, Strict
from forecast.model import Work
from forecast.sending import Gradient, Sending
from records.files import write_atomically
from records.record import Environment, Seconds

PROFILE_NAME = "profile.json"
PROFILE_VERSIONS = (1, 2)


class GradientTime(Strict):
    """One gradient."""

    name: str
    num_bytes: int = Field(gt=0)
    ready_seconds: Seconds = Field(description="since the last backward pass of the step began, median over steps")


class Computing(Strict):
    """Processes that do the work of a rank each, at the same time, on one machine."""

    num_processes: int = Field(ge=1)
    step_seconds: Interval = Field(
        description="the median step, with its interval; of several starts, the median of their median steps, with the "
        "interval in which the median step of one more start is expected"
    )
    spread_seconds: Seconds | None = Field(
        description="standard deviation of what processes take for the same step, from quartiles; null for one process"
    )


class AllReduceTime(Strict):
    """What all-reduces of one size took."""

    num_bytes: int = Field(gt=0)
    seconds: Interval = Field(description="of the slowest rank, median over repetitions")


class Collective(Strict):
    """What all-reduces over so many ranks took, and the line through it: latency + bytes / bandwidth."""

    num_processes: int = Field(ge=2)
    transport: str
    latency_seconds: Interval
    bytes_per_second: Interval
    times: list[AllReduceTime] = Field(default=[], description="in the order of size")


class Profile(OfBackend):
    """What a forecast needs to know of a training."""

    schema_version: Literal[1, 2] = Field(default=2, description="1: without `together` and the times of all-reduces")
    kind: Literal["forecast profile"] = "forecast profile"
    created_at: str
    command: str
    environment: Environment
    transport: str
    compressions: list[str] = Field(description="--grad-compression that the backend has, in forecasts of this model")
    sending: Sending
    samples_per_rank: int = Field(ge=1, description="of one step")
    num_samples: int = Field(ge=1, description="of one epoch, over all ranks")
    num_starts: int = Field(default=1, ge=1, description="how often each run was started")
    num_steps: int = Field(ge=1, description="steps that were timed in one process, in all its starts")
    micro_steps: int = Field(ge=1, description="micro-batches of one rank in a step")
    data_seconds: Seconds
    forward_seconds: Seconds = Field(description="of all micro-steps")
    backward_seconds: Seconds = Field(description="of all micro-steps")
    last_backward_seconds: Seconds = Field(description="of the last micro-step")
    update_seconds: Seconds
    sent_share: float = Field(default=1.0, gt=0, le=1, description="in which share of their bytes gradients are sent")
    gradients: list[GradientTime] = Field(min_length=1, description="in the order of time")
    computing: list[Computing] = Field(
        min_length=1,
        description="without communication, by number of processes; the first has one; steps of all processes",
    )
    overlap_slow_down: Interval | None = Field(
        description="how many times as long until the last gradient is ready while two ranks send, over two processes "
        "that send nothing; null: not measured"
    )
    collectives: list[Collective] = Field(description="on this machine, by number of processes; empty: not measured")
    together: list[Computing] = Field(
        default=[],
        description="ranks of the backend on this machine, by their number; steps of the slowest one",
    )
    remarks: list[str] = Field(description="what was assumed since it was not measured")

    @property
    def work(self) -> Work:
        """The work of one rank."""
        backward_before = self.backward_seconds - self.last_backward_seconds
        before = self.data_seconds + self.forward_seconds + backward_before
        return Work(
            before=before,
            micro_step=(self.data_seconds + self.forward_seconds + self.backward_seconds) / self.micro_steps,
            backward=self.last_backward_seconds,
            update=self.update_seconds,
            gradients=tuple(Gradient(one.ready_seconds, one.num_bytes) for one in self.gradients),
            micro_steps=self.micro_steps,
            share=self.sent_share,
        )


def write_profile(profile: Profile, directory: Path) -> Path:
    """Writes a profile into a directory, completely or not at all, and returns its path."""
    target = directory / PROFILE_NAME
    write_atomically(target, profile.model_dump_json(indent=1) + "\n")
    return target
