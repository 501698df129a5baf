"""The energy that runs used, in words.

Counters are those of whole machines, so that only a run that takes place alone has a figure of its own: what entrants
use that take turns cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from compare.numbers import number
from compare.report.runs import Run
from compare.report.words import ranks
from records.record import EnergyRecord


def describe_energy(completed: Sequence[Run]) -> str | None:
    """Says how much energy runs used that took place alone, or why that is not known; None where no run has read it.

    Args:
        completed: All runs. Those of a diagnosis take each step several times, and are left out.
    """
    readings = {id(run): [rank.energy for rank in run.record.ranks if rank.energy] for run in completed}
    alone = [run for run in completed if run.purpose != "diagnosis" and not (run.race and run.race.turns)]
    used = [said for run in alone if (said := _used(run, readings[id(run)]))]
    if used:
        return "; ".join(used)
    missing = {why for of_run in readings.values() for one in of_run if (why := _why_not(one))}
    if missing:
        return f"not known: {'; '.join(sorted(missing))}"
    return "known only of runs to the end, which --whole-runs adds" if any(readings.values()) else None


def _used(run: Run, readings: Sequence[EnergyRecord]) -> str:
    config = run.record.config
    parts = [
        f"{number(sum(known), 3)} J of {what}"
        for what, joules in {
            "processors": [one.processor_joules for one in readings],
            "GPUs": [one.gpu_joules for one in readings],
        }.items()
        if (known := [value for value in joules if value is not None]) and len(known) == len(joules)
    ]
    return f"{run.entrant}, {ranks(config.num_processes)}, {config.precision}: {', '.join(parts)}" if parts else ""


def _why_not(reading: EnergyRecord) -> str | None:
    """Returns why neither processors nor GPUs were counted; None if some were."""
    if reading.processor_joules is not None or reading.gpu_joules is not None:
        return None
    return reading.why_no_processor_joules
