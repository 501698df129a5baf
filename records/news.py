"""The news of a run, one model for each kind: rank 0 writes them while it runs, the launcher and trackers read them."""

from __future__ import annotations

import time
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from records.record import Disagreement, Environment, EvaluationRecord, Resumption, StepRecord, World


class _Item(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    time: float = Field(default_factory=time.time, description="when it was written, in seconds since 1970")


class StepEnded(_Item):
    """A step is complete; reported at most a few times a second."""

    event: Literal["step"] = "step"
    step: int
    num_steps: int
    loss: float | None = Field(description="the last loss that was read; null if it is not finite")


class LossesRead(_Item):
    """The records of all steps since the last such news are complete."""

    event: Literal["closed"] = "closed"
    steps: list[StepRecord]


class EvaluationBegan(_Item):
    """An evaluation has begun."""

    event: Literal["evaluating"] = "evaluating"
    step: int
    num_steps: int


class Evaluated(_Item):
    """An evaluation is complete."""

    event: Literal["evaluation"] = "evaluation"
    evaluation: EvaluationRecord


class Warned(_Item):
    """The user is warned of something."""

    event: Literal["warning"] = "warning"
    text: str


class Disagreed(_Item):
    """The parameters of the ranks have diverged."""

    event: Literal["disagreed"] = "disagreed"
    disagreement: Disagreement


class Saved(_Item):
    """A checkpoint is on the disk."""

    event: Literal["saved"] = "saved"
    step: int
    path: str
    seconds: float = Field(description="how long writing it took")


class SaveFailed(_Item):
    """A checkpoint could not be written."""

    event: Literal["save-failed"] = "save-failed"
    step: int
    why: str


class Resumed(_Item):
    """The run continues from a checkpoint, after these steps and evaluations."""

    event: Literal["resumed"] = "resumed"
    origin: Resumption
    steps: list[StepRecord]
    evaluations: list[EvaluationRecord]
    worlds: list[World]


class LibraryFound(_Item):
    """Which collectives are about to be measured, and over which transport."""

    event: Literal["library"] = "library"
    transport: str
    operations: list[str]
    environment: Environment = Field(description="that of rank 0")


class PointMeasured(_Item):
    """A collective has been measured at one size."""

    event: Literal["point"] = "point"
    operation: str
    bytes: int
    seconds: list[float] = Field(description="of each repetition, on the slowest rank")


News = (
    StepEnded
    | LossesRead
    | EvaluationBegan
    | Evaluated
    | Warned
    | Disagreed
    | Saved
    | SaveFailed
    | Resumed
    | LibraryFound
    | PointMeasured
)


class _Line(RootModel[News]):
    root: News = Field(discriminator="event")


def parse_news(line: bytes) -> News | None:
    """Reads a line; returns None if a full disk has cut it, or if its kind is not known."""
    try:
        return _Line.model_validate_json(line).root
    except ValidationError:
        return None
