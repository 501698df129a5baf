"""Who takes part in a race: which backends, under which conditions."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from backends.capabilities import UnsupportedError
from backends.devices import count_gpus
from backends.registry import BACKENDS, INDEPENDENT, REFERENCE, find_backend
from compare.race import core_clock
from compare.race.bare import add_loops
from compare.race.costs import measure_costs
from compare.race.options import RaceOptions
from compare.race.own_entrants import OwnEntrant, check_effect, read_own_entrant
from compare.race.peers.table import PEERS, find_peer
from compare.race.plan import Entrant, PlannedRun, RacePlan, Schedule
from compare.race.resolving import resolve_run
from compare.race.schedule import make_schedule
from compare.race.tuning import possible_entrants, seconds_of_tuning
from compare.results import Role
from launch.arguments import command_line
from launch.errors import UsageError
from launch.options import Options, read_option_file, read_options
from records.config import RunConfig, RunOptions
from records.environment import num_cpus
from records.processor import is_slow
from records.throughput import NUM_WARMUP_STEPS

# Until it is known who takes part: for checking the command lines of runs.
_UNKNOWN = Schedule(repeats=1, most_repeats=1, timed_steps=10, seconds=0.0)

# Options of a run that cannot be set in a race, with the reason or what to use instead.
_BY_THE_RACE = "set it on the command line of the race itself"
_DECIDED = {
    **dict.fromkeys(("num_processes", "precision", "global_batch_size", "output_dir"), _BY_THE_RACE),
    "micro_batch_size": "use --accumulation instead",
    "grad_compression": "it leaves no exact entrant; give it to one: --entrant 'fp16=ddp:--grad-compression fp16'",
    "max_steps": "use --budget or --timed-steps instead",
    "overwrite": "a race resumes where it was interrupted; leave it out",
    "diagnose": "a race makes diagnosis runs itself; leave it out",
    **dict.fromkeys(
        ("save_every", "keep", "on_save_error", "metric_for_best_model", "greater_is_better"),
        "a race saves no checkpoints; leave it out",
    ),
    **dict.fromkeys(("resume", "max_restarts"), "a race times whole runs; leave it out"),
    "early_stopping_patience": "a race times equal numbers of steps; leave it out",
    **dict.fromkeys(("tracker", "trace"), "a race keeps only the records of its runs; leave it out"),
    "start_method": "each backend is started by its own starter; --entrant gives another to one entrant",
    **dict.fromkeys(
        ("num_nodes", "min_nodes", "node_rank", "master_addr", "master_port"),
        "the race settles it by its --engine; leave it out",
    ),
}


class RunOptionsOfRace(NamedTuple):
    """Options that a race passes on to its runs.

    Attributes:
        arguments: Their command line.
        names: The names of the options that it sets, a configuration file included.
    """

    arguments: list[str]
    names: set[str]


def read_run_options(arguments: list[str], config: Path | None) -> RunOptionsOfRace:
    """Reads the options that are passed on to every run.

    Args:
        arguments: The part of the command line that is not of the race.
        config: The configuration file, if there is one.

    Raises:
        UsageError: One of these options cannot be set in a race.
    """
    from_file: dict[str, Any] = {}
    if config is not None:
        from_file = read_option_file(config)
        arguments = [f"--config={config}", *arguments]
    on_line = {
        option.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        for option in arguments
        if option.startswith("--")
    }
    names = on_line | set(from_file)
    for name in sorted(names):
        if name in _DECIDED:
            raise UsageError(f"--{name.replace('_', '-')}: cannot be set in a race: {_DECIDED[name]}")
    return RunOptionsOfRace(arguments, names)


def make_plan(options: RaceOptions, of_runs: RunOptionsOfRace) -> tuple[RacePlan, dict[Entrant, RunConfig]]:
    """Settles who takes part, and checks the command line of every run.

    Args:
        options: What the user asks of the race.
        of_runs: What is passed on to every run.

    Returns:
        The plan, and the configuration of a timed run of each entrant.

    Raises:
        UsageError, UnsupportedError, TaskInputError: A run that the user asks for cannot be made.
    """
    backends = options.backends or [name for name, row in BACKENDS.items() if row.unavailable_reason() is None]
    for name in backends:
        reason = find_backend(name).unavailable_reason()
        if reason is not None:
            raise UnsupportedError(f"--backends {name}: cannot run here: {reason}")
    for name in options.peers or ():
        find_peer(name)
    options.network.check(options.num_processes)
    # Any backend serves to read the options of every run.
    asked = read_options(backends[0], find_backend(backends[0]).settings, of_runs.arguments)
    plan = RacePlan(
        schema_version=8,
        options=options,
        schedule=_UNKNOWN,
        costs=None,
        entrants=[],
        run_options=_with_defaults(options, of_runs, asked),
        diagnosis_options=[],
        left_out=[],
        command=command_line(sys.argv[1:], without="--output-dir"),
        race=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
    )
    configs = _able(plan, backends, asked.run)
    plan.entrants = list(configs)
    plan.slow_bf16 = any(is_slow(config.precision, config.device) for config in configs.values())
    added = possible_entrants(plan.entrants) if options.tune else []
    if options.tune and not added:
        raise UsageError(
            "--tune: has no effect, since nobody who takes part has several ranks and settings to try; ask for other "
            "--backends or --num-processes, or leave it out"
        )
    _require_names([*plan.entrants, *added])
    plan.diagnosis_options = ["--no-torch-compile"]
    batchings = {config.batching for config in configs.values() if config.torch_compile}
    if len(batchings) == 1:  # a model that is not compiled would be given another layout
        plan.diagnosis_options.append(f"--batching={batchings.pop()}")
    if any("dropout" in config.task_settings for config in configs.values()):
        plan.diagnosis_options += ["--dropout=0"]  # its masks depend on how a batch is split over ranks
    for run in plan.runs():
        if run.purpose == "diagnosis":
            resolve_run(plan, run)
    return plan, configs


def schedule_race(plan: RacePlan, configs: dict[Entrant, RunConfig]) -> None:
    """Settles how the budget is spent, from what this machine does in a few seconds now.

    Raises:
        UsageError: The budget is too small.
    """
    costs = measure_costs(configs, plan.options.network)
    tuning, entrants = 0.0, plan.entrants
    if plan.options.tune:
        entrants = [*entrants, *possible_entrants(entrants)]
        tuning = seconds_of_tuning(plan, costs)
    plan.costs = costs
    plan.schedule = make_schedule(entrants, plan.options, costs, seconds_of_tuning=tuning)


def core_slowdowns(configs: dict[Entrant, RunConfig]) -> dict[int, float]:
    """Measures how busy cores slow each other down, where the race also shows what ranks reach that work alone.

    Args:
        configs: The configuration of a timed run of each entrant.

    Returns:
        How many times as long what needs no memory takes, by the number of ranks, each with its threads; nothing for
        ranks on GPUs, or for more threads than there are cores.
    """
    if not any(who.role == "limit" for who in configs):
        return {}
    ranks = [config for who, config in configs.items() if who.role == "backend" and config.device == "cpu"]
    num_cores = {config.num_processes: config.num_processes * config.threads_per_rank for config in ranks}
    measured = {number: core_clock.measure_apart(cores) for number, cores in num_cores.items()}
    return {number: slowdown for number, slowdown in measured.items() if slowdown is not None}


def _with_defaults(options: RaceOptions, of_runs: RunOptionsOfRace, asked: Options) -> list[str]:
    """Adds to the options of every run what a race sets unless the user does."""
    arguments = list(of_runs.arguments)
    arguments += [f"--{name.replace('_', '-')}={value}" for name, value in asked.task_settings.of_race().items()]
    if options.placement and "bind_ranks" not in of_runs.names and _can_bind(asked.run, options):
        arguments.append("--bind-ranks")
    if "threads_per_rank" not in of_runs.names:
        # A rank is the same share of the machine in every world, or scaling would compare unlike ranks.
        arguments.append(f"--threads-per-rank={max(1, num_cpus() // _most_on_a_machine(options))}")
    if "logging_steps" not in of_runs.names and not _on_cpu(asked.run):
        # Reading the loss waits for the GPU: this happens at both ends of the steps that are timed.
        arguments.append(f"--logging-steps={NUM_WARMUP_STEPS}")
    if options.peers and not options.whole_runs and "num_train_epochs" not in of_runs.names:
        arguments.append("--num-train-epochs=1")  # enough to see what peers reach
    return arguments


def _able(plan: RacePlan, backends: Sequence[str], asked: RunOptions) -> dict[Entrant, RunConfig]:
    """Returns the configuration of each entrant that can take part, and notes the others in the plan."""
    configs: dict[Entrant, RunConfig] = {}
    refused: dict[Entrant, ValueError] = {}
    for entrant in _candidates(backends, plan.options, asked):
        try:
            configs[entrant] = resolve_run(plan, PlannedRun(entrant=entrant, purpose="timed", block=1, position=0))
        except (UnsupportedError, UsageError) as error:
            # Backends that the user did not name are left out where they cannot take part.
            if isinstance(error, UsageError) and (plan.options.backends or entrant.role == "peer"):
                raise
            refused[entrant] = error
            plan.left_out.append(f"{entrant.label}: left out, {' '.join(str(error).split())}")
    able_peers = {entrant.backend for entrant in configs if entrant.role == "peer"}
    for entrant, config in configs.items():
        check_effect(entrant.name, dict(entrant.variables), config.device)
    peers = [error for who, error in refused.items() if who.role == "peer" and who.backend not in able_peers]
    if peers or not any(entrant.role == "backend" for entrant in configs):
        raise [*peers, *refused.values()][0]
    if plan.options.bare:
        add_loops(configs, plan.left_out)
    return configs


def _candidates(names: Sequence[str], options: RaceOptions, asked: RunOptions) -> list[Entrant]:
    found: dict[Entrant, None] = {}
    alternative = _alternative(names, asked)
    for precision, accumulation, number in product(options.precision, options.accumulation, options.num_processes):
        for size in _global_batch_sizes(options, number):
            conditions = _Conditions(number, precision, accumulation, size)
            entrants = [conditions.entrant(name) for name in names]
            entrants += [conditions.entrant(own.backend, own) for own in map(read_own_entrant, options.entrant)]
            entrants += [*_limits(conditions, options, alternative), *_peers(conditions, options)]
            for entrant in entrants:
                if not entrant.divides:
                    raise UsageError(
                        f"--global-batch-size {size} is not a multiple of {entrant.num_processes} rank(s) x "
                        f"{accumulation} accumulation step(s); change one of the three"
                    )
                found[entrant] = None
    return list(found)


class _Conditions(NamedTuple):
    """Conditions under which all entrants take part, with as many of the ranks as they support."""

    num_processes: int
    precision: str
    accumulation: int
    global_batch_size: int

    def entrant(self, backend: str, own: OwnEntrant | None = None, *, role: Role = "backend") -> Entrant:
        """Returns a backend under these conditions, as it comes or with options of its own."""
        most = find_backend(backend).capabilities.max_world_size
        return Entrant(
            backend=backend,
            num_processes=min(self.num_processes, most or self.num_processes),
            precision=self.precision,
            accumulation=self.accumulation,
            global_batch_size=self.global_batch_size,
            role=role,
            variant=own.variant if own else "",
            options=own.options if own else (),
            variables=own.variables if own else (),
        )


def _can_bind(asked: RunOptions, options: RaceOptions) -> bool:
    """Whether each rank of every entrant can have cores of its own."""
    needed = _most_on_a_machine(options) * (asked.threads_per_rank or 1)
    return _on_cpu(asked) and hasattr(os, "sched_setaffinity") and needed <= num_cpus()


def _on_cpu(asked: RunOptions) -> bool:
    return asked.device == "cpu" or not count_gpus()


def _most_on_a_machine(options: RaceOptions) -> int:
    """Returns the number of ranks of the largest world that share a machine."""
    return math.ceil(max(options.num_processes) / options.network.num_machines)


def _alternative(names: Sequence[str], asked: RunOptions) -> OwnEntrant | None:
    """Returns what one could do instead of starting ranks; None if it takes part in any case.

    Args:
        names: The backends that take part.
        asked: The options of every run.
    """
    if _on_cpu(asked):
        return OwnEntrant(REFERENCE, "all cores", (f"--threads-per-rank={num_cpus()}",), ())
    return None if REFERENCE in names else OwnEntrant(REFERENCE, "one GPU", (), ())


def _limits(conditions: _Conditions, options: RaceOptions, alternative: OwnEntrant | None) -> Iterator[Entrant]:
    """Yields what shows how much is possible under these conditions, and what could be done instead."""
    if conditions.num_processes == 1 or not options.limits:
        return
    if options.engine is None:  # ranks that do not communicate would need no network
        apart = OwnEntrant(INDEPENDENT, "independent processes", (), ())
        yield conditions.entrant(INDEPENDENT, apart, role="limit")
    if alternative is not None:
        yield conditions.entrant(REFERENCE, alternative, role="alternative")


def _peers(conditions: _Conditions, options: RaceOptions) -> Iterator[Entrant]:
    """Yields each variant of each peer that the user names."""
    for name in options.peers or ():
        for variant, own in PEERS[name].variants.items():
            yield Entrant(**conditions._asdict(), backend=name, role="peer", variant=variant, options=own)


def _require_names(entrants: list[Entrant]) -> None:
    """Makes sure that no two entrants that race under the same conditions have the same name.

    Raises:
        UsageError: Two have.
    """
    labels = [entrant.label for entrant in entrants]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(
                f"--entrant: there are two entrants {label}; give one another name, as NAME=BACKEND:OPTIONS"
            )


def _global_batch_sizes(options: RaceOptions, num_processes: int) -> Iterator[int]:
    yield options.global_batch_size
    if options.weak_scaling:
        yield options.global_batch_size * num_processes // min(options.num_processes)
