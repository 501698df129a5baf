"""What may be said of a training beside its reference."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

# The verdicts under which a training computes what the reference computes.
SAME = ("reference", "bitwise", "rounding")


class Parity(BaseModel):
    """Whether a training computed what the reference computed."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    verdict: Literal["reference", "bitwise", "rounding", "approximate", "not comparable", "unknown"]
    detail: str = Field(description="one sentence: compared with what, how close, or where it differs")
    first_step: int | None = Field(default=None, description="first step that differs, where one does")
    parameter: str | None = Field(default=None, description="first parameter that differs in that step")
    num_steps: int | None = Field(default=None, description="how many steps could be compared; null for all of them")
    cause: Literal["BatchNorm"] | None = Field(default=None, description="what makes it differ, where that is known")
    distance: float | None = Field(
        default=None,
        description="of an approximation: how far its weights end from those of the reference, over how far training "
        "has moved these; null where no diagnosis run tells",
    )
