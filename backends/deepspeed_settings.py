"""The options of DeepSpeed, what it supports and where it runs; importing them imports no torch."""

from __future__ import annotations

import re
from importlib import metadata

from pydantic import Field
from typing_extensions import override

from backends.capabilities import BackendSettings, Capabilities, Place, UnsupportedError


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


def deepspeed_missing() -> str | None:
    """Says in one line why DeepSpeed cannot run here, or None."""
    install = "run launch/run.sh deepspeed, or pip install deepspeed==0.19.8"
    try:
        version = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return f"deepspeed is not installed; {install}"
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < (0, 19, 8):
        return f"deepspeed {version} may leave the average over ranks out on a CPU (DeepSpeed#8381); {install}"
    return None


def deepspeed_capabilities() -> Capabilities:
    """Returns what DeepSpeed supports."""
    return Capabilities(
        {"cpu": ("fp32", "bf16")},
        start_methods=("fork", "torchrun", "spawn"),
        shards_optimizer=True,
        # It updates one flat vector, in which zeros stand for gradients that are missing.
        unused_parameters=False,
        compiled_models=False,  # never tried against one process
        # The weights that it updates are in float32, whatever those of the model are.
        float64=False,
        reasons={
            "fp16": "each rank would see the overflows of its own part of the gradients only",
            "grad_compression": "its communication_data_type rounds the average, too",
        },
    )
