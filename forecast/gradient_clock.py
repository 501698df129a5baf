"""What a profiled rank looks at: when each phase of a step begins, and when each gradient is ready."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from forecast.times import RankTimes, times_path
from records.files import write_atomically
from records.throughput import NUM_WARMUP_STEPS
from training.hooks import Hooks
from training.loop import Trainer
from training.plan import SampleIds

# A moment: a float on a CPU, and an event of torch.cuda on a GPU.
_Mark = Any


class GradientClock(Hooks):
    """Notes when each phase of a step begins and when each gradient is ready, and writes the file after the last step.

    A hook of each parameter runs once its gradient is accumulated
    (https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_post_accumulate_grad_hook.html). On a GPU,
    the host runs ahead, so that events of its stream take the place of the host's clock.
    """

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        self._state, self._directory, self._rank = trainer.state, directory, trainer.backend.rank
        self._num_steps, self._device = trainer.num_steps, trainer.backend.device
        self._phases: list[tuple[str, _Mark]] = []
        self._ready: dict[str, _Mark] = {}
        parameters = {name: one for name, one in self._state.module.named_parameters() if one.requires_grad}
        self._times = RankTimes(
            rank=self._rank,
            data_seconds=[],
            forward_seconds=[],
            backward_seconds=[],
            last_backward_seconds=[],
            update_seconds=[],
            gradient_bytes={name: one.numel() * one.element_size() for name, one in parameters.items()},
            ready_seconds={name: [] for name in parameters},
        )
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._note(name))  # type: ignore[no-untyped-call]

    @override
    def on_step_begin(self, global_batch: SampleIds) -> None:
        self._phases = [("data", self._mark())]

    @override
    def on_phase(self, phase: str, step: int) -> None:
        if phase in ("data", "forward", "backward", "update"):
            self._phases.append((phase, self._mark()))
        if phase == "backward":
            self._ready = {}

    @override
    def on_update(self) -> None:
        self._phases.append(("end", self._mark()))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._state.step > NUM_WARMUP_STEPS:
            self._keep()
        if self._state.step == self._num_steps:
            write_atomically(times_path(self._directory, self._rank), self._times.model_dump_json() + "\n")

    def _note(self, name: str) -> None:
        self._ready[name] = self._mark()

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _keep(self) -> None:
        """Adds the step that has just ended to the times."""
        times = self._times
        spans = [
            (phase, _between(began, ended))
            for (phase, began), (_, ended) in zip(self._phases, self._phases[1:], strict=False)
        ]
        for phase in ("data", "forward", "backward", "update"):
            seconds: list[float] = getattr(times, f"{phase}_seconds")
            seconds.append(sum(span for name, span in spans if name == phase))
        times.last_backward_seconds.append([span for name, span in spans if name == "backward"][-1])
        began = [mark for phase, mark in self._phases if phase == "backward"][-1]
        for name, mark in self._ready.items():
            times.ready_seconds[name].append(_between(began, mark))


def _between(began: _Mark, ended: _Mark) -> float:
    """Returns the seconds between two moments."""
    return float(ended - began if isinstance(began, float) else 1e-3 * began.elapsed_time(ended))
