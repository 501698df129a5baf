"""The options of Horovod; importing them imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from backends.capabilities import BackendSettings


class HorovodSettings(BackendSettings):
    """Options of Horovod's adapter."""

    of_collectives: ClassVar[frozenset[str]] = frozenset({"wait"})
    wait: Literal["spin", "sleep"] = Field(
        "spin",
        description="what a rank does until a reduction is done: spin, as Horovod is released, which takes a core, or "
        "sleep, and look every 0.1 ms",
    )

    @property
    @override
    def keeps_core_busy(self) -> bool:
        return self.wait == "spin"
