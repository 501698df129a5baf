"""Which runs belong together: only those that differ in nothing but what is compared.

The runs of one *group* compute the same under the same conditions. Within a group, an *entrant* is one backend in one
version and with one set of settings. A diagnosis run, and a run that trains to the end, belong to the group whose runs
differ from them in the number of steps only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.registry import BACKENDS
from compare.machine_facts import network_between
from compare.report.runs import Run
from compare.results import Role
from records.config import RunConfig
from records.record import RunRecord

# What belongs to a backend, or to one start of a run, and not to what is computed.
_OF_A_START = {
    *("backend", "backend_settings", "start_method", "output_dir", "overwrite", "launch_command", "started_at"),
    *("diagnose", "num_nodes", "min_nodes", "master_port", "master_addr", "node_rank", "timeout", "hang_timeout"),
    "max_restarts",
    *("num_restarts", "keep", "on_save_error", "resume", "resume_from", "evaluate"),
    # Entrants may differ in them, which changes rounding or more.
    *("batching", "allocator", "scheduling", "grad_compression"),
}
_OF_A_SPLIT = {"num_processes", "micro_batch_size", "threads_per_rank", "network"}
_OF_A_BACKEND = {"backend", "backend_settings", "start_method", "grad_compression"}
# What a diagnosis run changes: dropout's masks depend on how a batch is split, and compiled models call no hooks, which
# tell the phases of a step apart.
_OF_A_DIAGNOSIS = {"max_steps", "dropout", "torch_compile"}
# Variables in which a launcher tells the ranks of one job where they are, or configures its library. Variables of the
# user with such names never reach a rank.
_OF_A_PLACE = ("_PORT", "_RANK", "_SIZE", "_ADDR", "_HOSTNAME", "_NUM_THREADS")
_OF_A_LAUNCHER = ("ACCELERATE_", "TORCH_NCCL_ASYNC_", "OMPI_MCA_orte", "OMPI_MCA_ess", "OMPI_MCA_pmix")


@dataclass
class EntrantRuns:
    """The runs of one entrant in one group; `key` is the same in all groups, `name` is for people."""

    name: str
    key: str
    backend: str
    role: Role
    timed: list[Run] = field(default_factory=list)
    left_out: list[Run] = field(default_factory=list)  # timed, too, but disturbed (compare/report/disturbed.py)
    failures: list[str] = field(default_factory=list)
    diagnosis: Run | None = None
    whole: Run | None = None

    @property
    def is_of_races(self) -> bool:
        """Whether races have made all of its timed runs."""
        return all(run.race is not None for run in self.timed)

    @property
    def own_settings(self) -> list[str] | None:
        """The options and variables that it alone has; None where no race has noted them."""
        return next((run.race.own_settings for run in self.timed if run.race), None)


def condition(run: Run) -> dict[str, Any]:
    """Returns everything that decides what was computed, and on what machine, whichever the backend."""
    return {**asked(run.record.config), "data": run.record.task, "machine": _machine(run), **_network(run)}


def asked(config: RunConfig) -> dict[str, Any]:
    """Returns the part of it that is known before a run."""
    return config.model_dump(mode="json", exclude=_OF_A_START)


def unsplit(run: Run) -> str:
    """Returns `unsplit_condition` as a key."""
    return _key(unsplit_condition(run))


def unsplit_condition(run: Run) -> dict[str, Any]:
    """Returns `condition` without how a global batch is split over ranks and micro-batches."""
    return {name: value for name, value in condition(run).items() if name not in _OF_A_SPLIT}


def version(record: RunRecord) -> dict[str, Any]:
    """Returns what tells entrants apart, whatever the number of ranks: the backend, its settings, and all software."""
    environment = record.environment
    variables = {
        name: value
        for name, value in environment.variables.items()
        if not name.endswith(_OF_A_PLACE) and not name.startswith(_OF_A_LAUNCHER)
    }
    return {
        "backend": _backend(record),
        "variables": variables,
        **environment.model_dump(include={"python", "packages", "git_commit", "git_dirty", "cuda", "nccl"}),
    }


def group_runs(runs: Sequence[Run]) -> list[list[EntrantRuns]]:
    """Puts runs into groups of entrants, which are in the order of the table of backends.

    A run that trains to the end makes a group of its own if there is no timed run of its group.
    """
    completed = [run for run in runs if run.is_usable]
    groups: dict[str, dict[str, EntrantRuns]] = {}
    for run in completed:
        if run.purpose == "timed" or (run.purpose == "whole" and not _has_timed(run, completed)):
            entrants = groups.setdefault(_key(condition(run)), {})
            entrants.setdefault(_entrant(run), _without_runs(run, _entrant(run))).timed.append(run)
    for entrants in groups.values():
        for entrant in entrants.values():
            _attach(entrant, completed)
    for run in runs:
        if not run.is_usable:
            _attach_failure(run, groups)
    for entrants in groups.values():
        _number_namesakes(list(entrants.values()))
    return [sorted(entrants.values(), key=_place_of) for entrants in groups.values()]


def _network(run: Run) -> dict[str, str]:
    """Returns the network between the nodes, if there are several."""
    network = network_between(run.record.config.num_nodes, run.record.environment.network)
    return {} if network is None else {"network": network}


def _machine(run: Run) -> str:
    if run.machine is None:
        raise ValueError(f"{run.name}: runs are located (compare.report.machines) before they are compared")
    return run.machine.label


def _backend(record: RunRecord) -> dict[str, Any]:
    return record.config.model_dump(mode="json", include=_OF_A_BACKEND)


def _belongs(other: Run, timed: Run) -> bool:
    """Tells whether a diagnosis or whole run is of the group of a timed run, apart from the number of its steps."""
    leave_out = _OF_A_DIAGNOSIS if other.purpose == "diagnosis" else {"max_steps"}
    ours, theirs = condition(other), condition(timed)
    return _key(_without(ours, leave_out)) == _key(_without(theirs, leave_out))


def _without(facts: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Leaves out names, also in nested mappings, where the task's own settings are."""
    return {
        name: _without(value, names) if isinstance(value, dict) else value
        for name, value in facts.items()
        if name not in names
    }


