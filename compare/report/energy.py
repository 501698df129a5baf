"""The energy that runs used, in words.

Counters are those of whole machines, so that only a run that takes place alone has a figure of its own: what entrants
use that take turns cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from compare.numbers import number
from compare.report.runs import Run
from compare.report.words import ranks


def describe_energy(completed: Sequence[Run]) -> str | None:
    """Says how much energy runs used that took place alone, or why that is not known; None where no run has read it.

    Args:
        completed: All runs. Those of a diagnosis take each step several times, and are left out.
    """
    readings = [rank.energy for run in completed for rank in run.record.ranks if rank.energy is not None]
    alone = [run for run in completed if run.purpose != "diagnosis" and not (run.race and run.race.turns)]
    used = [_used(run) for run in alone if run.record.joules]
    if used:
        return "; ".join(used)
    if any(run.record.joules for run in completed):
        return "known only of runs to the end, which --whole-runs adds"
    missing = sorted({one.why_no_processor_joules for one in readings if one.why_no_processor_joules})
    return f"not known: {'; '.join(missing)}" if missing else None


def _used(run: Run) -> str:
    config = run.record.config
    joules = ", ".join(f"{number(joules, 3)} J of {name}" for name, joules in run.record.joules.items())
    return f"{run.entrant}, {ranks(config.num_processes)}, {config.precision}: {joules}"
