"""Options that are quantities, written as people do: 90s, 10min, 5ms; 3%; 10gbit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_PARTS_OF_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


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


def _short_time(value: Any) -> Any:
    return _read(value, _PARTS_OF_SECONDS, "is not a time; write it as 200us, 5ms or 1s")


def _bandwidth(value: Any) -> Any:
    return _read(value, _BITS, "is not a bandwidth; write it as 100mbit or 10gbit")


def _in_range(bits_per_second: float) -> float:
    if not 1e6 <= bits_per_second <= 1e12:
        raise ValueError(f"is too {'little' if bits_per_second < 1e6 else 'much'}; give 1mbit to 1000gbit")
    return bits_per_second


def format_bandwidth(bits_per_second: float) -> str:
    """Writes a bandwidth as the options read it: 100mbit, 2.5gbit."""
    unit = next((unit for unit in ("gbit", "mbit") if bits_per_second >= _BITS[unit]), "kbit")
    return f"{bits_per_second / _BITS[unit]:g}{unit}"


def format_duration(seconds: float) -> str:
    """Writes a duration as the options read it, in whole units: 90s, 10min."""
    return f"{math.ceil(seconds / 60)}min" if seconds > 90 else f"{math.ceil(seconds)}s"


Duration = Annotated[float, BeforeValidator(_duration), Field(gt=0, le=30 * 24 * 3600)]
"""Seconds."""

Share = Annotated[float, BeforeValidator(_share), Field(gt=0, le=1)]
"""A part of one."""

Seconds = Annotated[float, BeforeValidator(_short_time), Field(gt=0, le=60)]
"""Seconds, of what takes much less than one."""

Bandwidth = Annotated[float, BeforeValidator(_bandwidth), AfterValidator(_in_range)]
"""Bits per second."""
