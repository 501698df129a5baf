"""The options of Horovod; importing them imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from backends.capabilities import BackendSettings


class HorovodSettings(BackendSettings):
    """Options of Horovod's adapter."""

    wait: Literal["spin", "sleep"] = Field(
        "spin",
        description="what a rank does until a reduction is done: spin, as Horovod is released, which takes a core, or "
        "sleep, and look every 0.1 ms",
    )
