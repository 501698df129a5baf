"""The report of a race, in the directory of the race."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from rich.console import Console

from compare.race.directory import RaceDirectory
from compare.race.plan import RacePlan
from compare.report.info import NothingToReport, ReportInfo
from compare.report.pages import render, write_pages
from compare.report.reading import read_inputs
from launch.arguments import command_line
from records.names import RECORD_NAME


def is_decided(directory: RaceDirectory, within: float) -> bool:
    """Tells whether all differences between entrants of a group are known well enough.

    Args:
        directory: The directory of the race.
        within: The largest half of an interval of a relative difference.
    """
    from compare.report.analysis import analyse

    runs = read_inputs(directory.records()).runs
    try:
        groups = analyse(runs, [], ReportInfo(title="")).groups
    except NothingToReport:
        return False
    halves = [
        (interval.high - interval.low) / 2
        for group in groups
        for comparison in group.comparisons
        if (interval := comparison.slowdown) is not None and interval.high is not None and interval.low is not None
    ]
    return len(halves) == sum(len(group.comparisons) for group in groups) and all(half <= within for half in halves)


def write_report(directory: RaceDirectory, plan: RacePlan, terminal: Console) -> int:
    """Writes the report of a race into its directory; returns the exit code."""
    from compare.report.analysis import analyse

    inputs = read_inputs([*directory.records(), *directory.measured_collectives()])
    runs = [dataclasses.replace(run, name=_name(Path(run.name))) for run in inputs.runs]
    options = plan.options
    info = ReportInfo(
        title="Race of data-parallel backends",
        problems=[*plan.left_out, *directory.failures(without_record=True)],
        commands=_commands(plan),
        facts={
            "starts of each entrant": plan.schedule.repeats,
            "steps of each start": plan.schedule.timed_steps,
            "order": f"drawn anew for each round of turns, --order-seed {options.order_seed}",
        },
        target_accuracy=options.target_accuracy,
        conditions=list(dict.fromkeys((one.precision, one.accumulation) for one in plan.entrants)),
    )
    try:
        results = analyse(runs, inputs.collectives, info)
    except NothingToReport as error:
        for line in directory.failures():
            print(f"lockstep: {line}", file=sys.stderr)
        print(f"lockstep: {error}; logs are in {directory.failed}", file=sys.stderr)
        return 1
    write_pages(render(results), results, directory.path, terminal)
    return 0


def _name(path: Path) -> str:
    return path.stem if path.name != RECORD_NAME else path.parent.name


def _commands(plan: RacePlan) -> dict[str, str]:
    """Returns the command of the race, and one command for each purpose and backend."""
    commands = {"the race, and with it every figure": plan.command}
    for run in plan.runs():
        what = f"a {run.purpose} run of {run.entrant.backend}"
        commands.setdefault(what, command_line(plan.arguments(run), without="--output-dir"))
    return commands
