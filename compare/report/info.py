"""What a report is told besides runs and measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class NothingToReport(ValueError):
    """There is no run to report."""


class UnknownOpponent(ValueError):
    """The entrant that all others are to be compared with was not ranked; the text names those that were."""


@dataclass(frozen=True)
class ReportInfo:
    """What a report is told besides runs and measurements.

    Attributes:
        title: The title of the report.
        problems: What could not be read or run, one line each.
        commands: The commands that reproduce the parts of the report, by the name of the part.
        facts: How the race was run.
        target_accuracy: The report gives the time until this accuracy.
        opponent: The entrant that all others are compared with; None for the fastest.
        conditions: Precisions and accumulation steps, in the order in which the user named them.
    """

    title: str
    problems: Sequence[str] = ()
    commands: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    target_accuracy: float = 0.9
    opponent: str | None = None
    conditions: Sequence[tuple[str, int]] = ()
