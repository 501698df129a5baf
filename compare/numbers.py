"""Numbers as people read them: without exponents, and with no more digits than are significant."""

from __future__ import annotations

import math

from compare.results import Interval
from compare.steps import Breakdown

# From this share on, percents have no decimals.
_WHOLE = 0.0995
NOTHING = "–"  # noqa: RUF001 - an en dash, as printed tables have it


def number(value: float | None, digits: int = 4) -> str:
    """Formats a number with so many significant digits, and thousands separated; an integer keeps all its digits."""
    if value is None:
        return NOTHING
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits}g}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def significant(value: float) -> float:
    """Returns a measured number to six significant digits: more would only make files larger."""
    return float(f"{value:.6g}")


def rate(value: float) -> str:
    """Formats a rate, such as samples per second, with three significant digits or, if it is large, as an integer."""
    return f"{value:.0f}" if value >= 99.95 else number(value, 3)


def percent(share: float | None) -> str:
    """Formats a share in percent, without the percent sign, which is in the heading of the column."""
    return NOTHING if share is None else f"{100 * share:.1f}"


def difference(share: float | None) -> str:
    """Formats a relative difference in percent, always with + or -."""
    return NOTHING if share is None else f"{100 * share:+.1f}"


def points(share: float) -> str:
    """Formats a share in percent, without the percent sign, as a sentence has it: 31, but 1.3."""
    return f"{100 * share:.{0 if abs(share) >= _WHOLE else 1}f}"


def longer(value: Interval | None) -> str:
    """Formats by how much a time is longer, in percent, with its interval: +31 % [+29, +33]."""
    if value is None:
        return NOTHING
    if value.low is None or value.high is None:
        return f"{_signed(value.estimate)} %"
    return f"{_signed(value.estimate)} % [{_signed(value.low)}, {_signed(value.high)}]"


def _signed(share: float) -> str:
    text = points(share)
    return text.removeprefix("-") if float(text) == 0 else text if share < 0 else f"+{text}"


def score(value: float | None) -> str:
    """Formats accuracy and similar metrics."""
    return NOTHING if value is None else f"{value:.4f}"


def interval(value: Interval, scale: float = 1.0, digits: int = 4) -> str:
    """Formats an estimate with its interval, if it has one."""
    estimate = number(value.estimate * scale, digits)
    if value.low is None or value.high is None:
        return estimate
    return f"{estimate} ({number(value.low * scale, digits)} to {number(value.high * scale, digits)})"


def part_of_step(breakdown: Breakdown, part: str, digits: int = 4) -> str:
    """Formats a part of a step in milliseconds, or says how much noise may hide of it."""
    seconds = getattr(breakdown, part)
    if part in breakdown.unresolved:
        return f"noise, at most {number(1e3 * breakdown.unresolved[part], 2)}"
    return NOTHING if seconds is None else number(1e3 * seconds, digits)


def format_size(num_bytes: float) -> str:
    """Formats a size in the largest binary unit that leaves a number of at least 1, with three significant digits."""
    units = ("B", "KiB", "MiB", "GiB")
    power = min(max(int(math.log2(num_bytes) // 10), 0), len(units) - 1) if num_bytes else 0
    text = number(num_bytes / 1024**power, 3 if power else 4)
    return f"{text.removesuffix('.000').removesuffix('.00').removesuffix('.0')} {units[power]}"


def format_seconds(seconds: float) -> str:
    """Formats a duration with three significant digits, in s, ms or us."""
    units = (("s", 1.0), ("ms", 1e3), ("us", 1e6))
    # What would be written as 1000 of a unit is written as 1 of the next.
    unit, scale = next((unit, scale) for unit, scale in units if seconds * scale >= 0.9995 or unit == "us")
    text = f"{seconds * scale:.3g}"
    return f"{number(seconds * scale, 3) if 'e' in text else text} {unit}"


def one_line(text: str) -> str:
    """Puts a text on one line."""
    return " ".join(text.split())


def joined(parts: list[str]) -> str:
    """Joins words as in a sentence: a, b and c."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)
