"""``launch/run.sh compare``: a race of backends, and its report."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from compare.race.baseline import check_baseline, like_baseline
from compare.race.collectives import measure_collectives, seconds_of_collectives
from compare.race.directory import RaceDirectory
from compare.race.entrants import core_slowdowns, make_plan, read_run_options, schedule_race
from compare.race.heat import require_place_for_sockets
from compare.race.options import RaceOptions
from compare.race.plan import Entrant, RacePlan
from compare.race.report import write_report
from compare.race.run import run_race
from compare.race.tuning import can_be_tuned, tuned_entrants
from compare.report.baseline import Baseline, GateOptions, read_baseline
from compare.report.pages import require_packages
from compare.results import MIN_PAIRS
from launch.arguments import named_path
from launch.display import console
from launch.errors import UsageError, one_line, refused_path, tell
from launch.options import option_parser, validated
from launch.quantities import format_bandwidth, format_duration
from launch.signals import Interrupted, signals_raised
from records.config import RunConfig


def run(arguments: list[str]) -> int:
    """Runs a race from the command line; returns the exit code."""
    began = time.monotonic()
    parser = option_parser("compare", {"race": RaceOptions, "gate": GateOptions})
    parser.description = "All other options are passed on to every run (launch/run.sh ddp --help lists them)."
    parser.add_argument(
        "--output-dir",
        type=named_path,
        help="directory of the race, resumed if it exists (default: runs/race-TIME)",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the plan and an estimate of its duration")
    namespace, rest = parser.parse_known_args(arguments)
    require_packages()
    asked = {"output_dir": None, "dry_run": False, "config": None, **vars(namespace)}
    of_runs = read_run_options(rest, asked["config"])
    options: RaceOptions = validated(RaceOptions, asked)
    baseline = read_baseline(validated(GateOptions, asked))
    if baseline is not None:
        options = like_baseline(options, baseline)
    _check_effects(options)
    terminal = console()
    output_dir: Path = asked["output_dir"] or Path("runs") / f"race-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        plan, configs = make_plan(options, of_runs)
        if baseline is not None:
            check_baseline(baseline, options, configs, terminal)
        directory = RaceDirectory(output_dir)
        begun = directory.begun(plan)
        require_place_for_sockets()
        if begun is None:
            terminal.print("taking a few steps to see how long the race will take")
            schedule_race(plan, configs)
            if {"budget", "timed_steps"} <= set(vars(namespace)):  # beside a baseline, its steps count
                _check_budget(plan)
        if asked["dry_run"]:
            _show_plan(begun or plan, terminal, directory if begun else None)
            return 0
        return _race_to_its_report(plan, configs, directory, baseline, terminal, began)
    except OSError as error:  # any path among the options may be one that the system refuses
        raise refused_path(error) from error


def _race_to_its_report(
    plan: RacePlan,
    configs: dict[Entrant, RunConfig],
    directory: RaceDirectory,
    baseline: Baseline | None,
    terminal: Console,
    began: float,
) -> int:
    """Races and writes the report; a race that cannot come to its end says how it goes on.

    Args:
        plan: What was asked for.
        configs: The configuration of each entrant.
        directory: The directory of the race.
        baseline: What the race is compared with, if with anything.
        terminal: Shows how far it is.
        began: When the command began, on the clock of time.monotonic.

    Returns:
        The exit code.

    Raises:
        OSError: The race could not begin.
    """
    with contextlib.ExitStack() as stack:
        try:
            with signals_raised():
                plan_in_force = _race(plan, configs, directory, terminal, stack, began)
            return write_report(directory, plan_in_force, baseline, terminal)
        except Interrupted as interruption:
            _tell_how_it_goes_on("interrupted", plan, directory)
            return 128 + interruption.signal_number
        except OSError as error:  # as on a full disk
            if not directory.is_open:
                raise
            why = error.strerror or str(error)
            _tell_how_it_goes_on(f"{error.filename}: {why}" if error.filename else why, plan, directory)
            return 1


def _tell_how_it_goes_on(why: str, plan: RacePlan, directory: RaceDirectory) -> None:
    """Removes what a run has left that did not come to its end, and says what is kept."""
    if directory.is_open:  # else another command may race in it
        directory.clear()
    again = f"{plan.command} --output-dir {shlex.quote(str(directory.path))}"
    kept = "finished runs are kept, resume" if directory.holds_race else "nothing was kept, begin again"
    tell(f"{one_line(why)}; {kept} with: {again}")


def _race(
    plan: RacePlan,
    configs: dict[Entrant, RunConfig],
    directory: RaceDirectory,
    terminal: Console,
    stack: contextlib.ExitStack,
    began: float,
) -> RacePlan:
    """Makes all runs of a race, or those that are left of one, and measures collectives.

    Args:
        plan: What was asked for.
        configs: The configuration of each entrant.
        directory: The directory of the race.
        terminal: Shows how far it is.
        stack: Keeps the directory open.
        began: When the command began, on the clock of time.monotonic.

    Returns:
        The plan in force: that of the race which has begun in the directory.
    """
    if not directory.holds_race:
        plan.core_slowdowns = core_slowdowns(configs)
        if plan.options.tune and plan.costs is not None:
            plan.tuned = tuned_entrants(plan, plan.costs, terminal.print)
    plan = stack.enter_context(directory.opened(plan))
    _announce(plan, directory, terminal)
    options = plan.options
    # What the user has settled is not cut short.
    is_settled = options.repeats is not None or options.timed_steps is not None
    spent = time.monotonic() - began + seconds_of_collectives(plan.entrants, options)
    run_race(plan, directory, terminal, seconds=math.inf if is_settled else options.budget - spent)
    devices = {who.backend: config.device for who, config in configs.items() if who.role == "backend"}
    measure_collectives(plan, devices, directory, terminal)
    return plan


def _check_effects(options: RaceOptions) -> None:
    """Refuses options that cannot work, or have no effect, beside others.

    Raises:
        UsageError: There is one.
    """
    _check_until(options)
    if options.bare and options.engine is not None:  # plans of older races, whose reports can be made, may have both
        raise UsageError(f"--bare: cannot race on --engine {options.engine}; leave one of the two out")
    if options.peers is None and not options.peer_accuracy:
        raise UsageError("--no-peer-accuracy: has no effect without --peers; name some, or leave it out")
    if options.bandwidth is not None and max(options.num_processes) == 1:
        raise UsageError(
            f"--bandwidth {format_bandwidth(options.bandwidth)}: has no effect on a single rank, which sends nothing; "
            "ask for more with --num-processes, or leave it out"
        )


def _check_until(options: RaceOptions) -> None:
    if options.until is None:
        return
    until = f"--until {100 * options.until:g}%"
    if options.timed_steps is not None and options.repeats is None:
        raise UsageError(
            f"{until}: has no effect beside --timed-steps {options.timed_steps}, which asks for no more than three "
            "starts; give --repeats, too, or leave one of the two out"
        )
    if options.repeats is not None and options.repeats <= MIN_PAIRS:
        raise UsageError(
            f"{until}: has no effect beside --repeats {options.repeats}, since {MIN_PAIRS} starts take place in any "
            "case; ask for more, or leave one of the two out"
        )


def _check_budget(plan: RacePlan) -> None:
    schedule, budget = plan.schedule, plan.options.budget
    if schedule.seconds > budget:
        raise UsageError(
            f"--budget {format_duration(budget)}: {schedule.repeats} starts of {schedule.timed_steps} timed steps need "
            f"about {format_duration(schedule.seconds)}; give more, or ask for fewer steps"
        )


def _announce(plan: RacePlan, directory: RaceDirectory, terminal: Console) -> None:
    terminal.print(f"{_describe(plan)}; results go to {directory.path}")
    for line in plan.remarks:
        terminal.print(line)


def _describe(plan: RacePlan) -> str:
    schedule = plan.schedule
    number = len(plan.entrants) + len(plan.tuned)
    is_planned = schedule.most_repeats > schedule.repeats
    times = f"{schedule.repeats} times"
    if is_planned:
        times = f"about {times}, as time allows,"
        if (until := plan.options.until) is not None:
            times += f" or until all is known to {100 * until:g} %,"
    seconds = max(plan.options.budget, schedule.seconds) if is_planned else schedule.seconds
    return (
        f"race of {number} entrants, each started {times} for {schedule.timed_steps} steps: "
        f"about {format_duration(seconds)}"
    )


def _show_plan(plan: RacePlan, terminal: Console, begun: RaceDirectory | None = None) -> None:
    """Shows the plan of a race.

    Args:
        plan: The plan.
        terminal: Where to show it.
        begun: Where the race has begun; None if it has not.
    """
    expected = [run for run in plan.runs() if run.purpose != "timed" or run.block <= plan.schedule.repeats]
    entrants = dict.fromkeys(run.entrant for run in expected)
    named = [(one.num_processes, one.precision, one.accumulation) for one in plan.entrants]  # in the user's order
    order = [*dict.fromkeys([*named, *((one.num_processes, one.precision, one.accumulation) for one in entrants)])]

    def place(who: Entrant) -> tuple[int, str]:
        return order.index((who.num_processes, who.precision, who.accumulation)), who.label

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("entrant", "ranks", "precision", "global batch = ranks x micro x accumulation", "runs"):
        table.add_column(heading)
    for who in sorted(entrants, key=place):
        times = Counter(run.purpose for run in expected if run.entrant == who)
        batch = f"{who.global_batch_size} = {who.num_processes} x {who.micro_batch_size} x {who.accumulation}"
        runs = ", ".join(purpose if number == 1 else f"{number} {purpose}" for purpose, number in sorted(times.items()))
        table.add_row(who.name, str(who.num_processes), who.precision, batch, runs)
    terminal.print(table)
    for line in plan.remarks:
        terminal.print(line)
    if begun is not None:
        number = sum(map(begun.is_finished, plan.runs()))
        terminal.print(f"{_describe(plan)}; it has begun in {begun.path}, where {number} run(s) are finished")
        return
    if plan.options.tune:
        terminal.print(f"--tune adds up to {len(can_be_tuned(plan.entrants))} entrant(s), which the estimate includes")
    terminal.print(f"{_describe(plan)}, estimated from a few steps taken now")
