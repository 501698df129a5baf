"""Options that are a duration or a share, written as people do: 90s, 10min, 2h; 3%."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def _read(value: Any, units: Mapping[str, float], complaint: str) -> Any:
    """Turns a number with a unit into a number; what is no text is left for pydantic to judge."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(units)})\s*", value)
    if found is None:
        raise ValueError(complaint)
    return float(found[1]) * units[found[2]]


def _duration(value: Any) -> Any:
    return _read(value, _SECONDS, "is not a duration; write it as 90s, 10min or 2h")


def _share(value: Any) -> Any:
    return _read(value, {"%": 0.01}, "is not a percentage; write it as 3% or 0.5%")


def format_duration(seconds: float) -> str:
    """Writes a duration as the options read it, in whole units: 90s, 10min."""
    return f"{math.ceil(seconds / 60)}min" if seconds > 90 else f"{math.ceil(seconds)}s"


Duration = Annotated[float, BeforeValidator(_duration), Field(gt=0, le=30 * 24 * 3600)]
"""Seconds."""

Share = Annotated[float, BeforeValidator(_share), Field(gt=0, le=1)]
"""A part of one."""
