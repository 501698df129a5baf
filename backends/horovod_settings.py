"""The options of Horovod; importing them imports no torch."""

from __future__ import annotations

import os
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from backends.capabilities import BackendSettings, UnsupportedError


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

    @override
    def check_machine(self) -> None:
        fusion_threshold()
        cycle_time()


def fusion_threshold() -> int:
    """Returns how many bytes Horovod reduces at once.

    Raises:
        UnsupportedError: The variable that says so is no whole number.
    """
    return int(_number_in("HOROVOD_FUSION_THRESHOLD", 128 * 1024 * 1024, whole=True))


def cycle_time() -> float:
    """Returns after how many milliseconds Horovod looks again for something to reduce.

    Raises:
        UnsupportedError: The variable that says so is no number.
    """
    return _number_in("HOROVOD_CYCLE_TIME", 1.0)


def _number_in(variable: str, default: float, *, whole: bool = False) -> float:
    """Returns the number in a variable that Horovod reads. It has no function that returns it, and these defaults.

    Raises:
        UnsupportedError: It is no number. Horovod would take what comes before the first other character.
    """
    text = os.environ.get(variable)
    try:
        return default if text is None else int(text) if whole else float(text)
    except ValueError as error:
        kind = "a whole number" if whole else "a number"
        raise UnsupportedError(f"{variable}={text}: is not {kind}; correct it, or unset it") from error
