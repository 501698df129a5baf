"""What the machine of a race can do, measured before it."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from compare.race import core_clock, matmul_peak


class MachineLimits(BaseModel):
    """The limits of a machine.

    Attributes:
        matmul_flops_per_second: What square products reach on all cores, by precision; None if that failed.
        core_slowdowns: How many times as long what needs no memory takes when so many cores compute; None if not known.
    """

    model_config = ConfigDict(extra="forbid")

    matmul_flops_per_second: dict[str, float | None] = {}
    core_slowdowns: dict[int, float | None] = {}


def measure_limits(precisions: Iterable[str], worlds: Iterable[int]) -> MachineLimits:
    """Measures them for the precisions and the numbers of ranks of a race."""
    return MachineLimits(
        matmul_flops_per_second={precision: matmul_peak.measure_apart("cpu", precision) for precision in precisions},
        core_slowdowns={number: core_clock.measure_apart(number) for number in worlds},
    )
