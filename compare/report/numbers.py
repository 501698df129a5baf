"""Numbers as people read them: no exponents, no more digits than mean something."""

from __future__ import annotations

import math

from compare.report.results import Interval

NOTHING = "–"  # noqa: RUF001 - an en dash, as printed tables have it


def number(value: float | None, digits: int = 4) -> str:
    """Formats with so many significant digits, thousands separated; counts in full."""
    if value is None:
        return NOTHING
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits}g}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def percent(share: float | None) -> str:
    """Formats a share in percent, without the sign, which stands in the heading."""
    return NOTHING if share is None else f"{100 * share:.1f}"


def difference(share: float | None) -> str:
    """Formats a relative difference in percent, its direction always said."""
    return NOTHING if share is None else f"{100 * share:+.1f}"


def score(value: float | None) -> str:
    """Formats accuracy and its like."""
    return NOTHING if value is None else f"{value:.4f}"


def interval(value: Interval, scale: float = 1.0) -> str:
    """Formats an estimate, and its interval where it has one."""
    estimate = number(value.estimate * scale)
    if value.low is None or value.high is None:
        return estimate
    return f"{estimate} ({number(value.low * scale)} to {number(value.high * scale)})"


def size(num_bytes: float) -> str:
    """Formats a size in the largest binary unit that leaves a number of at least 1."""
    units = ("B", "KiB", "MiB", "GiB")
    power = min(max(int(math.log2(num_bytes) // 10), 0), len(units) - 1) if num_bytes else 0
    return f"{number(num_bytes / 1024**power, 3).removesuffix('.00').removesuffix('.0')} {units[power]}"


def joined(parts: list[str]) -> str:
    """Joins as a sentence does: a, b and c."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)
