"""The report of a race, in the directory of the race."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from compare.race.directory import RaceDirectory
from compare.race.plan import RacePlan
from compare.report.baseline import Baseline
from compare.report.gate_table import show_gate
from compare.report.info import NothingToReport, ReportInfo
from compare.report.pages import render, write_pages
from compare.report.reading import read_inputs
from compare.report.runs import Run
from compare.results import Interval, Results
from launch.arguments import command_line
from launch.errors import UsageError
from records.names import RECORD_NAME
from records.processor import SLOW_BF16

# The exit code of a race that does not pass beside its baseline.
FAILED_GATE = 3


def is_decided(directory: RaceDirectory, within: float, *, without: Iterable[Path] = ()) -> bool:
    """Tells whether all differences that the report will show are known well enough.

    Args:
        directory: The directory of the race.
        within: The largest half of an interval of a relative difference.
        without: Records of entrants of which no more will be known.
    """
    from compare.report.analysis import analyse

    runs = read_inputs(sorted(set(directory.records()) - set(without))).runs
    try:
        results = analyse(runs, [], ReportInfo(title=""))
    except NothingToReport:
        return False
    differences = [comparison.slowdown for group in results.groups for comparison in group.comparisons]
    for standing in results.standings:
        differences += [one.longer for one in (*standing.placings[1:], *standing.approximations, *standing.limits)]
    differences += [cost.time for cost in results.adapter_costs]
    differences += [row.longer for peers in results.peers for row in peers.rows if row.name != peers.opponent]
    differences += [pair.slowdown for peers in results.peers for pair in peers.others]
    return all(_is_known(difference, within) for difference in differences)


def _is_known(difference: Interval | None, within: float) -> bool:
    if difference is None or difference.low is None or difference.high is None:
        return False
    return (difference.high - difference.low) / 2 <= within


def write_report(directory: RaceDirectory, plan: RacePlan, baseline: Baseline | None, terminal: Console) -> int:
    """Writes the report of a race into its directory.

    Args:
        directory: The directory.
        plan: The plan of the race.
        baseline: What the race is compared with, if with anything.
        terminal: Shows the verdict.

    Returns:
        The exit code.

    Raises:
        UsageError: The report has been written, but the race cannot be compared with the baseline.
    """
    from compare.report.analysis import analyse

    inputs = read_inputs(files_of(directory))
    runs = [dataclasses.replace(run, name=name_of(Path(run.name))) for run in inputs.runs]
    try:
        results = analyse(runs, inputs.collectives, info_of(directory, plan))
    except NothingToReport as error:
        for line in directory.failures():
            print(f"lockstep: {line}", file=sys.stderr)
        print(f"lockstep: {error}; logs are in {directory.failed}", file=sys.stderr)
        return 1
    refused = None
    if baseline is not None:
        from compare.report.gate import judge

        try:
            results = judge(results, baseline)
        except UsageError as error:
            refused = error
    code = finish(results, runs, directory.path, terminal)
    if refused is not None:
        raise refused
    return code


def finish(results: Results, runs: Sequence[Run], output_dir: Path, terminal: Console) -> int:
    """Writes a report, shows what it says, and returns the exit code.

    Args:
        results: What was found.
        runs: What it was found from, as far as it is known.
        output_dir: Receives the report.
        terminal: Shows the verdict.
    """
    write_pages(render(results, runs), results, output_dir, terminal)
    if results.gate is None:
        return 0
    show_gate(results.gate, terminal)
    return 0 if results.gate.passed else FAILED_GATE


def files_of(directory: RaceDirectory) -> list[Path]:
    """Returns the files of a race that its report is made of."""
    return [*directory.records(), *directory.measured_collectives()]


def info_of(directory: RaceDirectory, plan: RacePlan) -> ReportInfo:
    """Returns what a race tells its report besides its runs."""
    options = plan.options
    return ReportInfo(
        title="Race of data-parallel backends",
        problems=[*plan.left_out, *directory.failures(without_record=True)],
        commands=_commands(plan),
        facts={
            "steps of each start": plan.schedule.timed_steps,
            "order": f"drawn anew for each round of turns, --order-seed {options.order_seed}",
            **({"bf16": SLOW_BF16} if plan.slow_bf16 else {}),
        },
        target_accuracy=options.target_accuracy,
        conditions=list(dict.fromkeys((one.precision, one.accumulation) for one in plan.entrants)),
    )


def name_of(path: Path) -> str:
    """Returns what a report calls the run of a race with this record."""
    return path.stem if path.name != RECORD_NAME else path.parent.name


def _commands(plan: RacePlan) -> dict[str, str]:
    """Returns the command of the race, and one command for each purpose and entrant, whatever its conditions."""
    commands = {"the race, and with it every figure": plan.command}
    for run in plan.runs():
        if run.entrant.role in ("peer", "bare"):  # which have no command of their own
            continue
        what = f"a {run.purpose} run of {run.entrant.name}"
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in run.entrant.variables)
        commands.setdefault(what, variables + command_line(plan.arguments(run), without="--output-dir"))
    return commands