def _has_timed(whole: Run, completed: Sequence[Run]) -> bool:
    return any(run.purpose == "timed" and _belongs(whole, run) for run in completed)


def _attach(entrant: EntrantRuns, completed: Sequence[Run]) -> None:
    entrant.timed.sort(key=lambda run: run.record.config.started_at)
    for run in completed:
        if run.purpose == "timed" or _entrant(run) != entrant.key or not _belongs(run, entrant.timed[0]):
            continue
        if run.purpose == "diagnosis":
            entrant.diagnosis = run
        else:
            entrant.whole = run


def _attach_failure(run: Run, groups: dict[str, dict[str, EntrantRuns]]) -> None:
    """Attaches a failed run, which knows neither its data nor its settings, to the group with the same options."""
    backend = _backend(run.record)
    leave_out = set() if run.purpose == "timed" else _OF_A_DIAGNOSIS
    conditions = _conditions_of_failed(run, leave_out)
    for entrants in groups.values():
        sample = next((entrant.timed[0] for entrant in entrants.values() if entrant.timed), None)
        if sample is not None and _conditions_of_failed(sample, leave_out) == conditions:
            wanted = {"backend": backend, "name": run.entrant}
            fitting = [entrant for key, entrant in entrants.items() if wanted.items() <= json.loads(key).items()]
            if not fitting:
                fitting = [entrants.setdefault(_key(wanted), _without_runs(run, _key(wanted)))]
            fitting[0].failures.append(f"{run.why_unusable} ({run.name})")
            return


def _conditions_of_failed(run: Run, leave_out: set[str]) -> str:
    """Returns what is known of the conditions of a run even if it failed, as a key."""
    return _key(_without({**asked(run.record.config), "machine": _machine(run), **_network(run)}, leave_out))


def _place_of(entrant: EntrantRuns) -> tuple[int, str]:
    known = list(BACKENDS)
    return (known.index(entrant.backend) if entrant.backend in known else len(known), entrant.name)


def _number_namesakes(entrants: list[EntrantRuns]) -> None:
    """Numbers entrants of the same name, which have two versions of a backend, or two sets of settings."""
    for name in {entrant.name for entrant in entrants}:
        namesakes = [entrant for entrant in entrants if entrant.name == name]
        for number, entrant in enumerate(namesakes[1:], start=2):
            entrant.name = f"{name} #{number}"


def _entrant(run: Run) -> str:
    rank = run.record.ranks[0]
    in_force = {**rank.effective_settings, "scheduling": rank.scheduling}
    return _key({**version(run.record), "name": run.entrant, "in force": in_force})


def _without_runs(sample: Run, key: str) -> EntrantRuns:
    return EntrantRuns(sample.entrant, key, sample.record.config.backend, sample.role)


def _key(facts: dict[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True)
