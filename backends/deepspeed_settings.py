"""The options of DeepSpeed; importing them imports no torch."""

from __future__ import annotations

from pydantic import Field
from typing_extensions import override

from backends.capabilities import BackendSettings, Place, UnsupportedError


class DeepSpeedSettings(BackendSettings):
    """Options of DeepSpeed's ZeRO optimizer."""

    zero_stage: int = Field(
        1,
        ge=1,
        le=3,
        description="what each rank holds a part of only: the optimizer's state (1), or averaged gradients, too (2)",
    )

    @override
    def check(self, *, precision: str, optimizer: str, grad_compression: str, place: Place) -> None:
        if self.zero_stage == 3:
            raise UnsupportedError(
                "--zero-stage 3: under deepspeed, each rank holds all weights; choose 1 or 2, or use fsdp2 for stage 3"
            )
