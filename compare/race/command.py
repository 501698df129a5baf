"""``lockstep compare``: backends race each other, and a report says what may be said."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from backends.interface import UnsupportedError
from backends.registry import BACKENDS, find_backend
from compare.race.plan import Entrant, PlannedRun, RaceOptions
from compare.race.run import (
    RaceDirectory,
    RacePlan,
    format_duration,
    run_command,
    run_race,
)
from launch.arguments import named_path
from launch.display import console
from launch.errors import UsageError, refused_path
from launch.options import option_parser, read_option_file, read_options, validated
from launch.resolve import resolve
from launch.signals import Interrupted, signals_raised
from records.config import RunConfig
from records.environment import num_cpus
from records.throughput import NUM_WARMUP_STEPS

# Options of a run that a race decides itself, with what to say instead.
_ITS_OWN = "give it to the race on the command line"
_DECIDED = {
    **dict.fromkeys(("num_processes", "precision", "global_batch_size", "output_dir"), _ITS_OWN),
    "micro_batch_size": "use --accumulation",
    "max_steps": "use --timed-steps",
    "overwrite": "a race goes on where it was interrupted",
    "diagnose": "a race does it by itself",
    **dict.fromkeys(("save_every", "keep", "on_save_error", "metric_for_best_model"), "a race saves no checkpoints"),
    **dict.fromkeys(("resume", "max_restarts"), "a race times whole runs"),
    "early_stopping_patience": "a race times equal numbers of steps",
    "tracker": "what runs of a race write is not kept",
    "start_method": "each backend is started by its own launcher",
    **dict.fromkeys(("num_nodes", "node_rank", "master_addr", "master_port"), "a race is run on one node"),
}


def run(arguments: list[str]) -> int:
    """Runs a race from the command line; returns the exit code."""
    parser = option_parser("compare", {"race": RaceOptions})
    parser.description = "All other options are passed on to every run (launch/run.sh ddp --help lists them)."
    parser.add_argument(
        "--output-dir",
        type=named_path,
        help="of the race (default: runs/race-TIME); an old one goes on",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the plan and about how long it takes")
    namespace, run_options = parser.parse_known_args(arguments)
    # All of it now: what is missing must not come out after an hour.
    from compare.report.command import require_plotting, write_report

    require_plotting()
    asked = {"output_dir": None, "dry_run": False, **vars(namespace)}
    if "config" in asked:
        run_options = [f"--config={asked['config']}", *run_options]
    names = _refuse_decided(run_options, read_option_file(asked["config"]) if "config" in asked else {})
    options: RaceOptions = validated(RaceOptions, asked)
    terminal = console()
    path = (asked["output_dir"] or Path("runs") / f"race-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()
    try:
        plan, configs = make_plan(options, run_options, names)
        if asked["dry_run"]:
            _show_plan(plan, configs, terminal)
            return 0
        directory = RaceDirectory(path)
        with directory.opened(plan) as plan_in_force:
            _announce(plan_in_force, path, terminal)
            try:
                with signals_raised():
                    run_race(plan_in_force, directory, terminal)
                    _measure_collectives(plan_in_force, directory, terminal)
            except Interrupted as interruption:
                directory.clear()
                again = plan.command if asked["output_dir"] else f"{plan.command} --output-dir {shlex.quote(str(path))}"
                print(f"lockstep: interrupted; finished runs are kept, go on with: {again}", file=sys.stderr)
                return 128 + interruption.signal_number
            return write_report(directory, plan_in_force, terminal)
    except OSError as error:  # any path among the options may be one that the system refuses
        raise refused_path(error) from error


def make_plan(
    options: RaceOptions, run_options: list[str], names: set[str]
) -> tuple[RacePlan, dict[Entrant, RunConfig]]:
    """Settles who takes part, checking the command line of every run.

    Args:
        options: What was asked of the race.
        run_options: What is passed on to every run.
        names: The options that these, and a configuration file, set.

    Raises:
        UsageError, UnsupportedError, TaskInputError: Something asked for cannot be had.
    """
    backends = options.backends or [name for name, row in BACKENDS.items() if row.unavailable_reason() is None]
    for name in backends:
        reason = find_backend(name).unavailable_reason()
        if reason is not None:
            raise UnsupportedError(f"--backends {name}: cannot run here: {reason}")
    if "threads_per_rank" not in names:
        # A rank is the same share of the machine in every world, or scaling would compare unlike ranks.
        run_options = [*run_options, f"--threads-per-rank={max(1, num_cpus() // max(options.num_processes))}"]
    if "logging_steps" not in names:
        # Where the loss is read a GPU is waited for: so at both ends of what is timed.
        run_options = [*run_options, f"--logging-steps={NUM_WARMUP_STEPS}"]
    plan = RacePlan(
        options=options,
        entrants=[],
        run_options=run_options,
        diagnosis_options=[],
        left_out=[],
        command=shlex.join(["launch/run.sh", *sys.argv[1:]]),
        race=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
    )
    configs: dict[Entrant, RunConfig] = {}
    refused: list[ValueError] = []
    for entrant in _candidates(backends, options):
        try:
            configs[entrant] = _resolve(plan, PlannedRun(entrant=entrant, purpose="timed", block=1, position=0))
        except (UnsupportedError, UsageError) as error:
            # Of those who were not asked for by name, who cannot take part does not.
            if isinstance(error, UsageError) and options.backends:
                raise
            refused.append(error)
            plan.left_out.append(f"{entrant.label}: left out, {' '.join(str(error).split())}")
    if not configs:
        raise refused[0]
    plan.entrants = list(configs)
    plan.diagnosis_options = ["--no-torch-compile"]
    if any("dropout" in config.task_settings for config in configs.values()):
        plan.diagnosis_options += ["--dropout=0"]  # its masks depend on how a batch is split over ranks
    for run in plan.runs():
        if run.purpose == "diagnosis":
            _resolve(plan, run)
    return plan, configs


def _candidates(names: Sequence[str], options: RaceOptions) -> list[Entrant]:
    found: dict[Entrant, None] = {}
    for precision in options.precision:
        for accumulation in options.accumulation:
            for number in options.num_processes:
                sizes = [options.global_batch_size]
                if options.weak_scaling:
                    sizes += [options.global_batch_size * number // min(options.num_processes)]
                for size in sizes:
                    for name in names:
                        most = find_backend(name).capabilities.max_world_size
                        entrant = Entrant(
                            backend=name,
                            num_processes=min(number, most or number),
                            precision=precision,
                            accumulation=accumulation,
                            global_batch_size=size,
                        )
                        if not entrant.divides:
                            raise UsageError(
                                f"--global-batch-size {size} is not a multiple of {entrant.num_processes} rank(s) x "
                                f"{accumulation} accumulation step(s); change one of the three"
                            )
                        found[entrant] = None
    return list(found)


def _resolve(plan: RacePlan, run: PlannedRun) -> RunConfig:
    row = find_backend(run.entrant.backend)
    asked = read_options(run.entrant.backend, row.settings, plan.arguments(run)[1:])
    return resolve(run.entrant.backend, row, asked, started_at=time.time()).config


def _refuse_decided(run_options: list[str], from_file: dict[str, Any]) -> set[str]:
    """Refuses what the race decides, and returns the names of all other options that are set."""
    on_line = {
        option.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        for option in run_options
        if option.startswith("--")
    }
    for name in sorted(on_line | set(from_file)):
        if name in _DECIDED:
            raise UsageError(f"--{name.replace('_', '-')}: the race decides that; {_DECIDED[name]}")
    return on_line | set(from_file)


def _announce(plan: RacePlan, path: Path, terminal: Console) -> None:
    terminal.print(f"race of {len(plan.entrants)} entrants, {len(plan.runs())} runs; results go to {path}")
    for line in plan.left_out:
        terminal.print(line)


def _show_plan(plan: RacePlan, configs: dict[Entrant, RunConfig], terminal: Console) -> None:
    from compare.race.estimate import estimate_seconds

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("", "purpose", "backend", "ranks", "precision", "global batch = ranks x micro x accumulation"):
        table.add_column(heading)
    for number, planned in enumerate(plan.runs(), start=1):
        who = planned.entrant
        batch = f"{who.global_batch_size} = {who.num_processes} x {who.micro_batch_size} x {who.accumulation}"
        purpose = f"timed, block {planned.block}" if planned.purpose == "timed" else planned.purpose
        table.add_row(str(number), purpose, who.backend, str(who.num_processes), who.precision, batch)
    terminal.print(table)
    for line in plan.left_out:
        terminal.print(line)
    seconds = estimate_seconds(plan, next(iter(configs.values())))
    terminal.print(f"{len(plan.runs())} runs, about {format_duration(seconds)}: a guess from a few steps measured now")


def _measure_collectives(plan: RacePlan, directory: RaceDirectory, terminal: Console) -> None:
    """Measures each library's own path, for those who take part in worlds of more than one rank."""
    entered = dict.fromkeys(entrant.backend for entrant in plan.entrants)
    names = [name for name in entered if name in BACKENDS and BACKENDS[name].has_own_collectives]
    worlds = ",".join(str(number) for number in plan.options.num_processes if number > 1)
    if not plan.options.collectives or not worlds:
        return
    device = [option for option in plan.run_options if option.startswith("--device=")]
    for name in names:
        target = directory.collectives(name)
        if target.exists():
            continue
        terminal.print(f"measuring the collectives of {name}")
        done = run_command(
            ["allreduce", f"--backends={name}", f"--num-processes={worlds}", f"--output={target}", *device], {}
        )
        directory.note_collectives(name, None if done.returncode == 0 else done.stderr.strip()[-300:])
