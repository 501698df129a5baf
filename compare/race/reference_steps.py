"""Takes a few steps of the reference, to see what they cost: ``python -m compare.race.reference_steps ASKED SEEN``.

The race takes them in its own process, whose modules it needs anyway. On a GPU it has this command take them: a process
that has used a GPU holds some of its memory to its end, and counts as one that disturbs those who race.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles

from pydantic import BaseModel, ConfigDict, TypeAdapter

from launch.errors import UsageError, one_line
from launch.guardian import scratch_directory
from launch.own_command import run_command
from records.config import RunConfig
from records.resident import peak_resident_bytes

_NUM_STEPS = 8
# What CUDA and its libraries take of a GPU for each process, beside what torch allocates: about this much.
_BYTES_OF_A_CONTEXT = 600 * 2**20


class ReferenceSteps(BaseModel):
    """Steps to take.

    Attributes:
        config: The configuration of an entrant, whose global batches the reference computes.
        accumulation: The number of micro-batches in which it does so.
    """

    model_config = ConfigDict(extra="forbid")

    config: RunConfig
    accumulation: int


class StepsSeen(BaseModel):
    """What these steps show.

    Attributes:
        step_seconds: The time of a step.
        evaluation_seconds: The time of an evaluation.
        steps_of_whole: The number of steps of a run that trains to the end.
        gradient_bytes: The bytes of the gradients of all parameters.
        rank_bytes: The memory of this process, which is as large as a rank.
        gpu_bytes: What it takes of its GPU; None on a CPU.
        gpu_available_bytes: What was free of this GPU; None on a CPU.
    """

    model_config = ConfigDict(extra="forbid")

    step_seconds: float
    evaluation_seconds: float
    steps_of_whole: int
    gradient_bytes: int
    rank_bytes: int
    gpu_bytes: int | None
    gpu_available_bytes: int | None


_ASKED = TypeAdapter(list[ReferenceSteps])
_SEEN = TypeAdapter(list[StepsSeen])


def take_steps(asked: Sequence[ReferenceSteps]) -> list[StepsSeen]:
    """Takes steps, one kind after the other; on a GPU in another process.

    Raises:
        UsageError: They failed.
    """
    if any(one.config.device == "cuda" for one in asked):
        return take_steps_apart(asked)
    try:
        return [_take(one) for one in asked]
    except Exception as error:
        raise _refused(_why(error)) from error


def take_steps_apart(asked: Sequence[ReferenceSteps]) -> list[StepsSeen]:
    """Takes steps in another process.

    Raises:
        UsageError: They failed.
    """
    with scratch_directory("lockstep-race-") as directory:
        files = directory / "asked.json", directory / "seen.json"
        files[0].write_bytes(_ASKED.dump_json(list(asked)))
        done = run_command(list(map(str, files)), module=("compare.race.reference_steps",))
        if done.returncode:
            why = (done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"])[-1]
            raise _refused(why)
        return _SEEN.validate_json(files[1].read_bytes())


def _refused(why: str) -> UsageError:
    return UsageError(f"a few steps of one process, by which the race is planned, failed: {why}")


def _why(error: Exception) -> str:
    """Returns the first line of what an error says: it may come from a task of the user's, or from any library."""
    return one_line(str(error).strip().partition("\n")[0] or repr(error))


def _take(asked: ReferenceSteps) -> StepsSeen:
    """Takes a few steps of the reference, and evaluates once."""
    import torch

    from backends.capabilities import BackendSettings
    from backends.registry import REFERENCE, reference_backend
    from tasks.registry import load_task
    from training.clock import ProcessorClock
    from training.loop import Trainer
    from training.measurements import Measurements
    from watch.heartbeat import Heartbeat

    config = asked.config
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
            "evaluate": True,
            "micro_batch_size": config.global_batch_size // asked.accumulation,
        }
    )
    trainer = Trainer(alone, task, reference_backend(alone.backend_options(BackendSettings)))
    measurements = Measurements(Heartbeat(), ProcessorClock())
    trainer.observe(measurements)
    began = time.perf_counter()
    trainer.train()
    evaluation = time.perf_counter() - began - sum(measurements.step_seconds)
    parameters = [one for one in trainer.state.module.parameters() if one.requires_grad]
    gpu_bytes = gpu_available_bytes = None
    if trainer.backend.device.type == "cuda":
        gpu_bytes = torch.cuda.max_memory_reserved() + _BYTES_OF_A_CONTEXT
        gpu_available_bytes = torch.cuda.mem_get_info()[0] + gpu_bytes
    return StepsSeen(
        # Most of a few steps build kernels for shapes that are new, which a race does once.
        step_seconds=quantiles(measurements.step_seconds[1:], n=4)[0],
        evaluation_seconds=evaluation,
        steps_of_whole=config.num_train_epochs * trainer.plan.steps_per_epoch,
        gradient_bytes=sum(one.numel() * one.element_size() for one in parameters),
        rank_bytes=peak_resident_bytes(),
        gpu_bytes=gpu_bytes,
        gpu_available_bytes=gpu_available_bytes,
    )


def main(asked: str, seen: str) -> int:
    """Takes the steps that a file asks for, and writes what they show; returns the exit code."""
    try:
        found = [_take(one) for one in _ASKED.validate_json(Path(asked).read_bytes())]
    except Exception as error:  # the race says it in a line
        print(_why(error), file=sys.stderr)
        return 1
    Path(seen).write_bytes(_SEEN.dump_json(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
