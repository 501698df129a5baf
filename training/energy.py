"""The energy that the machine of a rank used during the training, read by the first rank of each node."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from typing_extensions import override

from backends.interface import Backend
from records.energy import POWERCAP, EnergyCounter, NoCountersError, gpu_counters, processor_counters
from records.record import EnergyRecord
from training.hooks import Hooks

# A processor's counter begins again after 262 kJ or less: at 1 kW after four minutes, and it must not do so twice.
_SECONDS_BETWEEN_READINGS = 30.0


class EnergyMeter(Hooks):
    """Reads energy counters from the beginning of a training to its end."""

    def __init__(self, *, gpus: list[str], powercap: Path = POWERCAP) -> None:
        """Finds the counters and reads them for the first time.

        Args:
            gpus: The UUIDs of the GPUs that the ranks of this node use; none for a training on CPUs.
            powercap: The directory of Linux' power capping framework.
        """
        self._why_not_processors: str | None = None
        self._why_not_gpus: str | None = None
        processors: list[EnergyCounter] = []
        graphics: list[EnergyCounter] = []
        try:
            processors = processor_counters(powercap)
        except NoCountersError as error:
            self._why_not_processors = str(error)
        try:
            graphics = gpu_counters(gpus) if gpus else []
        except NoCountersError as error:
            self._why_not_gpus = str(error)
        self._processors, self._gpus = _Sum(processors), _Sum(graphics)
        self._began = self._read_at = time.monotonic()

    @override
    def on_phase(self, phase: str, step: int) -> None:
        if time.monotonic() - self._read_at >= _SECONDS_BETWEEN_READINGS:
            self._read()

    def _read(self) -> None:
        self._read_at = time.monotonic()
        self._processors.read()
        self._gpus.read()

    def record(self) -> EnergyRecord:
        """Reads the counters for the last time and returns what was used since the first."""
        self._read()
        return EnergyRecord(
            seconds=self._read_at - self._began,
            processor_joules=self._processors.joules,
            why_no_processor_joules=self._processors.error or self._why_not_processors,
            gpu_joules=self._gpus.joules,
            why_no_gpu_joules=self._gpus.error or self._why_not_gpus,
        )


class _Sum:
    """The energy of several counters; None if there are none, or one cannot be read any more."""

    def __init__(self, counters: list[EnergyCounter]) -> None:
        self._counters = counters
        self.joules: float | None = 0.0 if counters else None
        self.error: str | None = None
        self._values = self._readings()

    def read(self) -> None:
        values = self._readings()
        if self.joules is not None:
            for counter, earlier, later in zip(self._counters, self._values, values, strict=True):
                self.joules += counter.joules_between(earlier, later)
        self._values = values

    def _readings(self) -> list[int]:
        try:
            return [counter.read() for counter in self._counters]
        except Exception as error:  # NVML has errors of its own
            self._counters, self.joules = [], None
            self.error = f"the counters could not be read to the end: {' '.join(str(error).split())}"
            return []


def gpus_of_node(backend: Backend, *, num_local_ranks: int) -> list[str]:
    """Returns the UUIDs of the GPUs that the ranks of this node use, as NVML writes them.

    Args:
        backend: The backend of this rank.
        num_local_ranks: How many ranks the node has.
    """
    if backend.device.type != "cuda":
        return []
    used = min(num_local_ranks * backend.num_devices, torch.cuda.device_count())
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(used)]
