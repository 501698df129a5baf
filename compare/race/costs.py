"""How long the parts of a race take on this machine, from a few steps of the reference and the start of a process."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from backends.devices import count_gpus
from backends.registry import REFERENCE, find_backend
from compare.networks import RaceNetwork
from compare.race.memory_limit import available_bytes
from compare.race.reference_steps import ReferenceSteps, take_steps
from launch.options import settings_in
from launch.starters.interface import PROJECT_DIRECTORY
from records.config import RunConfig
from records.environment import num_cpus

if TYPE_CHECKING:
    from compare.race.options import RaceOptions
    from compare.race.plan import Entrant, PlannedRun

# Beyond the import of its modules: a model is built, ranks meet, the directory is prepared, the record is written.
_SECONDS_OF_A_RUN = 4.0
_SECONDS_TO_SAVE = 1.0
# What the modules of a starter, and of the command line, cost beside those of its ranks.
_IMPORTS_OF_A_STARTER = 1.0
_IMPORTS_OF_A_COMMAND_LINE = 0.3
# A rank of a peer imports its whole library, and its steps take longer.
_IMPORTS_OF_A_PEER = 2.5
_PEER_FACTOR = 1.3
# A diagnosis run takes each step four times more without communication.
_DIAGNOSIS_FACTOR = 6.0
# What ranks of one machine take for a step beside computing: for each call, and for each byte of the gradients.
_SECONDS_TO_COMMUNICATE = 0.006
_SECONDS_OF_A_BYTE = 1.5e-9
# What ranks that poll while they wait make of a step where there are fewer cores than ranks.
# In docs/results/race-horovod-waits-2026-11-26, four ranks of Horovod on two cores take 199 % longer than DDP's.
_POLLING_FACTOR = 3.0
# Ranks that compute at the same time share caches and memory.
_SHARING_FACTOR = 1.08
# Signals, and the entrants that are waited for. In a race of 2026-11-29 on two cores of an Intel Xeon, it was 1.05.
_TURN_FACTOR = 1.1
# What a starter and its command line hold, beside their ranks; and what of the free memory entrants may take together.
_BYTES_OF_A_STARTER = 300 * 2**20
_SHARE_OF_MEMORY = 0.8


class Costs(BaseModel):
    """What was measured on this machine before a race.

    Attributes:
        step_seconds: The time of a step of one process, with the threads of one rank and the largest micro-batches that
            an entrant computes, by precision, accumulation and global batch.
        evaluation_seconds: The time of an evaluation.
        import_seconds: The time in which a rank imports its modules.
        steps_of_whole: The number of steps of a run that trains to the end.
        gradient_bytes: The bytes of the gradients of all parameters.
        bandwidth: What a rank sends in a second at most, in bits; None if nothing limits it.
        has_nodes: Whether each rank, or each machine, is a node, with a command line and a starter of its own.
        num_cpus: The number of cores of a machine.
        num_machines: The number of machines like this one that share the ranks.
        rank_bytes: The memory of a rank.
        available_bytes: The memory that was free.
        gpu_rank_bytes: The memory of a rank on its GPU; None on CPUs.
        gpu_available_bytes: The memory of a GPU that was free; None on CPUs.
        num_gpus: The number of GPUs that the ranks of a machine share; None on CPUs, and if each has one of its own.
    """

    model_config = ConfigDict(extra="forbid")

    step_seconds: dict[str, float]
    evaluation_seconds: float
    import_seconds: float
    steps_of_whole: int
    gradient_bytes: int
    bandwidth: float | None
    has_nodes: bool = False
    num_cpus: int
    num_machines: int = 1
    rank_bytes: int
    available_bytes: int
    gpu_rank_bytes: int | None = None
    gpu_available_bytes: int | None = None
    num_gpus: int | None = None

    def step(self, who: Entrant) -> float:
        """Returns the expected time of a step of an entrant, in seconds."""
        alone = self._alone(who)
        # On CPUs, all cores work in either case: on several ranks, or on several threads of one process.
        num_cores = self.num_cpus * self.num_machines
        has_all_cores = who.role == "alternative" and self.gpu_rank_bytes is None
        cores = self.num_cpus if has_all_cores else min(who.num_processes, num_cores)
        seconds = alone if cores == 1 else _SHARING_FACTOR * alone / cores
        if who.num_processes > 1:
            # Where there are fewer cores than ranks, each has to wait until all others have had their turn.
            others = who.num_processes - 1 if who.num_processes > num_cores else 1
            seconds += others * _SECONDS_TO_COMMUNICATE + self.gradient_bytes * _SECONDS_OF_A_BYTE
        if who.num_processes > num_cores and _keeps_core_busy(who):
            seconds *= _POLLING_FACTOR
        if who.num_processes > 1 and self.bandwidth is not None:  # a ring, as in compare/report/traffic.py
            seconds += 2 * (1 - 1 / who.num_processes) * 8 * self.gradient_bytes / self.bandwidth
        return seconds * (_PEER_FACTOR if who.role == "peer" else 1.0)

    def _alone(self, who: Entrant) -> float:
        """Returns the time in which one process does the work of a step of an entrant, in seconds.

        What entrants are judged by, such as the reference on the whole batch, may have an accumulation of its own.
        """
        found = self.step_seconds.get(_key(who))
        if found is not None:
            return found
        batch = [who.precision, str(who.global_batch_size)]
        return min(seconds for key, seconds in self.step_seconds.items() if key.split(", ")[::2] == batch)

    def start(self, entrants: Iterable[Entrant]) -> float:
        """Returns the expected time until entrants that are started together are ready, in seconds."""
        imports = [self._imports(who) for who in entrants]
        together = sum(imports) / (self.num_cpus * self.num_machines)
        return self.import_seconds * max(together, 1.0 + _IMPORTS_OF_A_STARTER) + _SECONDS_OF_A_RUN

    def alone(self, run: PlannedRun, options: RaceOptions) -> float:
        """Returns the expected time of a run that takes place alone, in seconds."""
        steps, factor, evaluations = options.diagnosis_steps, _DIAGNOSIS_FACTOR, 1
        if run.purpose == "whole":
            steps, factor, evaluations = self.steps_of_whole, 1.0, 4
        return (
            self.start([run.entrant]) + factor * steps * self.step(run.entrant) + evaluations * self.evaluation_seconds
        )

    def turns(self, entrants: Iterable[Entrant], num_steps: int) -> float:
        """Returns the expected time in which entrants take so many steps in turns, in seconds."""
        return _TURN_FACTOR * num_steps * sum(self.step(who) for who in entrants)

    def heat(self, runs: Iterable[PlannedRun], options: RaceOptions, num_steps: int) -> float:
        """Returns the expected time of runs that take place together, in seconds.

        Args:
            runs: The runs; a run that is not timed is alone.
            options: What the user asks of the race.
            num_steps: The steps of a timed run.
        """
        runs = list(runs)
        if runs[0].purpose != "timed":
            return self.alone(runs[0], options)
        entrants = [run.entrant for run in runs]
        return self.start(entrants) + self.turns(entrants, num_steps) + self.end(entrants)

    def end(self, entrants: Iterable[Entrant]) -> float:
        """Returns the expected time in which entrants save and end, all at once, in seconds."""
        return _SECONDS_TO_SAVE * (1 + sum(1 for _ in entrants))

    def parts(self, entrants: list[Entrant], shared: Entrant | None = None) -> list[list[Entrant]]:
        """Divides entrants into parts that fit into memory together; if there are several, all have one in common.

        What a part measures beside this one, which comes first, can be compared with what another part does.

        Args:
            entrants: Who takes part.
            shared: Whom the parts are to have in common; None for the reference, or else for a backend.
        """
        if self._fit(entrants) or len(entrants) < 3:
            return [entrants]
        shared = shared or min(
            entrants, key=lambda who: (who.role != "backend", who.backend != REFERENCE, who.num_processes, who.label)
        )
        parts: list[list[Entrant]] = []
        for who in (one for one in entrants if one != shared):
            if not parts or not self._fit([*parts[-1], who]):
                parts.append([shared])
            parts[-1].append(who)
        return parts

    def _fit(self, entrants: list[Entrant]) -> bool:
        """Whether entrants fit into memory together, and into that of the first GPU, which each of them uses."""
        here, on_gpu = sum(map(self._bytes, entrants)), sum(map(self._bytes_on_gpu, entrants))
        if here > _SHARE_OF_MEMORY * self.available_bytes:
            return False
        return on_gpu <= _SHARE_OF_MEMORY * (self.gpu_available_bytes or 0)

    def _bytes(self, who: Entrant) -> int:
        return self._ranks_here(who) * self.rank_bytes + _BYTES_OF_A_STARTER

    def _bytes_on_gpu(self, who: Entrant) -> int:
        """Returns the memory of those of its ranks that compute on the first GPU."""
        num_gpus = self.num_gpus or self._ranks_here(who)
        return math.ceil(self._ranks_here(who) / num_gpus) * (self.gpu_rank_bytes or 0)

    def _ranks_here(self, who: Entrant) -> int:
        return math.ceil(who.num_processes / self.num_machines)

    def _imports(self, who: Entrant) -> float:
        starter = 0.0 if who.backend == REFERENCE else _IMPORTS_OF_A_STARTER
        ranks = who.num_processes * (_IMPORTS_OF_A_PEER if who.role == "peer" else 1.0)
        num_nodes = 1
        if self.has_nodes and who.num_processes > 1:
            num_nodes = self.num_machines if self.num_machines > 1 else who.num_processes
        return ranks + num_nodes * (starter + _IMPORTS_OF_A_COMMAND_LINE)


def _keeps_core_busy(who: Entrant) -> bool:
    if who.role == "peer":  # a program of its own
        return False
    return settings_in(find_backend(who.backend).settings, who.options).keeps_core_busy


def measure_costs(configs: dict[Entrant, RunConfig], network: RaceNetwork) -> Costs:
    """Takes a few steps of the reference under the conditions of each entrant, and starts one process.

    The reference computes micro-batches that some entrant computes, too: a larger one may not fit into memory.

    Args:
        configs: The configuration of a timed run of each entrant.
        network: Where the ranks are started.

    Raises:
        UsageError: These steps failed.
    """
    fewest: dict[str, int] = {}
    for who in configs:
        number = who.num_processes * who.accumulation
        fewest[_key(who)] = min(number, fewest.get(_key(who), number))
    asked: dict[str, ReferenceSteps] = {}
    for who, config in configs.items():
        asked.setdefault(_key(who), ReferenceSteps(config=config, accumulation=fewest[_key(who)]))
    found = dict(zip(asked, take_steps(list(asked.values())), strict=True))
    seen = list(found.values())[-1]
    return Costs(
        step_seconds={key: one.step_seconds for key, one in found.items()},
        evaluation_seconds=seen.evaluation_seconds,
        import_seconds=_import_seconds(),
        steps_of_whole=seen.steps_of_whole,
        gradient_bytes=seen.gradient_bytes,
        bandwidth=network.bandwidth,
        has_nodes=network.engine is not None,
        num_cpus=num_cpus(),
        num_machines=network.num_machines,
        rank_bytes=seen.rank_bytes,
        available_bytes=available_bytes(),
        gpu_rank_bytes=seen.gpu_bytes,
        gpu_available_bytes=seen.gpu_available_bytes,
        num_gpus=None if seen.gpu_bytes is None else count_gpus() or None,
    )


def _key(who: Entrant) -> str:
    return f"{who.precision}, {who.accumulation}, {who.global_batch_size}"


def _import_seconds() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "training.rank_work"], cwd=PROJECT_DIRECTORY, check=True)  # it only imports
    return time.perf_counter() - began
