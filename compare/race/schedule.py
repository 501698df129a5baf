"""How long the parts of a race take, and how its budget is spent: on starts of entrants, and on steps of each start.

The estimate comes from a few steps of the reference and from the import of a rank's modules, both taken now.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from backends.capabilities import BackendSettings
from backends.registry import REFERENCE
from compare.race.heat import SECONDS_OF_A_TURN
from compare.race.options import RaceOptions
from compare.race.plan import Entrant, PlannedRun, Schedule, draw_plan, heats_of
from compare.results import MIN_PAIRS
from launch.engines.interface import PROJECT_DIRECTORY
from launch.errors import UsageError
from launch.quantities import format_duration
from records.config import RunConfig
from records.environment import num_cpus
from records.throughput import NUM_WARMUP_STEPS

_NUM_STEPS = 4
# Beyond the import of its modules: a model is built, ranks meet, the directory is prepared, the record is written.
_SECONDS_OF_A_RUN = 2.5
# What the modules of an engine, and of the command line, cost beside those of its ranks.
_IMPORTS_OF_AN_ENGINE = 1.0
_IMPORTS_OF_A_COMMAND_LINE = 0.3
# A rank of a peer imports its whole library, and its steps take longer.
_IMPORTS_OF_A_PEER = 2.5
_PEER_FACTOR = 1.3
# A diagnosis run takes each step twice more without communication.
_DIAGNOSIS_FACTOR = 4.0
_COMMUNICATION_FACTOR = 1.3
# Steps that warm a turn up, signals, and the entrants that are waited for.
_TURN_FACTOR = 1.2
_SECONDS_OF_COLLECTIVES = 40.0
_MOST_STARTS = 10
# In a start, turns take at least so many times as long as starting did.
_TURNS_PER_START = 1.5
_FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Costs:
    """What was measured on this machine now.

    Attributes:
        step_seconds: The time of a step of one process, with the threads of one rank, by the entrant's conditions.
        evaluation_seconds: The time of an evaluation.
        import_seconds: The time in which a rank imports its modules.
        steps_of_whole: The number of steps of a run that trains to the end.
        num_cpus: The number of cores.
    """

    step_seconds: dict[tuple[str, int, int], float]
    evaluation_seconds: float
    import_seconds: float
    steps_of_whole: int
    num_cpus: int

    def step(self, who: Entrant) -> float:
        """Returns the expected time of a step of an entrant, in seconds."""
        whole = self.step_seconds[who.precision, 1, who.global_batch_size]
        alone = self.step_seconds.get((who.precision, who.accumulation, who.global_batch_size), whole)
        factor = 1.0 if who.num_processes == 1 else _COMMUNICATION_FACTOR
        factor *= _PEER_FACTOR if who.role == "peer" else 1.0
        return factor * alone / min(who.num_processes, self.num_cpus)

    def start(self, entrants: Iterable[Entrant]) -> float:
        """Returns the expected time until entrants that are started together are ready, in seconds."""
        imports = [self._imports(who) for who in entrants]
        together = sum(imports) / self.num_cpus
        return self.import_seconds * max(together, 1.0 + _IMPORTS_OF_AN_ENGINE) + _SECONDS_OF_A_RUN

    def alone(self, run: PlannedRun, options: RaceOptions) -> float:
        """Returns the expected time of a run that takes place alone, in seconds."""
        steps, factor, evaluations = options.diagnosis_steps, _DIAGNOSIS_FACTOR, 1
        if run.purpose == "whole":
            steps, factor, evaluations = self.steps_of_whole, 1.0, 4
        return (
            self.start([run.entrant]) + factor * steps * self.step(run.entrant) + evaluations * self.evaluation_seconds
        )

    def end(self, entrants: Iterable[Entrant]) -> float:
        """Returns the expected time in which entrants evaluate and save, one after the other, in seconds."""
        return sum(self.evaluation_seconds + _SECONDS_OF_A_RUN for _ in entrants)

    def _imports(self, who: Entrant) -> float:
        engine = 0.0 if who.backend == REFERENCE else _IMPORTS_OF_AN_ENGINE
        ranks = who.num_processes * (_IMPORTS_OF_A_PEER if who.role == "peer" else 1.0)
        return ranks + engine + _IMPORTS_OF_A_COMMAND_LINE


def make_schedule(entrants: list[Entrant], options: RaceOptions, costs: Costs) -> Schedule:
    """Spends the budget of a race.

    Raises:
        UsageError: The budget is too small.
    """
    once = draw_plan(entrants, options, repeats=1)
    fixed = sum(costs.alone(run, options) for run in once if run.purpose != "timed")
    fixed += _SECONDS_OF_COLLECTIVES if options.collectives and max(options.num_processes) > 1 else 0.0
    heats = [[run.entrant for run in heat] for heat in heats_of(once) if heat[0].purpose == "timed"]
    of_a_start = sum(costs.start(heat) + costs.end(heat) for heat in heats)
    of_a_step = _TURN_FACTOR * sum(costs.step(who) for heat in heats for who in heat)
    slowest = max(median(costs.step(who) for who in heat) for heat in heats)
    fewest = NUM_WARMUP_STEPS + round(_FEWEST_ROUNDS * SECONDS_OF_A_TURN / slowest)
    repeats = options.repeats or 0
    if options.timed_steps is not None:
        steps = options.timed_steps
        repeats = repeats or MIN_PAIRS
    else:
        left = options.budget - fixed
        repeats = repeats or max(MIN_PAIRS, min(_MOST_STARTS, int(left / ((1 + _TURNS_PER_START) * of_a_start))))
        steps = int((left / repeats - of_a_start) / of_a_step)
        if steps < fewest:
            needed = fixed + repeats * (of_a_start + fewest * of_a_step)
            raise UsageError(
                f"--budget {format_duration(options.budget)}: {len(entrants)} entrants, each started {repeats} times, "
                f"need about {format_duration(needed)}; give more, or ask for fewer entrants"
            )
    return Schedule(repeats=repeats, timed_steps=steps, seconds=fixed + repeats * (of_a_start + steps * of_a_step))


def measure_costs(configs: dict[Entrant, RunConfig]) -> Costs:
    """Takes a few steps of the reference under the conditions of each entrant, and starts one process.

    Args:
        configs: The configuration of a timed run of each entrant.
    """
    step_seconds: dict[tuple[str, int, int], float] = {}
    evaluation, steps = 0.0, 0
    for who, config in configs.items():
        for accumulation in dict.fromkeys((1, who.accumulation)):
            conditions = (who.precision, accumulation, who.global_batch_size)
            if conditions not in step_seconds:
                step_seconds[conditions], evaluation, steps = _measure(config, accumulation)
    return Costs(step_seconds, evaluation, _import_seconds(), steps, num_cpus())


def _import_seconds() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import training.rank_work"], cwd=PROJECT_DIRECTORY, check=True)
    return time.perf_counter() - began


def _measure(config: RunConfig, accumulation: int) -> tuple[float, float, int]:
    """Returns the seconds of a step and of an evaluation of the reference, and the number of steps of a whole run."""
    import torch

    from backends.registry import reference_backend
    from tasks.registry import load_task
    from training.clock import ProcessorClock
    from training.loop import Trainer
    from training.measurements import Measurements
    from watch.heartbeat import Heartbeat

    task_class = load_task(config.task)
    task = task_class(task_class.Settings.model_validate(config.task_settings))
    task.prepare()
    torch.set_num_threads(config.threads_per_rank)
    alone = config.model_copy(
        update={
            "backend": REFERENCE,
            "num_processes": 1,
            "backend_settings": {},
            "max_steps": _NUM_STEPS,
            "micro_batch_size": config.global_batch_size // accumulation,
        }
    )
    trainer = Trainer(alone, task, reference_backend(alone.backend_options(BackendSettings)))
    measurements = Measurements(Heartbeat(), ProcessorClock())
    trainer.observe(measurements)
    began = time.perf_counter()
    trainer.train()
    evaluation = time.perf_counter() - began - sum(measurements.step_seconds)
    steps = config.num_train_epochs * trainer.plan.steps_per_epoch
    return median(measurements.step_seconds[1:]), evaluation, steps
