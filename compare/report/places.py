"""Where runs took place, how idle the machine was, and which runs cannot be compared because of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median

from compare.machine_facts import Idleness, Place
from compare.report.machines import several_machines
from compare.report.runs import Run
from compare.report.words import machine_of, software_of
from records.record import Environment


def places_of(completed: Sequence[Run]) -> list[Place]:
    """Returns each machine with its software, and how many runs took place there."""
    several = several_machines(completed)
    places: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in completed:
        places[_label(run), software_of(run.record)].append(run)
    return [
        Place(
            machine=label if several else machine_of(runs[0].record),
            software=software,
            hardware=runs[0].machine,
            versions=versions_of(runs[0].record.environment),
            num_runs=len(runs),
            idleness=_idleness(runs),
        )
        for (label, software), runs in places.items()
    ]


def versions_of(environment: Environment) -> dict[str, str]:
    """Returns the versions of all software that a step depends on, but for Lockstep's own."""
    known = {"CUDA": environment.cuda, "NCCL": environment.nccl, "kernel": environment.platform}
    return {
        "Python": environment.python,
        **environment.packages,
        **{name: version for name, version in known.items() if version is not None},
    }


def idleness_of(completed: Sequence[Run]) -> Idleness | None:
    """Returns what other programs took while entrants were timed; None where no race has watched the machine."""
    shares = []
    for race in (run.race for run in completed if run.race and run.purpose == "timed"):
        of_turns = [turn.foreign_share for turn in race.turns if turn.round > 0] or [race.foreign_share]
        shares.append(max(0.0, fmean(of_turns)))  # a single turn is too short for the kernel's clocks
    return Idleness(mean=fmean(shares), largest=max(shares)) if shares else None


def _label(run: Run) -> str:
    return run.machine.label if run.machine is not None else ""


def _idleness(runs: Sequence[Run]) -> str | None:
    races = [run.race for run in runs if run.race]
    if not races:
        return None
    before, during = ([race.busy_share for race in races], [race.foreign_share for race in races])
    text = f"before runs, {median(before):.0%} of the cores were busy (median), at most {max(before):.0%}"
    text += f"; during runs, other programs took {median(during):.0%} (median), at most {max(during):.0%}"
    num_gpu = sum(race.gpu_processes > 0 for race in races)
    return text + (f"; before {num_gpu} runs, other programs used a GPU" if num_gpu else "")


def mixtures_of(completed: Sequence[Run]) -> list[str]:
    """Names the differences that keep runs apart, where a reader may expect them to be compared."""
    records = [run.record for run in completed]
    kinds = {
        "tasks": {record.config.task for record in records},
        "seeds": {str(record.config.seed) for record in records},
        "data sets": {str(record.task.get("data")) for record in records if record.task},
        "machines": {_label(run) for run in completed},
    }
    return [
        f"the runs have {len(values)} different {what} ({'; '.join(sorted(values))}); such runs are never compared"
        for what, values in kinds.items()
        if len(values) > 1
    ]
