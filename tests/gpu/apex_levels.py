"""What `launch/run.sh contract apex` does not reach by itself: the other levels and ways of reducing."""

from __future__ import annotations

from typing import Any, ClassVar

from backends.apex import ApexBackend
from tests.apex_levels import ChosenSettings


class ApexO2(ChosenSettings, ApexBackend):
    """O2 for fp16: a model in half precision, and master weights."""

    chosen: ClassVar[dict[str, Any]] = {"opt_level": "O2"}


class ApexO1Delayed(ChosenSettings, ApexBackend):
    """O1 for fp16, with all reductions at the end of the backward pass."""

    chosen: ClassVar[dict[str, Any]] = {"delay_allreduce": True}
