"""Energy counters of a machine: of its processors through RAPL, and of its NVIDIA GPUs through NVML.

RAPL's counters are files of Linux' power capping framework
(https://docs.kernel.org/power/powercap/powercap.html). NVML's needs the optional package nvidia-ml-py and a GPU of the
Volta generation or newer
(https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")
_MICROJOULES = 1e-6
_MILLIJOULES = 1e-3


class NoCountersError(Exception):
    """There are no energy counters that can be read; the text says why, in one sentence."""


@dataclass(frozen=True)
class EnergyCounter:
    """A counter of energy.

    Attributes:
        name: What it measures.
        read: Returns its value, in units of `joules`.
        joules: One unit, in joules.
        range: The number of values, after which it begins again at 0; None if it never does.
    """

    name: str
    read: Callable[[], int]
    joules: float
    range: int | None = None

    def joules_between(self, earlier: int, later: int) -> float:
        """Returns the energy between two readings, between which the counter began again once at most."""
        difference = later - earlier
        if difference < 0 and self.range is not None:
            difference += self.range
        return difference * self.joules


def processor_counters(powercap: Path = POWERCAP) -> list[EnergyCounter]:
    """Returns the counters of the processors and of the memory that is counted apart from them.

    Args:
        powercap: The directory of the power capping framework.

    Raises:
        NoCountersError: There are none.
    """
    counters, problem = [], f"{powercap} shows no energy counter, as on most virtual machines"
    for zone in sorted(powercap.glob("intel-rapl:*")):  # AMD's have this name, too
        try:
            name = (zone / "name").read_text().strip()
            # Other zones are parts of a package, or hold it: the core, the uncore, the platform.
            if name.startswith("package") or name == "dram":
                size = int((zone / "max_energy_range_uj").read_text()) + 1
                read = _reader(zone / "energy_uj")
                read()
                counters.append(EnergyCounter(name, read, _MICROJOULES, size))
        except PermissionError:
            problem = f"{zone / 'energy_uj'} may be read by root only"
        except (OSError, ValueError) as error:
            problem = f"{zone} cannot be read: {' '.join(str(error).split())}"
    if not counters:
        raise NoCountersError(problem)
    return counters


def _reader(path: Path) -> Callable[[], int]:
    return lambda: int(path.read_text())


def gpu_counters(uuids: list[str] | None = None) -> list[EnergyCounter]:
    """Returns the counters of GPUs.

    Args:
        uuids: The GPUs, as "GPU-..."; None for all of the machine.

    Raises:
        NoCountersError: There are none, or one of these GPUs has none.
    """
    try:
        nvml = importlib.import_module("pynvml")  # of the package nvidia-ml-py
    except ImportError:
        raise NoCountersError("nvidia-ml-py is not installed; pip install nvidia-ml-py") from None
    try:
        nvml.nvmlInit()
        if uuids is None:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        else:
            handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        counters = [_gpu_counter(nvml, number, handle) for number, handle in enumerate(handles)]
        for counter in counters:
            counter.read()
    except nvml.NVMLError as error:
        raise NoCountersError(f"NVML does not count the energy of these GPUs: {error}") from None
    if not counters:
        raise NoCountersError("NVML sees no GPU")
    return counters


def _gpu_counter(nvml: Any, number: int, handle: Any) -> EnergyCounter:
    return EnergyCounter(f"gpu {number}", lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)), _MILLIJOULES)
