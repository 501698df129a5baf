"""Starts groups of ranks through the backend's own launcher, each for as many cases as possible.

A case that hangs is ended and named. A new group then runs the cases that are left, as long as each start
completes at least one case, whether it passes or fails.
"""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from backends.capabilities import Signs
from backends.registry import find_backend
from contract.case import SKIPPING_PRECISIONS, Case
from contract.cases import SHUTDOWN
from contract.patience import stretched
from contract.worker import SPECIFICATION_NAME, Specification, observation_path, phases_path
from launch.job import Job, compose_job
from launch.starters.interface import Ranks, Starter
from launch.starters.registry import settle_starter
from launch.supervisor import run_job
from records.names import LOGS_NAME
from watch.failures import FailureKind, JobFailure
from watch.rank_files import RankFiles
from watch.stacks import innermost_frame, take_stacks

# For a machine that does nothing else. A collective that one rank never enters should fail by itself, naming the rank;
# a phase that does not is ended after PHASE_SECONDS. The start of Python and torch is not the adapter's doing.
COLLECTIVE_SECONDS = 15.0
PHASE_SECONDS = 25.0
START_SECONDS = 90.0
_MAX_HANGS = 2


@dataclass(frozen=True)
class GroupKey:
    """What is settled when a group of ranks is started; cases with the same key share a group."""

    world_size: int
    precision: str
    find_unused_parameters: bool
    grad_compression: str = "none"
    keeps_nonfinite: bool = False

    def __str__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        unused = ", unused parameters" if self.find_unused_parameters else ""
        compressed = f", {self.grad_compression} gradients" if self.grad_compression != "none" else ""
        kept = ", no update skipped" if self.keeps_nonfinite else ""
        return f"{ranks}, {self.precision}{unused}{compressed}{kept}"


@dataclass(frozen=True)
class Breakdown:
    """Why a case left no evidence: what happened, on which rank, if that is known, and whether the case ran at all."""

    rank: int | None
    message: str
    is_hang: bool = False
    has_run: bool = True


Outcome = list[Any] | Breakdown

# Composes the job that starts the ranks of a group, given the backend's default starter.
Compose = Callable[[Starter, Ranks, Path, Signs], Job]


class Hung(Exception):
    """A rank has been in one phase for too long."""

    def __init__(self, phase: str, breakdown: Breakdown) -> None:
        super().__init__(breakdown.message)
        self.phase, self.breakdown = phase, breakdown


@dataclass(frozen=True)
class Group:
    """What a group of ranks is started with.

    Attributes:
        adapter: The name of a backend, or "module:Class".
        key: The number of ranks, and what else the ranks cannot change later.
        directory: Receives all files of the group; it is created.
        device: "cpu" or "cuda".
        single_states: For each case that resumes from the single-process backend, the file of its state.
        settings: The options of the adapter alone; those that are left out have their defaults.
        module: The module that each rank runs.
        compose: Composes the job that starts the ranks.
    """

    adapter: str
    key: GroupKey
    directory: Path
    device: str = "cpu"
    single_states: Mapping[str, Path] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    module: str = "contract.worker"
    compose: Compose = compose_job


def run_group(
    group: Group, cases: Sequence[Case], on_phase: Callable[[str], None] = lambda phase: None
) -> dict[str, Outcome]:
    """Runs cases in as few starts of a group as possible.

    Args:
        group: What the ranks are started with.
        cases: The cases to run. Leaving the group is a case of its own, which always comes last.
        on_phase: Called with the phase that the slowest rank is in.

    Returns:
        The outcome of each case, by its name.
    """
    outcomes: dict[str, Outcome] = {}
    wanted = [case.name for case in cases if case is not SHUTDOWN]
    if SHUTDOWN in cases:
        wanted.append(SHUTDOWN.name)
    num_starts = 0
    while left := [name for name in wanted if name not in outcomes]:
        num_starts += 1
        place = group.directory / f"start-{num_starts}"
        broken_phase, breakdown = _run_once(group, left, place, on_phase)
        for name in left:
            paths = [observation_path(place, name, rank) for rank in range(group.key.world_size)]
            if all(path.exists() for path in paths):
                outcomes[name] = _read(paths)
        if breakdown is not None and broken_phase in left:
            outcomes[broken_phase] = breakdown
        never_ran = [name for name in left if name not in outcomes]
        num_hangs = sum(isinstance(outcome, Breakdown) and outcome.is_hang for outcome in outcomes.values())
        if len(never_ran) == len(left) or num_hangs == _MAX_HANGS:  # no case was reached, or others would hang, too
            outcomes |= dict.fromkeys(never_ran, _not_run(num_starts, broken_phase, breakdown, outcomes))
    return outcomes


