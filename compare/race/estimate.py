"""Estimates how long a race takes, from a few steps of the reference, taken now, and from what a start costs."""

from __future__ import annotations

import time
from statistics import median

from backends.capabilities import BackendSettings
from backends.registry import REFERENCE
from compare.race.plan import PlannedRun, RacePlan
from records.config import RunConfig

# From the command to the first step, and from the last step to the end, on two cores: most of it is imports.
_SECONDS_OF_A_START = 8.0
_NUM_STEPS = 4
# A diagnosis run takes each step twice more without communication.
_DIAGNOSIS_FACTOR = 4.0
_COMMUNICATION_FACTOR = 1.3


def estimate_seconds(plan: RacePlan, config: RunConfig) -> float:
    """Estimates how long a race takes.

    Args:
        plan: The plan of the race.
        config: The configuration of one of its runs, of which this process takes a few steps.

    Returns:
        The estimate in seconds.
    """
    step_seconds, evaluation_seconds, steps_of_whole = _measure(config)

    def seconds(run: PlannedRun) -> float:
        factor = 1.0 if run.entrant.backend == REFERENCE else _COMMUNICATION_FACTOR
        steps = {"timed": plan.options.timed_steps, "whole": steps_of_whole}.get(run.purpose)
        if steps is None:
            steps, factor = plan.options.diagnosis_steps, _DIAGNOSIS_FACTOR
        evaluations = 4 if run.purpose == "whole" else 1
        return _SECONDS_OF_A_START + factor * steps * step_seconds + evaluations * evaluation_seconds

    return sum(seconds(run) for run in plan.runs())


def _measure(config: RunConfig) -> tuple[float, float, int]:
    """Returns the seconds of a step and of an evaluation of the reference, and the number of steps of a whole run."""
    import torch

    from backends.registry import reference_backend
    from tasks.registry import load_task
    from training.loop import Trainer
    from training.measurements import Measurements
    from watch.heartbeat import Heartbeat

    task_class = load_task(config.task)
    task = task_class(task_class.Settings.model_validate(config.task_settings))
    task.prepare()
    torch.set_num_threads(config.threads_per_rank * config.num_processes)
    alone = config.model_copy(
        update={
            "backend": REFERENCE,
            "num_processes": 1,
            "backend_settings": {},
            "max_steps": _NUM_STEPS,
            "micro_batch_size": config.global_batch_size,
        }
    )
    trainer = Trainer(alone, task, reference_backend(alone.backend_options(BackendSettings)))
    measurements = Measurements(Heartbeat())
    trainer.observe(measurements)
    began = time.perf_counter()
    trainer.train()
    evaluation = time.perf_counter() - began - sum(measurements.step_seconds)
    steps = config.num_train_epochs * trainer.plan.steps_per_epoch
    return median(measurements.step_seconds[1:]), evaluation, steps
