"""The options of DeepSpeed; importing them imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from backends.capabilities import BackendSettings


class DeepSpeedSettings(BackendSettings):
    """Options of DeepSpeed's ZeRO optimizer."""

    zero_stage: Literal[1, 2] = Field(
        1,
        description="what each rank holds a part of: the optimizer's state (1), or the averaged gradients, too (2); "
        "for parts of the weights (3), use fsdp2",
    )
