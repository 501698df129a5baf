"""Starting groups of ranks for cases: through the backend's own launcher, one group for many cases.

A case that hangs is ended and named. What it left undone is done by a fresh group, for as long as each start
brings some case to its end, good or bad.
"""

from __future__ import annotations

import json
import pickle
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from backends.interface import Signs
from backends.registry import BackendRow
from contract.cases import SHUTDOWN, Case
from contract.patience import stretched
from contract.worker import SPECIFICATION_NAME, observation_path, phases_path
from launch.engines.interface import Engine, Ranks
from launch.engines.registry import find_engine
from launch.job import Job, compose_job
from launch.supervisor import run_job
from records.names import LOGS_NAME
from watch.failures import FailureKind, JobFailure
from watch.rank_files import RankFiles
from watch.stacks import innermost_frame, take_stacks

# A collective that one rank never enters should fail by itself, naming the rank; what does not is
# ended after this long in one phase. Starting Python and torch is not the adapter's doing. All of them
# are for an idle machine.
COLLECTIVE_SECONDS = 15.0
PHASE_SECONDS = 25.0
START_SECONDS = 90.0
_MAX_HANGS = 2


@dataclass(frozen=True)
class GroupKey:
    """What is settled when a group of ranks is started."""

    world_size: int
    precision: str
    find_unused_parameters: bool

    def __str__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{ranks}, {self.precision}" + (", unused parameters" if self.find_unused_parameters else "")


@dataclass(frozen=True)
class Breakdown:
    """Why a case gave no evidence: on which rank (None: unknown) and what happened."""

    rank: int | None
    message: str
    is_hang: bool = False


Outcome = list[Any] | Breakdown

# Composes the job that starts a group's ranks with the backend's first engine.
Compose = Callable[[Engine, Ranks, Path, Signs], Job]


class Hung(Exception):
    """Some rank has been in one phase for too long."""

    def __init__(self, phase: str, breakdown: Breakdown) -> None:
        super().__init__(breakdown.message)
        self.phase, self.breakdown = phase, breakdown


def run_group(
    adapter: str,
    row: BackendRow,
    key: GroupKey,
    cases: Sequence[Case],
    directory: Path,
    *,
    device: str,
    single_states: Mapping[str, Path],
    on_phase: Callable[[str], None] = lambda phase: None,
    module: str = "contract.worker",
    compose: Compose = compose_job,
) -> dict[str, Outcome]:
    """Runs cases in as few groups as it takes, and returns the outcome of each.

    Args:
        adapter: A name of the registry, or module:Class.
        row: Its row.
        key: What the group is started with.
        cases: What to run; leaving the group is a case of its own, always the last.
        directory: Receives everything; created.
        device: "cpu" or "cuda".
        single_states: Files of states kept by the one-process backend, by case.
        on_phase: Told what is being done.
        module: What each rank runs.
        compose: Composes the job that starts the ranks, where that is not the backend's own launcher.
    """
    outcomes: dict[str, Outcome] = {}
    wanted = [case.name for case in cases if case is not SHUTDOWN]
    if SHUTDOWN in cases:
        wanted.append(SHUTDOWN.name)
    num_starts = 0
    while left := [name for name in wanted if name not in outcomes]:
        num_starts += 1
        place = directory / f"start-{num_starts}"
        specification = {
            "adapter": adapter,
            "world_size": key.world_size,
            "precision": key.precision,
            "device": device,
            "find_unused_parameters": key.find_unused_parameters,
            "timeout_seconds": stretched(COLLECTIVE_SECONDS),
            "cases": [name for name in left if name != SHUTDOWN.name],
            "single_states": {name: str(path) for name, path in single_states.items()},
        }
        broken_phase, breakdown = _run_once(row, key, place, specification, device, on_phase, module, compose)
        for name in left:
            paths = [observation_path(place, name, rank) for rank in range(key.world_size)]
            if all(path.exists() for path in paths):
                outcomes[name] = _read(paths)
        if breakdown is not None and broken_phase in left:
            outcomes[broken_phase] = breakdown
        never_ran = [name for name in left if name not in outcomes]
        num_hangs = sum(isinstance(outcome, Breakdown) and outcome.is_hang for outcome in outcomes.values())
        if len(never_ran) == len(left) or num_hangs == _MAX_HANGS:  # it comes as far as no case, or others will hang
            outcomes |= dict.fromkeys(never_ran, _not_run(num_starts, broken_phase, breakdown, outcomes))
    return outcomes


