"""Holds one adapter to the contract: runs cases in groups of ranks and judges them by the checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backends.capabilities import PRECISIONS, Place, UnsupportedError
from backends.devices import count_gpus
from backends.interface import KnownFailure
from backends.registry import find_backend, load_backend
from contract import jobs
from contract.alone import train_alone
from contract.case import Case
from contract.cases import ALL, REFUSALS, SHUTDOWN, WORLD
from contract.check import Check, Evidence, NotRun, NotSeen, State, Violation, all_checks
from contract.groups import Breakdown, Compose, Group, GroupKey, Outcome, run_group
from contract.options import ContractOptions, OwnOptions
from launch.errors import UsageError
from launch.job import compose_job
from launch.signals import Interrupted


@dataclass(frozen=True)
class Instance:
    """One check of one case at one world size."""

    check: Check
    case: Case
    world_size: int

    def __str__(self) -> str:
        return f"{self.world_size}-{self.case.precision}-{self.check.id}-{self.case.name}"


@dataclass(frozen=True)
class Result:
    """How an instance ended and, unless it passed, why; `cause` is what other instances may have failed of alike."""

    instance: Instance
    state: State
    reason: str = ""
    link: str = ""
    cause: str = ""


class Suite:
    """All that is known about one adapter; groups and jobs run when their evidence is asked for.

    Args:
        adapter: The name of a backend, or "module:Class".
        directory: Receives the files of all groups and jobs.
        options: Which part of the contract to check, and where.
        own: The options of the adapter alone (default: none are given).
        on_phase: Called with the group or job that runs, and with its phase.
        compose: Composes the jobs that start ranks.

    Raises:
        UnsupportedError: There is no such adapter, or its own options exclude every precision.
    """

    def __init__(
        self,
        adapter: str,
        directory: Path,
        options: ContractOptions,
        *,
        own: OwnOptions | None = None,
        on_phase: Callable[[str, str], None] = lambda place, phase: None,
        compose: Compose = compose_job,
    ) -> None:
        self.adapter, self.directory = adapter, directory
        self.row = find_backend(adapter)
        self.own = own or OwnOptions((), self.row.settings())
        self.device = self._settle_device(options.device)
        self._require_a_precision(options.precision or PRECISIONS)
        self.unavailable_reason = self.row.unavailable_reason()
        self.seconds: dict[str, float] = {}
        self._on_phase, self._compose = on_phase, compose
        self._outcomes: dict[tuple[str, int], Evidence | Breakdown] = {}
        self._known: dict[str, KnownFailure] | None = None
        checks = all_checks()
        wanted = [
            Instance(checks[check_id], case, world_size)
            for check_id in sorted(options.check or checks)
            for case in checks[check_id].cases
            if case.precision in (options.precision or PRECISIONS)
            for world_size in self._world_sizes(case, options.num_processes or None)
            if world_size in checks[check_id].world_sizes
        ]
        # Sorted by group, so that judging them in this order starts each group once.
        self.instances = sorted(wanted, key=lambda instance: _order(instance.case, instance.world_size))

    @property
    def float64(self) -> bool:
        """Whether the adapter can average float64; otherwise, cases in float64 run in float32."""
        return self.row.capabilities.float64

    @property
    def name(self) -> str:
        """The adapter, with its own options as far as they were given."""
        return " ".join([self.adapter, *self.own.arguments])

    def _settle_device(self, asked: str) -> str:
        devices = self.row.capabilities.precisions
        if asked != "auto":
            return asked
        return "cuda" if "cuda" in devices and (count_gpus() or "cpu" not in devices) else "cpu"

    def _require_a_precision(self, precisions: Sequence[str]) -> None:
        """Refuses options of the adapter that no case could run with."""
        refusals = []
        for precision in precisions:
            try:
                self._check_settings(precision)
                return
            except UnsupportedError as refusal:
                refusals.append(refusal)
        raise refusals[0]

    def _check_settings(self, precision: str, grad_compression: str = "none", optimizer: str = "adamw") -> None:
        self.own.settings.check(
            precision=precision,
            optimizer=optimizer,
            grad_compression=grad_compression,
            place=Place(self.device, num_nodes=1),
        )

    def _world_sizes(self, case: Case, asked: Sequence[int] | None) -> Sequence[int]:
        sizes = case.sizes_among(asked)
        limit = self.row.capabilities.max_world_size
        if case.is_job and sizes:  # a job is run at the largest size only
            return [max([size for size in sizes if limit is None or size <= limit] or sizes)]
        return sizes

    def results(self) -> Iterator[Result]:
        """Judges every instance, and starts the groups and jobs that this takes."""
        for instance in self.instances:
            yield self.judge(instance)

    def judge(self, instance: Instance) -> Result:
        """Judges one instance; the first of a group runs the whole group."""
        if self.unavailable_reason is not None:
            return Result(instance, State.UNAVAILABLE, self.unavailable_reason, cause=self.unavailable_reason)
        state, reason, cause = State.PASSED, "", ""
        try:
            self._require_supported(instance)
            self._require_gpus(instance.world_size)
            if not instance.case.is_job and instance.case is not WORLD:
                self._require_world(instance.case, instance.world_size)
            self._verify(instance)
        except UnsupportedError as refusal:
            state, reason = State.UNSUPPORTED, str(refusal)
        except NotRun as omission:
            state, reason, cause = State.NOT_RUN, str(omission), str(omission)
        except NotSeen as blindness:
            state, reason = State.UNAVAILABLE, str(blindness)
        except Violation as violation:
            state, reason, cause = State.FAILED, str(violation), violation.cause
        except (Interrupted, UsageError):
            raise
        except Exception as error:  # what an adapter leaves may be anything
            state, reason = State.FAILED, f"expected evidence that can be judged, saw {_in_a_line(error)}"
        known = self.known_failures.get(instance.check.id) if state is State.FAILED else None
        if known is not None:
            return Result(instance, State.EXPECTED_FAILURE, f"{known.reason}: {reason}", link=known.link)
        return Result(instance, state, reason, cause=cause)

    def _require_gpus(self, world_size: int) -> None:
        if self.device == "cuda" and world_size > count_gpus() and not self.row.capabilities.ranks_may_share_gpu:
            raise NotSeen(
                f"{self.adapter} needs one GPU for each of {world_size} ranks, but {count_gpus()} are visible"
            )

    def _require_supported(self, instance: Instance) -> None:
        """Raises UnsupportedError for what the adapter does not declare, provided that it refuses that itself."""
        case, world_size = instance.case, instance.world_size
        reduces_within = any(training.options.get("sync_batchnorm") for training in case.trainings)
        if reduces_within and not self.row.capabilities.sync_batchnorm:
            # The launcher refuses it, before there is an adapter.
            raise UnsupportedError(f"--sync-batchnorm: {self.adapter} does not declare it")
        # What the adapter's own options exclude, the launcher refuses, too.
        for optimizer in {training.options.get("optimizer", "sgd") for training in case.trainings} or {"sgd"}:
            self._check_settings(case.precision, case.grad_compression, optimizer)
        try:
            self.row.capabilities.check(
                name=self.adapter,
                device=self.device,
                precision=case.precision,
                world_size=world_size,
                find_unused_parameters=case.find_unused_parameters,
                grad_compression=case.grad_compression,
            )
        except UnsupportedError as error:
            seen = self._other_than_a_refusal(case, world_size)
            if seen is None:
                raise
            raise Violation(f"a refusal of what is not declared ({error})", seen) from error

    def _other_than_a_refusal(self, case: Case, world_size: int) -> str | None:
        """Returns what the adapter did when it was asked for what this case needs; None if it refused that clearly."""
        evidence = self.evidence(REFUSALS, 1)
        assert isinstance(evidence, Evidence), "a job always leaves evidence"
        limit = self.row.capabilities.max_world_size
        if self.device not in self.row.capabilities.precisions:
            wanted = self.device
        elif limit is not None and world_size > limit:
            wanted = str(limit + 1)
        elif case.grad_compression not in ("none", *self.row.capabilities.compressions):
            wanted = f"--grad-compression {case.grad_compression}"
        elif case.find_unused_parameters and not self.row.capabilities.unused_parameters:
            wanted = "unused"
        else:
            wanted = case.precision
        answers = evidence.ranks[0]["answers"]
        for answer in answers:
            # A precision is refused for each device by itself.
            elsewhere = wanted == case.precision and answer["asked"]["device"] != self.device
            if answer["names"] == wanted and not elsewhere:
                if answer["clear"]:
                    return None
                return "the adapter accepted it" if answer["error"] is None else f"{answer['type']}: {answer['error']}"
        if all(answer["clear"] for answer in answers):
            return "no answer"
        return "another request that was not refused, after which nothing else was asked (C04)"

    @property
    def known_failures(self) -> dict[str, KnownFailure]:
        """The clauses that the adapter declares to fail, by id."""
        if self._known is None:
            self._known = dict(load_backend(self.adapter).known_failures)
            for check_id, known in self._known.items():
                if check_id not in all_checks() or not isinstance(known, KnownFailure):
                    raise UnsupportedError(
                        f"{self.adapter} declares {check_id!r}: {known!r} as a known failure; "
                        "give ids of checks, each with a KnownFailure"
                    )
        return self._known

    def _require_world(self, case: Case, world_size: int) -> None:
        """Refuses to judge a group that is not the one that was asked for."""
        world = self._outcome(WORLD, _key(case, world_size), world_size)
        if isinstance(world, Breakdown):
            raise _unjudged(world, "a group of ranks")
        try:
            all_checks()["C01"].verify(world)
        except Violation as violation:
            cause = str(violation)
            raise Violation("the group of ranks that was asked for (C01)", cause, cause=cause) from violation

    def _verify(self, instance: Instance) -> None:
        evidence = self.evidence(instance.case, instance.world_size)
        if isinstance(evidence, Breakdown):
            if instance.case is WORLD:  # without which there is no group
                raise Violation("a group of ranks", evidence.message, evidence.rank, cause=evidence.message)
            raise _unjudged(evidence, "the case to complete")
        refusal = next((seen["refused"] for seen in evidence.ranks if "refused" in seen), None)
        if refusal is not None:
            raise UnsupportedError(refusal)
        instance.check.verify(evidence)

    def evidence(self, case: Case, world_size: int) -> Evidence | Breakdown:
        """Returns what was observed of a case, or why nothing was."""
        return self._outcome(case, _key(case, world_size), world_size)

    def _outcome(self, case: Case, key: GroupKey, world_size: int) -> Evidence | Breakdown:
        place = f"{case.name} of {key}" if case.is_job else str(key)
        if (place + case.name, world_size) not in self._outcomes:
            began = time.monotonic()
            outcomes = self._run_job(case, place, world_size) if case.is_job else self._run_group(key, place)
            for name, outcome in outcomes.items():
                self._outcomes[place + name, world_size] = outcome
            self.seconds[place] = time.monotonic() - began
        return self._outcomes[place + case.name, world_size]

    def _run_job(self, case: Case, place: str, world_size: int) -> dict[str, Evidence | Breakdown]:
        self._on_phase(place, "")
        directory = self.directory / f"{case.name}-{world_size}"
        directory.mkdir(parents=True)
        seen = getattr(jobs, case.scene)(self.adapter, self.own.arguments, world_size, case, directory, self.device)
        return {case.name: Evidence(self.adapter, case, world_size, self.device, seen)}

    def _run_group(self, key: GroupKey, place: str) -> dict[str, Evidence | Breakdown]:
        self._on_phase(place, "start")
        asked = {
            instance.case.name
            for instance in self.instances
            if not instance.case.is_job and _key(instance.case, instance.world_size) == key
        }
        cases = [case for case in ALL if case.name in asked or case in (WORLD, SHUTDOWN)]
        directory = self.directory / "-".join(str(key).replace(",", "").split())
        directory.mkdir(parents=True)
        alone, files = {}, {}
        for case in cases:
            if any(training.resume == "reference" for training in case.trainings):
                alone[case.name] = train_alone(case, key.world_size, device=self.device, float64=self.float64)
                files[case.name] = directory / f"{case.name}.single.pt"
                torch.save(alone[case.name]["state"], files[case.name])
        settings = self.own.settings.model_dump(mode="json", exclude_unset=True)
        group = Group(self.adapter, key, directory, self.device, files, settings, compose=self._compose)
        outcomes = run_group(group, cases, lambda phase: self._on_phase(place, phase))
        return {
            case.name: self._as_evidence(case, key.world_size, outcomes[case.name], alone.get(case.name))
            for case in cases
        }

    def _as_evidence(
        self, case: Case, world_size: int, outcome: Outcome, alone: dict[str, Any] | None
    ) -> Evidence | Breakdown:
        if isinstance(outcome, Breakdown):
            return outcome
        memory = {} if alone is None else {"alone": alone}
        return Evidence(self.adapter, case, world_size, self.device, outcome, memory, self.float64)


def _unjudged(breakdown: Breakdown, expected: str) -> Exception:
    """Returns the reason for which nothing that a case shows can be judged."""
    if not breakdown.has_run:
        return NotRun(breakdown.message)
    return Violation(expected, breakdown.message, breakdown.rank, cause=breakdown.message)


def _key(case: Case, world_size: int) -> GroupKey:
    return GroupKey(
        world_size, case.precision, case.find_unused_parameters, case.grad_compression, case.keeps_nonfinite
    )


def _order(case: Case, world_size: int) -> tuple[Any, ...]:
    group = (case.find_unused_parameters, case.grad_compression != "none", PRECISIONS.index(case.precision))
    return case.is_job, *group, case.keeps_nonfinite, world_size, case.grad_compression, ALL.index(case)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