def _not_run(num_starts: int, phase: str, breakdown: Breakdown | None, outcomes: Mapping[str, Outcome]) -> Breakdown:
    """Says why some cases never ran."""
    if breakdown is None:
        why = "the ranks ended without any observation"
    else:
        where = "" if breakdown.rank is None else f"rank {breakdown.rank}: "
        what = f"{where}{breakdown.message}"
        hung = [name for name, outcome in outcomes.items() if isinstance(outcome, Breakdown) and outcome.is_hang]
        why = f"{' and '.join(hung) or phase} hung ({what})"
        if not breakdown.is_hang:
            why = f"the last start ended in {phase!r} with: {what}"
    return Breakdown(None, f"the group was started {num_starts} time{'s' * (num_starts > 1)}, and {why}", has_run=False)


def _read(paths: list[Path]) -> Outcome:
    try:
        return [torch.load(path, map_location="cpu") for path in paths]
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        kind = f"a {found[1]}" if found else "something else"
        return Breakdown(None, f"only plain data and tensors may be saved, but this case has saved {kind}")


def _run_once(
    group: Group, case_names: Sequence[str], directory: Path, on_phase: Callable[[str], None]
) -> tuple[str, Breakdown | None]:
    """Starts the group once; returns the phase in which it ended and, unless all went well, why."""
    key, timeout = group.key, stretched(COLLECTIVE_SECONDS, group.key.world_size)
    (directory / LOGS_NAME).mkdir(parents=True)
    specification = Specification(
        adapter=group.adapter,
        world_size=key.world_size,
        precision=key.precision,
        device=group.device,
        skip_nonfinite=key.precision in SKIPPING_PRECISIONS and not key.keeps_nonfinite,
        find_unused_parameters=key.find_unused_parameters,
        grad_compression=key.grad_compression,
        settings=dict(group.settings),
        timeout_seconds=timeout,
        cases=[name for name in case_names if name != SHUTDOWN.name],
        single_states=dict(group.single_states),
    )
    (directory / SPECIFICATION_NAME).write_text(specification.model_dump_json())
    ranks = Ranks(key.world_size, (group.module, str(directory)), group.device, 1, None, timeout, directory / LOGS_NAME)
    watch = _PhaseWatch(directory, key.world_size, on_phase, patience=timeout / COLLECTIVE_SECONDS)
    try:
        row = find_backend(group.adapter)
        starter = settle_starter(group.adapter, row.capabilities.start_methods, None, device=group.device)
        job = group.compose(starter, ranks, directory, row.signs)
        failure = run_job(replace(job, must_end_cleanly=True), on_poll=watch.look)
    except Hung as hung:
        return hung.phase, hung.breakdown
    if failure is None:
        return SHUTDOWN.name, None
    return watch.phase(failure.rank), _breakdown(failure)


def _breakdown(failure: JobFailure) -> Breakdown:
    return Breakdown(failure.rank, failure.message, is_hang=failure.kind is FailureKind.STUCK)


class _PhaseWatch:
    """Follows the phases that ranks report, and ends the group when a rank is in one of them for too long."""

    def __init__(self, directory: Path, world_size: int, on_phase: Callable[[str], None], *, patience: float) -> None:
        """Remembers where ranks report.

        Args:
            directory: Their directory.
            world_size: How many there are.
            on_phase: Gets the name of the phase of the slowest rank at each look.
            patience: How many times as long as on an idle machine the ranks themselves wait for each other: what they
                would find is not to be reported before, in words that say less.
        """
        self._directory, self._world_size, self._on_phase = directory, world_size, on_phase
        self._patience = patience
        self._began = time.time()

    def look(self) -> None:
        phases = self._phases()
        self._on_phase(min(phases)[1])
        now = time.time()
        late = [
            rank
            for rank, (since, name) in enumerate(phases)
            if now - since > self._limit(PHASE_SECONDS if name != "start" else START_SECONDS)
        ]
        if late:
            # The rank that hangs entered its phase first: ranks that wait for it have come further.
            rank = min(late, key=lambda rank: phases[rank][0])
            name = phases[rank][1]
            stacks = take_stacks(RankFiles(self._directory, number) for number in range(self._world_size))
            where = "; ".join(f"rank {n} {innermost_frame(stacks.get(n, ''))}" for n in range(self._world_size))
            seconds = f"{now - phases[rank][0]:.0f} s"
            raise Hung(name, Breakdown(None, f"hung: {name} has not ended after {seconds} ({where})", True))

    def _limit(self, seconds: float) -> float:
        return max(stretched(seconds, self._world_size), self._patience * seconds)

    def phase(self, rank: int | None) -> str:
        """Returns the phase that a rank is in; for None, the phase of the slowest rank."""
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