def _not_run(num_starts: int, phase: str, breakdown: Breakdown | None, outcomes: Mapping[str, Outcome]) -> Breakdown:
    """What to say of cases that no start has come to."""
    if breakdown is None:
        why = "the ranks ended without any observation"
    elif breakdown.is_hang:
        hung = [name for name, outcome in outcomes.items() if isinstance(outcome, Breakdown) and outcome.is_hang]
        why = f"{' and '.join(hung) or phase} hung ({breakdown.message})"
    else:
        where = "" if breakdown.rank is None else f"rank {breakdown.rank}: "
        why = f"the last one ended in {phase!r} with: {where}{breakdown.message}"
    return Breakdown(None, f"not run: the group was started {num_starts} time{'s' * (num_starts > 1)}, {why}")


def _read(paths: list[Path]) -> Outcome:
    try:
        return [torch.load(path, map_location="cpu") for path in paths]
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        kind = f", but a {found[1]}" if found else ""
        return Breakdown(None, f"plain data and tensors are all that may be saved{kind}: it is not loaded")


def _run_once(
    row: BackendRow,
    key: GroupKey,
    directory: Path,
    specification: Mapping[str, Any],
    device: str,
    on_phase: Callable[[str], None],
    module: str,
    compose: Compose,
) -> tuple[str, Breakdown | None]:
    """Starts one group; returns the phase it ended in and, unless it went through, why."""
    (directory / LOGS_NAME).mkdir(parents=True)
    (directory / SPECIFICATION_NAME).write_text(json.dumps(specification))
    log_directory, timeout = directory / LOGS_NAME, specification["timeout_seconds"]
    ranks = Ranks(key.world_size, (module, str(directory)), device, 1, None, timeout, log_directory)
    watch = _PhaseWatch(directory, key.world_size, on_phase)
    try:
        job = compose(find_engine(row.capabilities.start_methods[0]), ranks, directory, row.signs)
        failure = run_job(replace(job, must_end_cleanly=True), on_poll=watch.look)
    except Hung as hung:
        return hung.phase, hung.breakdown
    if failure is None:
        return SHUTDOWN.name, None
    return watch.phase(failure.rank), _breakdown(failure)


def _breakdown(failure: JobFailure) -> Breakdown:
    return Breakdown(failure.rank, failure.message, is_hang=failure.kind is FailureKind.STUCK)


class _PhaseWatch:
    """Follows what the ranks say they are doing, and ends the group when one is at it for too long."""

    def __init__(self, directory: Path, world_size: int, on_phase: Callable[[str], None]) -> None:
        self._directory, self._world_size, self._on_phase = directory, world_size, on_phase
        self._began = time.time()

    def look(self) -> None:
        phases = self._phases()
        self._on_phase(min(phases)[1])
        now = time.time()
        late = [
            rank
            for rank, (since, name) in enumerate(phases)
            if now - since > stretched(PHASE_SECONDS if name != "start" else START_SECONDS)
        ]
        if late:
            # The one that is behind the others, or that never waited for them, is stuck.
            rank = min(late, key=lambda rank: phases[rank][0])
            name = phases[rank][1]
            stacks = take_stacks(RankFiles(self._directory, number) for number in range(self._world_size))
            where = "; ".join(f"rank {n} {innermost_frame(stacks.get(n, ''))}" for n in range(self._world_size))
            seconds = f"{now - phases[rank][0]:.0f} s"
            raise Hung(name, Breakdown(None, f"hung: no end to {name} after {seconds} ({where})", True))

    def phase(self, rank: int | None) -> str:
        """The phase this rank is in; for None, the one that the slowest is in."""
        phases = self._phases()
        return phases[rank][1] if rank is not None else min(phases)[1]

    def _phases(self) -> list[tuple[float, str]]:
        return [self._last_phase(rank) for rank in range(self._world_size)]

    def _last_phase(self, rank: int) -> tuple[float, str]:
        try:
            text = phases_path(self._directory, rank).read_text()
        except FileNotFoundError:
            return self._began, "start"
        lines = text.splitlines()
        if not lines:
            return self._began, "start"
        since, _, name = lines[-1].partition(" ")
        return float(since), name
